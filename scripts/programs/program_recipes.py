"""Which published programs run, and what is made smaller in each, so that a few steps take seconds.

None of their code is here: a recipe names a file of a checkout of keras-io's examples or Keras' guides, and the few
pieces of its text that are replaced. Everything else of a program runs as it is.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a published program is run.

    Attributes:
        path: Its file in the checkout.
        group: Its subject.
        edits: (old, new) for each piece of text that is replaced, after "float32" by "float64"; each must occur.
        stretches: (start, end, new) for each stretch of text that is replaced, from start up to end: mostly what
            reads the data.
        rows: Numbers of rows of the training and test parts of made image data; some programs count on the true ones.
        ends_before: Text before which the program ends: what follows it needs no training. Empty for its end.
        explained: Why a result differs from that of one process; empty if none may.
    """

    path: str
    group: str
    edits: tuple[tuple[str, str], ...] = ()
    stretches: tuple[tuple[str, str, str], ...] = ()
    rows: tuple[int, int] = (120, 40)
    ends_before: str = ""
    explained: str = ""

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return self.path.rpartition("/")[2].removesuffix(".py")


# Stand-ins for data sets that several programs read.
_SERIES = ('data = np.loadtxt(filename, delimiter="\\t")', "data = np.random.default_rng(1).normal(size=(60, 65))\n"
           "    data[:, 0] = np.arange(60) % 2 * 2 - 1")
_TEXTS = """
raw_train_ds, raw_val_ds, raw_test_ds = (tf.data.Dataset.from_tensor_slices(
    ([f"a film<br />of {i % 7} words, number {i}" for i in range(40)], [i % 2 for i in range(40)])).batch(10)
    for _ in range(3))
"""
_PATIENTS = """
dataframe = pd.DataFrame({name: [i * number % 5 for i in range(60)] for number, name in enumerate(
    ("sex", "cp", "fbs", "restecg", "exang", "ca", "age", "trestbps", "chol", "thalach", "oldpeak", "slope"), 1)})
dataframe["thal"] = [("normal", "fixed", "reversible")[i % 3] for i in range(60)]
dataframe["target"] = [i % 2 for i in range(60)]
"""

# Keras' RandomRotation computes in single precision, whatever the type of the layer: it is left out.
RECIPES = (
    Recipe("examples/keras_io/vision/mnist_convnet.py", "vision"),
    Recipe("examples/keras_io/vision/knowledge_distillation.py", "vision"),
    Recipe("examples/keras_io/nlp/bidirectional_lstm_imdb.py", "nlp"),
    Recipe("examples/keras_io/tensorflow/keras_recipes/antirectifier.py", "recipes"),
    Recipe("examples/demo_subclass.py", "guides"),
    Recipe("examples/keras_io/vision/convmixer.py", "vision"),
    Recipe("examples/keras_io/vision/cct.py", "vision"),
    Recipe("examples/keras_io/vision/eanet.py", "vision",
           edits=(("layers.RandomRotation(factor=0.1),", ""),
                  ("convert_to_tensor(1e-9)", "convert_to_tensor(1e-9, \"float64\")")),
           explained="two runs of plain Keras differ by as much"),
    Recipe("examples/keras_io/vision/image_classification_with_vision_transformer.py", "vision",
           edits=(("layers.RandomRotation(factor=0.02),", ""),)),
    Recipe("examples/keras_io/vision/mlp_image_classification.py", "vision"),
    Recipe("examples/keras_io/vision/token_learner.py", "vision"),
    Recipe("examples/keras_io/vision/siamese_contrastive.py", "vision",
           rows=(60000, 10000)),
    Recipe("examples/keras_io/vision/autoencoder.py", "vision",
           edits=(("display(test_data, predictions)\n", ""), ("display(noisy_test_data, predictions)\n", "")),
           rows=(60000, 10000)),
    Recipe("examples/keras_io/vision/attention_mil_classification.py", "vision"),
    Recipe("examples/keras_io/nlp/addition_rnn.py", "nlp", edits=(("epochs = 30", "epochs = 3"),)),
    Recipe("examples/keras_io/tensorflow/vision/involution.py", "vision"),
    Recipe("examples/keras_io/tensorflow/vision/swim_transformers.py", "vision",
           edits=(("numerical_utils.", ""),)),
    Recipe("examples/keras_io/tensorflow/vision/perceiver_image_classification.py", "vision"),
    Recipe("examples/keras_io/tensorflow/vision/cutmix.py", "vision"),
    Recipe("examples/keras_io/tensorflow/generative/vae.py", "generative",
           ends_before="\"\"\"\n## Display a grid of sampled digits"),
    Recipe("examples/keras_io/tensorflow/generative/wgan_gp.py", "generative"),
    Recipe("examples/keras_io/tensorflow/keras_recipes/endpoint_layer_pattern.py", "recipes"),
    Recipe("examples/keras_io/tensorflow/keras_recipes/trainer_pattern.py", "recipes"),
    Recipe("examples/demo_functional.py", "guides"),
    Recipe("examples/demo_mnist_convnet.py", "guides"),
    Recipe("examples/demo_custom_layer_backend_agnostic.py", "guides"),
    Recipe("guides/custom_train_step_in_tensorflow.py", "guides"),
    Recipe("guides/functional_api.py", "guides",
           rows=(60000, 10000), edits=(("keras.applications.VGG19()", "keras.applications.VGG19(weights=None)"),)),
    Recipe("guides/making_new_layers_and_models_via_subclassing.py", "guides",
           rows=(60000, 10000)),
    Recipe("guides/writing_your_own_callbacks.py", "guides",
           edits=(("np.Inf", "np.inf"),)),
    Recipe("examples/keras_io/timeseries/timeseries_classification_from_scratch.py", "timeseries", edits=(_SERIES,)),
    Recipe("examples/keras_io/timeseries/timeseries_classification_transformer.py", "timeseries", edits=(_SERIES,)),
    Recipe("examples/keras_io/timeseries/timeseries_anomaly_detection.py", "timeseries", stretches=(
        ("df_small_noise = pd.read_csv", "print(df_small_noise.head())",
         "df_small_noise = df_daily_jumpsup = pd.DataFrame({'value': np.random.default_rng(1).normal(size=400)})\n"),
        ("fig, ax", "training_mean =", "")), ends_before="\"\"\"\nLet's plot training and validation loss"),
    Recipe("examples/keras_io/vision/conv_lstm.py", "vision", stretches=(
        ("fpath =", "dataset = np.swapaxes", "dataset = np.random.default_rng(1).integers(0, 256, (6, 60, 8, 8))\n"),
        ("fig, axes", "inp = layers.Input", "")), ends_before="\"\"\"\n## Frame Prediction Visualizations"),
    Recipe("examples/keras_io/structured_data/collaborative_filtering_movielens.py", "structured data", stretches=(
        ("movielens_data_file_url =", "user_ids = df",
         "df = pd.DataFrame({'userId': np.arange(100) % 7, 'movieId': np.arange(100) % 13,"
         " 'rating': np.arange(100) % 9 / 2})\n"),), ends_before="\"\"\"\n## Plot training and validation loss"),
    Recipe("examples/keras_io/tensorflow/structured_data/imbalanced_classification.py", "structured data", stretches=(
        ("fname =", "print(\"features.shape:\"",
         "features = np.random.default_rng(1).normal(size=(100, 30))\n"
         "targets = (np.arange(100) % 4 == 0)[:, None].astype('uint8')\n"),)),
    Recipe("examples/keras_io/nlp/lstm_seq2seq.py", "nlp", stretches=(
        ("fpath =", "batch_size = 64", ""),
        ("with open(data_path", "for line in lines",
         "lines = [f'{chr(97 + i % 20)} {i % 7}\\t{i % 11} {chr(98 + i % 9)}\\t' for i in range(50)]\n"),
        ("data_path =", "# Vectorize the data", "")), ends_before="# Save model"),
    Recipe("examples/keras_io/tensorflow/generative/lstm_character_level_text_generation.py", "generative",
           edits=(("epochs = 40", "epochs = 1"), ("range(400)", "range(2)")),
           stretches=(("path = keras.utils.get_file", "text = text.replace",
                       "text = 'the quick brown fox jumps over the lazy dog; ' * 20\n"),)),
    Recipe("examples/keras_io/tensorflow/nlp/text_classification_from_scratch.py", "nlp", stretches=(
        ("fpath =", "\"\"\"\n## Prepare the data", _TEXTS),)),
    Recipe("examples/keras_io/tensorflow/nlp/pretrained_word_embeddings.py", "nlp", stretches=(
        ("data_path =", "# Shuffle the data",
         "samples = [f'the cat sat on mat {i} and word{i % 17}' for i in range(60)]\n"
         "labels = [i % 4 for i in range(60)]\nclass_names = list('abcd')\n"),
        ("path_to_glove_file =", "print(\"Found %s word",
         "embeddings_index = {f'word{i}': np.random.default_rng(i).normal(size=100) for i in range(17)}\n"))),
    Recipe("examples/keras_io/tensorflow/timeseries/timeseries_traffic_forecasting.py", "graph", stretches=(
        ("url =", "print(f\"route_distances shape",
         "route_distances = np.random.default_rng(1).uniform(0, 20000, (228, 228))\n"
         "speeds_array = np.random.default_rng(2).uniform(20, 70, (600, 228))\n"),),
           ends_before="\"\"\"\n## Making forecasts on test set"),
    Recipe("examples/keras_io/tensorflow/structured_data/structured_data_classification_from_scratch.py",
           "structured data", stretches=(("file_url =", "val_dataframe =", _PATIENTS),),
           ends_before="\"\"\"\n## Inference on new data"),
)
