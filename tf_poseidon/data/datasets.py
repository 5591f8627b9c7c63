"""Splits global batches by rows, so that each rank computes its own part of every batch.

Tests: tests/unit/test_data.py, tests/training/test_training.py.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import logging
import typing
from typing import Any
import weakref

import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.data import array_rows
from tf_poseidon.data import changing_shares
from tf_poseidon.data import fingerprints
from tf_poseidon.data import input_report
from tf_poseidon.data import parts
from tf_poseidon.data import row_selection
from tf_poseidon.errors import GraphError
from tf_poseidon.errors import shortened
from tf_poseidon.job import agreement
from tf_poseidon.job.communicator import Communicator

_log = logging.getLogger("tf_poseidon")


class OwnRows(tf.experimental.ExtensionType):
    """The rows of one tensor of a global batch that this rank computes.

    `strategy.run` passes its tensor to the step; TensorFlow's functions accept it in place of the tensor, too.

    Attributes:
        value: This rank's rows. A rank without rows holds one padding row, since many layers do not
            accept empty batches.
        part: [3] int64: rows of the global batch, the first one of this rank's, and how many it has, 0 for a padding
            row. The ranks' parts follow each other.
        contributors: Scalar int32: ranks that have rows.
        never_empty: Whether the batch is known to give every rank a row.
        usual_total: Rows of every global batch except possibly the last; -1 if unknown.
    """

    value: typing.Union[tf.Tensor, tf.RaggedTensor, tf.SparseTensor]  # noqa: UP007, as TensorFlow reads it
    part: tf.Tensor
    contributors: tf.Tensor
    never_empty: bool
    usual_total: int

    @property
    def total(self) -> tf.Tensor:
        """Scalar int32: rows of the global batch. K."""
        return tf.cast(self.part[0], tf.int32)

    @property
    def count(self) -> tf.Tensor:
        """Scalar int32: the rank's rows, 0 for a padding row. K_r."""
        return tf.cast(self.part[2], tf.int32)

    @property
    def shape(self) -> tf.TensorShape:
        return self.value.shape

    @property
    def dtype(self) -> tf.DType:
        return self.value.dtype

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.value, dtype=dtype, name=name)


# Batch sizes declared by the creator of a dataset; see `batch_size`.
batch_sizes: weakref.WeakKeyDictionary[tf.data.Dataset, int] = weakref.WeakKeyDictionary()
# How ranks share the batches of datasets whose rows they make themselves, where that may change while these are read.
_changing: weakref.WeakKeyDictionary[tf.data.Dataset, changing_shares.ChangingShares] = weakref.WeakKeyDictionary()
# Datasets of (tag, batch), as `row_selection.Selected` has them, by what tells them of which ranks they make the rows.
row_sources: weakref.WeakKeyDictionary[tf.data.Dataset, Callable[[row_selection.Ranks], None]] = (
    weakref.WeakKeyDictionary())


def all_rows(structure: Any) -> list[OwnRows]:
    """Returns the `OwnRows` in a nested structure."""
    return [leaf for leaf in tf.nest.flatten(structure) if isinstance(leaf, OwnRows)]


def check_divided_alike(batches: Sequence[OwnRows], numbers: Callable[[tf.Tensor], tf.Tensor],
                        text: str) -> list[tf.Operation]:
    """Refuses batches that ranks divide in different ways, when it is called or its function runs.

    Args:
        batches: Batches of one step.
        numbers: Returns what must be the same for all batches, given their parts, [N, 3] int64.
        text: What is said, a sentence.

    Returns:
        The ops that check it when its function runs; none if it is checked already.

    Raises:
        GraphError: If it differs.
    """
    parts_of_all = list({id(batch.part): batch.part for batch in batches}.values())
    if len(parts_of_all) < 2:
        return []
    stacked = tf.stack(parts_of_all)
    compared = numbers(stacked)
    if not tf.executing_eagerly():
        return [tf.raw_ops.Assert(condition=tf.reduce_all(compared == compared[:1]), data=[text])]
    if (compared.numpy() != compared.numpy()[:1]).any():
        rows = " and ".join(dict.fromkeys(f"{count} of {total} rows" for total, _, count in stacked.numpy()))
        raise GraphError(f"{text} This rank has {rows}.")
    return []


def values(structure: Any) -> Any:
    """Returns the structure with every `OwnRows` replaced by its tensor."""
    return tf.nest.map_structure(lambda leaf: leaf.value if isinstance(leaf, OwnRows) else leaf,
                                 structure)


def has_own_rows(dataset: tf.data.Dataset) -> bool:
    """Whether the elements of a dataset have `OwnRows`."""
    return any(isinstance(spec, OwnRows.Spec) for spec in tf.nest.flatten(dataset.element_spec))


def changing(dataset: tf.data.Dataset | None) -> changing_shares.ChangingShares | None:
    """Returns how ranks share the batches of a dataset of `OwnRows` that follows changes; None for any other one."""
    return None if dataset is None else _changing.get(dataset)


def specs(structure: Any) -> Any:
    """Returns the `tf.TypeSpec`s of elements with those of global batches in place of those of `OwnRows`."""
    def of_all(spec: tf.TypeSpec) -> tf.TypeSpec:
        if not isinstance(spec, OwnRows.Spec):
            return spec
        value = spec.value
        return value if not isinstance(value, tf.TensorSpec) or value.shape.rank is None else (
            tf.TensorSpec([None, *value.shape[1:]], value.dtype))

    return tf.nest.map_structure(of_all, structure)


def own_rows(structure: Any) -> Any:
    """Returns the structure with every `OwnRows` replaced by the rows of this rank, without a padding row."""
    return tf.nest.map_structure(
        lambda leaf: leaf if not isinstance(leaf, OwnRows) else leaf.value if leaf.never_empty else
        _slice_rows(leaf.value, 0, leaf.count), structure)


def split_dataset(dataset: tf.data.Dataset, ranks: row_selection.Ranks, communicator: Communicator) -> tf.data.Dataset:
    """Returns a dataset of this rank's `OwnRows` of each global batch.

    Every rank makes as many steps as the dataset has batches. Ranks compare the first batch, or the elements of which
    each makes its own rows: if their orders differed, they would train on some rows twice and never on others.

    Args:
        dataset: `tf.data.Dataset` of global batches, the same on all ranks.
        ranks: The ranks.
        communicator: This rank's communicator.

    Raises:
        PoseidonError: If the elements have no rows, or the dataset's options ask for another kind of
            sharding.
    """
    _check_batches(dataset)
    own = _own_dataset(dataset, ranks, communicator)
    if own is not None:
        return own
    usual_total = batch_size(dataset)

    @tf.autograph.experimental.do_not_convert
    def split(index: tf.Tensor, batch: Any) -> Any:
        batch = _check_first(index, batch, ranks.name)
        return split_batch(batch, ranks, usual_total)

    return _read_ahead(dataset.enumerate().map(split))


def global_dataset(dataset: tf.data.Dataset, ranks: row_selection.Ranks,
                   communicator: Communicator) -> tf.data.Dataset:
    """Returns a dataset of the global batches, of which ranks compare the first one; or of `OwnRows`.

    Args:
        dataset, ranks, communicator: Same as in `split_dataset`.

    Raises:
        PoseidonError: Same as in `split_dataset`.
    """
    _check_batches(dataset)
    own = _own_dataset(dataset, ranks, communicator)
    if own is not None:
        return own
    checked = _read_ahead(dataset.enumerate().map(_comparing_first(ranks.name)))
    batch_sizes[checked] = batch_size(dataset)
    return checked


def select(dataset: tf.data.Dataset, ranks: row_selection.Ranks) -> tuple[
        row_selection.Selected | None, input_report.InputReport]:
    """Returns the result of `row_selection.select`; where that fails, that every rank makes all rows, and why.

    Ranks take their rows of arrays by `array_rows`; `row_sources` have them already.
    """
    try:
        if dataset in row_sources:
            row_sources[dataset](ranks)
            source = input_report.Transformation("PyDataset", True, "")
            return row_selection.Selected(dataset, -1), input_report.InputReport((source,), -1)
        if dataset in batch_sizes:
            return array_rows.select(dataset, batch_sizes[dataset], ranks)
        return row_selection.select(dataset, ranks)
    except Exception as error:  # whatever a dataset has that is not known, whole batches are right
        problem = f"its graph could not be rebuilt ({type(error).__name__}: {shortened(str(error))}); please report it"
        return None, input_report.InputReport((input_report.Transformation("map", False, problem),), None)


def _own_dataset(dataset: tf.data.Dataset, ranks: row_selection.Ranks,
                 communicator: Communicator) -> tf.data.Dataset | None:
    """Returns a dataset of `OwnRows` whose rows each rank makes itself; None if every rank makes all rows."""
    # What was selected last, which holds the dataset: the caches of a rank's rows are those of the `fit` before.
    key = dataclasses.replace(ranks, name="")
    known, *result = vars(dataset).get("_poseidon_selected", (None,))
    if known != key:
        result = [*select(dataset, ranks)]
        vars(dataset)["_poseidon_selected"] = key, *result
    selected, report = result
    difference = agreement.CommunicatorComparison(communicator).difference(
        f"data/{ranks.name}", "\n".join(("divided" if selected else "whole", str(report))))
    if communicator.rank == 0 and (text := difference or report.sentence()):
        _log.warning("%s: %s", ranks.name, text)
    if selected is None or difference:
        return None

    is_static = selected.batch_size > 0 and not selected.follows_changes
    has_all = is_static and parts.contributors(selected.batch_size, ranks.shares) == ranks.size

    @tf.autograph.experimental.do_not_convert
    def as_own_rows(index: tf.Tensor, tagged: tuple[tf.Tensor, Any]) -> Any:
        tag, batch = tagged
        compared = fingerprints.with_elements_compared(index, tag[0], tag[row_selection.PART:],
                                                       f"{ranks.name}/first_batch", f"the first batch of {ranks.name}")
        with tf.control_dependencies([compared]):
            part = tf.identity(tag[:row_selection.PART])
        contributors = parts.contributors(part[0], ranks.shares)
        return tf.nest.map_structure(lambda leaf: OwnRows(
            leaf, part, contributors, has_all and leaf.shape[0] is not None, selected.batch_size), batch)

    own = _read_ahead(selected.dataset.enumerate().map(as_own_rows))
    batch_sizes[own] = selected.batch_size
    if selected.follows_changes and ranks.changing is not None:
        _changing[own] = ranks.changing
    return own


def _read_ahead(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset that is read ahead and timed.

    Keras lets TensorFlow not tune a PyDataset with workers. That is not read ahead: its workers go on with what the
    last iterator has not read.
    """
    is_tuned = dataset.options().autotune.enabled is not False
    return ops.timed(dataset.prefetch(tf.data.AUTOTUNE) if is_tuned else dataset)


def _check_batches(dataset: tf.data.Dataset) -> None:
    """Raises PoseidonError unless a dataset has batches, the same on all ranks, that are not sharded elsewhere."""
    if any(map(tf_compat.reads_service, row_selection.in_order(dataset))):
        raise GraphError(
            "The dataset reads tf.data.service, whose workers give each reader elements in another order, and readers "
            "with one job_name different ones, but PoseidonStrategy splits batches that are the same on all ranks: "
            "leave distribute(...) out, or give each rank batches of its own, with one job_name, by "
            "strategy.distribute_datasets_from_function.")
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy not in (None, tf.data.experimental.AutoShardPolicy.AUTO,
                      tf.data.experimental.AutoShardPolicy.DATA):
        raise GraphError(
            f"The dataset's auto_shard_policy is {policy.name}, but PoseidonStrategy splits every "
            "global batch by rows (AUTO or DATA): omit the option, and give all ranks the same "
            "dataset of global batches.")

    for spec in tf.nest.flatten(dataset.element_spec):
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank == 0:
            raise GraphError(
                "The dataset's elements are not batches: one of their parts is a scalar, and "
                "PoseidonStrategy splits global batches by rows. Add .batch(GLOBAL_BATCH_SIZE) to "
                "the dataset.")


def join_datasets(dataset: tf.data.Dataset, ranks: row_selection.Ranks) -> tf.data.Dataset:
    """Returns a dataset of global batches, each the concatenation of the ranks' own batches.

    Every rank makes as many steps as the rank with the most batches; the others have no rows in the
    last steps.

    Args:
        dataset: `tf.data.Dataset` of this rank's batches, which differ between the ranks.
        ranks: The ranks.

    Raises:
        PoseidonError: If the elements have no rows, or are not tensors.
    """
    for spec in tf.nest.flatten(dataset.element_spec):
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
            raise GraphError(
                f"A dataset of distribute_datasets_from_function has elements with the part {spec}, "
                "but every part must be a tensor with rows; add .batch(BATCH_SIZE // number of "
                "ranks), or give experimental_distribute_dataset a dataset of global batches.")
    rows = batch_size(dataset)

    # The row that a rank computes after its last batch.
    padding_row = tf.nest.map_structure(
        lambda spec: tf.zeros([1, *(d or 1 for d in spec.shape[1:])], spec.dtype),
        dataset.element_spec)
    ended = tf.data.Dataset.from_tensors((0, padding_row)).repeat()

    @tf.autograph.experimental.do_not_convert
    def count(_: tf.Tensor, batch: Any) -> tuple[tf.Tensor, Any]:
        return fingerprints.num_rows(tf.nest.flatten(batch)[0]), batch

    @tf.autograph.experimental.do_not_convert
    def join(count: tf.Tensor, batch: Any) -> tuple[tf.Tensor, Any]:
        counts = ops.all_gather(tf.cast(count[tf.newaxis], tf.int64), f"{ranks.name}/rows")
        total = tf.reduce_sum(counts)
        part = tf.stack([total, tf.reduce_sum(counts[:ranks.rank]), counts[ranks.rank]])
        contributors = tf.math.count_nonzero(counts, dtype=tf.int32)
        return total > 0, tf.nest.map_structure(
            lambda leaf: OwnRows(leaf, part, contributors, False, rows * ranks.size if rows > 0 else -1), batch)

    def only_batch(_: tf.Tensor, batch: Any) -> Any:
        return batch

    # Timed before they are joined: what comes then is a wait for other ranks.
    batches = ops.timed(dataset.enumerate().map(count).prefetch(tf.data.AUTOTUNE)).concatenate(ended)
    joined = batches.map(join).take_while(lambda has_rows, _: has_rows).map(only_batch)
    # Nothing may read ahead: when an iterator is dropped, one rank could have started an exchange that
    # another starts only in the next iteration.
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_parallelization = False
    return joined.with_options(options)


def batch_size(dataset: tf.data.Dataset) -> int:
    """Returns the batch size of a dataset that ends in `batch`, or -1.

    If the last batch may be smaller, the elements' shapes do not have it; and reading a batch could
    lose it.
    """
    if dataset in batch_sizes:
        return batch_sizes[dataset]
    return tf_compat.batch_size(dataset)


def usual_rows(batches: Any) -> int | None:
    """Returns the rows of every global batch of an iterator except possibly the last; None if unknown."""
    dataset = tf_compat.dataset_of(batches)
    rows = -1 if dataset is None else batch_sizes.get(dataset, -1)
    return rows if rows > 0 else None


def split_batch(batch: Any, ranks: row_selection.Ranks, usual_total: int = -1) -> Any:
    """Returns this rank's `OwnRows` of one global batch.

    Args:
        batch: Nested structure of tensors with the same number of rows; None and
            `tf.experimental.Optional` are unchanged.
        ranks: The ranks.
        usual_total: Rows of a global batch, -1 if unknown.
    """
    leaves = [leaf for leaf in tf.nest.flatten(batch) if not fingerprints.is_missing(leaf)]
    static_totals = {leaf.shape[0] for leaf in leaves} - {None}
    if len(static_totals) > 1:
        raise GraphError(
            f"The parts of a batch have {sorted(static_totals)} rows, but PoseidonStrategy splits "
            "all parts alike; give every part of an element the same first dimension.")
    if static_totals:
        total = usual_total = static_totals.pop()
        begin, count = parts.of_rank(total, ranks.rank, ranks.shares)
        begin, length = (begin, count) if count > 0 else (0, min(1, total))
        never_empty = parts.contributors(total, ranks.shares) == ranks.size
    else:
        total, never_empty = fingerprints.num_rows(leaves[0]), False
        same = [tf.debugging.assert_equal(
            fingerprints.num_rows(leaf), total, "The parts of a batch must have the same first dimension.")
                for leaf in leaves[1:]]
        with tf.control_dependencies(same):
            begin, count = parts.of_rank(tf.identity(total), ranks.rank, ranks.shares)
        begin, length = tf.where(count > 0, begin, 0), tf.maximum(count, 1)

    contributors = tf.cast(parts.contributors(total, ranks.shares), tf.int32)
    part = tf.stack([tf.cast(number, tf.int64) for number in (total, begin, count)])

    def split(leaf: Any) -> Any:
        if fingerprints.is_missing(leaf):
            return leaf
        return OwnRows(_slice_rows(leaf, begin, length), part, contributors, never_empty, usual_total)

    return tf.nest.map_structure(split, batch)


def _slice_rows(leaf: Any, begin: tf.Tensor | int, length: tf.Tensor | int) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        shape = leaf.dense_shape
        start = tf.concat([[tf.cast(begin, tf.int64)], tf.zeros_like(shape[1:])], 0)
        return tf.sparse.slice(leaf, start,
                               tf.concat([[tf.cast(length, tf.int64)], shape[1:]], 0))
    return leaf[begin:begin + length]


@functools.lru_cache  # each call of `fit` has its datasets under the same names, so only the first one traces this
def _comparing_first(name: str) -> Callable[[tf.Tensor, Any], Any]:
    """Returns a function that returns a batch, and compares the first one with rank 0's."""
    return tf.function(lambda index, batch: _check_first(index, batch, name), autograph=False)


def _check_first(index: tf.Tensor, batch: Any, name: str) -> Any:
    """Returns `batch`; compares the first one with rank 0's."""
    return fingerprints.with_first_compared(index, batch, f"{name}/first_batch", f"the first batch of {name}")
