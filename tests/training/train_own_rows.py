"""Trains on datasets of which each rank makes its own rows: OUTPUT SHARES.

OUTPUT.RANK.npz has what every program has trained and predicted, and how often each element was decoded. SHARES are
"equal", or numbers such as 4,1,2.
"""

import collections
import os
import pathlib
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf

import tf_poseidon as poseidon
from tf_poseidon.data import array_rows

Dataset = tf.data.Dataset
COUNT, BATCH, EPOCHS = 23, 6, 2  # of images; 4 batches in an epoch, the last of which has 5 rows
PROGRAMS = {}
decoded = collections.Counter()


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def images(directory):
    """Writes images of two classes, and returns their files."""
    rng = np.random.default_rng(2)
    files = []
    for i in range(COUNT):
        name = directory / f"class{i % 2}" / f"{i:02}.jpg"
        name.parent.mkdir(exist_ok=True)
        tf.io.write_file(str(name), tf.io.encode_jpeg(tf.constant(rng.integers(0, 256, (9, 9, 3)), tf.uint8)))
        files.append(str(name))
    return files


def noted(file):
    decoded[pathlib.Path(file.decode()).name] += 1
    return file


def decode(file, label):
    if not tf.executing_eagerly():
        file = tf.ensure_shape(tf.numpy_function(noted, [file], tf.string, stateful=False), [])
    image = tf.image.resize(tf.io.decode_jpeg(tf.io.read_file(file), channels=3), [8, 8])
    return tf.cast(image, tf.float32) / 128 - 1, label


def augment(images, labels):
    return tf.image.flip_left_right(images) * 0.5, tf.one_hot(labels, 2)


def of_files(files):
    return Dataset.from_tensor_slices((files, [i % 2 for i in range(COUNT)]))


def network(rate=0.3):
    model = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 3, activation="relu"),
                              keras.layers.Flatten(), keras.layers.Dropout(rate, seed=4), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.05), keras.losses.CategoricalCrossentropy(from_logits=True),
                  metrics=["accuracy"])
    return model


def fitted(train, test, rate=0.3, **options):
    model = network(rate)
    history = model.fit(train, epochs=EPOCHS, validation_data=test, verbose=0, **options)
    return [*model.get_weights(), *(np.array(values) for values in history.history.values()),
            model.predict(test, verbose=0)]


@program
def files(directory, files):
    train = of_files(files).shuffle(10, seed=3).map(decode, 2).batch(BATCH).map(augment).prefetch(2)
    return fitted(train, of_files(files).map(decode).batch(4).map(augment))


@program
def steps_per_execution(directory, files):
    train = of_files(files).map(decode, 2).shuffle(10, seed=3).batch(BATCH, drop_remainder=True)
    train = train.map(lambda images, labels: (images, tf.one_hot(labels, 2)))
    model = network()
    model.compile(keras.optimizers.SGD(0.05), "mse", steps_per_execution=3)
    model.fit(train, epochs=EPOCHS, verbose=0)
    return model.get_weights()


@program
def repeated(directory, files):
    train = of_files(files).repeat().shuffle(10, seed=3).map(decode).batch(BATCH).map(augment)
    return fitted(train, of_files(files).map(decode).batch(4).map(augment), steps_per_epoch=5)


@program
def directories(directory, files):
    train, test = keras.utils.image_dataset_from_directory(
        str(directory), label_mode="categorical", batch_size=BATCH, image_size=(8, 8), seed=1, validation_split=0.3,
        subset="both", verbose=False)
    scale = keras.layers.Rescaling(1 / 128, offset=-1)
    return fitted(train.map(lambda images, labels: (scale(images), labels)).cache().prefetch(1),
                  test.map(lambda images, labels: (scale(images), labels)))


@program
def records(directory, files):
    path = str(directory / f"records{os.getpid()}")
    with tf.io.TFRecordWriter(path) as writer:
        for i, file in enumerate(files):
            example = tf.train.Example(features=tf.train.Features(feature={
                "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[pathlib.Path(file).read_bytes()])),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[i % 2]))}))
            writer.write(example.SerializeToString(deterministic=True))

    def parse(record):
        parsed = tf.io.parse_single_example(record, {"image": tf.io.FixedLenFeature([], tf.string),
                                                     "label": tf.io.FixedLenFeature([], tf.int64)})
        image = tf.image.resize(tf.io.decode_jpeg(parsed["image"], channels=3), [8, 8])
        return image / 128 - 1, tf.one_hot(parsed["label"], 2)

    data = tf.data.TFRecordDataset(path).map(parse, tf.data.AUTOTUNE).batch(BATCH)
    return fitted(data, data)


@program
def files_by_rank(directory, files):
    """Each rank gives its own rows, in other numbers than the shares of ranks."""
    strategy = tf.distribute.get_strategy()

    def own(context):
        size, rank = context.num_input_pipelines, context.input_pipeline_id
        parts = [range(begin, min(begin + BATCH, COUNT)) for begin in range(0, COUNT, BATCH)]
        chosen = [part[len(part) * rank // size:len(part) * (rank + 1) // size] for part in parts]
        batches = [Dataset.from_tensor_slices((np.array(files)[part], np.array(part) % 2)).map(decode).batch(BATCH)
                   for part in chosen if len(part)]
        result = batches[0]
        for each in batches[1:]:
            result = result.concatenate(each)
        return result.map(augment)

    # In an epoch of unknown length, Keras' step draws numbers before it finds that there is no batch for them.
    return fitted(strategy.distribute_datasets_from_function(own), of_files(files).map(decode).batch(4).map(augment),
                  rate=0)


@program
def arrays(directory, files):
    rng = np.random.default_rng(6)
    images, targets = rng.normal(size=(COUNT, 8, 8, 3)).astype(np.float32), np.eye(2)[np.arange(COUNT) % 2]
    weights = np.linspace(0.5, 1.5, COUNT, dtype=np.float32)
    results = []
    for options in ({}, {"shuffle": False, "steps_per_epoch": 3}):
        model = network()
        history = model.fit(images, targets, BATCH, EPOCHS, verbose=0, sample_weight=weights,
                            validation_data=(images, targets), **options)
        results += [*model.get_weights(), *(np.array(values) for values in history.history.values()),
                    model.predict(images, 4, verbose=0)]
    return results


class Batches(keras.utils.PyDataset):
    """Batches of files, of which a rank reads its rows alone."""

    def __init__(self, files, **options):
        super().__init__(**options)
        self.files = files

    def __len__(self):
        return -(-len(self.files) // BATCH)

    def num_rows(self, index):
        return min(BATCH, len(self.files) - BATCH * index)

    def __getitem__(self, index):
        return self.rows(index, 0, self.num_rows(index))

    def rows(self, index, start, stop):
        numbers = range(BATCH * index + start, BATCH * index + stop)
        chosen = [decode(noted(self.files[number].encode()).decode(), 0)[0] for number in numbers]
        return np.stack(chosen), np.eye(2)[np.array(numbers) % 2]


@program
def py_dataset(directory, files):
    return fitted(Batches(files, workers=2), Batches(files))


@program
def loop_of_ones_own(directory, files):
    strategy = tf.distribute.get_strategy()
    model = network()
    train = of_files(files).shuffle(10, seed=3).map(decode, 2).batch(BATCH).map(augment)
    optimizer = keras.optimizers.SGD(0.05)

    @poseidon.distribute
    @tf.function
    def step(batch):
        images, labels = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(images, training=False) - labels))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    losses = [float(step(batch)) for batch in strategy.experimental_distribute_dataset(train)]
    return [*model.get_weights(), np.array(losses)]


def main(output, shares):
    array_rows.LEAST_BYTES = 0
    keras.utils.set_random_seed(5)
    strategy = poseidon.PoseidonStrategy(
        policy="ps", rows=None if shares == "equal" else tuple(map(int, shares.split(","))), strict=True)
    results = {}
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        made = images(directory)
        for title, train in PROGRAMS.items():
            keras.backend.clear_session()
            keras.utils.set_random_seed(5)
            decoded.clear()
            with strategy.scope():
                values = train(directory, made)
            results |= {f"{title}/{i}": np.asarray(value) for i, value in enumerate(values)}
            results[f"{title}/decoded"] = np.array([decoded[pathlib.Path(file).name] for file in made])
    np.savez(f"{output}.{strategy.rank}.npz", **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
