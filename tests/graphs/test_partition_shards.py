"""Variables of which each rank holds a shard, or one rank all, on many ranks in this process against one process."""

import typing

import numpy as np
import partitioning
import pytest
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon import grappler
from tf_poseidon.graph_passes.partition import partitioner as partition_lib
from tf_poseidon.graph_passes.partition.preparation import inline
from tf_poseidon.graph_passes.partition.preparation import working_copies
from tf_poseidon.graph_passes.partition.states import Division
from tf_poseidon.graph_passes.partition.updates import early_updates

# Batches of some steps: without rows, with fewer rows than ranks, uneven ones.
BATCHES = (7, 1, 0, 12)
SHAPE = (7000, 3)  # in several KV pairs


def _after(ops, *values):
    with tf.control_dependencies(ops):
        return [tf.identity(value) for value in values]


def momentum(weights, slots, gradient):
    slot, = slots
    with tf.control_dependencies([slot.assign(0.5 * slot.read_value() - gradient)]):
        return weights.assign_add(slot.read_value())


def nesterov(weights, slots, gradient):
    """The weights are assigned, not added to; the gradient passes an op with others."""
    slot, = slots
    gradient, _ = tf.identity_n([gradient, weights.read_value()])
    with tf.control_dependencies([slot.assign(0.5 * slot.read_value() - gradient)]):
        return weights.assign(weights.read_value() + 0.5 * slot.read_value() - gradient)


def decayed(weights, slots, gradient):
    """Weights, which are whole, meet a slot; single elements have dimensions, or none."""
    slot, = slots
    ratio = tf.reshape(tf.reduce_max(tf.abs(weights.read_value())), [1, 1])
    with tf.control_dependencies([slot.assign(tf.abs(slot.read_value() / (1 + ratio)) + weights.read_value())]):
        return weights.assign_sub(0.25 * slot.read_value() + 2 * gradient)


def second_moment(weights, slots, gradient):
    first, second = slots
    with tf.control_dependencies([first.assign_add(0.5 * (gradient - first.read_value())),
                                  second.assign_add(0.25 * (tf.square(gradient) - second.read_value()))]):
        return weights.assign_sub(first.read_value() / (tf.sqrt(second.read_value()) + 0.125))


def clipped(weights, slots, gradient):
    """Its norm is a sum over all shards, as those of LAMB are."""
    slot, = slots
    norm = tf.sqrt(tf.reduce_sum(tf.square(gradient), [0, 1], keepdims=True))
    clipped_gradient = gradient / tf.maximum(norm, 1.0)
    with tf.control_dependencies([slot.assign(slot.read_value() + clipped_gradient)]):
        return weights.assign_sub(slot.read_value() * tf.reduce_mean(tf.square(slot.read_value())))


def guarded(weights, slots, gradient):
    """Only finite gradients are applied, as under loss scaling."""
    slot, = slots
    finite = tf.reduce_all(tf.math.is_finite(gradient))

    def apply():
        with tf.control_dependencies([slot.assign_sub(gradient)]):
            with tf.control_dependencies([weights.assign_add(slot.read_value())]):
                return tf.constant(1.0, tf.float64)

    return tf.cond(finite, apply, lambda: tf.constant(0.0, tf.float64))


def any_large(weights, slots, gradient):
    slot, = slots
    large = tf.reduce_any(tf.abs(gradient) > 20, axis=[0, 1], keepdims=True)
    with tf.control_dependencies([slot.assign_add(tf.where(large, tf.zeros_like(gradient), gradient))]):
        return weights.assign_sub(slot.read_value())


def of_one_element(weights, slots, gradient):
    """One element decides, whose rank may have no rows."""
    slot, = slots
    is_first = tf.constant(np.arange(np.prod(SHAPE)).reshape(SHAPE) == 0)
    value = tf.where(is_first, tf.fill(SHAPE, tf.constant(1000.0, tf.float64)), slot.read_value())
    added = tf.cast(tf.reduce_any(value > 500), tf.float64) + 2 * (1 - tf.cast(tf.reduce_all(value < 500), tf.float64))
    with tf.control_dependencies([slot.assign_add(gradient + added)]):
        return weights.assign_sub(slot.read_value())


def also_whole(weights, slots, gradient):
    """The gradient is needed whole besides."""
    slot, = slots
    with tf.control_dependencies([slot.assign_add(gradient)]):
        return weights.assign_sub(slot.read_value() * tf.reduce_max(tf.cumsum(gradient)))


def by_rows(weights, slots, gradient):
    """A mean over one dimension is no sum over a shard."""
    slot, = slots
    with tf.control_dependencies([slot.assign_add(gradient * tf.reduce_mean(slot.read_value(), 0))]):
        return weights.assign_sub(slot.read_value())


def products(weights, slots, gradient):
    """Matrix products, as those of Muon; the norm of the whole matrix is needed for nothing else."""
    slot, = slots
    with tf.control_dependencies([slot.assign_add(gradient + slot.read_value() * -0.5)]):
        x = gradient + 0.5 * slot.read_value()
    x /= tf.norm(x, axis=(-2, -1), keepdims=True) + 1
    return weights.assign_sub(tf.matmul(x, tf.matmul(x, x, transpose_a=True)))


def means(weights, slots, gradient):
    """Means of rows and columns, as those of Adafactor, in slots of their own."""
    slot, rows, columns = slots
    squares = tf.square(gradient) + 1
    with tf.control_dependencies([rows.assign(0.5 * rows + tf.reduce_mean(squares, 1)),
                                  columns.assign(0.5 * columns + tf.reduce_mean(squares, 0))]):
        ratio = rows.read_value() / tf.reduce_mean(rows.read_value())
    with tf.control_dependencies([slot.assign(ratio[:, None] * columns.read_value()[None])]):
        return weights.assign_sub(gradient / tf.sqrt(slot.read_value()))


def of_other_types(weights, slots, gradient):
    """A number of another type leaves a branch."""
    slot, = slots

    def apply():
        sums = tf.cast(tf.cumsum(slot.read_value() + gradient), tf.float32)
        with tf.control_dependencies([slot.assign(tf.cast(sums, tf.float64) / 1024)]):
            with tf.control_dependencies([weights.assign_add(slot.read_value())]):
                return tf.argmax(slot.read_value()[:, 0])

    return tf.cond(tf.reduce_all(tf.math.is_finite(gradient)), apply, lambda: tf.constant(0, tf.int64))


def by_others(weights, slots, gradient):
    """A slot of another shape leads to those of the weights by another one only."""
    slot, first, second = slots
    with tf.control_dependencies([first.assign(0.5 * first.read_value() + tf.reduce_mean(gradient, 1)),
                                  slot.assign_add(gradient * (1 + second.read_value()[:, None]))]):
        with tf.control_dependencies([second.assign(tf.tanh(first.read_value()))]):
            return weights.assign_sub(slot.read_value())


def statistics(weights, slots, gradient):
    """Shampoo's: slots take shards of what is computed of the whole gradient and of a slot of another shape alone."""
    slot, others = slots
    with tf.control_dependencies([others.assign_add(tf.tanh(tf.matmul(gradient, gradient, transpose_a=True)))]):
        scaled = tf.matmul(gradient, others.read_value())
    with tf.control_dependencies([slot.assign(0.5 * slot.read_value() + scaled)]):
        return weights.assign_sub(slot.read_value())


def without_slots(weights, slots, gradient):
    """What is kept has another shape, and leads to the weights alone; what waits for it is not led to."""
    others, number = slots
    with tf.control_dependencies([others.assign_add(tf.tanh(tf.matmul(gradient, gradient, transpose_a=True)))]):
        read = others.value()
    with tf.control_dependencies([read]):
        counted = number.assign_add(1)
    with tf.control_dependencies([counted]):
        return weights.assign_sub(tf.matmul(gradient, read))


def norm_of_rows(weights, slots, gradient):
    """A number that is computed of them trains a variable that is whole."""
    slot, others = slots
    with tf.control_dependencies([slot.assign_add(gradient)]):
        largest = tf.reduce_max(tf.norm(slot.read_value(), axis=1))
    with tf.control_dependencies([others.assign_add([largest])]):
        return weights.assign_sub(slot.read_value() / (1 + others.read_value()))


def of_both(weights, slots, gradients):
    """Two variables with two owners, which need the norms of both gradients."""
    gradients = tf.identity_n(gradients)
    updates, ratio = [], 1 + tf.sqrt(sum(tf.reduce_sum(tf.square(one)) for one in gradients))
    for variable, slot, one in zip(weights, slots, gradients):
        with tf.control_dependencies([slot.assign_add(one / ratio + slot.read_value() * -0.25)]):
            x = tf.cumsum(slot.read_value(), 1) - 2
        updates.append(variable.assign_sub(tf.cast(x > 1, tf.float64)))
    return tf.group(updates)


def of_the_same(weights, slots, gradients):
    """The slots of two variables take the same value, which is whole."""
    same, updates = tf.reverse(weights[0].read_value(), [1]), []
    for variable, slot, one in zip(weights, slots, gradients):
        with tf.control_dependencies([slot.assign_add(same)]):
            updates.append(variable.assign_sub(tf.reverse(slot.read_value() + one, [0])))
    return tf.group(updates)


def one_of_another(weights, slots, gradients):
    """What one owner computes is in the slot of another; there are no shards in which it could be."""
    first, second = slots
    with tf.control_dependencies([first.assign_add(gradients[0])]):
        turned = tf.reverse(first.read_value(), [0])
    with tf.control_dependencies([second.assign(turned)]):
        total = tf.cumsum(second.read_value() + gradients[1]) / 1024
    return tf.group(weights[0].assign_sub(turned), weights[1].assign_sub(total))


def read_again(weights, slots, gradient):
    """The weights are read again in the step, whole, and a slot is in two updates."""
    slot, others = slots
    with tf.control_dependencies([slot.assign_add(gradient * tf.reduce_mean(slot.read_value(), 0))]):
        updated = weights.assign_sub(0.5 * tf.reverse(slot.read_value(), [0])).read_value()
    with tf.control_dependencies([others.assign_add([tf.reduce_sum(updated)])]):
        return slot.assign_sub(gradient)


def guarded_products(weights, slots, gradient):
    """In a branch, and in a loop."""
    slot, = slots

    def apply():
        x, _ = tf.while_loop(lambda x, i: i < 3, lambda x, i: (tf.reverse(x, [0]) - 0.5 * x, i + 1),
                             (slot.read_value() + gradient, 0))
        with tf.control_dependencies([slot.assign(x / (1 + tf.norm(x)))]):
            with tf.control_dependencies([weights.assign_add(tf.cumsum(slot.read_value()))]):
                return tf.constant(1.0, tf.float64)

    return tf.cond(tf.reduce_max(weights.read_value()) < 4.8, apply, lambda: tf.constant(0.0, tf.float64))


def waited_for(weights, slots, gradient):
    """What other ranks do not run, nothing waits for."""
    slot, = slots
    total = tf.reverse(slot.read_value() + gradient, [0])
    with tf.control_dependencies([total]):
        updated = weights.assign_add(total)
    with tf.control_dependencies([updated]):
        return slot.assign(total / (1 + tf.norm(total)))


def in_python(weights, slots, gradient):
    slot, = slots
    total, = tf.compat.v1.py_func(lambda x: x[::-1].copy(), [slot.read_value() + gradient], [tf.float64])
    total.set_shape(SHAPE)
    with tf.control_dependencies([slot.assign(total / (1 + tf.norm(total)))]):
        return weights.assign_add(slot.read_value())


def early(weights, slots, gradient):
    """A slot changes before the gradient is there."""
    slot, = slots
    with tf.control_dependencies([slot.assign(0.5 * slot.read_value())]):
        with tf.control_dependencies([slot.assign_sub(gradient)]):
            return weights.assign_add(slot.read_value())


class Update(typing.NamedTuple):
    """What is expected of an update.

    Attributes:
        slots: The number of slots that have the shape of their weights.
        kinds: The kinds of what is exchanged.
        owned: The kinds if ranks may own variables and do; None if they do not.
        others: The shapes of other variables.
        held: Whether slots are shards without owners.
        trained: The number of trained variables.
    """

    slots: int
    kinds: list[str]
    owned: list[str] | None = None
    others: tuple[tuple[int, ...], ...] = ()
    held: bool = True
    trained: int = 1


SHARDS = ["scatter", "shards"]
UPDATES = {
    momentum: Update(1, SHARDS), nesterov: Update(1, SHARDS), decayed: Update(1, SHARDS),
    second_moment: Update(2, SHARDS), clipped: Update(1, [*SHARDS, "sum", "sum"]), guarded: Update(1, [*SHARDS, "sum"]),
    any_large: Update(1, [*SHARDS, "sum"]), of_one_element: Update(1, [*SHARDS, "sum", "sum"]),
    also_whole: Update(1, ["shards", "sum"], SHARDS),
    by_rows: Update(1, ["sum"], SHARDS, held=False), products: Update(1, ["sum"], SHARDS, held=False),
    means: Update(1, ["shards", "sum"], SHARDS, (SHAPE[:1], SHAPE[1:])),
    of_other_types: Update(1, ["sum"], ["shards", "shards", "sum"], held=False),
    by_others: Update(1, ["shards", "sum"], SHARDS, (SHAPE[:1], SHAPE[:1])),
    statistics: Update(1, ["shards", "sum"], SHARDS, (SHAPE[1:] * 2,)),
    without_slots: Update(0, ["sum"], SHARDS, (SHAPE[1:] * 2, ()), held=False),
    norm_of_rows: Update(1, ["sum"], ["scatter", "shards", "shards"], ((1,),), held=False),
    of_both: Update(2, ["sum", "sum"], ["scatter"] * 2 + ["shards"] * 4, held=False, trained=2),
    of_the_same: Update(2, ["sum", "sum"], ["scatter"] * 2 + ["shards"] * 2, held=False, trained=2),
    one_of_another: Update(2, ["sum", "sum"], ["scatter"] * 2 + ["shards"] * 2, held=False, trained=2),
    read_again: Update(1, ["sum"], SHARDS, ((1,),), held=False),
    guarded_products: Update(1, ["sum"], SHARDS, held=False), waited_for: Update(1, ["sum"], held=False),
    in_python: Update(1, ["sum"], held=False), early: Update(1, SHARDS)}


def make(update, read=lambda weights: weights.read_value()):
    """Returns (the graph in one process, the names to run: (initial value, step, weights and slots)).

    Args:
        update: One of `UPDATES`.
        read: Returns what the gradient is computed from.
    """
    graph, expected = tf.Graph(), UPDATES[update]
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float64, (None, SHAPE[0]), name="x")
        rows, = partitioning.rows(x)
        shapes = {**dict.fromkeys(["weights", "weights1"][:expected.trained], SHAPE),
                  **{f"slot{i}": SHAPE for i in range(expected.slots)},
                  **{f"other{i}": shape for i, shape in enumerate(expected.others)}}
        variables = [tf.Variable(tf.zeros(shape, tf.float64), use_resource=True, name=name)
                     for name, shape in shapes.items()]
        initial, = _after([variable.assign(tf.reshape(tf.range(1.0, 1.0 + np.prod(shape), dtype=tf.float64) % (i + 3),
                                                      shape))
                           for i, (variable, shape) in enumerate(zip(variables, shapes.values()))], 1.0)
        weights, slots = variables[:expected.trained], variables[expected.trained:]
        gradients = [tf.matmul(rows, tf.matmul(rows, read(one)), transpose_a=True) / 1024  # sums are exact
                     for one in weights]
        done, = _after([update(weights, slots, gradients) if expected.trained > 1 else update(
            weights[0], slots, gradients[0])], 1.0)
        values = _after([], *[variable.read_value() for variable in variables])
    return graph, initial.name, done.name, {name: tensor.name for name, tensor in zip(shapes, values)}


def run(session, names, feeds_of):
    """Returns the variables after each of some steps."""
    initial, done, read = names
    session.run(initial, feeds_of({"x:0": np.ones((2, SHAPE[0]))}))
    found = []
    for i, rows in enumerate(BATCHES):
        x = np.zeros((rows, SHAPE[0]))
        x[:, i::7] = np.random.default_rng(i).integers(-3, 4, x[:, i::7].shape)
        session.run(done, feeds_of({"x:0": x}))
        found.append(session.run(read))
    return found


@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update.__name__)
def test_updates_run_on_shards(update):
    expected = UPDATES[update]
    _check(update, expected.kinds, {f"slot{i}" for i in range(expected.slots)} if expected.held else set())


OWNED = [update for update in UPDATES if UPDATES[update].owned or not UPDATES[update].held]


@pytest.mark.parametrize("update", OWNED, ids=lambda update: update.__name__)
def test_one_rank_owns_what_no_shard_can_update(update):
    expected = UPDATES[update]
    names = {f"slot{i}" for i in range(expected.slots)}
    if update in (means, by_others, statistics):  # what only this update reads and writes
        names |= {f"other{i}" for i in range(len(expected.others))}
    elif update is without_slots:
        names = {"other0"}
    _check(update, expected.owned or expected.kinds, names if expected.owned else set(), {0: 9, 1: 0, 2: 0})


@pytest.mark.parametrize("how", [{}, {"loads": {0: 9, 1: 0, 2: 0}},
                                 {"divisions": {"weights": Division("weights", divided=1, columns=700)}}],
                         ids=["shards", "owners", "columns"])
@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update.__name__)
def test_updates_that_wait_for_no_rank_are_found(update, how):
    graph, _, done, read = make(update)
    step = tf.compat.v1.graph_util.extract_sub_graph(inline.inline(graph.as_graph_def(), [done]), [done.split(":")[0]])
    partitioned = partition_lib.partition(step, [done], grappler.add_shapes, partition_lib.KnownVariables(
        shard_candidates=_layouts(update, read), **how))
    found = early_updates.find(partitioned.graph_def, partitioned.shards)
    # Slots of two of these use no gradient.
    assert found == (partitioned.shards.keys() if update in (early, decayed, of_the_same) else set())
    delayed = early_updates.delayed(partitioned.graph_def, partitioned.shards)
    assert early_updates.find(delayed, partitioned.shards) == set()


@pytest.mark.parametrize("depends", [False, True])
def test_updates_wait_for_gradients_that_do_not_depend_on_them(depends):
    nodes = [("v", "VarHandleOp", []), ("x", "Placeholder", []), ("update", "AssignVariableOp", ["v", "x"]),
             ("gradient", "ReadVariableOp", ["v", *["^update"] * depends]),
             ("scatter", "PoseidonReduceScatter", ["gradient", "x"])]
    graph_def = graph_pb2.GraphDef(node=[node_def_pb2.NodeDef(name=name, op=op, input=inputs)
                                         for name, op, inputs in nodes])
    graph_def.node[-1].attr["layout"].s = b"weights"
    delayed = early_updates.delayed(graph_def, {"v": "weights"})
    assert early_updates.find(delayed, {"v"}) == ({"v"} if depends else set())
    assert list(delayed.node[2].input) == ["v", "x", *["^scatter"] * (not depends)]


def _layouts(update, names):
    return {name: "" if name.startswith("other") else "weights1" if UPDATES[update].trained > 1 and name == "slot1"
            else "weights" for name in names
            if not name.startswith("weights") and not (update is without_slots and name == "other1")}


def in_16_bits(weights):
    return tf.cast(tf.cast(weights.read_value(), tf.bfloat16), tf.float64)


def with_zeros(weights):
    """Zeros of the size of weights, as gradients of loops have, besides."""
    return in_16_bits(weights) + tf.zeros(tf.raw_ops.VariableShape(input=weights.handle), tf.float64)


@pytest.mark.parametrize("read", [in_16_bits, with_zeros])
@pytest.mark.parametrize("update, kinds", [
    (momentum, SHARDS), (nesterov, SHARDS), (clipped, [*SHARDS, "sum", "sum"]), (guarded, [*SHARDS, "sum"]),
    (products, SHARDS), (decayed, None)], ids=lambda value: getattr(value, "__name__", ""))
def test_new_weights_come_back_in_the_type_in_which_they_are_read(update, kinds, read):
    graph, initial, done, values = make(update, read)
    with graph.as_default():
        tf.Variable(tf.zeros(SHAPE, tf.bfloat16), use_resource=True, name="copy")
    names = [initial, done, *values.values()]
    flat = inline.inline(graph.as_graph_def(), names)
    types = working_copies.types(flat, ["weights", "slot0"])
    assert types == {"weights": types_pb2.DT_BFLOAT16}
    flat = working_copies.with_copies(flat, {"weights": working_copies.Copy("copy", types["weights"])})
    assert all(node.input[0] == "copy" for node in flat.node if node.op == "VariableShape")
    layouts = dict.fromkeys(["weights", "slot0"], "weights")
    partitioned = partition_lib.partition(flat, [initial, done], grappler.add_shapes, partition_lib.KnownVariables(
        shard_candidates=layouts, loads={0: 9, 1: 0, 2: 0} if kinds else {}))
    if kinds is None:  # the largest weight is asked for
        assert "weights" not in partitioned.shards
        return
    assert partitioned.shards == layouts
    exchanges = partitioned.report.exchanges
    of_assigned = ["shards"] * 2  # with initial values, which the graph has besides
    assert sorted(exchange.kind for exchange in exchanges) == sorted([*kinds, *of_assigned])
    assert {exchange.dtype for exchange in exchanges if exchange.kind == "shards"} == {types_pb2.DT_BFLOAT16}
    _compare((graph, initial, done, values), flat, partitioned)


@pytest.mark.parametrize("divided, columns", [(0, SHAPE[1]), (1, 700), (1, SHAPE[1])])
@pytest.mark.parametrize("update", [momentum, nesterov, decayed, clipped, guarded, of_one_element, also_whole, by_rows,
                                    products, early], ids=lambda update: update.__name__)
def test_updates_run_on_columns_or_rows_of_matrices(update, divided, columns):
    """Elements of any matrix with as many of them; what no shard can update, no rank owns."""
    expected = UPDATES[update]
    kinds = sorted("sum" if kind == "scatter" else kind for kind in expected.kinds)
    partitioned = _check(update, kinds, {"slot0"} if expected.held else set(), {0: 9, 1: 0, 2: 0},
                         Division("weights", divided=divided, columns=columns))
    assert not any(division.owner >= 0 for division in partitioned.divisions.values())
    nodes = {node.name: node for node in partitioned.graph_def.node}
    of_sum = [node for node in nodes.values() if node.op == "PoseidonShard"
              and nodes[node.input[0]].op == "PoseidonSync"]
    assert len(of_sum) == expected.kinds.count("scatter")


def _check(update, kinds, held, loads=None, division=None):
    graph, initial, done, read = make(update)
    layouts = _layouts(update, read)
    flat = inline.inline(graph.as_graph_def(), [initial, done, *read.values()])
    partitioned = partition_lib.partition(flat, [initial, done], grappler.add_shapes, partition_lib.KnownVariables(
        {} if UPDATES[update].slots else {name: name for name in read}, shard_candidates=layouts, loads=loads or {},
        divisions={division.layout: division} if division else {}))
    assert sorted(exchange.kind for exchange in partitioned.report.exchanges) == kinds, partitioned.report
    assert partitioned.shards.keys() == held
    if not division:
        assert {owner for _, owner, *_ in partitioned.divisions.values()} - {-1} == set(
            [1, 2][:UPDATES[update].trained] * bool(loads and held))
    _compare((graph, initial, done, read), flat, partitioned)
    return partitioned


def _compare(of_one_process, flat, partitioned):
    """Compares the graph on any number of ranks with that of one process; takes the result of `make` and others."""
    graph, initial, done, read = of_one_process
    with tf.compat.v1.Session(graph=graph) as session:
        expected = run(session, (initial, done, list(read.values())), lambda feeds: feeds)
    names = [initial, done, *read.values()]
    for size in partitioning.RANKS:
        divisions = {layout: division._replace(owner=division.owner % size) if division.owner >= 0 else division
                     for layout, division in partitioned.divisions.items()}
        of_size = partition_lib.partition(flat, names, grappler.add_shapes, partition_lib.KnownVariables(
            shards=partitioned.shards, divisions=divisions))
        joined, of_ranks = partitioning.on_ranks(of_size, size)
        with tf.compat.v1.Session(graph=joined) as session:
            found = run(session, (of_ranks[0], of_ranks[1], of_ranks[2:]), lambda feeds: {
                f"rank{rank}/{name}": value for name, value in feeds.items() for rank in range(size)})
        for step, (got, want) in enumerate(zip(found, expected, strict=True)):
            for name, of_all, value in zip(read, got, want, strict=True):
                for rank in range(size):
                    np.testing.assert_allclose(of_all[rank], value, rtol=1e-12, atol=1e-12,
                                               err_msg=f"{name} on rank {rank} of {size} after step {step}")
                    assert of_all[rank].tobytes() == of_all[0].tobytes(), f"bits of {name} on rank {rank} of {size}"
