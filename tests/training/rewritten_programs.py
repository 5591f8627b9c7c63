"""Programs about the rewritten graph, started on several ranks: rewritten_programs.py NAME [ARGUMENT...]."""

import importlib.metadata
import json
import logging
import logging.handlers
import os
import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

import tf_poseidon as poseidon
from tf_poseidon import planning
from tf_poseidon.graph_passes import session
from tf_poseidon.graph_passes.write import send_receive

ROWS, BATCH = 70, 32  # the last batch has 6 rows


def small_model(strategy):
    """Returns (model, x, y): factors, a regularizer, a bias that rides along; slices, and dense ones."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        x, regularizer = keras.Input((8,)), keras.regularizers.L1L2(0.01, 0.01)
        h = keras.layers.Dense(16, "tanh", kernel_regularizer=regularizer, name="first")(x)
        ids = keras.ops.cast(keras.ops.abs(2 * x), "int32")
        tables = [keras.layers.Embedding(rows, 2, name=f"table{rows}")(ids) for rows in (4, 400)]
        h = keras.layers.Concatenate()([h, *map(keras.layers.Flatten(), tables)])
        model = keras.Model(x, keras.layers.Dense(3, name="second")(h))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    rng = np.random.default_rng(2)
    return model, rng.integers(-3, 4, (ROWS, 8)) / 2, rng.integers(-3, 4, (ROWS, 3)) / 2


def write_report(strategy, **values):
    """Writes the report of this rank to $REPORTS/RANK.json."""
    path = pathlib.Path(os.environ["REPORTS"], f"{strategy.rank}.json")
    path.write_text(json.dumps(values))


def report(strategy, model, **more):
    """Reports the weights and the plan of this rank."""
    plan = strategy.plan
    write_report(strategy, **more, weights=[w.tolist() for w in model.get_weights()],
                 schemes={d.site: d.scheme for d in plan.decisions} if plan else None,
                 refusal=plan.refusal if plan else None)


def break_pass(when=lambda call: True):
    """Makes the passes fail in this process, in those calls."""
    find, calls = session.RewriteSession.find, []

    def broken(*args, **kwargs):
        calls.append(None)
        if when(len(calls)):
            raise RuntimeError("broken on purpose")
        return find(*args, **kwargs)

    session.RewriteSession.find = broken


def train(how, strict="False"):
    """Trains by policy "sfb", with something wrong on one rank or all; reports what was logged."""
    log = logging.handlers.BufferingHandler(10_000)
    logging.getLogger("tf_poseidon").addHandler(log)
    keras.config.set_floatx("float64")
    strategy = poseidon.PoseidonStrategy("sfb", strict=strict == "True", timeout_s=30)
    on_rank_1 = strategy.rank == 1
    if how == "fails_on_rank_1" and on_rank_1:
        break_pass()
    if how == "other_optimizations" and on_rank_1:
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    if how == "fails_later_on_rank_1" and on_rank_1:
        break_pass(lambda call: call > 1)
    if how == "disabled" or (how == "disabled_on_rank_1" and on_rank_1):
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    model, x, y = small_model(strategy)
    fit = dict(batch_size=BATCH, shuffle=False, verbose=0)
    if how in ("other_shapes", "other_optimizations"):
        train_by_hand(strategy, model, x, y, how == "other_optimizations" or on_rank_1)
    else:
        model.fit(x, y, epochs=2, **fit)
    if how == "fails_later_on_rank_1":
        # Another function of the same variables; on rank 1 it is not rewritten.
        with strategy.scope():
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model.fit(x, y, epochs=2, **fit)
    report(strategy, model, warnings=[record.getMessage() for record in log.buffer])


def train_on_accelerator(policy):
    """Trains on the second of two CPUs, in place of a GPU; reports which of our ops ran where."""
    keras.config.set_floatx("float64")
    cpu, = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = poseidon.PoseidonStrategy(policy, strict=True, verify=2, timeout_s=30)
    strategy.extended._device = tf.config.list_logical_devices("CPU")[1].name
    model, x, y = small_model(strategy)
    with context.collect_graphs(optimized=True) as graphs:
        model.fit(x, y, epochs=2, batch_size=BATCH, shuffle=False, verbose=0)
    places = {(node.op, node.device.rpartition(":")[2]) for graph in graphs for node in graph.node}
    report(strategy, model, places=sorted(
        f"{op} on {device}" for op, device in places if op.startswith(("Poseidon", "Sufficient"))))


def train_by_hand(strategy, model, x, y, for_each_shape):
    """Same as fit, in a loop over strategy.run; its function is traced once, or once per shape."""
    size, rank = strategy.num_replicas_in_sync, strategy.rank

    def step(x, y):
        def replica(x, y):
            with tf.GradientTape() as tape:
                prediction = model(x, training=True)
                loss = tf.reduce_sum(tf.reduce_mean(tf.square(prediction - y), 1)) / total
                loss += tf.add_n(model.losses) / size
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)
        strategy.run(replica, args=(x, y))

    total = tf.Variable(1.0, dtype=tf.float64)
    signature = [tf.TensorSpec((None, n), tf.float64) for n in (8, 3)]
    function = tf.function(step, input_signature=None if for_each_shape else signature)
    for _ in range(2):
        for begin in range(0, ROWS, BATCH):
            parts = [np.array_split(a[begin:begin + BATCH], size)[rank] for a in (x, y)]
            total.assign(float(min(BATCH, ROWS - begin)))
            function(*map(tf.constant, parts))


def train_with(options):
    """Trains with options of the strategy, as JSON; rank 0 saves the plan beside the reports.

    With "broken", the pass fails on rank 1.
    """
    keras.config.set_floatx("float64")
    options = json.loads(options)
    is_broken = options.pop("broken", False)
    if "cluster" in options:
        options["cluster"] = poseidon.Cluster(**options["cluster"])
    strategy = poseidon.PoseidonStrategy(timeout_s=30, **options)
    if is_broken and strategy.rank == 1:
        break_pass()
    model, x, y = small_model(strategy)
    start = [w.tolist() for w in model.get_weights()]
    model.fit(x, y, epochs=2, batch_size=BATCH, shuffle=False, verbose=0)
    model.evaluate(x, y, batch_size=BATCH, verbose=0)  # whose sums are in no plan
    report(strategy, model, start=start)
    if strategy.rank == 0 and strategy.plan:
        strategy.plan.save(pathlib.Path(os.environ["REPORTS"], "plan"))


def measure(policy):
    """Reports the plan of a step, the counted bytes, and the executed ops."""
    options = {}
    if policy == "auto":  # with whole numbers of bytes that decide
        size = int(os.environ["PMI_SIZE"])
        options = dict(cluster=poseidon.Cluster(size, latency_us=0), wire_dtype="bfloat16")
    strategy = poseidon.PoseidonStrategy(policy, strict=True, timeout_s=30, **options)
    keras.utils.set_random_seed(1)
    batch, steps = 8 * strategy.num_replicas_in_sync, 3
    with strategy.scope():
        x = keras.Input((16, 16, 1))
        h = keras.layers.Flatten()(keras.layers.Conv2D(4, 3, padding="same")(x))
        h = keras.layers.Dense(512, "tanh", kernel_regularizer="l2")(h)  # factors without zeros
        model = keras.Model(x, keras.layers.Dense(2)(h))
        model.compile("adam", "mse")
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(batch * steps, 16, 16, 1)), rng.normal(size=(batch * steps, 2))
    before = strategy.stats()
    with context.collect_graphs(optimized=True) as graphs:
        model.fit(x, y, batch_size=batch, verbose=0)
    after = strategy.stats()
    write_report(
        strategy,
        plan={d.site: [d.scheme, d.num_bytes] for d in strategy.plan.decisions},
        total=strategy.plan.total_bytes,
        steps=steps,
        sites=after["sites"],
        headers=after["header_bytes"] - before["header_bytes"],
        waiting=after["waiting_seconds"],
        ops=sorted({node.op for graph in graphs for node in graph.node}))


def shorten(policy, how):
    """Trains in mixed precision, with zeros in factors; reports weights, and the bytes of each site.

    With "whole", nothing travels shorter than it is; with "broken", the pass fails on rank 1; with "verified", each
    sum is compared with that of the gradients as they are.
    """
    keras.config.set_dtype_policy("mixed_bfloat16")
    if how == "whole":
        send_receive.SendReceive.sums_narrow = False
        planning.least_saving = lambda cluster: 1.0
    size = int(os.environ["PMI_SIZE"])
    strategy = poseidon.PoseidonStrategy(
        policy, timeout_s=30, ranks_per_node=1, verify=1 if how == "verified" else None,
        cluster=poseidon.Cluster(size, bandwidth_gbps=1))
    if how == "broken" and strategy.rank == 1:
        break_pass()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        x = keras.Input((8, 8, 1))
        h = keras.layers.Flatten()(keras.layers.Conv2D(16, 3, activation="relu")(x))
        h = keras.layers.Dropout(0.5, seed=1)(keras.layers.Dense(256, "relu", name="first")(h))
        model = keras.Model(x, keras.layers.Dense(3, name="second", dtype="float32")(h))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(ROWS, 8, 8, 1)), rng.normal(size=(ROWS, 3))
    model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0)
    report(strategy, model, sites=strategy.stats()["sites"],
           reasons={each["name"]: each["reason"] for each in strategy.plan.predictions()["variables"]}, shares={
               site.name: site.factors.sent_share for site in strategy.plan.measured(strategy.stats()).sites
               if site.factors})


def come_back():
    """Trains the same variables eagerly and in large batches, which send no factors, and then again.

    Reports what each epoch has sent for the kernel, as multiples of its factors.
    """
    strategy = poseidon.PoseidonStrategy("paper", strict=True, timeout_s=30)
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, name="dense")])
        model.compile("sgd", "mse")
    x, y = np.ones((512, 64), "float32"), np.ones((512, 64), "float32")
    sent = []
    for rows, batch, eager in ((64, 8, False), (64, 8, True), (64, 8, False), (512, 256, False),
                               (64, 8, False)):
        model.run_eagerly = eager
        model.make_train_function(force=True)
        before = strategy.stats()["sites"].get("sequential/dense/kernel", {}).get("sent_bytes", 0)
        model.fit(x[:rows], y[:rows], batch_size=batch, verbose=0)
        after = strategy.stats()["sites"]["sequential/dense/kernel"]["sent_bytes"]
        sent.append((after - before) / (4 * (64 + 64) * 4))  # 4 rows of each of 2 ranks, float32
    write_report(strategy, sent=sent)


def order(policy, directory):
    """Trains under TensorFlow's profiler, with a model whose last layer's gradient is early."""
    strategy = poseidon.PoseidonStrategy(policy, timeout_s=30)

    @tf.custom_gradient
    def slow_backwards(x):
        def gradient(upstream):
            late = tf.numpy_function(lambda v: time.sleep(0.1) or v, [upstream], upstream.dtype)
            return tf.ensure_shape(late, upstream.shape)
        return tf.identity(x), gradient

    with strategy.scope():
        x = keras.Input((8,))
        h = keras.layers.Dense(16, name="first")(x)
        h = keras.layers.Lambda(slow_backwards)(h)
        model = keras.Model(x, keras.layers.Dense(3, name="last")(h))
        model.compile("sgd", "mse")
    x, y = np.ones((8, 8)), np.ones((8, 3))
    model.fit(x, y, batch_size=8, verbose=0)
    with tf.profiler.experimental.Profile(f"{directory}/{strategy.rank}"):
        model.fit(x, y, batch_size=8, verbose=0)


def freeze_on_rank_1():
    class WithoutConfig(keras.Sequential):
        """A model whose configuration ranks cannot compare."""

        def get_config(self):
            raise NotImplementedError

    strategy = poseidon.PoseidonStrategy(timeout_s=30)
    with strategy.scope():
        model = WithoutConfig([keras.Input((8,)), keras.layers.Dense(4, name="first"),
                               keras.layers.Dense(3, name="second")])
        model.layers[0].trainable = strategy.rank != 1
        model.compile(keras.optimizers.SGD(), "mse")
    model.fit(np.ones((8, 8)), np.ones((8, 3)), verbose=0)


def differ_on_rank_1(what):
    rank = int(os.environ["PMI_RANK"])
    options = {}
    if what == "policy":
        options["policy"] = "sfb" if rank == 1 else "ps"
    if what == "keras" and rank == 1:
        version = importlib.metadata.version
        importlib.metadata.version = lambda name: "9.9" if name == "keras" else version(name)
    poseidon.PoseidonStrategy(**options)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
