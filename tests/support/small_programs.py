"""Programs that the tests start on several ranks: small_programs.py NAME [ARGUMENT...]."""

import hashlib
import json
import os
import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf

from evaluation.faults.faulty_program import AtBatch
from evaluation.faults.faulty_program import train
import tf_poseidon as poseidon
from tf_poseidon import ops
from tf_poseidon.errors import PoseidonError
from tf_poseidon.job import runtime
from tf_poseidon.ops import library


def reach_the_end():
    strategy = poseidon.PoseidonStrategy()
    train(strategy, epochs=1)
    print(f"rank {strategy.rank} of {strategy.num_replicas_in_sync} is done", flush=True)


def train_without_seed():
    """Prints the final weights: ranks must shuffle alike without the user's help."""
    strategy = poseidon.PoseidonStrategy(timeout_s=30)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("adam", "mse")
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(100, 4)), rng.normal(size=(100, 3))
    model.fit(x, y, epochs=2, verbose=0)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(100).batch(32)
    model.fit(data, epochs=2, verbose=0)
    print("weights", hashlib.sha256(model.get_weights()[0].tobytes()).hexdigest(), flush=True)


def tell_shared_memory():
    """Prints the files in /dev/shm that would be left if the job ended now."""
    strategy = poseidon.PoseidonStrategy(timeout_s=30)
    with open("/proc/self/maps") as maps:
        shared = [line for line in maps if "/dev/shm/" in line]
    print(f"{sum('mpich_shm' in line for line in shared)} shared, left: "
          f"{[line.split()[-1] for line in shared if not line.endswith('(deleted)' + os.linesep)]}", flush=True)
    train(strategy, epochs=1)


def train_beside_others(folder, name, *awaited):
    """Prints the final weights. After its first batch, each rank writes who it is, and waits for files of others."""
    folder = pathlib.Path(folder)
    strategy = poseidon.PoseidonStrategy(policy="ps", timeout_s=60)
    with open("/proc/self/maps") as maps:
        shared = sorted({line.split()[5] for line in maps if "/dev/shm/" in line})

    def meet():
        (folder / f"{name}.{strategy.rank}.new").write_text(json.dumps({"pid": os.getpid(), "shared": shared}))
        os.rename(folder / f"{name}.{strategy.rank}.new", folder / f"{name}.{strategy.rank}")
        end = time.monotonic() + 50
        while not all((folder / file).exists() for file in awaited):
            assert time.monotonic() < end, f"{awaited} are not all in {os.listdir(folder)}"
            time.sleep(0.01)

    model, _, _ = train(strategy, [AtBatch(strategy, strategy.rank, meet, batch=1)], epochs=20, features=200,
                        optimizer="adam")
    values = b"".join(value.tobytes() for value in model.get_weights())
    print("weights", hashlib.sha256(values).hexdigest(), flush=True)


def tell_local_results():
    """A batch of one row: rank 1 has none."""
    strategy = poseidon.PoseidonStrategy(timeout_s=60)
    batch, = strategy.experimental_distribute_dataset(tf.data.Dataset.range(7, 8).batch(3))
    results, = strategy.experimental_local_results(batch)
    print(f"rank {strategy.rank}: {results.numpy().tolist()}, {strategy.extended.should_save_summary}", flush=True)


def print_what_keras_prints():
    strategy = poseidon.PoseidonStrategy(timeout_s=60)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
        model.compile("sgd", "mse")
    model.summary()
    stop = keras.callbacks.EarlyStopping("loss", min_delta=1e9, patience=1, verbose=1)
    model.fit(np.ones((8, 4)), np.ones((8, 4)), epochs=3, callbacks=[stop])
    lines = []
    model.summary(print_fn=lines.append)
    print(f"rank {strategy.rank} has {len(lines)} summaries", flush=True)


def refuse():
    """Prints the errors of PoseidonStrategy for models that it cannot train."""
    pins = {"divided/*": "ps", "*columns/kernel": "columns"}
    strategy = poseidon.PoseidonStrategy(timeout_s=30, shard_update=True, pins=pins)
    x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")

    def dense():
        return keras.layers.Dense(1)

    def outside():
        model = keras.Sequential([keras.Input((4,)), dense()], name="outside")
        model.compile("sgd", "mse")
        model.fit(x, y)

    def layer_outside():
        layer = keras.layers.Dense(1, name="early")
        layer.build((None, 4))
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), layer])
            model.compile("sgd", "mse")
        model.fit(x, y)

    def optimizer_outside():
        optimizer = keras.optimizers.SGD(name="early_sgd")
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), dense()])
            model.compile(optimizer, "mse")
        model.fit(x, y)

    def jit():
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), dense()], name="jitted")
            model.compile("sgd", "mse", jit_compile=True)
        model.fit(x, y)

    def own_train_function():
        class Own(keras.Sequential):
            def make_train_function(self, force=False):
                self.train_function = lambda iterator: self.distribute_strategy.run(self.train_step, (next(iterator),))

        with strategy.scope():
            model = Own([keras.Input((4,)), dense()], name="own")
            model.compile("sgd", "mse")
        model.fit(x, y)

    def eager_after_graph():
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), dense()])
            model.compile(keras.optimizers.SGD(gradient_accumulation_steps=3), "mse")
        model.fit(x, y)
        model.compile(model.optimizer, "mse", run_eagerly=True)
        model.fit(x, y)

    def apply_outside_run():
        with strategy.scope():
            variable = keras.Variable([1.0])
            keras.optimizers.SGD(name="free").apply([tf.constant([1.0])], [variable])

    def scalars():
        strategy.experimental_distribute_dataset(tf.data.Dataset.range(3))

    def files():
        dataset = tf.data.Dataset.range(8).batch(4)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.FILE)
        strategy.experimental_distribute_dataset(dataset.with_options(options))

    def gather():
        strategy.gather(tf.constant(1.0), axis=0)

    def reduce_bytes():
        strategy.reduce("SUM", tf.constant([1], tf.int8), axis=None)

    def gather_slices():
        strategy.gather(tf.RaggedTensor.from_row_lengths([1, 2], [2]), axis=1)

    def gather_axis():
        strategy.gather(tf.ones([2, 3]), axis=2)

    def scatter_in_step():
        with strategy.scope():
            total = tf.Variable([1.0, 2.0], aggregation=tf.VariableAggregation.SUM, trainable=False)
        strategy.run(lambda: total.scatter_add(tf.IndexedSlices([1.0], [0])))

    def columns_in_step():
        with strategy.scope():
            layer = keras.layers.Dense(64, name="columns")
            layer.build((None, 4))
        strategy.run(tf.function(lambda: layer(x)))

    def read_without_aggregation():
        with strategy.scope():
            mine = tf.Variable(1.0, synchronization=tf.VariableSynchronization.ON_READ, trainable=False)
        strategy.run(lambda: mine.assign(2.0))
        mine.numpy()

    def distribute_own_value():
        with strategy.scope():
            mean = tf.Variable(1.0, synchronization=tf.VariableSynchronization.ON_READ, trainable=False,
                               aggregation=tf.VariableAggregation.MEAN)
        strategy.run(lambda: mean.assign(2.0))
        poseidon.distribute(lambda x: x + mean)(tf.ones([4]))

    def distribute_other_rows():
        first, second = (next(iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(rows).batch(rows))))
                         for rows in (2, 3))
        poseidon.distribute(lambda x, y: (x, y))(first, second)

    def from_function():
        strategy.distribute_datasets_from_function(lambda context: tf.data.Dataset.range(3))

    def synchronize_outside_run():
        strategy.synchronize([tf.ones(1)], [tf.Variable([1.0])])

    def float8():
        with strategy.scope():
            layer = keras.layers.Dense(1, dtype="float8_from_float32")
            layer.build((None, 4))
            optimizer = keras.optimizers.SGD()
        variables = layer.trainable_variables
        strategy.run(lambda: optimizer.apply([tf.zeros(v.shape) for v in variables], variables))

    def other_options():
        poseidon.PoseidonStrategy(timeout_s=31)

    def on_batch_outside():
        model = keras.Sequential([keras.Input((4,)), dense()], name="on_batch")
        model.compile("sgd", "mse")
        model.train_on_batch(x, y)

    def function_in_eager_run():
        with strategy.scope():
            layer = keras.layers.BatchNormalization()
            layer.build((None, 4))
        inner = tf.function(lambda rows: layer(rows, training=True))
        data = tf.data.Dataset.from_tensor_slices(x).batch(8)
        for rows in strategy.experimental_distribute_dataset(data):
            strategy.run(lambda rows: inner(rows), args=(rows,))

    def apply_in_condition():
        with strategy.scope():
            variable = keras.Variable([1.0])
            optimizer = keras.optimizers.SGD(name="sometimes")
            optimizer.build([variable])

        @tf.function
        def step(x):
            return strategy.run(lambda x: tf.cond(
                x > 0, lambda: optimizer.apply([x], [variable]) or x, lambda: x), args=(x,))

        step(tf.constant([1.0])[0])

    def unequal_parts():
        parts = tf.data.Dataset.from_tensors((tf.ones((6, 2)), tf.ones((7, 2))))
        strategy.experimental_distribute_dataset(parts)

    def server_out_of_range():
        poseidon.PoseidonStrategy(servers=[5])

    def no_kv_pair():
        poseidon.PoseidonStrategy(kv_pair_bytes=0)

    def no_time():
        poseidon.PoseidonStrategy(timeout_s=0)

    def no_steps():
        poseidon.PoseidonStrategy(verify=0)

    def no_policy():
        poseidon.PoseidonStrategy("fastest")

    def plan_and_policy():
        poseidon.PoseidonStrategy("sfb", plan=poseidon.Plan("ps", poseidon.Cluster(2)))

    def plan_of_others():
        poseidon.PoseidonStrategy(plan=poseidon.Plan("ps", poseidon.Cluster(3)))

    def other_cluster():
        poseidon.PoseidonStrategy(cluster=poseidon.Cluster(3))

    def no_rank_on_a_node():
        poseidon.PoseidonStrategy(ranks_per_node=0)

    def no_pin():
        poseidon.PoseidonStrategy(pins={"*": "fast"})

    def no_wire_dtype():
        poseidon.PoseidonStrategy(wire_dtype="float16")

    def verify_what_is_rounded():
        poseidon.PoseidonStrategy(wire_dtype="bfloat16", verify=5)

    def other_policy():
        poseidon.PoseidonStrategy("sfb", timeout_s=30)

    def load_optimizer_on_rank_0():
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), dense()], name="divided")
            model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
        model.fit(x, y, verbose=0)
        if strategy.rank == 0:
            model.optimizer.set_weights([np.zeros(v.shape) for v in model.optimizer.variables])
        model.fit(x, y, verbose=0)

    def weights():
        """Returns a model with a weight that is to be divided, to which each rank has assigned another value."""
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64, name="columns")])
            model.compile("sgd", "mse")
        model.layers[0].kernel.assign(np.full((4, 64), strategy.rank))
        return model

    def assign_other_weights():
        weights().fit(x, np.ones((8, 64)), verbose=0)

    def distribute_other_weights():
        model = weights()

        @poseidon.distribute
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x)**2)
            model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        step(x)

    for case in (outside, layer_outside, optimizer_outside, jit, own_train_function, eager_after_graph,
                 apply_outside_run, scalars, files,
                 gather, reduce_bytes, gather_slices, gather_axis, scatter_in_step, columns_in_step,
                 read_without_aggregation, distribute_own_value, distribute_other_rows, from_function,
                 synchronize_outside_run, float8,
                 other_options, on_batch_outside, function_in_eager_run,
                 apply_in_condition, unequal_parts, server_out_of_range, no_rank_on_a_node,
                 no_kv_pair, no_time, no_steps, no_policy, other_policy,
                 plan_and_policy, plan_of_others, other_cluster, no_pin, no_wire_dtype,
                 verify_what_is_rounded, load_optimizer_on_rank_0,
                 assign_other_weights, distribute_other_weights):
        try:
            case()
        except PoseidonError as error:
            if strategy.rank == 0:
                print(f"{case.__name__}: {error}", flush=True)


def pin_to_columns():
    """Trains a model of which some weights are to be divided that cannot be."""
    strategy = poseidon.PoseidonStrategy("ps", timeout_s=30, pins={"*/kernel": "columns", "other/*": "columns"})
    with strategy.scope():
        model = keras.Sequential([
            keras.Input((4, 4, 1)), keras.layers.Conv2D(4, 3, name="conv"), keras.layers.Flatten(),
            keras.layers.Dense(20, name="body"), keras.layers.Dense(24, name="half", dtype="bfloat16"),
            keras.layers.Dense(24, name="head"), keras.layers.Dense(1, name="one")], name="net")
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 4, 4, 1)), np.ones((8, 1)), verbose=0)
    model.evaluate(np.ones((8, 4, 4, 1)), np.ones((8, 1)), verbose=0)
    if strategy.rank == 0:
        print(*(f"divided {weight.path}" for weight in strategy.plan.divided), sep="\n")


def calibrate():
    """Measures without a strategy, and again with one; prints the results and the times."""
    begin = time.monotonic()
    cluster = poseidon.calibrate(servers=[1], timeout_s=30)
    seconds = time.monotonic() - begin
    strategy = poseidon.PoseidonStrategy(servers=[1], timeout_s=30)
    assert poseidon.calibrate() is cluster
    assert "seed" in strategy.stats()["sites"]
    assert not any("calibration" in site for site in strategy.stats()["sites"])
    print(f"{cluster!r} in {seconds:.3f} s", flush=True)


def sum_many_pairs():
    """Sums more KV pairs at once than MPI buffers unexpected messages."""
    strategy = poseidon.PoseidonStrategy("ps", kv_pair_bytes=40_960, timeout_s=10)
    wait = [runtime.communicator().submit(f"x{i}", np.full(500_000, i, np.float32)) for i in range(8)]
    for i, result in enumerate(wait):
        np.testing.assert_array_equal(result(), strategy.num_replicas_in_sync * i)


def incomplete_group():
    """Sends one gradient of a group of two, first alone and then with the other."""
    poseidon.PoseidonStrategy("ps", timeout_s=10)
    module, _ = library.load()

    def start(site):
        x = tf.ones(3)
        ticket = module.poseidon_send(tensors=[x], contributes=True, site=site, scheme="ps",
                                      group="both", group_size=2)
        return lambda: module.poseidon_recv(ticket=ticket, T=[x.dtype])[0][0].numpy()

    begin = time.monotonic()
    np.testing.assert_array_equal(start("one")(), [2, 2, 2])
    assert time.monotonic() - begin < 5
    for finish in [start("one"), start("two")]:
        np.testing.assert_array_equal(finish(), [2, 2, 2])
    print("all right", flush=True)


def wait_and_idle():
    """Prints the share of a core that rank 0 uses while it waits for rank 1, and while idle."""
    strategy = poseidon.PoseidonStrategy()
    communicator = strategy.extended.job.communicator
    for what in ("wait", "idle"):
        communicator.sum("begin", np.zeros(1))
        begin_wall, begin_cpu = time.perf_counter(), time.process_time()
        if what == "idle" or strategy.rank == 1:
            time.sleep(4)
        if what == "wait":
            communicator.sum("wait", np.zeros(1))
        used = (time.process_time() - begin_cpu) / (time.perf_counter() - begin_wall)
        if strategy.rank == 0:
            print(f"{what}: {used:.4f} of a core", flush=True)


def use_ops(largest):
    """Checks the ops on values of many kinds; the argument is the number of elements of the largest."""
    strategy = poseidon.PoseidonStrategy()
    rank, size = strategy.rank, strategy.num_replicas_in_sync

    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64):
        for shape in ((), (3, 0, 2), (7, 11), (300, 300)):
            value = tf.cast(tf.fill(shape, rank + 1), dtype)
            expected = np.full(shape, size * (size + 1) // 2)
            for op in (ops.sync, ops.all_reduce):
                site = f"{op.__name__}/{dtype.name}/{shape}"
                eager = op(value, site)
                graph = tf.function(op)(value, site)
                for got in (eager, graph):
                    assert got.dtype == dtype
                    np.testing.assert_array_equal(tf.cast(got, tf.float64), expected)

    for dtype in (tf.bool, tf.uint8, tf.uint32, tf.int8, tf.float16, tf.int64):
        value = tf.cast(tf.range(5) * (rank + 1) % 2, dtype)
        got = ops.broadcast(value, f"broadcast/{dtype.name}", root=size - 1)
        np.testing.assert_array_equal(got, tf.cast(tf.range(5) * size % 2, dtype))

    @tf.function
    def left_out(value):
        return ops.sync(value, "left_out", contributes=rank != 0)

    np.testing.assert_array_equal(left_out(tf.fill([3], np.nan if rank == 0 else 1.0)), size - 1)

    for owner in (-1, size - 1):
        layout = {"layout": "kernel", "owner": owner}
        own = tf.function(ops.reduce_scatter)(tf.fill([300, 300], rank + 1.0), f"scatter/{owner}", **layout)
        np.testing.assert_array_equal(own, size * (size + 1) // 2)
        assert own.shape == ops.shard(tf.zeros([300, 300], tf.int8), **layout).shape
        whole = tf.function(ops.gather_shards)(own, f"shards/{owner}", [300, 300], **layout)
        np.testing.assert_array_equal(whole, np.full([300, 300], size * (size + 1) // 2))

    x = tf.Variable(float(rank + 1))
    with tf.GradientTape() as tape:
        loss = (rank + 1.0) * ops.all_reduce(x * x, "differentiated")
    # d(sum over ranks of loss) / dx on this rank: 2 x times the sum of all ranks' factors.
    np.testing.assert_allclose(tape.gradient(loss, x),
                               2 * (rank + 1) * sum(r + 1 for r in range(size)))

    @tf.function
    def sum_of_largest():
        total = ops.sync(tf.fill([int(largest)], tf.cast(rank + 1, tf.float32)), "largest")
        return tf.reduce_min(total), tf.reduce_max(total)

    for extreme in sum_of_largest():
        assert extreme == size * (size + 1) // 2
    print(f"rank {rank}: all right", flush=True)


def overlap():
    """Prints how long a sum of the first of two values takes when the second one comes late.

    In a function, the first sync must not wait for the second, nor the second for the first.
    """
    strategy = poseidon.PoseidonStrategy()

    @tf.function
    def late_first():
        late = tf.py_function(lambda: time.sleep(1.0) or 1.0, [], tf.float32)
        late.set_shape([])
        first = ops.sync(late, "late")  # first in program order
        second = ops.sync(tf.constant(1.0), "early")
        return first, second

    late_first()
    sites = strategy.stats()["sites"]
    if strategy.rank == 0:
        print(f"late {sites['late']['seconds']:.3f} early {sites['early']['seconds']:.3f}")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
