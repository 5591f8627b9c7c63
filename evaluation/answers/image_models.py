"""Models for images: those of keras.applications, a vision transformer of keras-hub, and a U-Net."""

import functools

import keras
from keras import layers

from evaluation.answers.trained_model import TrainedModel


def _application(name, size):
    return functools.partial(getattr(keras.applications, name), weights=None, input_shape=(size, size, 3))


def _of_keras(name, batch_size, size=224):
    return TrainedModel(name, "images", batch_size, _application(name, size), "keras.applications")


def _vision_transformer(layers_, heads, width):
    import keras_hub

    backbone = keras_hub.models.ViTBackbone(
        image_shape=(224, 224, 3), patch_size=16, num_layers=layers_, num_heads=heads, hidden_dim=width,
        mlp_dim=4 * width, dropout_rate=0.1)
    return keras_hub.models.ViTImageClassifier(backbone, num_classes=1000)


def _unet():
    """Returns the network of O. Ronneberger et al., MICCAI 2015, with padded convolutions and 256 x 256 pixels."""
    x = inputs = keras.Input((256, 256, 1))
    skipped = []
    for channels in (64, 128, 256, 512):
        x = _two_convolutions(x, channels)
        skipped.append(x)
        x = layers.MaxPooling2D()(x)
    x = _two_convolutions(x, 1024)
    for channels in (512, 256, 128, 64):
        x = layers.Conv2DTranspose(channels, 2, 2, activation="relu")(x)
        x = _two_convolutions(layers.Concatenate()([skipped.pop(), x]), channels)
    return keras.Model(inputs, layers.Conv2D(2, 1, activation="softmax")(x))


def _two_convolutions(x, channels):
    for _ in range(2):
        x = layers.Conv2D(channels, 3, padding="same", activation="relu")(x)
    return x


MODELS = (
    _of_keras("VGG16", 32),
    _of_keras("VGG19", 32),
    _of_keras("ResNet50", 64),
    _of_keras("ResNet101", 64),
    _of_keras("ResNet152", 32),
    _of_keras("InceptionV3", 64, 299),
    _of_keras("InceptionResNetV2", 32, 299),
    _of_keras("Xception", 32, 299),
    _of_keras("DenseNet121", 64),
    _of_keras("MobileNetV2", 128),
    _of_keras("MobileNetV3Large", 128),
    _of_keras("EfficientNetB0", 128),
    _of_keras("EfficientNetB4", 32, 380),
    _of_keras("EfficientNetV2S", 32, 384),
    _of_keras("ConvNeXtTiny", 64),
    _of_keras("ConvNeXtLarge", 16),
    TrainedModel("ViT-B/16", "images", 64, functools.partial(_vision_transformer, 12, 12, 768),
                 "A. Dosovitskiy et al., ICLR 2021; keras-hub"),
    TrainedModel("ViT-L/16", "images", 16, functools.partial(_vision_transformer, 24, 16, 1024),
                 "A. Dosovitskiy et al., ICLR 2021; keras-hub"),
    TrainedModel("U-Net", "images", 8, _unet, "O. Ronneberger et al., MICCAI 2015"),
)
