"""Lets each rank make its own rows of a global batch, instead of the whole batch of which it takes a part.

A dataset is a graph: each one reads others, down to its sources. Here it is rebuilt with the selection of a rank's rows
as near to the sources as it can be: behind everything that decides which elements there are, and in which order
(shuffle, repeat, take, skip, filter, interleave, ...), in front of what makes one element of one element (map, and
decoding in it) and of batches. So order, number of batches and their contents stay those of one process, while each
rank makes K_r of K rows.

To that end, what a dataset does is described by `_Elements`: a base, and what is done with each of its elements later.
A map is done later; shuffle and others, which only move elements, are done with the base at once. At `batch`, ranks
choose their elements of the base, K at a time, do with them what was left for later, and batch them: `_Batches`. What
cannot be described so is a base itself, as it stands: its maps run for all rows on every rank. So a transformation
without a rule costs speed, never correctness.

Each dataset is described once, after those that it reads; it was made of these, so there is an order in which to do so.

Tests: tests/unit/test_row_selection.py, tests/unit/test_row_selection_fuzz.py, tests/unit/test_published_inputs.py.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import operator
import re
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

from tf_poseidon import ops
from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.data import changing_shares
from tf_poseidon.data import element_functions
from tf_poseidon.data import input_report
from tf_poseidon.data import parts
from tf_poseidon.graph_passes.partition.states import GATHERED

# Datasets whose data, in bytes, would be copied to find how they shuffle: more is not worth it.
_MOST_COPIED = 1 << 28
PART, _TAG = 3, 4  # numbers of a part, which a tag begins with, and of that
_BATCHES = ("batch", "padded_batch")
# What is done with batches so that one that all ranks have made belongs to the same step of all.
_MAKE_ALL = frozenset((*_BATCHES, "map", "prefetch", "repeat", "shuffle"))
_MOVES = frozenset(("repeat", "shard", "shuffle", "skip", "take"))


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The ranks that divide batches.

    Attributes:
        rank: This rank.
        shares: By rank, how many rows of a batch it has in proportion to others.
        name: A name for messages and exchanges, the same on all ranks.
        is_independent: Whether maps that draw random numbers, or call Python, are done for a rank's rows alone.
        by_rows: Returns what runs a function of batches for a rank's rows, given its part and these; or why nothing
            does. Takes the function and the number of ranks.
        changing: How they share batches where that may change; begins with `shares`.
    """

    rank: int
    shares: tuple[int, ...]
    name: str
    is_independent: bool = False
    by_rows: Callable[[Any, int], Callable[..., Sequence[tf.Tensor]] | str] = (
        lambda function, size: "its function takes batches, and may need all rows; map it in front of batch")
    changing: changing_shares.ChangingShares | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.shares)

    def of_batches(self, follows_changes: bool) -> tf.data.Dataset:
        """Returns a dataset of shares, [P] int64, one of each batch."""
        return self.changing.of_batches() if follows_changes and self.changing else (
            tf.data.Dataset.from_tensors(tf.constant(self.shares, tf.int64)).repeat())


@dataclasses.dataclass(frozen=True)
class Selected:
    """A dataset of this rank's rows.

    Attributes:
        dataset: Its elements are (tag, batch): int64s, and this rank's rows of a batch. A tag is a part, as
            `OwnRows.part`, and numbers that depend on what the batch was made of if it was the first one, else zeros.
        batch_size: Rows of every global batch except possibly the last; -1 if unknown.
        follows_changes: Whether it follows the `changing` shares of ranks.
    """

    dataset: tf.data.Dataset
    batch_size: int
    follows_changes: bool = False


@dataclasses.dataclass(frozen=True)
class _Later:
    """What is done with elements when they were chosen.

    Attributes:
        method: "map", "prefetch" or "cache".
        dataset: The user's dataset that does so.
        begin: Of a map, the first of the tensors of an element that it takes.
    """

    method: str
    dataset: tf.data.Dataset
    begin: int = 0


@dataclasses.dataclass(frozen=True)
class _Elements:
    """Elements of a dataset.

    Attributes:
        base: Returns a dataset that has as many, as tuples of tensors.
        later: What is done with each of these.
        obstacles: By identity of a dataset: why what it reads is made for all rows.
    """

    base: Callable[[], tf.data.Dataset]
    later: tuple[_Later, ...] = ()
    obstacles: Mapping[int, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Batches:
    """Batches of which a rank has its rows.

    Attributes:
        rows: Returns a dataset of tuples: a tag, as in `Selected`, and the tensors of a batch.
        batch_size: Rows of every global batch except possibly the last.
        done: The user's datasets that run for a rank's rows alone.
    """

    rows: Callable[[], tf.data.Dataset]
    batch_size: int
    done: tuple[tf.data.Dataset, ...]


_Stream = _Elements | _Batches


@dataclasses.dataclass(frozen=True)
class _Views:
    """A dataset as others may take it.

    Attributes:
        elements: For one that makes batches of its elements, which may be batches themselves.
        batches: For any other one; None if it has no batches of which a rank makes its rows alone.
        obstacles: Of its batches, as in `_Elements`; or why it has none.
    """

    elements: _Elements
    batches: _Batches | None
    obstacles: Mapping[int, str]


def select(dataset: tf.data.Dataset, ranks: Ranks) -> tuple[Selected | None, input_report.InputReport]:
    """Returns the dataset of this rank's rows, and what it runs for which rows.

    Args:
        dataset: `tf.data.Dataset` of global batches, the same on all ranks.
        ranks: The ranks.

    Returns:
        (the dataset, None if no map would run for fewer rows than without it, the report).
    """
    ordered = in_order(dataset)
    if not tf.executing_eagerly():
        reason = "its seeds and sizes are not known while a function is traced; make it outside"
        return None, _report(ordered, {id(dataset): reason}, (), None)
    if dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY or dataset.options().experimental_warm_start:
        # Keras leaves a pass that is longer than the first one, and ranks have made unequally much of what is left; so
        # they may of an iterator from which nothing is read, if it makes batches as soon as it is there.
        ranks = dataclasses.replace(ranks, changing=None)
    selection = _Selection(ranks)
    views: dict[int, _Views] = {}
    for each in ordered:
        views[id(each)] = selection.describe(each, [views[id(read)] for read in tf_compat.inputs_of(each)])
    batches, obstacles = views[id(dataset)].batches, dict(views[id(dataset)].obstacles)
    if is_shuffled_twice := _shuffles_for_two(ordered):
        obstacles[id(is_shuffled_twice)] = (
            "two datasets read it, and what one of them reads changes what the other does; make one for each")
    elif batches is not None and (text := refused_types(dataset)):
        obstacles[id(dataset)] = text
    elif batches is not None and any(tf_compat.transformation(each)[0] == "map" for each in batches.done):
        return (Selected(_structured(batches.rows(), dataset), batches.batch_size, selection.follows_changes),
                _report(ordered, obstacles, batches.done, batches.batch_size))
    return None, _report(ordered, obstacles, (), None)


def in_order(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns a dataset and all that it reads, each once, behind those that it reads."""
    ordered: dict[int, tf.data.Dataset] = {}
    stack = [dataset]
    while stack:
        missing = [read for read in reversed(tf_compat.inputs_of(stack[-1])) if id(read) not in ordered]
        if missing:
            stack += missing
        else:
            each = stack.pop()
            ordered[id(each)] = each
    return list(ordered.values())


def _shuffles_for_two(ordered: Sequence[tf.data.Dataset]) -> tf.data.Dataset | None:
    """Returns a dataset that shuffles, and is read by several: the order of their iterators decides how."""
    readers: dict[int, int] = {}
    for each in ordered:
        for read in tf_compat.inputs_of(each):
            readers[id(read)] = readers.get(id(read), 0) + 1
    above: set[int] = set()  # read by several, through others too
    for each in reversed(ordered):
        if readers.get(id(each), 0) > 1:
            above.add(id(each))
        if id(each) in above:
            if tf_compat.transformation(each)[0] == "shuffle":
                return each
            above.update(map(id, tf_compat.inputs_of(each)))
    return None


def refused_types(dataset: tf.data.Dataset) -> str:
    """Returns why a rank cannot be given its rows of a dataset's elements alone; "" if it can."""
    for spec in tf.nest.flatten(dataset.element_spec):
        if not isinstance(spec, tf.TensorSpec):
            return f"a part of its elements is a {type(spec).__name__.removesuffix('Spec')}; make it a dense tensor"
        if spec.dtype.as_datatype_enum not in GATHERED:
            return (f"a part of its elements is a {spec.dtype.name}, which a step could not gather from all ranks; "
                    "turn it into numbers")
    return ""


class _Selection:
    """Rules by which datasets are described."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.follows_changes = ranks.changing is not None

    def describe(self, dataset: tf.data.Dataset, reads: Sequence[_Views]) -> _Views:
        """Returns the views of a dataset, given those of the ones that it reads."""
        method, how = tf_compat.transformation(dataset)
        if method == "options":  # of the graph: they are given to the result
            return reads[0]
        if method == "cache":
            self.follows_changes = False
        rule = getattr(self, f"_{method}", self._moved if method in _MOVES else _without_rule)
        of_elements = [read.elements for read in reads]
        of_batches = [read.batches for read in reads if read.batches is not None]
        below = _united(stream.obstacles for stream in of_elements)
        found: _Stream | str | None
        if method in _BATCHES:
            elements: _Stream | str = "its batches are elements of other ones; do what is expensive behind it"
            found = rule(dataset, how, *of_elements)
            obstacles = below
        else:
            elements = rule(dataset, how, *of_elements)
            found = rule(dataset, how, *of_batches) if of_batches and len(of_batches) == len(reads) else None
            obstacles = _united(read.obstacles for read in reads)
        if isinstance(elements, str):
            is_obstacle = elements and any(stream.later for stream in of_elements)
            elements = _Elements(lambda: _flat(dataset), (), {id(dataset): elements} if is_obstacle else below)
        assert isinstance(elements, _Elements)
        if isinstance(found, str):
            obstacles = {id(dataset): found}
        elif isinstance(found, _Batches) and method not in _MAKE_ALL:
            self.follows_changes = False
        return _Views(elements, found if isinstance(found, _Batches) else None, obstacles or (
            elements.obstacles if found is None else {}))

    # A rule returns a stream, or why there is none, "" if there is nothing to move.

    def _map(self, dataset: tf.data.Dataset, how: Mapping[str, Any], stream: _Stream) -> _Stream | str:
        reason = "" if self._ranks.is_independent else _dependence(how["map_func"].function)
        if isinstance(stream, _Batches):
            if _does_nothing(dataset):
                return _with(stream, dataset, lambda rows: rows)
            by_rows = reason or self._ranks.by_rows(how["map_func"].function, self._ranks.size)
            return by_rows if isinstance(by_rows, str) else _with(stream, dataset, lambda rows: _mapped(
                rows, lambda tag, *tensors: (tag, *by_rows(tag[:PART], *tensors)), how))
        if reason:
            return _Elements(lambda: _flat(dataset), (), {id(dataset): reason})
        return dataclasses.replace(stream, later=(*stream.later, _Later("map", dataset)))

    def _prefetch(self, dataset: tf.data.Dataset, how: Mapping[str, Any], stream: _Stream) -> _Stream | str:
        if isinstance(stream, _Batches):
            return _with(stream, dataset, lambda rows: rows.prefetch(how["buffer_size"]))
        return dataclasses.replace(stream, later=(*stream.later, _Later("prefetch", dataset))) if stream.later else ""

    def _assert_cardinality(self, dataset: tf.data.Dataset, how: Mapping[str, Any], stream: _Stream) -> _Stream | str:
        check = tf.data.experimental.assert_cardinality(how["expected_cardinality"])
        if isinstance(stream, _Batches):
            return _with(stream, dataset, lambda rows: rows.apply(check))
        return dataclasses.replace(stream, base=lambda: stream.base().apply(check)) if stream.later else ""

    def _copy_to_device(self, dataset: tf.data.Dataset, how: Mapping[str, Any], stream: _Stream) -> _Stream | str:
        del how
        if isinstance(stream, _Elements):
            return "it has to be the last one; copy batches"
        # To where they are: a rank's rows go to the device of its step, but iterators behind a copy begin later.
        return _with(stream, dataset, lambda rows: rows.apply(tf.data.experimental.copy_to_device("/cpu:0")))

    def _cache(self, dataset: tf.data.Dataset, how: Mapping[str, Any], stream: _Stream) -> _Stream | str:
        if isinstance(stream, _Batches):
            return _with(stream, dataset, lambda rows: rows.cache(self._file(how["filename"], "batches")))
        return dataclasses.replace(stream, later=(*stream.later, _Later("cache", dataset))) if stream.later else ""

    def _moved(self, dataset: tf.data.Dataset, how: Mapping[str, Any], stream: _Stream) -> _Stream | str:
        method = tf_compat.transformation(dataset)[0]
        if method == "shuffle" and (isinstance(stream, _Batches) or stream.later):
            if _bytes(dataset) > _MOST_COPIED:
                return "its data are too large to be copied; shuffle in front of map"
            if any(tf_compat.transformation(each)[0] == "copy_to_device" for each in in_order(dataset)):
                return "how it shuffles is not known behind a copy to a device; copy behind it"

        def move(rows: tf.data.Dataset) -> tf.data.Dataset:
            if method == "shuffle":
                return _shuffled(rows, dataset, how)
            return _repeated(rows, dataset, how) if method == "repeat" else getattr(rows, method)(**how)

        if isinstance(stream, _Batches):
            return _with(stream, dataset, move)
        stream = self._behind_cache(stream, dataset)
        base = (lambda: move(stream.base())) if stream.later else lambda: _flat(dataset)
        return dataclasses.replace(stream, base=base)

    def _zip(self, dataset: tf.data.Dataset, how: Mapping[str, Any], *streams: _Stream) -> _Stream | str:
        del how
        if batches := [stream for stream in streams if isinstance(stream, _Batches)]:
            return self._zipped_batches(dataset, batches)
        elements = [self._behind_cache(stream, dataset) for stream in streams if isinstance(stream, _Elements)]
        later: list[_Later] = []
        begin = 0
        for stream, read in zip(elements, tf_compat.inputs_of(dataset), strict=True):
            later += [dataclasses.replace(each, begin=each.begin + begin) for each in stream.later]
            begin += len(tf_compat.flat_specs(read))
        base = (lambda: _flat(tf.data.Dataset.zip(tuple(stream.base() for stream in elements)))) if later else (
            lambda: _flat(dataset))
        return _Elements(base, tuple(later), _united(stream.obstacles for stream in elements))

    def _zipped_batches(self, dataset: tf.data.Dataset, streams: Sequence[_Batches]) -> _Stream | str:
        if len({stream.batch_size for stream in streams}) > 1:
            return "it reads batches of different sizes; zip in front of batch"

        def joined(*each: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, ...]:
            same = [tf.debugging.assert_equal(tag[:PART], each[0][0][:PART], (
                "The parts of a batch must have the same first dimension, but zip joins batches of different sizes."))
                    for tag, *_ in each[1:]]
            with tf.control_dependencies(same):
                return (tf.identity(each[0][0]), *(tensor for _, *tensors in each for tensor in tensors))

        def rows() -> tf.data.Dataset:
            return tf.data.Dataset.zip(tuple(stream.rows() for stream in streams)).map(_unconverted(joined))

        return _Batches(rows, streams[0].batch_size, (*(each for stream in streams for each in stream.done), dataset))

    def _concatenate(self, dataset: tf.data.Dataset, how: Mapping[str, Any], *streams: _Stream) -> _Stream | str:
        del how
        first, second = streams
        if isinstance(first, _Batches) and isinstance(second, _Batches) and first.batch_size == second.batch_size:
            return _Batches(lambda: first.rows().concatenate(second.rows()), first.batch_size,
                            (*first.done, *second.done, dataset))
        return "what is done with the elements of one is not done with those of the other; map behind it"

    def _batch(self, dataset: tf.data.Dataset, how: Mapping[str, Any], stream: _Elements) -> _Batches | str:
        is_static = self._is_static(how)

        def batched(rows: tf.data.Dataset, count: int | tf.Tensor) -> tf.data.Dataset:
            return rows.batch(count, is_static, num_parallel_calls=how.get("num_parallel_calls"),
                              deterministic=True if "num_parallel_calls" in how else None)

        return self._batched(dataset, how, stream, batched)

    def _padded_batch(self, dataset: tf.data.Dataset, how: Mapping[str, Any], stream: _Elements) -> _Batches | str:
        shapes = [shape.numpy() for shape in tf.nest.flatten(how["padded_shapes"])]
        if any((shape < 0).any() for shape in shapes):
            return ("it pads to the longest row of a batch, which is known when all of them are made; give "
                    "padded_shapes without None")
        is_static = self._is_static(how)
        values = [tf.convert_to_tensor(value, spec.dtype) for value, spec in zip(
            tf.nest.flatten(how["padding_values"]), tf.nest.flatten(dataset.element_spec), strict=True)]

        def batched(rows: tf.data.Dataset, count: int | tf.Tensor) -> tf.data.Dataset:
            return rows.padded_batch(count, ([_TAG], *shapes), (tf.constant(0, tf.int64), *values), is_static)

        return self._batched(dataset, how, stream, batched)

    def _is_static(self, how: Mapping[str, Any]) -> bool:
        """Whether shapes say how many rows a rank has: all ranks have as many, or their graphs would differ."""
        ranks = self._ranks
        are_equal = ranks.changing is None and len(set(ranks.shares)) == 1
        return how["drop_remainder"] and are_equal and how["batch_size"] % ranks.size == 0

    def _batched(self, dataset: tf.data.Dataset, how: Mapping[str, Any], stream: _Elements,
                 batched: Callable[[tf.data.Dataset, int | tf.Tensor], tf.data.Dataset]) -> _Batches | str:
        """Returns the batches that `batched` makes of chosen elements."""
        if any(not isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(dataset.element_spec)):
            return "its batches are not dense tensors; make them dense in front of it"
        batch_size, drops = how["batch_size"], how["drop_remainder"]
        _, count = parts.of_rank(batch_size, self._ranks.rank, self._ranks.shares)

        def rows() -> tf.data.Dataset:
            ranks, follows_changes = self._ranks, self.follows_changes
            chosen = ops.own_elements(stream.base(), ranks.of_batches(follows_changes), batch_size, drops, ranks.rank)
            for later in stream.later:
                chosen = self._done(chosen, later, f"{batch_size}{'full' if drops else ''}")
            batches = batched(chosen, max(1, count)) if not follows_changes else chosen.group_by_window(
                _unconverted(lambda tag, *_: tf.maximum(tag[2], 1)),  # rows come batch by batch, so no group mixes them
                _unconverted(lambda rows, group: batched(group, rows)),
                window_size_func=_unconverted(lambda rows: rows))
            return batches.map(_unconverted(lambda tags, *tensors: (tags[0], *tensors)))

        return _Batches(rows, batch_size, (*(later.dataset for later in stream.later), dataset))

    def _done(self, rows: tf.data.Dataset, later: _Later, batches: str) -> tf.data.Dataset:
        """Does with elements that were chosen for batches, of which a text says the size, what was left for later."""
        _, how = tf_compat.transformation(later.dataset)
        if later.method == "prefetch":
            return rows.prefetch(how["buffer_size"])
        if later.method == "cache":
            return rows.cache(self._file(how["filename"], batches))
        function = how["map_func"].function
        begin = later.begin + 1  # behind the part
        end = begin + len(tf_compat.flat_specs(tf_compat.inputs_of(later.dataset)[0]))
        return _mapped(rows, lambda *each: (*each[:begin], *function(*each[begin:end]), *each[end:]), how)

    def _behind_cache(self, stream: _Elements, dataset: tf.data.Dataset) -> _Elements:
        """Returns elements that a dataset may move: those that a cache gives stay as they are."""
        caches = [i for i, each in enumerate(stream.later) if each.method == "cache"]
        if not caches:
            return stream
        cached = stream.later[caches[-1]].dataset
        reason = (f"'{tf_compat.transformation(dataset)[0]}' behind it gives other ranks' rows in the next epoch; "
                  "cache batches, or leave cache out")
        return _Elements(lambda: _flat(cached), stream.later[caches[-1] + 1:], {id(cached): reason})

    def _file(self, name: bytes, batches: str) -> str:
        """Returns the file of a cache: each rank has its own, for its rows of batches of a size."""
        text = name.decode()
        ranks = self._ranks
        shares = "" if len(set(ranks.shares)) == 1 else "." + "-".join(map(str, ranks.shares))
        return f"{text}.rank{ranks.rank}of{ranks.size}{shares}.{batches}" if text else ""


def _without_rule(*_: Any) -> str:
    return "which elements it makes may depend on all that it reads; do what is expensive behind it"


def _united(obstacles: Iterable[Mapping[int, str]]) -> dict[int, str]:
    return {identity: text for each in obstacles for identity, text in each.items()}


def _mapped(rows: tf.data.Dataset, function: Callable[..., tuple[tf.Tensor, ...]],
            how: Mapping[str, Any]) -> tf.data.Dataset:
    """Returns a dataset mapped as another one is; in order, whatever that one says: elements are counted behind it."""
    calls = how.get("num_parallel_calls")
    return rows.map(_unconverted(function), num_parallel_calls=calls, deterministic=None if calls is None else True)


def _with(stream: _Batches, dataset: tf.data.Dataset,
          move: Callable[[tf.data.Dataset], tf.data.Dataset]) -> _Batches:
    """Returns the batches that a dataset gives of those that it reads, without taking them apart."""
    return _Batches(lambda: move(stream.rows()), stream.batch_size, (*stream.done, dataset))


def _shuffled(rows: tf.data.Dataset, shuffle: tf.data.Dataset, how: Mapping[str, Any]) -> tf.data.Dataset:
    """Returns rows in the order in which a dataset shuffles its own, now and in each later iteration of either."""
    shapes, types = zip(*tf_compat.flat_specs(rows), strict=True)
    return tf.data.experimental.from_variant(tf.raw_ops.ShuffleDatasetV3(
        input_dataset=tf.data.experimental.to_variant(rows), buffer_size=how["buffer_size"], seed=how["seed"],
        seed2=how["seed2"], seed_generator=_seed_generator(shuffle), output_types=types, output_shapes=shapes,
        reshuffle_each_iteration=how["reshuffle_each_iteration"]), rows.element_spec)


def _repeated(rows: tf.data.Dataset, repeat: tf.data.Dataset, how: Mapping[str, Any]) -> tf.data.Dataset:
    """Returns rows repeated as a dataset repeats its own.

    TensorFlow's optimizer joins `repeat` with `shuffle` right before it to one dataset, which takes other seeds: where
    a map stood between them, there are options now.
    """
    before, = tf_compat.inputs_of(repeat)
    while _does_nothing(before):
        before, = tf_compat.inputs_of(before)
    is_joined = tf_compat.transformation(before)[0] == "shuffle"
    return (rows if is_joined else rows.with_options(tf.data.Options())).repeat(**how)


def _does_nothing(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset returns the elements that it reads, so that TensorFlow's optimizer removes it."""
    method, how = tf_compat.transformation(dataset)
    if method == "map":
        return _is_identity(how["map_func"].function)
    return (method, how.get("count", how.get("num_shards"))) in (
        ("repeat", 1), ("shard", 1), ("skip", 0), ("take", -1))


def _is_identity(function: Any) -> bool:
    """Whether a map's function returns its arguments."""
    returned = []
    for tensor in function.outputs:
        while tensor.op.type == "Identity":
            tensor, = tensor.op.inputs
        returned.append(tensor)
    return len(returned) == len(function.inputs) and all(map(operator.is_, returned, function.inputs))


def _seed_generator(shuffle: tf.data.Dataset) -> tf.Tensor:
    """Returns the resource from which a dataset takes the seeds of its iterations, which only its GraphDef names."""
    graph_def = graph_pb2.GraphDef.FromString(tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(shuffle)).numpy())
    nodes = {node.name: node for node in graph_def.node}
    returned, = (node for node in graph_def.node if node.op == "_Retval")
    constant: node_def_pb2.NodeDef = nodes[nodes[returned.input[0]].input[4]]

    @tf.function(autograph=False)
    def generator() -> tf.Tensor:
        return tf.import_graph_def(graph_pb2.GraphDef(node=[constant]), return_elements=[f"{constant.name}:0"])[0]

    return generator.get_concrete_function()()  # called itself, it would warn that it is traced often


def _bytes(dataset: tf.data.Dataset) -> int:
    """Returns the bytes of the tensors that a dataset and those that it reads hold, of what is known."""
    tensors = [tensor for each in in_order(dataset) for tensor in tf_compat.tensors_of(each)]
    return sum((tensor.shape.num_elements() or 0) * tensor.dtype.size for tensor in tensors)


def _dependence(function: Any) -> str:
    """Returns why what a map's function makes of an element may depend on other elements; "" if it does not."""
    op = next(element_functions.stateful_ops(function.graph), "")
    if op in ("EagerPyFunc", "PyFunc"):
        return ("its function calls Python, and what that does is not known; use tf.numpy_function(..., "
                "stateful=False), ops of TensorFlow, or PoseidonStrategy(input='independent')")
    return op and (f"its function has a {op}, so what it makes of an element depends on those before; use stateless "
                   "random ops with seeds of the elements, or PoseidonStrategy(input='independent')")


def _flat(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset whose elements are tuples of tensors; what is not dense is a tf.variant."""
    return tf.data.experimental.from_variant(
        tf.data.experimental.to_variant(dataset),
        tuple(tf.TensorSpec(shape, dtype) for shape, dtype in tf_compat.flat_specs(dataset)))


def _structured(rows: tf.data.Dataset, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset of (tag, batch), with the structure and the options of the user's dataset."""
    spec = dataset.element_spec

    def structured(tag: tf.Tensor, *tensors: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tag, tf.nest.pack_sequence_as(spec, tensors)

    result = rows.map(_unconverted(structured)).with_options(dataset.options())
    cardinality = dataset.cardinality()
    if cardinality != tf.data.UNKNOWN_CARDINALITY:
        result = result.apply(tf.data.experimental.assert_cardinality(cardinality))
    result.made_of = dataset  # with which seeds of shuffle, and what functions have captured, would be freed
    return result


def _report(ordered: Sequence[tf.data.Dataset], obstacles: Mapping[int, str], done: Sequence[tf.data.Dataset],
            batch_size: int | None) -> input_report.InputReport:
    own = set(map(id, done))
    return input_report.InputReport(tuple(input_report.Transformation(
        _name(each), id(each) in own, obstacles.get(id(each), "")) for each in ordered
        if tf_compat.transformation(each)[0] not in ("options", "prefetch")), batch_size)


def _name(dataset: tf.data.Dataset) -> str:
    """Returns what a dataset does, and of a map its function."""
    method, how = tf_compat.transformation(dataset)
    if method != "map":
        return method or re.sub(r"^_|Dataset(V\d)?$", "", type(dataset).__name__)
    name = how["map_func"].function.name
    text = name.decode() if isinstance(name, bytes) else name
    return f"map ({re.sub(r'^__inference_(Dataset_map_)?|_[0-9]+$', '', text)})"


def _unconverted(function: Any) -> Any:
    return tf.autograph.experimental.do_not_convert(function)
