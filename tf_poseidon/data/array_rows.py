"""Lets each rank take its own rows of arrays, instead of the whole batch of which it takes a part.

Keras makes batches of arrays by a map that gathers rows by their indices. Here it is given this rank's indices alone.

Tests: tests/unit/test_data.py, tests/training/test_own_rows.py.
"""

import math
from typing import Any

import tensorflow as tf

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.data import fingerprints
from tf_poseidon.data import input_report
from tf_poseidon.data import parts
from tf_poseidon.data import row_selection

# Bytes of a batch from which on ranks take their own rows. Of a smaller one, two ranks copy all rows in less time than
# they need to choose theirs (0.2 ms a batch, several in an epoch), and steps that need all rows have them.
LEAST_BYTES = 1 << 23


def select(dataset: tf.data.Dataset, batch_size: int, ranks: row_selection.Ranks) -> tuple[
        row_selection.Selected | None, input_report.InputReport]:
    """Returns the dataset of this rank's rows of arrays, and what it does.

    Args:
        dataset: The dataset that Keras makes of arrays.
        batch_size: Rows of every global batch except possibly the last.
        ranks: The ranks.

    Returns:
        (the dataset, None if every rank takes all rows, the report).
    """
    reason = _reason(dataset, batch_size)
    report = input_report.InputReport((input_report.Transformation("arrays", not reason, reason),),
                                      None if reason else batch_size)
    gathering = _gathering(dataset)
    if reason or gathering is None:
        return None, report
    indices, arrays = tf_compat.inputs_of(tf_compat.inputs_of(gathering)[0])
    structure = dataset.element_spec

    @tf.autograph.experimental.do_not_convert
    def own_rows(numbered: tuple[tf.Tensor, tf.Tensor], arrays: Any) -> tuple[tf.Tensor, Any]:
        number, chosen = numbered
        total = tf.size(chosen, tf.int64)
        begin, count = parts.of_rank(total, ranks.rank, ranks.shares)
        part = tf.stack([total, tf.where(count > 0, begin, 0), count])

        def gathered(chosen: tf.Tensor) -> list[tf.Tensor]:
            return [tf.gather(array, chosen) for array in tf.nest.flatten(arrays)]

        fingerprint = tf.cond(number == 0, lambda: fingerprints.fingerprint(gathered(chosen)),
                              lambda: tf.zeros([4], tf.int64))
        own = chosen[part[1]:part[1] + tf.maximum(count, 1)]
        if len(set(ranks.shares)) == 1 and chosen.shape[0] is not None and chosen.shape[0] % ranks.size == 0:
            own = tf.ensure_shape(own, [chosen.shape[0] // ranks.size])
        return tf.concat([part, fingerprint], 0), tf.nest.pack_sequence_as(structure, gathered(own))

    rows = tf.data.Dataset.zip((indices.enumerate(), arrays)).map(own_rows, tf.data.AUTOTUNE)
    return row_selection.Selected(rows.with_options(dataset.options()), batch_size), report


def _reason(dataset: tf.data.Dataset, batch_size: int) -> str:
    """Returns why every rank takes all rows; "" if it need not."""
    if text := row_selection.refused_types(dataset):
        return text
    if sum(math.prod([batch_size, *spec.shape[1:]]) * spec.dtype.size
           for spec in tf.nest.flatten(dataset.element_spec)) < LEAST_BYTES:
        return "its batches are small"
    return "" if _gathering(dataset) is not None else "Keras makes its batches in a way that is not known"


def _gathering(dataset: tf.data.Dataset) -> tf.data.Dataset | None:
    """Returns the map that takes (indices of the rows of a batch, arrays), None if there is none."""
    while tf_compat.transformation(dataset)[0] in ("options", "prefetch"):
        dataset, = tf_compat.inputs_of(dataset)
    if tf_compat.transformation(dataset)[0] != "map":
        return None
    zipped, = tf_compat.inputs_of(dataset)
    reads = tf_compat.inputs_of(zipped)
    is_known = tf_compat.transformation(zipped)[0] == "zip" and len(reads) == 2 and (
        isinstance(reads[0].element_spec, tf.TensorSpec) and reads[0].element_spec.dtype == tf.int64)
    return dataset if is_known else None
