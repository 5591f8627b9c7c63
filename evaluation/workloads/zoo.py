"""The models of the benchmarks: as Keras models, and as the arithmetic and gradients of their training.

Those of the paper (H. Zhang et al., USENIX ATC 2017, table 3), ResNet-50, a network of dense layers, and
BERT-base's head that predicts masked words. They end in logits. Models that Keras provides are Keras' own:
Inception-V3 has 23.8 million parameters, where the paper says 27.
"""

import dataclasses
import functools
import math

import keras
from keras import layers

from tf_poseidon import planning


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, and how it is trained.

    Attributes:
        build: Returns the Keras model, without a softmax at its end.
        batch_size: Rows on each worker: the paper's, where it has the model.
        inputs: Shape of a row.
        classes: Number of logits per row.
        densities: Of each dense layer, from the first: the shares of its input, and of the errors of its output, that
            are not zero in training. Empty if these are not known.
    """

    build: object
    batch_size: int
    inputs: tuple
    classes: int
    densities: tuple[tuple[float, float], ...] = ()


def _application(name, classes, size):
    def build():
        make = getattr(keras.applications, name)
        return make(weights=None, classes=classes, classifier_activation=None,
                    input_shape=(size, size, 3))
    return build


def _mlp(sizes):
    def build():
        hidden = [layers.Dense(size, "relu") for size in sizes[1:-1]]
        return keras.Sequential([keras.Input((sizes[0],)), *hidden, layers.Dense(sizes[-1])])
    return build


def _cifar10_quick():
    """The network of Caffe's tutorial with 145,578 parameters."""
    return keras.Sequential([
        keras.Input((32, 32, 3)),
        layers.Conv2D(32, 5, padding="same"), layers.MaxPooling2D(3, 2, "same"), layers.ReLU(),
        layers.Conv2D(32, 5, padding="same", activation="relu"), layers.AveragePooling2D(3, 2, "same"),
        layers.Conv2D(64, 5, padding="same", activation="relu"), layers.AveragePooling2D(3, 2, "same"),
        layers.Flatten(), layers.Dense(64), layers.Dense(10)])


# Output channels of the modules of C. Szegedy et al., "Going deeper with convolutions", CVPR 2015, table 1:
# 1x1, 3x3 reduced, 3x3, 5x5 reduced, 5x5, after pooling. None halves the image.
_INCEPTION = ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), None,
              (192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64),
              (112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128), None,
              (256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128))


def _googlenet():
    """GoogLeNet without its auxiliary classifiers and its dropout, whose masks would differ between systems.

    It has 7.0 million parameters; Poseidon's paper says 5 million.
    """
    def conv(x, channels, size, strides=1):
        return layers.Conv2D(channels, size, strides, "same", activation="relu")(x)

    inputs = keras.Input((224, 224, 3))
    x = layers.MaxPooling2D(3, 2, "same")(conv(inputs, 64, 7, 2))
    x = layers.MaxPooling2D(3, 2, "same")(conv(conv(x, 64, 1), 192, 3))
    for channels in _INCEPTION:
        if channels is None:
            x = layers.MaxPooling2D(3, 2, "same")(x)
            continue
        one, reduced_3, three, reduced_5, five, pooled = channels
        x = layers.Concatenate()([
            conv(x, one, 1), conv(conv(x, reduced_3, 1), three, 3), conv(conv(x, reduced_5, 1), five, 5),
            conv(layers.MaxPooling2D(3, 1, "same")(x), pooled, 1)])
    return keras.Model(inputs, layers.Dense(1000)(layers.GlobalAveragePooling2D()(x)))


_WORDS = 30522  # of BERT's vocabulary
_MASKED = 20  # of 128 words, 15 %, are predicted


def _bert_base_head():
    """The head that predicts masked words from BERT-base's states (J. Devlin et al., NAACL 2019), weights not tied."""
    return keras.Sequential([
        keras.Input((_MASKED, 768)), layers.Dense(768, "gelu"), layers.LayerNormalization(),
        layers.Dense(_WORDS)])


def faces(people):
    """Returns ResNet-50 at 112 x 112 pixels, with 512 features of a face, and a class for each person."""
    backbone = keras.applications.ResNet50(weights=None, include_top=False, pooling="avg", input_shape=(112, 112, 3))
    x = layers.Dense(512)(backbone.output)
    return keras.Model(backbone.input, layers.Dense(people, use_bias=False)(x))


MODELS = {
    # Densities after an epoch: docs/results/bench_zeros.json.
    "mlp": Model(_mlp((1024, 4096, 4096, 1000)), 32, (1024,), 1000, ((1.0, 0.44), (0.44, 0.41), (0.42, 0.9))),
    "cifar10_quick": Model(_cifar10_quick, 100, (32, 32, 3), 10),
    "googlenet": Model(_googlenet, 128, (224, 224, 3), 1000),
    "inception_v3": Model(_application("InceptionV3", 1000, 299), 32, (299, 299, 3), 1000),
    "vgg19": Model(_application("VGG19", 1000, 224), 32, (224, 224, 3), 1000),
    "vgg19_22k": Model(_application("VGG19", 21841, 224), 32, (224, 224, 3), 21841),
    "resnet50": Model(_application("ResNet50", 1000, 224), 32, (224, 224, 3), 1000),
    "resnet152": Model(_application("ResNet152", 1000, 224), 32, (224, 224, 3), 1000),
    "faces_100k": Model(functools.partial(faces, 100_000), 64, (112, 112, 3), 100_000),
    "bert_base_head": Model(_bert_base_head, 8, (_MASKED, 768), _WORDS),
}


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer with weights: what determines how its gradients travel.

    Attributes:
        name: Its name.
        weights: (name, shape) of its trainable variables.
        operations: Additions and multiplications of its forward pass per row of the batch. The errors of
            its inputs take as many, and so does the gradient of its kernel.
        rows: Rows of its factors per row of the batch; None if its gradient is not a product.
    """

    name: str
    weights: tuple
    operations: float
    rows: int | None = None


@functools.cache
def describe(name):
    """Returns the `Layer`s of a model in the order of its forward pass."""
    # In this scope variables have shapes, but no values: some models are large.
    with keras.StatelessScope(initialize_variables=False):
        model = MODELS[name].build()
    return tuple(_layer(layer) for layer in model.layers if layer.trainable_weights)


def _layer(layer):
    weights = tuple((v.name, tuple(v.shape)) for v in layer.trainable_weights)
    positions = math.prod(layer.output.shape[1:-1])
    if isinstance(layer, layers.Dense):
        return Layer(layer.name, weights, 2 * positions * math.prod(layer.kernel.shape), positions)
    if isinstance(layer, layers.Conv2D):
        return Layer(layer.name, weights, 2 * positions * math.prod(layer.kernel.shape))
    if isinstance(layer, (layers.BatchNormalization, layers.LayerNormalization)):
        return Layer(layer.name, weights, 0)  # some per element: negligible beside the products
    raise NotImplementedError(f"The layer '{layer.name}' is a {type(layer).__name__}, expected a dense, a "
                              "convolutional or a normalizing one: say here what its operations are.")


def has_many_outputs(shape):
    """Returns whether a dense layer, given the shape of its kernel, is divided by its outputs where layers are."""
    return shape[1] > 4 * shape[0]


def operations(name):
    """Returns the additions and multiplications of a training step per row of the batch."""
    described = describe(name)
    return 3 * sum(layer.operations for layer in described) - described[0].operations


def sites(name, batch_size, itemsize=4):
    """Returns the `planning.Site`s of a model's training step, in the order of its variables.

    Their `operations` assume a device that works sequentially: the forward pass, and then for each layer, from the
    last to the first, its gradients before the errors of its inputs.
    """
    described = describe(name)
    before = batch_size * sum(layer.operations for layer in described)
    found = []
    for layer in reversed(described):
        own = batch_size * layer.operations
        leader = f"{layer.name}/{layer.weights[0][0]}"
        for i, (weight, shape) in reversed(list(enumerate(layer.weights))):
            is_product = layer.rows is not None and i == 0
            factors = planning.Factors(*shape, layer.rows * batch_size, itemsize) if is_product else None
            found.append(planning.Site(
                f"{layer.name}/{weight}", "float32", itemsize, shape, factors,
                refusal="" if is_product else "its gradient is no product of factors",
                bias_of=leader if layer.rows is not None and i else None,
                operations=before + own))
        before += 2 * own
    return tuple(reversed(found))
