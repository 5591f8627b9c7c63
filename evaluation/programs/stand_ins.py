"""Small made-up data in place of what published programs download."""

from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import pathlib
import sys
import tempfile
import types
from typing import Any
from unittest import mock

import keras
from keras.src.utils import file_utils
import numpy as np
import tensorflow as tf

_CLASSES = 3


def datasets(image_rows: tuple[int, int]) -> contextlib.ExitStack:
    """Replaces downloads, in a context.

    Args:
        image_rows: Numbers of rows of the training and test parts of image data.
    """
    stack = contextlib.ExitStack()
    for name, load in _keras_datasets(image_rows).items():
        stack.enter_context(mock.patch.object(getattr(keras.datasets, name), "load_data", load))
    # Weights of keras.applications stay random: they are "loaded" from the file that is "downloaded".
    downloaded = stack.enter_context(tempfile.TemporaryDirectory())
    load_weights = keras.Model.load_weights

    def load(model: keras.Model, path: Any, *args: Any, **options: Any) -> None:
        if str(path) != downloaded:
            load_weights(model, path, *args, **options)

    for module in (keras.utils, file_utils):
        stack.enter_context(mock.patch.object(module, "get_file", lambda *_, **__: downloaded))
    stack.enter_context(mock.patch.object(keras.Model, "load_weights", load))
    for module in (keras.utils, keras.preprocessing):
        stack.enter_context(mock.patch.object(module, "image_dataset_from_directory", _images_from_directory))
    tfds = types.ModuleType("tensorflow_datasets")
    tfds.load, tfds.disable_progress_bar = _tensorflow_datasets, lambda: None
    tfds.Split = types.SimpleNamespace(TRAIN="train", TEST="test")
    stack.enter_context(modules({"tensorflow_datasets": tfds}))
    return stack


@contextlib.contextmanager
def modules(by_name: Mapping[str, Any]) -> Iterator[None]:
    """Has modules in a context only. Others that are imported there stay, since some cannot be imported twice."""
    sys.modules.update(by_name)
    try:
        yield
    finally:
        for name in by_name:
            del sys.modules[name]


def _keras_datasets(image_rows: tuple[int, int]) -> dict[str, Any]:
    """Returns the functions in place of those of keras.datasets."""
    rng = np.random.default_rng(5)

    def images(*shape: int, classes: int, column: bool) -> Any:
        def load_data(*_: Any, **__: Any) -> Any:
            return tuple((rng.integers(0, 256, (rows, *shape), np.uint8),
                          np.arange(rows).reshape((rows, 1) if column else (rows,)) * 7 % classes)
                         for rows in image_rows)

        return load_data

    def texts(*_: Any, num_words: int | None = None, **__: Any) -> Any:
        parts = []
        for rows in (120, 40):
            x = np.empty(rows, object)
            x[:] = [rng.integers(1, num_words or 1000, rng.integers(5, 30)).tolist() for _ in range(rows)]
            parts.append((x, np.arange(rows) % 2))
        return tuple(parts)

    def numbers(*_: Any, **__: Any) -> Any:
        return tuple((rng.normal(size=(rows, 13)), rng.normal(size=rows)) for rows in (30, 12))

    return {
        "boston_housing": numbers,
        "mnist": images(28, 28, classes=10, column=False),
        "fashion_mnist": images(28, 28, classes=10, column=False),
        "cifar10": images(32, 32, 3, classes=10, column=True), "imdb": texts,
        "cifar100": images(32, 32, 3, classes=100, column=True)}


def _images_from_directory(
        directory: pathlib.Path, label_mode: str | None = "int", class_names: Any = None, color_mode: str = "rgb",
        batch_size: int | None = 32, image_size: tuple[int, int] = (256, 256), subset: str | None = None,
        **_: Any) -> Any:
    """Does what keras.utils.image_dataset_from_directory does, with any labels but "categorical" ones."""
    rng = np.random.default_rng(6)

    def dataset() -> tf.data.Dataset:
        channels = 1 if color_mode == "grayscale" else 3
        images = rng.uniform(0, 255, (35, *image_size, channels)).astype(keras.config.floatx())
        found = tf.data.Dataset.from_tensor_slices(
            images if label_mode is None else (images, (np.arange(35) % 2).astype("int32")))
        found = found if batch_size is None else found.batch(min(batch_size, 10))
        found.class_names = class_names or ["a", "b"]
        return found

    return (dataset(), dataset()) if subset == "both" else dataset()


def _tensorflow_datasets(
        name: str, split: Any = None, as_supervised: bool = False, with_info: bool = False,
        batch_size: int | None = None, **_: Any) -> Any:
    """Does what `tensorflow_datasets.load` does, for images with labels."""
    rng = np.random.default_rng(7)

    def dataset(_: str) -> tf.data.Dataset:
        images, labels = rng.integers(0, 256, (35, 40, 48, 3), np.uint8), np.arange(35) % _CLASSES
        found = tf.data.Dataset.from_tensor_slices((images, labels) if as_supervised else
                                                   {"image": images, "label": labels})
        return found.batch(batch_size) if batch_size else found

    loaded = tf.nest.map_structure(dataset, {"train": "", "test": ""} if split is None else split)
    information = mock.MagicMock()
    information.features["label"].num_classes = information.features.__getitem__.return_value.num_classes = _CLASSES
    return (loaded, information) if with_info else loaded
