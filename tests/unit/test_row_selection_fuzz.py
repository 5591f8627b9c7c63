"""Random datasets whose rows each rank makes: element by element, what one process reads.

A program is two chains of transformations, each a few small numbers, and what joins them; where one does not apply, it
is left out. POSEIDON_INPUT_PROGRAMS sets the number of programs (15, or 600 with --full), POSEIDON_FUZZ_SEED the seed.
"""

import os

import hypothesis
from hypothesis import strategies as st
import numpy as np
import tensorflow as tf
import test_row_selection as rows

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.data import row_selection
from tf_poseidon.strategy import row_maps

PROGRAMS = int(os.environ.get("POSEIDON_INPUT_PROGRAMS", 15))
SEED = os.environ.get("POSEIDON_FUZZ_SEED")
_BATCHES = 14  # that are compared
_WIDEST = 4  # tensors of an element
Dataset = tf.data.Dataset

# ---- functions of maps, by the tensors of an element ----


def _affine(*tensors):
    return tuple(3 * tensor + 1 for tensor in tensors)


def _wider(*tensors):
    return (*tensors, 2 * tensors[0])


def _sum(*tensors):
    return (tf.add_n([tf.reduce_sum(tensor) if tensor.shape.rank else tensor for tensor in tensors]),)


def _vector(*tensors):
    return (*tensors[1:], tensors[0][..., tf.newaxis] + tf.range(2, dtype=tf.int64))


def _swapped(*tensors):
    return tuple(reversed(tensors))


def _longer(*tensors):
    return (tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)[:3],)


def _row_sums(*tensors):
    return tuple(tf.reduce_sum(tf.reshape(tensor, [tf.shape(tensor)[0], -1]), 1) for tensor in tensors)


def _of_total(*tensors):
    return tuple(tensor + tf.cast(tf.shape(tensor)[0], tensor.dtype) for tensor in tensors)


def _rolled(*tensors):
    return tuple(tf.roll(tensor, 1, 0) for tensor in tensors)


def _halved(*tensors):
    return tuple(tensor[:(tf.shape(tensor)[0] + 1) // 2] for tensor in tensors)


_OF_ELEMENTS = (_affine, _wider, _sum, _vector, _swapped, _longer)
_OF_BATCHES = (_affine, _wider, _row_sums, _vector, _swapped, _of_total, _rolled, _halved)


# ---- transformations: of a dataset and three small numbers; None where they do not apply ----


def _is_batched(dataset):
    return all(spec.shape.rank for spec in tf.nest.flatten(dataset.element_spec)) and _has_batch(dataset)


def _has_batch(dataset):
    return tf_compat.transformation(dataset)[0] in ("batch", "padded_batch") or any(
        map(_has_batch, tf_compat.inputs_of(dataset)))


def _is_even(dataset):
    """Whether all elements have the same shapes."""
    return all(spec.shape.is_fully_defined() for spec in tf.nest.flatten(dataset.element_spec))


def _width(dataset):
    return len(tf.nest.flatten(dataset.element_spec))


def _map(dataset, a, b, c):
    functions = _OF_BATCHES if _is_batched(dataset) else _OF_ELEMENTS
    function = functions[(a + 4 * c) % len(functions)]
    if function is _wider and _width(dataset) == _WIDEST:
        return None

    def mapped(*element):
        return function(*tf.nest.flatten(element))

    mapped.__name__ = function.__name__
    return dataset.map(mapped, *[(), (2,), (tf.data.AUTOTUNE,)][b % 3])


def _structured(dataset, a, b, c):
    return dataset.map(lambda *element: {str(i): (tensor,) for i, tensor in enumerate(tf.nest.flatten(element))})


def _shuffle(dataset, a, b, c):
    return dataset.shuffle(1 + 2 * a, seed=b, reshuffle_each_iteration=(None, True, False)[c % 3])


def _repeat(dataset, a, b, c):
    is_endless = a % 4 == 3 and dataset.cardinality() > 0
    return dataset.repeat(None if is_endless else 1 + a % 3)


def _take(dataset, a, b, c):
    return dataset.take(2 * a + b if c < 4 else -1)


def _skip(dataset, a, b, c):
    return dataset.skip(a // 2)


def _shard(dataset, a, b, c):
    return dataset.shard(1 + a % 3, b % (1 + a % 3))


def _cache(dataset, a, b, c):
    return dataset.cache() if dataset.cardinality() != tf.data.INFINITE_CARDINALITY else None


def _filter(dataset, a, b, c):
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:  # it may read for ever
        return None
    return dataset.filter(lambda *element: tf.reduce_sum(tf.nest.flatten(element)[0]) % (2 + a % 2) < 1 + b % 2)


def _prefetch(dataset, a, b, c):
    return dataset.prefetch(1 + a)


def _options(dataset, a, b, c):
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_optimization.apply_default_optimizations = bool(a % 2)
    return dataset.with_options(options)


def _assert_cardinality(dataset, a, b, c):
    number = dataset.cardinality()
    return dataset.apply(tf.data.experimental.assert_cardinality(number)) if number >= 0 else None


def _copy_to_device(dataset, a, b, c):
    return dataset.apply(tf.data.experimental.copy_to_device("/cpu:0"))


def _enumerate(dataset, a, b, c):
    return dataset.enumerate() if _width(dataset) < _WIDEST and not _is_batched(dataset) else None


def _batch(dataset, a, b, c):
    if _is_batched(dataset) and c < 5 or not _is_even(dataset):
        return None
    return dataset.batch(1 + a, drop_remainder=b % 3 == 2, num_parallel_calls=2 if c == 1 else None)


def _padded_batch(dataset, a, b, c):
    if _is_batched(dataset):
        return None
    specs = dataset.element_spec
    return dataset.padded_batch(1 + a, tf.nest.map_structure(lambda spec: [d or 4 for d in spec.shape], specs),
                                tf.nest.map_structure(lambda spec: tf.constant(-1, spec.dtype), specs), b % 3 == 2)


def _unbatch(dataset, a, b, c):
    return dataset.unbatch() if _is_batched(dataset) else None


def _flat_map(dataset, a, b, c):
    def elements(*element):
        return Dataset.range(tf.reduce_sum(tf.nest.flatten(element)[0]) % 4).map(lambda x: 5 * x)

    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        return None
    return dataset.flat_map(elements) if a % 2 else dataset.interleave(elements, 2, 1 + b % 2)


TRANSFORMATIONS = (*(_map,) * 6, *(_shuffle,) * 3, *(_batch,) * 4, _structured, _repeat, _repeat, _take, _skip, _shard,
                   _cache, _filter, _prefetch, _options, _enumerate, _padded_batch, _unbatch, _flat_map,
                   _assert_cardinality, _copy_to_device)


def chain(dataset, steps):
    for number, a, b, c in steps:
        dataset = TRANSFORMATIONS[number % len(TRANSFORMATIONS)](dataset, a, b, c) or dataset
    return dataset


def build(program):
    """Returns the dataset of a program."""
    (number, size), first, (join, other_size), second, last = program
    source = Dataset.range(size) if number % 2 else Dataset.from_tensor_slices((np.arange(size), -np.arange(size)))
    dataset = chain(source, first)
    if join in (1, 2):
        # The other one reads the same source, or its own.
        other = chain(source if join == 1 else Dataset.range(other_size), second)
        if _width(dataset) + _width(other) <= _WIDEST and _is_batched(dataset) == _is_batched(other):
            dataset = Dataset.zip(dataset, other)
    elif join == 3:
        dataset = dataset.concatenate(chain(source, first)) if second else chain(dataset.concatenate(dataset), second)
    dataset = chain(dataset, last)
    if _is_batched(dataset):
        return dataset
    return (_batch if _is_even(dataset) else _padded_batch)(dataset, size % 7, 0, 0)


_steps = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), max_size=5)
_programs = st.tuples(st.tuples(st.integers(0, 1), st.integers(0, 25)), _steps,
                      st.tuples(st.integers(0, 5), st.integers(0, 25)), _steps, _steps)

_functions = {}


def _by_rows(function, size):
    """Same as `row_maps.by_rows`, which many programs ask the same."""
    asked = (size, function.graph.as_graph_def().SerializeToString(deterministic=True))
    if asked not in _functions:
        _functions[asked] = row_maps.by_rows(function, size)
    return _functions[asked]


def check(program, size, other):
    """Checks the rows of the last rank, which has the fewest, and of another one."""
    dataset = build(program)
    try:
        batches, = rows.read(dataset, 1, _BATCHES)
    except (tf.errors.InvalidArgumentError, tf.errors.DataLossError):  # as of rows of several shapes
        return None
    if any(len(tensor) != len(batch[0]) for batch in batches for tensor in batch):
        return None
    # TensorFlow reads ahead in parallel: how many repetitions have begun, and have seeds, when an iterator is dropped?
    names = {tf_compat.transformation(each)[0] for each in row_selection.in_order(dataset)}
    epochs = 1 if "repeat" in names and ("take" in names or len(batches) == _BATCHES) else 2
    return rows.check(lambda: build(program), (1,) * size, epochs, _BATCHES, ranks=sorted({other % size, size - 1}),
                      by_rows=_by_rows)


@hypothesis.settings(max_examples=PROGRAMS, derandomize=True, deadline=None, database=None,
                     suppress_health_check=list(hypothesis.HealthCheck), phases=[hypothesis.Phase.generate])
@hypothesis.given(_programs, st.integers(1, 5), st.integers(0, 4))
def test_random_programs(program, size, other):
    check(program, size, other)


if SEED:  # for further searches for errors
    def test_other_random_programs():
        rng = np.random.default_rng(int(SEED))
        for number in range(PROGRAMS):
            steps = [[tuple(map(int, rng.integers(0, (100, 6, 6, 6)))) for _ in range(rng.integers(0, 6))]
                     for _ in range(3)]
            ends = [tuple(map(int, rng.integers(0, (largest, 26)))) for largest in (2, 6)]
            program, size, other = (ends[0], steps[0], ends[1], *steps[1:]), *map(int, rng.integers((1, 0), (6, 5)))
            print(f"program {number}: {program} on {size} ranks, of which {other}", flush=True)
            check(program, size, other)
