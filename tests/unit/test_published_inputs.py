"""Datasets built as published programs build them: each rank's rows are those of one process, whoever makes them.

Each case says which maps a rank runs for its own rows alone, and, where some run for all rows, why. Files that they
read are small, and made here.
"""

import csv
import dataclasses
import wave

import keras
import numpy as np
import pytest
import tensorflow as tf
import test_row_selection as rows

from tf_poseidon.data import row_selection
from tf_poseidon.strategy import row_maps

AUTOTUNE = tf.data.AUTOTUNE
Dataset = tf.data.Dataset
WORDS = "a big cat sat on the red mat and saw two small dogs run".split()


@dataclasses.dataclass(frozen=True)
class Case:
    """A dataset of files.

    Attributes:
        build: Returns the dataset, always the same, given the folder of files.
        own: The functions of its maps that each rank runs for its own rows.
        obstacle: A part of the reason why others run for all rows; "" if all maps are a rank's own.
        tolerance: Of real numbers that are rounded in another way for fewer rows.
    """

    build: object
    own: tuple[str, ...]
    obstacle: str
    tolerance: float


CASES = {}


def case(*own, obstacle="", tolerance=0.0):
    def add(build):
        CASES[build.__name__] = Case(build, own, obstacle, tolerance)
        return build

    return add


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Returns a folder of photographs with masks, clips, reviews, records, tables and lines, of two classes."""
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(1)
    for name in ("photos/rose", "photos/tulip", "masks", "clips/up", "clips/down", "reviews/neg", "reviews/pos"):
        (folder / name).mkdir(parents=True)
    for i in range(13):
        photo = tf.constant(rng.integers(0, 256, (10 + i % 3, 12, 3)), tf.uint8)
        (folder / "photos" / ("rose", "tulip")[i % 2] / f"{i:02}.jpg").write_bytes(tf.io.encode_jpeg(photo).numpy())
        (folder / "masks" / f"{i:02}.png").write_bytes(tf.io.encode_png(photo[..., :1] % 3).numpy())
        with wave.open(str(folder / "clips" / ("up", "down")[i % 2] / f"{i:02}.wav"), "wb") as clip:
            clip.setparams((1, 2, 800, 0, "NONE", ""))
            clip.writeframes(rng.integers(-999, 999, 60 + i % 4, dtype=np.int16).tobytes())
        (folder / "reviews" / ("neg", "pos")[i % 2] / f"{i:02}.txt").write_text(" ".join(rng.choice(WORDS, 3 + i % 5)))
    for shard in range(3):
        with tf.io.TFRecordWriter(str(folder / f"photos-{shard}.tfrecord")) as writer:
            for i in range(4 + shard):
                photo = tf.io.encode_jpeg(tf.constant(rng.integers(0, 256, (9, 9, 3)), tf.uint8)).numpy()
                tokens = rng.integers(1, 9, 1 + i)
                writer.write(tf.train.Example(features=tf.train.Features(feature={
                    "photo": tf.train.Feature(bytes_list=tf.train.BytesList(value=[photo])),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[i % 2])),
                    "tokens": tf.train.Feature(int64_list=tf.train.Int64List(value=tokens))})).SerializeToString())
    with open(folder / "table.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["age", "fare", "class", "survived"])
        table.writerows([20 + i, i / 4, ("first", "second")[i % 2], i % 3 == 0 and 1 or 0] for i in range(17))
    for name in ("first", "second"):
        (folder / f"{name}.txt").write_text("\n".join(" ".join(rng.choice(WORDS, 4)) for _ in range(9)) + "\n")
    return folder


def paths(files, pattern):
    return sorted(map(str, files.glob(pattern)))


def read_photo(path):
    photo = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
    return tf.image.resize(photo, [8, 8]) / 255


def read_labelled(path):
    return read_photo(path), tf.cast(tf.strings.split(path, "/")[-2] == "rose", tf.int32)


# ---- images ----


def photo_folder(files, **how):
    return keras.utils.image_dataset_from_directory(
        files / "photos", image_size=(8, 8), batch_size=4, seed=3, verbose=False, **how)


@case("lambda")
def photos_of_a_folder(files):
    return photo_folder(files)


@case("lambda")
def photos_of_a_folder_cached_and_shuffled(files):
    return photo_folder(files, validation_split=0.3, subset="training").cache().shuffle(10, seed=1).prefetch(AUTOTUNE)


@case("lambda", "rescaled")
def photos_rescaled(files):
    rescaling = keras.layers.Rescaling(1 / 256)

    def rescaled(photos, labels):
        return rescaling(photos), labels

    return photo_folder(files, label_mode="categorical").map(rescaled, AUTOTUNE).prefetch(AUTOTUNE)


@case(obstacle="AssignVariableOp")
def photos_augmented_by_layers(files):
    augmentation = keras.Sequential(
        [keras.layers.RandomFlip("horizontal", seed=1), keras.layers.RandomRotation(0.1, seed=2)])

    def augmented(photos, labels):
        return augmentation(photos, training=True), labels

    return photo_folder(files).map(augmented)


@case("read_labelled")
def flowers(files):
    found = Dataset.list_files(str(files / "photos/*/*.jpg"), shuffle=False).shuffle(
        13, seed=1, reshuffle_each_iteration=False)
    return found.skip(2).map(read_labelled, AUTOTUNE).batch(4).prefetch(AUTOTUNE)


@case(obstacle="'shuffle' behind it")
def flowers_cached_and_shuffled(files):
    found = Dataset.list_files(str(files / "photos/*/*.jpg"), shuffle=False).shuffle(
        13, seed=1, reshuffle_each_iteration=False)
    return found.map(read_labelled, AUTOTUNE).cache().shuffle(10, seed=2).batch(4).prefetch(AUTOTUNE)


@case("read_labelled")
def flowers_cached_in_batches(files):
    found = Dataset.list_files(str(files / "photos/*/*.jpg"), seed=5)
    return found.map(read_labelled, AUTOTUNE).batch(4).cache().shuffle(3, seed=2).prefetch(AUTOTUNE)


@case("read_labelled", "lambda", "flipped")
def flowers_flipped_by_seeds(files):
    def flipped(photo_and_label, seed):
        photo, label = photo_and_label
        photo = tf.image.stateless_random_brightness(photo, 0.3, seed)
        return tf.image.stateless_random_flip_left_right(photo, seed), label

    seeds = Dataset.counter().map(lambda number: tf.stack([number, 0]))
    found = Dataset.from_tensor_slices(paths(files, "photos/*/*.jpg")).map(read_labelled)
    return Dataset.zip((found, seeds)).shuffle(20, seed=4).map(flipped, AUTOTUNE).batch(4).prefetch(1)


@case(obstacle="RandomUniform")
def pix2pix(files):
    def jittered(path):
        photo = tf.image.random_crop(read_photo(path), [6, 6, 3], seed=1)
        return photo, photo * 2 - 1

    return Dataset.from_tensor_slices(paths(files, "photos/*/*.jpg")).map(jittered).shuffle(8, seed=1).batch(2)


@case("read_pair")
def segmentation(files):
    def read_pair(photo, mask):
        mask = tf.image.resize(tf.io.decode_png(tf.io.read_file(mask), channels=1), [8, 8], "nearest")
        return read_photo(photo), mask - 1

    photos = sorted(paths(files, "photos/*/*.jpg"), key=lambda path: path[-6:])
    return Dataset.from_tensor_slices((photos, paths(files, "masks/*.png"))).map(read_pair, AUTOTUNE).batch(4)


@case("read_pair", "cropped")
def segmentation_cropped_together(files):
    def read_pair(photo, mask):
        return tf.io.decode_jpeg(tf.io.read_file(photo)), tf.io.decode_png(tf.io.read_file(mask))

    def cropped(pair, seed):
        joint = tf.concat(tf.nest.map_structure(lambda image: image[:10], pair), -1)
        joint = tf.image.stateless_random_crop(joint, [8, 8, 4], seed)
        return joint[..., :3], joint[..., 3:]

    photos = sorted(paths(files, "photos/*/*.jpg"), key=lambda path: path[-6:])
    pairs = Dataset.from_tensor_slices((photos, paths(files, "masks/*.png"))).map(read_pair)
    seeds = Dataset.random(seed=3).batch(2, drop_remainder=True)
    return Dataset.zip((pairs, seeds)).map(cropped, AUTOTUNE).batch(5, drop_remainder=True).repeat(2)


@case("read_photo", "scaled")
def cyclegan(files):
    def scaled(photo):
        return photo * 2 - 1

    horses, zebras = (Dataset.from_tensor_slices(paths(files, f"photos/{name}/*.jpg")) for name in ("rose", "tulip"))
    return Dataset.zip((horses.map(read_photo).map(scaled).shuffle(5, seed=1).batch(2),
                        zebras.map(read_photo).map(scaled).shuffle(5, seed=2).batch(2)))


@case("read_photo", "seen")
def two_views(files):
    def seen(photo, seed):
        return tf.image.stateless_random_flip_left_right(photo, seed)

    photos = Dataset.from_tensor_slices(paths(files, "photos/*/*.jpg")).map(read_photo)
    views = [Dataset.zip((photos, Dataset.random(seed=seed).batch(2, drop_remainder=True))).map(seen)
             for seed in (1, 2)]
    return Dataset.zip(tuple(views)).shuffle(7, seed=3).batch(4)


@case(obstacle="RandomUniform")
def mixup(files):
    def mixed(first, second):
        share = tf.random.stateless_uniform([tf.shape(first[0])[0]], [1, 2])[:, None] * tf.random.uniform([], seed=2)
        return first[0] * share[..., None, None] + second[0] * (1 - share[..., None, None]), first[1]

    photos = Dataset.from_tensor_slices(paths(files, "photos/*/*.jpg")).map(read_labelled)
    return Dataset.zip((photos.shuffle(9, seed=1).batch(4), photos.shuffle(9, seed=2).batch(4))).map(mixed)


@case("read_labelled", "mixed")
def mixup_of_elements(files):
    def mixed(first, second, seed):
        share = tf.random.stateless_uniform([], seed)
        return first[0] * share + second[0] * (1 - share), first[1], second[1]

    photos = Dataset.from_tensor_slices(paths(files, "photos/*/*.jpg")).map(read_labelled, AUTOTUNE)
    seeds = Dataset.random(seed=3).batch(2, drop_remainder=True)
    return Dataset.zip(photos.shuffle(9, seed=1), photos.shuffle(9, seed=2), seeds).map(mixed, AUTOTUNE).batch(4)


@case(obstacle="may need all rows")
def cutmix_of_a_batch(files):
    def cut(photos, labels):
        box = tf.pad(tf.ones([3, 4]), [[2, 3], [1, 3]])[None, :, :, None]
        return photos * (1 - box) + tf.reverse(photos, [0]) * box, labels

    return photo_folder(files).map(cut)


@case("lambda", "low_and_high", tolerance=1e-6)  # the sum of colours is a product of matrices
def super_resolution(files):
    def low_and_high(photos):
        grey = tf.image.rgb_to_grayscale(photos / 255)
        return tf.image.resize(grey, [4, 4], "area"), grey

    return photo_folder(files, label_mode=None).map(low_and_high).prefetch(AUTOTUNE)


@case("triplet")
def siamese_triplets(files):
    def triplet(*three):
        return tuple(read_photo(path) for path in three)

    anchors = paths(files, "photos/rose/*.jpg")
    negatives = Dataset.from_tensor_slices(paths(files, "photos/tulip/*.jpg")).shuffle(20, seed=1)
    triplets = Dataset.zip((Dataset.from_tensor_slices(anchors), Dataset.from_tensor_slices(anchors[::-1]), negatives))
    return triplets.shuffle(30, seed=2).map(triplet).take(5).batch(2, drop_remainder=False).prefetch(AUTOTUNE)


@case("encoded")
def captcha(files):
    to_number = keras.layers.StringLookup(vocabulary=list("0123456789"), mask_token=None)

    def encoded(path, label):
        photo = tf.transpose(tf.image.rgb_to_grayscale(read_photo(path)), [1, 0, 2])
        return {"photo": photo, "label": to_number(tf.strings.unicode_split(label, "UTF-8"))}

    found = paths(files, "photos/*/*.jpg")
    return Dataset.from_tensor_slices((found, [path[-6:-4] for path in found])).map(
        encoded, AUTOTUNE).batch(4).prefetch(1)


# ---- records and tables ----


def parsed(record):
    example = tf.io.parse_single_example(record, {
        "photo": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)})
    return tf.image.resize(tf.io.decode_jpeg(example["photo"], channels=3), [8, 8]), example["label"]


@case("parsed")
def records(files):
    return Dataset.from_tensor_slices(paths(files, "*.tfrecord")).shuffle(3, seed=1).flat_map(
        tf.data.TFRecordDataset).shuffle(6, seed=2).map(parsed, AUTOTUNE).repeat(2).batch(4).prefetch(AUTOTUNE)


@case("parsed")
def records_read_in_parallel(files):
    unordered = tf.data.Options()
    unordered.deterministic = True
    shards = Dataset.list_files(str(files / "*.tfrecord"), shuffle=False)
    return shards.interleave(tf.data.TFRecordDataset, cycle_length=3, num_parallel_calls=AUTOTUNE).with_options(
        unordered).shuffle(9, seed=1).map(parsed, AUTOTUNE, deterministic=False).batch(4, drop_remainder=True)


@case(obstacle="may depend on all that it reads")
def records_parsed_inside_interleave(files):
    return Dataset.list_files(str(files / "*.tfrecord"), shuffle=False).map(lambda path: path).interleave(
        lambda path: tf.data.TFRecordDataset(path).map(parsed), cycle_length=2, block_length=2).batch(4)


@case("parsed_together")
def records_parsed_in_batches(files):
    def parsed_together(batch):
        found = tf.io.parse_example(batch, {"label": tf.io.FixedLenFeature([], tf.int64)})
        return tf.one_hot(found["label"], 2)

    return tf.data.TFRecordDataset(paths(files, "*.tfrecord")).shuffle(5, seed=1).batch(4).map(parsed_together)


def tokens(record):
    found = tf.io.parse_single_example(record, {"tokens": tf.io.VarLenFeature(tf.int64)})
    return tf.sparse.to_dense(found["tokens"])


@case(obstacle="padded_shapes without None")
def records_of_sequences(files):
    return tf.data.TFRecordDataset(paths(files, "*.tfrecord")).map(tokens).padded_batch(4, padded_shapes=[None])


@case("tokens")
def records_of_sequences_padded_to_a_length(files):
    return tf.data.TFRecordDataset(paths(files, "*.tfrecord")).map(tokens).padded_batch(4, padded_shapes=[9])


@case("map_fn")
def table_by_make_csv_dataset(files):
    return tf.data.experimental.make_csv_dataset(
        str(files / "table.csv"), batch_size=4, label_name="survived", select_columns=["age", "fare", "survived"],
        num_epochs=1, shuffle_seed=1)


@case("packed")
def table_by_csv_dataset(files):
    def packed(age, fare, survived):
        return tf.stack([age, fare]), survived

    return tf.data.experimental.CsvDataset(
        str(files / "table.csv"), [tf.float32, tf.float32, tf.int32], header=True, select_cols=[0, 1, 3]).map(
            packed).shuffle(9, seed=1).batch(5)


@case("row")
def table_by_lines(files):
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["first", "second"], [1, 2]), 0)

    def row(line):
        age, fare, name, survived = tf.io.decode_csv(line, [0.0, 0.0, "", 0])
        return {"age": age, "fare": fare, "class": table.lookup(name)}, survived

    return tf.data.TextLineDataset(str(files / "table.csv")).skip(1).map(row).batch(5).prefetch(AUTOTUNE)


@case(obstacle="string")
def table_with_a_column_of_strings(files):
    columns = {"age": np.arange(9.0), "class": np.array(["first", "second", "third"] * 3)}
    return Dataset.from_tensor_slices((columns, np.arange(9))).map(lambda row, label: (row, label)).batch(4)


@case("weighted")
def class_weights(files):
    def weighted(x, y):
        return x, y, tf.gather(tf.constant([1.0, 3.0]), tf.cast(y, tf.int32))

    return Dataset.from_tensor_slices((np.arange(13.0), np.arange(13) % 2)).shuffle(13, seed=1).batch(4).map(weighted)


# ---- text ----


@case(obstacle="may need all rows")
def reviews(files):
    vectorization = keras.layers.TextVectorization(max_tokens=20, output_sequence_length=6, vocabulary=WORDS)

    def vectorized(text, label):
        return vectorization(tf.expand_dims(text, -1)), label

    raw = keras.utils.text_dataset_from_directory(files / "reviews", batch_size=4, seed=1, verbose=False)
    return raw.map(vectorized).cache().prefetch(AUTOTUNE)


@case("vectorized", obstacle="done with the elements of one")
def lines_of_two_authors(files):
    vectorization = keras.layers.TextVectorization(max_tokens=20, output_sequence_length=6, vocabulary=WORDS)

    def vectorized(text, label):
        return vectorization(text), label

    first, second = (
        tf.data.TextLineDataset(str(files / f"{name}.txt")).map(lambda line, label=label: (line, tf.constant(label)))
        for label, name in enumerate(("first", "second")))
    return first.concatenate(second).shuffle(20, seed=1, reshuffle_each_iteration=False).map(vectorized).batch(5)


@case(obstacle="may need all rows")
def translation_of_vectorized_batches(files):
    vectorization = keras.layers.TextVectorization(max_tokens=20, output_sequence_length=5, vocabulary=WORDS)

    def formatted(source, target):
        words = vectorization(target)
        return {"source": vectorization(source), "target": words[:, :-1]}, words[:, 1:]

    lines = [(files / f"{name}.txt").read_text().splitlines() for name in ("first", "second")]
    return Dataset.from_tensor_slices(tuple(lines)).batch(4).map(formatted, AUTOTUNE).cache().shuffle(
        8, seed=1).prefetch(2)


@case(obstacle="may need all rows")
def translation_of_ragged_batches(files):
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(WORDS, list(range(len(WORDS)))), -1)

    def tokenized(source, target):
        return tuple(tf.ragged.map_flat_values(table.lookup, tf.strings.split(text)).to_tensor()
                     for text in (source, target))

    lines = [(files / f"{name}.txt").read_text().splitlines() for name in ("first", "second")]
    return Dataset.from_tensor_slices(tuple(lines)).shuffle(9, seed=1).batch(4).map(tokenized, AUTOTUNE).prefetch(1)


@case(obstacle="may depend on all that it reads")
def translation_by_length(files):
    def lengths(path):
        return tf.strings.length(tf.strings.split(tf.io.read_file(path)))

    return Dataset.from_tensor_slices(paths(files, "reviews/*/*.txt")).map(lengths).bucket_by_sequence_length(
        tf.size, [4, 6], [3, 2, 2])


@case("skip_grams")
def word2vec(files):
    targets, contexts = np.arange(17), np.arange(17 * 5).reshape(17, 5)

    def skip_grams(target, context):
        return (target, context), tf.one_hot(0, 5)

    return Dataset.from_tensor_slices((targets, contexts)).map(skip_grams).shuffle(20, seed=1).batch(
        4, drop_remainder=True).cache().prefetch(AUTOTUNE)


@case("split_input_target")
def characters(files):
    def split_input_target(sequence):
        return sequence[:-1], sequence[1:]

    text = tf.strings.unicode_decode((files / "first.txt").read_text(), "UTF-8")
    return Dataset.from_tensor_slices(text).batch(11, drop_remainder=True).map(split_input_target).shuffle(
        20, seed=1).batch(3, drop_remainder=True).prefetch(AUTOTUNE)


# ---- series and sound ----


@case("lambda")
def series(files):
    return keras.utils.timeseries_dataset_from_array(
        np.arange(30.0), np.arange(30), sequence_length=5, sampling_rate=2, batch_size=4, shuffle=True, seed=1)


@case("lambda", "split_window")
def series_split(files):
    def split_window(series):
        inputs, labels = series[:, :4], series[:, 4:, :1]
        inputs.set_shape([None, 4, None])
        return inputs, labels

    return keras.utils.timeseries_dataset_from_array(
        np.arange(60.0).reshape(30, 2), None, sequence_length=6, batch_size=4, shuffle=True, seed=1).map(split_window)


@case("last_is_label")
def series_of_windows(files):
    def last_is_label(window):
        return window[:-1], window[-1]

    return Dataset.range(30).window(5, shift=1, drop_remainder=True).flat_map(
        lambda window: window.batch(5)).map(last_is_label).shuffle(9, seed=1).batch(4).prefetch(1)


@case("label", "spectrogram")
def speech_commands(files):
    def label(path):
        sound, _ = tf.audio.decode_wav(tf.io.read_file(path), 1, 64)
        return tf.squeeze(sound, -1), tf.strings.split(path, "/")[-2] == "up"

    def spectrogram(sound, is_up):
        return tf.abs(tf.signal.stft(sound, 16, 8))[..., tf.newaxis], tf.cast(is_up, tf.int32)

    return Dataset.from_tensor_slices(paths(files, "clips/*/*.wav")).shuffle(20, seed=1).map(
        label, AUTOTUNE).map(spectrogram, AUTOTUNE).batch(4).prefetch(AUTOTUNE)


@case(obstacle="may need all rows")
def speech_commands_of_a_folder(files):
    def squeezed(sound, label):
        return tf.squeeze(sound, -1), label

    def spectrogram(sound, label):
        return tf.abs(tf.signal.stft(sound, 16, 8))[..., tf.newaxis], label

    return keras.utils.audio_dataset_from_directory(
        files / "clips", batch_size=4, output_sequence_length=64, seed=1, verbose=False).map(squeezed, AUTOTUNE).map(
            spectrogram, AUTOTUNE).cache().shuffle(10, seed=2).prefetch(AUTOTUNE)


# ---- sampling, generators, Python ----


@case("read_labelled", obstacle="may depend on all that it reads")
def oversampling(files):
    both = [Dataset.from_tensor_slices(paths(files, f"photos/{name}/*.jpg")).shuffle(9, seed=1)
            for name in ("rose", "tulip")]
    return Dataset.sample_from_datasets(both, [0.5, 0.5], seed=3, stop_on_empty_dataset=True).map(
        read_labelled).batch(4)


@case(obstacle="may depend on all that it reads")
def oversampling_of_decoded_photos(files):
    both = [Dataset.from_tensor_slices(paths(files, f"photos/{name}/*.jpg")).map(read_photo)
            for name in ("rose", "tulip")]
    return Dataset.sample_from_datasets(both, [0.5, 0.5], seed=3, stop_on_empty_dataset=True).batch(4)


@case("label", obstacle="may depend on all that it reads")
def resampling(files):
    def label(number, row):
        return row * 2

    return Dataset.range(60).map(lambda x: x % 10).rejection_resample(
        lambda x: tf.cast(x > 7, tf.int32), [0.5, 0.5], seed=3).map(label).batch(4)


@case("double")
def generator(files):
    def steps():
        rng = np.random.default_rng(1)
        for i in range(13):
            yield rng.integers(0, 99, 3), {"label": i}

    def double(x, labels):
        return 2 * x, labels["label"]

    return Dataset.from_generator(steps, output_signature=(
        tf.TensorSpec([3], tf.int64), {"label": tf.TensorSpec([], tf.int32)})).map(double).batch(4)


@case(obstacle="calls Python")
def features_loaded_by_numpy(files):
    def load(path):
        return tf.numpy_function(lambda path: np.frombuffer(path[-6:-4], np.uint8) / np.float32(2), [path], tf.float32)

    return Dataset.from_tensor_slices(paths(files, "photos/*/*.jpg")).map(load, AUTOTUNE).shuffle(9, seed=1).batch(4)


@case(obstacle="calls Python")
def decoding_in_python(files):
    def decode(path):
        photo = tf.py_function(lambda path: read_photo(path), [path], tf.float32)
        photo.set_shape([8, 8, 3])
        return photo

    return Dataset.from_tensor_slices(paths(files, "photos/*/*.jpg")).map(decode).batch(4)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_one_process(name, files):
    rows.check_split(lambda: CASES[name].build(files), CASES[name].tolerance)


@pytest.mark.parametrize("name", CASES)
def test_maps_are_divided(name, files):
    case = CASES[name]
    ranks = row_selection.Ranks(0, (1, 1, 1), name, by_rows=row_maps.by_rows)
    report = row_selection.select(case.build(files), ranks)[1]
    own = [each.name.removeprefix("map (").removesuffix(")") for each in report.transformations
           if each.is_own and each.name.startswith("map")]
    assert tuple(dict.fromkeys(own)) == case.own, report
    assert case.obstacle in str(report) and bool(case.obstacle) == bool(report.undivided_maps), report
