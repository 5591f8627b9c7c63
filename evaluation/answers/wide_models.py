"""Models of wide layers and tables: recommenders, and heads of ten thousand to ten million classes."""

import functools

import keras
from keras import layers

from evaluation.answers.trained_model import perceptron
from evaluation.answers.trained_model import TrainedModel
from evaluation.workloads import zoo

# Distinct values of the 26 categorical features of the Criteo Display Advertising Challenge, 2014.
_CRITEO = (1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194, 27, 14_992,
           5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572)


def _dlrm(width=16):
    """Returns the model of M. Naumov et al., 2019, as its repository trains it on Criteo's data."""
    numbers = keras.Input((13,), name="numbers")
    categories = keras.Input((len(_CRITEO),), dtype="int32", name="categories")
    x = numbers
    for size in (512, 256, 64, width):
        x = layers.Dense(size, "relu")(x)
    vectors = [layers.Embedding(values, width)(categories[:, number]) for number, values in enumerate(_CRITEO)]
    stacked = keras.ops.stack([x, *vectors], axis=1)
    products = keras.ops.matmul(stacked, keras.ops.transpose(stacked, (0, 2, 1)))
    x = layers.Concatenate()([x, layers.Flatten()(products)])
    for size in (512, 256):
        x = layers.Dense(size, "relu")(x)
    return keras.Model({"numbers": numbers, "categories": categories}, layers.Dense(1, "sigmoid")(x))


def _wide_and_deep(values=100_000, features=26, width=32):
    categories = keras.Input((features,), dtype="int32", name="categories")
    numbers = keras.Input((13,), name="numbers")
    wide = keras.ops.sum(layers.Embedding(values, 1)(categories), axis=1)
    x = layers.Concatenate()([layers.Flatten()(layers.Embedding(values, width)(categories)), numbers])
    for size in (1024, 512, 256):
        x = layers.Dense(size, "relu")(x)
    return keras.Model({"numbers": numbers, "categories": categories},
                       keras.ops.sigmoid(layers.Dense(1)(x) + wide))


def _next_item(items=100_000, width=256, length=50):
    """Returns a recurrent recommender that predicts the next item, of all, after each of a session."""
    seen = keras.Input((length,), dtype="int32")
    x = layers.GRU(width)(layers.Embedding(items, width)(seen))
    return keras.Model(seen, layers.Dense(items)(x))


def _sampled_video(videos=1_000_000, width=256, watched=50):
    """Returns candidate generation as P. Covington et al., RecSys 2016, do it, with a softmax over all videos."""
    history = keras.Input((watched,), dtype="int32")
    x = keras.ops.mean(layers.Embedding(videos, width)(history), axis=1)
    for size in (1024, 512, width):
        x = layers.Dense(size, "relu")(x)
    return keras.Model(history, layers.Dense(videos)(x))


def _autoencoder(items):
    """Returns a variational-style autoencoder of D. Liang et al., WWW 2018, without its noise."""
    return perceptron(items, 600, 200, 600, items)


MODELS = (
    TrainedModel("DLRM on Criteo", "recommenders", 2048, _dlrm, "M. Naumov et al., 2019; tables of 16 columns",
                 "binary_crossentropy"),
    TrainedModel("Wide & Deep", "recommenders", 2048, _wide_and_deep, "H.-T. Cheng et al., DLRS 2016",
                 "binary_crossentropy"),
    TrainedModel("GRU4Rec for 100k items", "recommenders", 128, _next_item,
                 "B. Hidasi et al., ICLR 2016; a full softmax"),
    TrainedModel("Video candidates of 1M", "recommenders", 256, _sampled_video,
                 "P. Covington et al., RecSys 2016; a full softmax"),
    TrainedModel("Autoencoder of 20k items", "recommenders", 500, functools.partial(_autoencoder, 20_000),
                 "D. Liang et al., WWW 2018, MovieLens-20M", "binary_crossentropy"),
    TrainedModel("Tabular perceptron", "wide heads", 256, zoo.MODELS["mlp"].build,
                 "three dense layers of 1,024, 4,096 and 4,096 inputs"),
    TrainedModel("Faces of 10k people", "wide heads", 64, functools.partial(zoo.faces, 10_000),
                 "ResNet-50 at 112 x 112 pixels, 512 features"),
    TrainedModel("Faces of 100k people", "wide heads", 64, functools.partial(zoo.faces, 100_000), "the same"),
    TrainedModel("Faces of 1M people", "wide heads", 64, functools.partial(zoo.faces, 1_000_000), "the same"),
    TrainedModel("Features of 10M classes", "wide heads", 64, functools.partial(perceptron, 2048, 512, 10_000_000),
                 "a head on stored features"),
)
