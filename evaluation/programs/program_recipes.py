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
        text: The program itself, where it is in no file; `path` then ends with its name.
        explained: Why a result differs from that of one process; empty if none may.
    """

    path: str
    group: str
    edits: tuple[tuple[str, str], ...] = ()
    stretches: tuple[tuple[str, str, str], ...] = ()
    rows: tuple[int, int] = (120, 40)
    ends_before: str = ""
    text: str = ""
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
_MOVIES = """
users = pd.DataFrame({"user_id": range(10), "sex": list("FM") * 5, "age_group": [i % 3 for i in range(10)],
                      "occupation": [i % 4 for i in range(10)], "zip_code": range(10)})
ratings = pd.DataFrame({"user_id": [i % 10 for i in range(200)], "movie_id": [i * 7 % 12 for i in range(200)],
                        "rating": [i % 5 + 1 for i in range(200)], "unix_timestamp": range(200)})
movies = pd.DataFrame({"movie_id": range(12), "title": range(12), "genres": ["Action|War", "Drama"] * 6})
"""
_CENSUS = """
texts = ("workclass", "education", "marital_status", "occupation", "relationship", "race", "gender")
columns = {name: [f" {i * number % 4}" if name in texts else i * number % 7 for i in range(40)]
           for number, name in enumerate(CSV_HEADER[:-2])}
columns |= {"native_country": [f" {i % 5}" for i in range(40)],
            "income_bracket": [(" <=50K", " >50K")[i % 2] for i in range(40)]}
train_data, test_data = pd.DataFrame(columns), pd.DataFrame(columns)
"""


def _hub(name: str, backbone: str, data: str, options: str = "") -> Recipe:
    """Returns a recipe for a model of keras-hub with random weights, of sizes as in keras-hub's own tests.

    Args:
        name: Task, as in `keras_hub.models`.
        backbone: What makes its backbone.
        data: What makes x, y and the weights of rows.
        options: Further arguments of the task.
    """
    return Recipe(f"keras_hub/{name}", "keras-hub", text=f"""
import keras_hub
import numpy as np
rng = np.random.default_rng(1)
{data}
model = keras_hub.models.{name}(
    backbone=keras_hub.models.{backbone}, preprocessor=None{options})
model.fit(x, y, sample_weight=w)
""")


_TOKENS = """
tokens, w = rng.integers(1, 10, (25, 8)), None
x = {"token_ids": tokens, "padding_mask": np.arange(8) < rng.integers(4, 9, (25, 1))}
"""
_NEXT_TOKENS = _TOKENS + "y, w = np.roll(tokens, -1, 1), x['padding_mask']"
_MASKED_TOKENS = _TOKENS + """
x["mask_positions"] = rng.integers(0, 4, (25, 3))
y, w = rng.integers(0, 10, (25, 3)), rng.integers(0, 2, (25, 3))
"""
_CLASSES_OF_TOKENS = _TOKENS + "y = np.arange(25) % 3"
_CLASSES_OF_IMAGES = "x, y, w = rng.normal(size=(25, 28, 28, 3)), np.arange(25) % 3, None"
_BERT_SIZES = ("vocabulary_size=10, num_layers=2, num_heads=2, hidden_dim=8, intermediate_dim=16, "
               "max_sequence_length=8")

# Keras' RandomRotation computes in single precision, whatever the type of the layer: it is left out.
RECIPES = (
    Recipe("examples/keras_io/vision/mnist_convnet.py", "vision"),
    Recipe("examples/keras_io/vision/knowledge_distillation.py", "vision"),
    Recipe("examples/keras_io/nlp/bidirectional_lstm_imdb.py", "nlp"),
    Recipe("examples/keras_io/tensorflow/keras_recipes/antirectifier.py", "recipes"),
    Recipe("examples/demo_subclass.py", "guides"),
    Recipe("examples/keras_io/vision/convmixer.py", "vision",
           edits=(("filters=256", "filters=16"), ("depth=8", "depth=2")),
           ends_before="\"\"\"\n## Visualizing the internals"),
    Recipe("examples/keras_io/vision/cct.py", "vision"),
    Recipe("examples/keras_io/vision/eanet.py", "vision",
           edits=(("layers.RandomRotation(factor=0.1),", ""), ("patch_size = 2", "patch_size = 8"),
                  ("convert_to_tensor(1e-9)", "convert_to_tensor(1e-9, \"float64\")")),
           explained="two runs of plain Keras differ by as much"),
    Recipe("examples/keras_io/vision/mlp_image_classification.py", "vision",
           edits=(("image_size = 64", "image_size = 32"), ("embedding_dim = 256", "embedding_dim = 16"))),
    Recipe("examples/keras_io/vision/token_learner.py", "vision"),
    Recipe("examples/keras_io/vision/siamese_contrastive.py", "vision",
           rows=(60000, 10000)),
    Recipe("examples/keras_io/vision/autoencoder.py", "vision",
           edits=(("display(test_data, predictions)\n", ""), ("display(noisy_test_data, predictions)\n", "")),
           rows=(60000, 10000)),
    Recipe("examples/keras_io/vision/attention_mil_classification.py", "vision"),
    Recipe("examples/keras_io/nlp/addition_rnn.py", "nlp",
           edits=(("range(1, epochs)", "range(1, 3)"), ("TRAINING_SIZE = 50000", "TRAINING_SIZE = 500"))),
    Recipe("examples/keras_io/tensorflow/vision/involution.py", "vision"),
    Recipe("examples/keras_io/tensorflow/generative/vae.py", "generative",
           ends_before="\"\"\"\n## Display a grid of sampled digits"),
    Recipe("examples/keras_io/tensorflow/keras_recipes/endpoint_layer_pattern.py", "recipes"),
    Recipe("examples/keras_io/tensorflow/keras_recipes/trainer_pattern.py", "recipes"),
    Recipe("examples/demo_functional.py", "guides"),
    Recipe("examples/demo_mnist_convnet.py", "guides"),
    Recipe("examples/demo_custom_layer_backend_agnostic.py", "guides"),
    Recipe("guides/custom_train_step_in_tensorflow.py", "guides"),
    Recipe("guides/functional_api.py", "guides",
           edits=(("keras.applications.VGG19()",
                   "keras.applications.MobileNet(weights=None, alpha=0.25, input_shape=(32, 32, 3))"),
                  ("(1, 224, 224, 3)", "(1, 32, 32, 3)"), ("reshape(60000, 784)", "reshape(-1, 784)"),
                  ("reshape(10000, 784)", "reshape(-1, 784)"))),
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
    Recipe("examples/keras_io/tensorflow/vision/metric_learning.py", "vision",
           edits=(("randint(0, 50000", "randint(0, 100"), ("self.num_batches", "self.number"),
                  ("self.compiled_loss(", "self.compute_loss(None, "),
                  ("        self.compiled_metrics.update_state(sparse_labels, similarities)\n", "")),
           ends_before="\"\"\"\n## Testing"),
    Recipe("examples/keras_io/tensorflow/vision/mixup.py", "vision",
           edits=(("val_samples = 2000", "val_samples = 20"), ("keras.backend.shape", "keras.ops.shape"),
                  # All ranks would write the same file.
                  ("initial_model.save_weights(\"initial_weights.weights.h5\")",
                   "initial_weights = initial_model.get_weights()"),
                  ("model.load_weights(\"initial_weights.weights.h5\")", "model.set_weights(initial_weights)"))),
    Recipe("examples/keras_io/generative/text_generation_with_miniature_gpt.py", "generative",
           edits=(("vocab_size = 20000", "vocab_size = 50"), ("maxlen = 80", "maxlen = 12"),
                  ("embed_dim = 256", "embed_dim = 16"), ("feed_forward_dim = 256", "feed_forward_dim = 16"),
                  ("num_tokens_generated = 40", "num_tokens_generated = 2"),
                  ("self.index_to_word[number]", "self.index_to_word[number % 40]"),
                  ("ops.tile(mask, mult)", "ops.broadcast_to(mask, (batch_size, n_dest, n_src))")),
           stretches=(("filenames = []", "text_ds = text_ds.shuffle",
                       "text_ds = tf_data.Dataset.from_tensor_slices([f'a film of {i} words, {i % 7}' "
                       "for i in range(35)])\n"),)),
    Recipe("examples/keras_io/generative/pixelcnn.py", "generative",
           edits=(("n_residual_blocks = 5", "n_residual_blocks = 2"), ("filters=128", "filters=8")),
           ends_before="from IPython"),
    Recipe("examples/keras_io/vision/gradient_centralization.py", "vision",
           edits=(("    layers.RandomRotation(0.3),\n", ""), ("    layers.RandomZoom(0.2),\n", ""),
                  ("(rescale(x), y)", "(rescale(tf.image.resize(x, (94, 94))), y)"), ("300, 300", "94, 94"),
                  ("import keras\n", "import keras\nimport tensorflow as tf\n"))),
    Recipe("examples/keras_io/tensorflow/keras_recipes/tensorflow_numpy_models.py", "recipes",
           # Within a scope of TensorFlow's strategies, this fails, too.
           edits=(("keras.backend.clear_session()\n", ""),)),
    Recipe("examples/keras_io/tensorflow/generative/dcgan_overriding_train_step.py", "generative",
           edits=(("alpha=0.2", "negative_slope=0.2"), ("image_size=(64, 64)", "image_size=(16, 16)"),
                  ("shape=(64, 64, 3)", "shape=(16, 16, 3)"), ("8 * 8 * 128", "2 * 2 * 128"),
                  ("(8, 8, 128)", "(2, 2, 128)"),
                  ("Conv2DTranspose(256", "Conv2DTranspose(16"), ("Conv2DTranspose(512", "Conv2DTranspose(16")),
           stretches=(("os.makedirs", "\"\"\"\nCreate a dataset", ""),)),
    Recipe("examples/keras_io/structured_data/deep_neural_decision_forests.py", "structured data",
           edits=(("num_trees = 25", "num_trees = 3"), ("depth = 10", "depth = 4"), ("depth = 5", "depth = 3"),
                  ("return batch_x", "batch_x.pop('fnlwgt')\n    return dict(batch_x)")),
           stretches=(("train_data_url =", "print(f\"Train dataset shape", _CENSUS),)),
    Recipe("examples/keras_io/timeseries/timeseries_weather_forecasting.py", "timeseries",
           edits=(("past = 720", "past = 60"), ("future = 72", "future = 6"), ("show_raw_visualization(df)\n", "")),
           stretches=(("uri =", "titles =", ""),
                      ("split_fraction =", "train_split =",
                       "import numpy as np\n"
                       "df = pd.DataFrame(np.random.default_rng(1).normal(size=(300, 14)), columns=feature_keys)\n"
                       "df[date_time_key] = range(300)\nsplit_fraction = 0.6\n")),
           ends_before="def visualize_loss"),
    Recipe("examples/keras_io/tensorflow/keras_recipes/subclassing_conv_layers.py", "recipes",
           edits=(("padding=\"valid\"", "padding=\"VALID\""),)),
    Recipe("examples/keras_io/tensorflow/structured_data/movielens_recommendations_transformers.py", "structured data",
           edits=(("hidden_units = [256, 128]", "hidden_units = [16, 8]"),
                  ("return features, target", "return dict(features), target")),
           stretches=(("urlretrieve(\"http", "\"\"\"\nHere, we do some simple data processing", _MOVIES),)),
    Recipe("examples/keras_io/vision/super_resolution_sub_pixel.py", "vision",
           edits=(("crop_size = 300", "crop_size = 24"),
                  ("self.test_img = get_lowres_image(load_img(test_img_paths[0]), upscale_factor)", "pass"),
                  ("        if epoch % 20 == 0:\n", "        if False:\n"), ("display(", "print(")),
           stretches=(("dataset = os.path.join(root_dir", "\"\"\"\n## Crop and resize", ""),),
           ends_before="\"\"\"\n## Run model prediction"),
    Recipe("examples/keras_io/nlp/neural_machine_translation_with_transformer.py", "nlp",
           edits=(("os[\"KERAS_BACKEND\"]", "os.environ[\"KERAS_BACKEND\"]"), ("vocab_size = 15000", "vocab_size = 40"),
                  ("sequence_length = 20", "sequence_length = 8"), ("embed_dim = 256", "embed_dim = 16"),
                  ("latent_dim = 2048", "latent_dim = 16"), ("num_heads = 8", "num_heads = 2"),
                  ("ops.tile(mask, mult)",
                   "ops.broadcast_to(mask, (batch_size, sequence_length, sequence_length))")),
           stretches=(("text_file = keras.utils.get_file", "\"\"\"\nHere's what our sentence",
                       "text_pairs = [(f'a sentence of {i} words', f'[start] una frase de {i} [end]') "
                       "for i in range(60)]\n"),),
           ends_before="\"\"\"\n## Decoding test sentences"),
    Recipe("guides/distributed_training_with_tensorflow.py", "guides",
           edits=(("num_val_samples = 10000", "num_val_samples = 20"),
                  ("tf.distribute.MirroredStrategy()", "tf.distribute.get_strategy()")),
           ends_before="\"\"\"\n## Using callbacks"),
    _hub("BertTextClassifier", f"BertBackbone({_BERT_SIZES})",
         _CLASSES_OF_TOKENS + "; x['segment_ids'] = tokens * 0", ", num_classes=3"),
    _hub("RobertaMaskedLM", f"RobertaBackbone({_BERT_SIZES})", _MASKED_TOKENS),
    _hub("DebertaV3TextClassifier", f"DebertaV3Backbone({_BERT_SIZES})", _CLASSES_OF_TOKENS, ", num_classes=3"),
    _hub("GPT2CausalLM", f"GPT2Backbone({_BERT_SIZES})", _NEXT_TOKENS),
    _hub("LlamaCausalLM", "LlamaBackbone(vocabulary_size=10, num_layers=2, num_query_heads=4, num_key_value_heads=2, "
         "hidden_dim=8, intermediate_dim=16)", _NEXT_TOKENS),
    _hub("ViTImageClassifier", "ViTBackbone(image_shape=(28, 28, 3), patch_size=(4, 4), num_layers=2, num_heads=2, "
         "hidden_dim=12, mlp_dim=24, dropout_rate=0.1)", _CLASSES_OF_IMAGES, ", num_classes=3"),
    _hub("DenseNetImageClassifier", "DenseNetBackbone(stackwise_num_repeats=[2, 2], image_shape=(28, 28, 3), "
         "growth_rate=4, compression_ratio=0.5)", _CLASSES_OF_IMAGES, ", num_classes=3, pooling='avg'"),
    Recipe("guides/writing_a_custom_training_loop_in_tensorflow.py", "guides",
           edits=(("10000:]", "20:]"), (":-10000]", ":-20]"), ("7 * 7 * 128", "7 * 7 * 8"), ("7, 7, 128", "7, 7, 8"),
                  ("128, (4, 4)", "8, (4, 4)"),
                  # Within a distributed step, the number of rows is known only when it runs.
                  ("real_images.shape[0]", "tf.shape(real_images)[0]"), ("(labels.shape)", "(tf.shape(labels))"),
                  ("@tf.function\ndef train_step(x", "@distributed(model)\n@tf.function\ndef train_step(x"),
                  ("@tf.function\ndef test_step(x", "@distributed()\n@tf.function\ndef test_step(x"),
                  ("@tf.function\ndef train_step(real",
                   "@distributed(discriminator, generator)\n@tf.function\ndef train_step(real")),
           stretches=(("epochs = 3\n", "\"\"\"\n## Speeding-up your training step",
                       "train_acc_metric = keras.metrics.SparseCategoricalAccuracy()\n"
                       "val_acc_metric = keras.metrics.SparseCategoricalAccuracy()\n"),)),
)
