"""Rules of the row partitioner: the table of partition_families on many ranks, random numbers, layers of Keras.

The graphs of one training step of Keras' layers, losses and optimizers are partitioned, not run: no op in them may
need whole inputs, and no rows may be gathered.
"""

import functools
import random

import keras
import numpy as np
import partition_cases
import partition_families
import partition_table
import partitioning
import pytest
import tensorflow as tf
from tensorflow.python.ops import handle_data_util

from tf_poseidon import grappler
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition import partitioner as partition_lib
from tf_poseidon.graph_passes.partition.preparation import inline
from tf_poseidon.graph_passes.partition.propagate import dividing
from tf_poseidon.graph_passes.partition.propagate import facts
from tf_poseidon.graph_passes.partition.row_loops import loop_outcomes
from tf_poseidon.graph_passes.partition.rules import gathering
from tf_poseidon.graph_passes.partition.rules import lists
from tf_poseidon.graph_passes.partition.rules import normalisation
from tf_poseidon.graph_passes.partition.rules import parsing
from tf_poseidon.graph_passes.partition.rules import sources
from tf_poseidon.graph_passes.partition.rules import stores
from tf_poseidon.graph_passes.partition.rules import windows
from tf_poseidon.graph_passes.partition.sizes import graph_sizes
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import SUM
from tf_poseidon.graph_passes.partition.states import WHOLE

FAMILIES = (windows, gathering, lists, stores, normalisation, parsing)
_CASES_OF_A_GRAPH = 30
layers, losses, metrics, optimizers = keras.layers, keras.losses, keras.metrics, keras.optimizers


@pytest.mark.parametrize("first", range(0, len(partition_families.CASES), _CASES_OF_A_GRAPH))
def test_ranks_compute_what_one_process_does(first):
    lines = partition_table.check(partition_families.CASES[first:first + _CASES_OF_A_GRAPH], all_rows=(0, 1, 2, 7))
    assert not lines, "\n".join(lines)


def test_every_rule_has_a_case():
    named = {op for case in partition_families.CASES for op in case.ops.split()}
    without = {op for family in FAMILIES for op in family.RULES} - named
    assert not without, f"Rules without a case in partition_families: {sorted(without)}"


def test_states_do_not_depend_on_the_order_of_nodes():
    """Of loops, lists and stores, whose states are iterated."""
    batch = partition_table.Batch([*partition_cases.CONTROL, *partition_families.LISTS, *partition_families.STORES])
    fetches = sum(batch.fetches, [])

    def states(graph_def):
        sizes = graph_sizes.Sizes(graph_def, grappler.add_shapes)
        propagated = dividing.propagate(sizes, fetches=fetches, row_loops=loop_outcomes.find(sizes, fetches))
        return propagated.states, {name: (outcome.takes, outcome.gives)
                                   for name, outcome in propagated.outcomes.items()}

    nodes = list(batch.flat.node)
    random.Random(0).shuffle(nodes)
    assert states(graph_lib.with_nodes(batch.flat, nodes)) == states(batch.flat)


@pytest.mark.parametrize("seen, expected, height", [
    ([None, None], None, 0), ([None, Rows(0), Rows(0)], Rows(0), 1), ([SUM, None], WHOLE, 3),
    ([SUM, Rows(0), SUM], WHOLE, 3), ([SUM, Rows(0), SUM, Rows(0)], WHOLE, 3), ([SUM, Rows(0)], Rows(0), 2),
    ([WHOLE, SUM], WHOLE, 3)])
def test_what_tensors_agree_on_only_rises(seen, expected, height):
    agreed, heights = facts.AgreedStates(changes=1), []
    for state in seen:
        agreed.see("loop", state)
        heights.append(agreed.height)
    assert agreed.get("loop") == expected and heights[-1] == height and heights == sorted(heights)


def test_a_state_that_was_found_too_early_does_not_make_a_loop_gather():
    """The loop's second variable is taken for whole at first, and so the third for a summand."""
    def build():
        x, = partitioning.rows(_placeholder(None, 3))
        zeros = tf.zeros(tf.shape(x), x.dtype)
        return tf.while_loop(lambda t, *_: t < 3, lambda t, h, d, product: (
            t + 1, tf.tanh(h), tf.sin(h), tf.reduce_sum(h, 0) * d), (0, x, zeros, zeros))[3]

    made = partitioning.check(build, _feeds(3), tolerance=1e-10)
    frames = frames_lib.find_frames(graph_lib.in_order(made.partitioned.graph_def))
    gathers = [frames[node.name] for node in made.partitioned.graph_def.node if node.op == "PoseidonAllGather"]
    assert gathers == [frames_lib.ROOT]


# ---- random numbers ---------------------------------------------------------------------------------------------


def _placeholder(*shape, name="x", dtype=tf.float64):
    return tf.compat.v1.placeholder(dtype, shape, name=name)


def _feeds(*shape):
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(rows, *shape))} for rows in (7, 1, 2)]


def test_dropout_and_augmentation_with_seeds_give_the_numbers_of_one_process():
    def build():
        x, = partitioning.rows(_placeholder(None, 4, 4, 3))
        images = tf.image.stateless_random_flip_left_right(x, seed=[3, 1])
        images = tf.image.stateless_random_contrast(images, 0.5, 1.5, seed=[1, 2])
        hidden = tf.reshape(images, [-1, 48])
        mask = tf.random.stateless_uniform(tf.shape(hidden), [5, 6], dtype=tf.float64) > 0.5
        dropped = tf.where(mask, hidden * 2, 0)
        noise = tf.random.stateless_normal(tf.shape(hidden), [7, 8], dtype=tf.float64)
        return [dropped, hidden + noise, tf.gradients(tf.reduce_mean(dropped ** 2), images)[0]]

    made = partitioning.check(build, _feeds(4, 4, 3), tolerance=1e-6)
    assert not made.report.whole


def _drawn():
    """Each op of random numbers without a seed, by its name."""
    raw = tf.raw_ops
    x, = partitioning.rows(_placeholder(None, 4))
    k = tf.shape(x)[0]
    shape = tf.stack([k, 3])
    logits = tf.cast(x, tf.float32)
    labels = tf.cast(tf.argmax(x, 1), tf.int64)[:, None]
    images = tf.reshape(x, [-1, 2, 2, 1])
    images = tf.tile(images, [1, 4, 4, 1])
    candidates = {"true_classes": labels, "num_true": 1, "num_sampled": 3, "unique": True}
    pooling = {"value": images, "pooling_ratio": [1.0, 1.5, 1.5, 1.0]}
    return {
        "RandomUniform": raw.RandomUniform(shape=shape, dtype=tf.float64),
        "RandomUniformInt": raw.RandomUniformInt(shape=shape, minval=0, maxval=1000000),
        "RandomStandardNormal": raw.RandomStandardNormal(shape=shape, dtype=tf.float64),
        "TruncatedNormal": raw.TruncatedNormal(shape=shape, dtype=tf.float64),
        "RandomShuffle": raw.RandomShuffle(value=x),
        "Multinomial": raw.Multinomial(logits=logits, num_samples=50),
        "RandomGamma": raw.RandomGamma(shape=shape, alpha=[1.0, 2.0]),
        "RandomPoissonV2": raw.RandomPoissonV2(shape=shape, rate=[100.0, 2.0]),
        "ParameterizedTruncatedNormal": raw.ParameterizedTruncatedNormal(
            shape=shape, means=0.0, stdevs=1.0, minvals=-1.0, maxvals=1.0),
        "UniformCandidateSampler": raw.UniformCandidateSampler(range_max=1000, **candidates),
        "LogUniformCandidateSampler": raw.LogUniformCandidateSampler(range_max=1000, **candidates),
        "LearnedUnigramCandidateSampler": raw.LearnedUnigramCandidateSampler(range_max=1000, **candidates),
        "FixedUnigramCandidateSampler": raw.FixedUnigramCandidateSampler(
            range_max=50, unigrams=list(range(1, 51)), **candidates),
        "AllCandidateSampler": raw.AllCandidateSampler(
            true_classes=labels, num_true=1, num_sampled=4, unique=True),
        "SampleDistortedBoundingBoxV2": raw.SampleDistortedBoundingBoxV2(
            image_size=tf.stack([100, 100, k]), bounding_boxes=tf.zeros([1, 0, 4]), min_object_covered=0.1,
            use_image_if_no_bounding_boxes=True),
        "FractionalMaxPool": raw.FractionalMaxPool(pseudo_random=True, **pooling),
        "FractionalAvgPool": raw.FractionalAvgPool(pseudo_random=True, **pooling),
        "NonDeterministicInts": raw.NonDeterministicInts(shape=tf.cast(shape, tf.int64)),
        "Timestamp": raw.Timestamp(),
    }


def test_all_ranks_draw_the_same_numbers_without_a_seed():
    names = []

    def build():
        drawn = _drawn()
        names.extend(drawn)
        return list(drawn.values())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.compat.v1, "set_random_seed", lambda seed: None)
        made = partitioning.Partitioned(build, optimize=False)
    assert set(names) == set(sources.RULES) - {"PoseidonRows", *sources.READERS}
    for size in (2, 3):
        for first, *others in made.on_ranks(_feeds(4)[:2], size):
            for other in others:
                for mine, theirs in zip(first, other, strict=True):
                    assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()


def test_what_is_drawn_without_a_seed_is_used_alike():
    def build():
        x, = partitioning.rows(_placeholder(None, 64))
        mask = tf.cast(tf.random.uniform(tf.shape(x)) > 0.5, tf.float64)
        return [mask, x * mask, tf.reduce_sum(x * mask, 0)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.compat.v1, "set_random_seed", lambda seed: None)
        made = partitioning.Partitioned(build, optimize=False)
    feed = _feeds(64)[0]
    for mask, masked, total in made.on_ranks([feed], 3)[0]:
        assert 0 < mask.mean() < 1
        np.testing.assert_array_equal(masked, feed["x"] * mask)
        np.testing.assert_allclose(total, masked.sum(0), rtol=1e-12)


# ---- dilated convolutions ---------------------------------------------------------------------------------------


def _variable(name, *shape):
    values = np.arange(np.prod(shape)).reshape(shape) % 7 - 3.0
    return tf.compat.v1.get_variable(name, initializer=tf.constant(values), use_resource=True)


def _dilated(rate, reads_blocks=False):
    def build():
        x, = partitioning.rows(_placeholder(None, 7, 6, 2))
        filters = _variable("filters", 3, 2, 2, 3)
        block, paddings = [rate, 2], [[1, -(7 + 1) % rate], [0, 2]]
        blocks = tf.space_to_batch_nd(x, block, paddings)
        value = tf.nn.relu(tf.nn.conv2d(blocks, filters.read_value(), 1, "SAME"))
        y = tf.batch_to_space(value, block, [[1, 0], [0, 1]])
        gradients = tf.gradients(y ** 2, [x, filters])
        return [y, *gradients, *([tf.cumsum(blocks)] if reads_blocks else [])]
    return build


@pytest.mark.parametrize("rate", (2, 3))
def test_dilated_convolutions_run_on_rows(rate):
    made = partitioning.check(_dilated(rate), _feeds(7, 6, 2), ranks=(2, 3))
    assert not made.report.whole


def test_blocks_that_are_read_in_their_order_stay_in_it():
    made = partitioning.check(_dilated(2, reads_blocks=True), _feeds(7, 6, 2), ranks=(2,))
    assert {op.op for op in made.report.whole} >= {"SpaceToBatchND"}


# ---- layers of Keras --------------------------------------------------------------------------------------------


def _with_variables(concrete):
    """Returns the GraphDef of a function in which captured variables are nodes with known shapes."""
    graph_def = concrete.graph.as_graph_def()
    nodes = {node.name: node for node in graph_def.node}
    for outer, inner in concrete.graph.captures:
        node = nodes[inner.op.name]
        name = node.name
        node.Clear()
        node.name = name
        if inner.dtype == tf.resource:
            part, = handle_data_util.get_resource_handle_data(inner).shape_and_type
            node.op = "VarHandleOp"
            node.attr["dtype"].type = part.dtype
            node.attr["shape"].shape.CopyFrom(part.shape)
            node.attr["shared_name"].s = name.encode()
        else:
            node.op = "Const"
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(outer.numpy()))
            node.attr["dtype"].type = inner.dtype.as_datatype_enum
    return graph_def


def _report(model, loss=None, optimizer=None, metric=None, labels=None):
    """Partitions one training step of a model, and returns the report."""
    loss, optimizer = loss or losses.MeanSquaredError(), optimizer or optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    labels = labels or tf.TensorSpec(model.outputs[0].shape, "float32")
    if metric:
        metric.update_state(tf.zeros([2, *labels.shape[1:]], labels.dtype), tf.zeros([2, *model.outputs[0].shape[1:]]))

    def step(y, *inputs):
        *inputs, y = partitioning.rows(*inputs, y)
        with tf.GradientTape() as tape:
            predictions = model(list(inputs), training=True)
            value = tf.add_n([loss(y, predictions), *model.losses])
            scaled = optimizer.scale_loss(value)
        optimizer.apply_gradients(zip(tape.gradient(scaled, model.trainable_variables), model.trainable_variables))
        if metric:
            metric.update_state(y, predictions)
        return value

    concrete = tf.function(step, autograph=False).get_concrete_function(
        labels, *(tf.TensorSpec(t.shape, t.dtype) for t in model.inputs))
    graph = concrete.graph
    flat = inline.inline(_with_variables(concrete), sorted(
        {t.op.name for t in graph.outputs} | {op.name for op in graph.control_outputs}))
    return partition_lib.partition(flat, [t.name for t in graph.outputs if t.dtype != tf.resource],
                                   grappler.add_shapes).report


def _check(*arguments, **options):
    report = _report(*arguments, **options)
    gathered = [exchange.site for exchange in report.exchanges if exchange.kind == "rows"]
    assert not report.whole and not gathered, str(report)
    return report


def _model(make, *shapes, dtype="float32"):
    inputs = [keras.Input(shape, dtype=dtype) for shape in shapes]
    return keras.Model(inputs, make(*inputs))


def _chain(*chained):
    return lambda x: functools.reduce(lambda value, layer: layer(value), chained, x)


def _flat(*chained):
    return _chain(*chained, layers.Flatten(), layers.Dense(2))


def _all_of(*branches):
    """Dense layers between an input and each of some layers, so that there are gradients of all of them."""
    return lambda x: layers.Dense(2)(layers.Concatenate()([layers.Flatten()(b(layers.Dense(3)(x))) for b in branches]))


def _embedded(*chained):
    return _chain(layers.Embedding(10, 4, mask_zero=True), *chained, layers.Dense(2))


def _merged(x, y):
    merged = [layers.Add(), layers.Subtract(), layers.Multiply(), layers.Average(), layers.Maximum(), layers.Minimum(),
              layers.Concatenate(), layers.Dot(1)]
    return layers.Dense(2)(layers.Concatenate()([merge([layers.Dense(4)(x), layers.Dense(4)(y)]) for merge in merged]))


def _attended(**options):
    return lambda x: layers.Dense(2)(layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x, **options))


def _transformer(x):
    value = layers.Embedding(20, 8, mask_zero=True)(x)
    for _ in range(2):
        hidden = layers.LayerNormalization()(value)
        value = value + layers.MultiHeadAttention(2, 4)(hidden, hidden, use_causal_mask=True)
        hidden = layers.Dense(16, "gelu")(layers.LayerNormalization()(value))
        value = value + layers.Dropout(0.1)(layers.Dense(8)(hidden))
    return layers.Dense(20, "softmax")(value)


ACTIVATIONS = "elu relu gelu selu silu softplus softsign tanh sigmoid hard_sigmoid mish relu6 log_softmax".split()
STEPS = {
    "dense": lambda: _model(_chain(layers.Dense(8, "relu"), layers.Dense(3, "softmax")), (5,)),
    "activations": lambda: _model(_all_of(*(layers.Activation(name) for name in ACTIVATIONS), layers.Softmax(),
                                          layers.PReLU(), layers.LeakyReLU()), (5,)),
    "convolutions 1D": lambda: _model(_flat(
        layers.Conv1D(4, 3, padding="causal"), layers.Conv1D(4, 3, strides=2, padding="same"),
        layers.SeparableConv1D(4, 3), layers.Conv1DTranspose(4, 3, strides=2)), (16, 3)),
    "convolutions 2D": lambda: _model(_flat(
        layers.Conv2D(4, 3, padding="same"), layers.Conv2D(4, 3, strides=2), layers.DepthwiseConv2D(3),
        layers.SeparableConv2D(4, 3, padding="same"), layers.Conv2DTranspose(4, 3, strides=2)), (16, 16, 3)),
    "convolutions, dilated": lambda: _model(_flat(layers.Conv2D(4, 3, dilation_rate=2, padding="same"),
                                                  layers.Conv2D(4, 3, dilation_rate=(1, 3))), (12, 12, 3)),
    "convolutions 3D": lambda: _model(_flat(
        layers.Conv3D(4, 3, padding="same"), layers.Conv3DTranspose(4, 3, strides=2)), (4, 4, 4, 3)),
    "pooling 1D": lambda: _model(_all_of(layers.MaxPooling1D(2), layers.AveragePooling1D(2),
                                         layers.GlobalMaxPooling1D(), layers.GlobalAveragePooling1D()), (8, 3)),
    "pooling 2D": lambda: _model(_all_of(layers.MaxPooling2D(2), layers.AveragePooling2D(2),
                                         layers.GlobalMaxPooling2D(), layers.GlobalAveragePooling2D()), (8, 8, 3)),
    "pooling 3D": lambda: _model(_all_of(layers.MaxPooling3D(2), layers.AveragePooling3D(2),
                                         layers.GlobalMaxPooling3D()), (4, 4, 4, 3)),
    "batch normalisation": lambda: _model(_flat(layers.Conv2D(4, 3), layers.BatchNormalization()), (8, 8, 3)),
    "normalisations": lambda: _model(_flat(
        layers.Conv2D(4, 3), layers.LayerNormalization(), layers.GroupNormalization(2), layers.UnitNormalization(),
        layers.RMSNormalization(), layers.SpectralNormalization(layers.Conv2D(4, 1))), (8, 8, 3)),
    "LSTM": lambda: _model(_chain(layers.LSTM(4, return_sequences=True), layers.LSTM(4)), (6, 3)),
    "LSTM, any length": lambda: _model(_chain(layers.LSTM(4, return_sequences=True), layers.LSTM(4)), (None, 3)),
    "LSTM, masked": lambda: _model(_embedded(layers.LSTM(5, dropout=0.1)), (6,), dtype="int32"),
    "GRU": lambda: _model(_chain(layers.GRU(4, return_sequences=True), layers.GRU(4, go_backwards=True)), (6, 3)),
    "SimpleRNN": lambda: _model(_chain(layers.SimpleRNN(4, return_sequences=True), layers.SimpleRNN(4)), (6, 3)),
    "Bidirectional": lambda: _model(_chain(layers.Bidirectional(layers.LSTM(4))), (6, 3)),
    "ConvLSTM2D": lambda: _model(_flat(layers.ConvLSTM2D(4, 3)), (4, 6, 6, 3)),
    "TimeDistributed": lambda: _model(_flat(layers.TimeDistributed(layers.Conv2D(4, 3))), (4, 6, 6, 3)),
    "attention": lambda: _model(_attended(), (6, 8)),
    "attention, causal": lambda: _model(_attended(use_causal_mask=True), (None, 8)),
    "attention, grouped": lambda: _model(lambda x: layers.Dense(2)(layers.GroupQueryAttention(4, 4, 2)(x, x)), (6, 8)),
    "dropout": lambda: _model(_chain(
        layers.Dense(4), layers.Dropout(0.5), layers.SpatialDropout1D(0.5), layers.GaussianNoise(0.1),
        layers.GaussianDropout(0.1), layers.AlphaDropout(0.1), layers.ActivityRegularization(0.1), layers.Dense(2)),
        (5, 3)),
    "augmentation": lambda: _model(_flat(
        layers.RandomFlip(seed=1), layers.RandomRotation(0.1, seed=1), layers.RandomZoom(0.1, seed=1),
        layers.RandomContrast(0.1, seed=1), layers.RandomTranslation(0.1, 0.1, seed=1), layers.Conv2D(4, 3)),
        (8, 8, 3)),
    "sizes": lambda: _model(_flat(
        layers.Conv2D(3, 1), layers.UpSampling2D(2), layers.UpSampling2D(2, interpolation="bilinear"),
        layers.Cropping2D(1), layers.ZeroPadding2D(2), layers.Resizing(6, 6)), (4, 4, 3)),
    "shapes": lambda: _model(_chain(
        layers.Dense(4), layers.Reshape((2, -1)), layers.Permute((2, 1)), layers.Flatten(), layers.RepeatVector(3),
        layers.Dense(2)), (5, 3)),
    "merging": lambda: _model(_merged, (5,), (5,)),
    "CategoryEncoding": lambda: _model(_chain(layers.CategoryEncoding(10, output_mode="one_hot"), layers.Dense(2)),
                                       (1,), dtype="int32"),
}


@pytest.mark.parametrize("name", STEPS)
def test_no_op_of_a_layer_runs_whole(name):
    # SGD scatters the gathered slices of all ranks into embeddings; other optimizers take sums.
    _check(STEPS[name](), optimizer=optimizers.Adam())


_classes = tf.TensorSpec([None], "int32")
LOSSES = {
    "MeanAbsoluteError": (losses.MeanAbsoluteError(), None), "Huber": (losses.Huber(), None),
    "LogCosh": (losses.LogCosh(), None), "Poisson": (losses.Poisson(), None),
    "BinaryCrossentropy": (losses.BinaryCrossentropy(label_smoothing=0.1), None),
    "BinaryFocalCrossentropy": (losses.BinaryFocalCrossentropy(), None),
    "CategoricalCrossentropy": (losses.CategoricalCrossentropy(label_smoothing=0.1), None),
    "CategoricalFocalCrossentropy": (losses.CategoricalFocalCrossentropy(), None),
    "SparseCategoricalCrossentropy": (losses.SparseCategoricalCrossentropy(ignore_class=0), _classes),
    "KLDivergence": (losses.KLDivergence(), None), "CosineSimilarity": (losses.CosineSimilarity(), None),
    "Hinge": (losses.Hinge(), None), "CategoricalHinge": (losses.CategoricalHinge(), None),
    "Dice": (losses.Dice(), None), "Tversky": (losses.Tversky(), None),
}


@pytest.mark.parametrize("name", LOSSES)
def test_no_op_of_a_loss_runs_whole(name):
    loss, labels = LOSSES[name]
    _check(_model(layers.Dense(3, "softmax"), (5,)), loss, labels=labels)


@pytest.mark.parametrize("make", [
    metrics.AUC, metrics.R2Score, metrics.F1Score, lambda: metrics.Precision(top_k=2),
    lambda: metrics.TopKCategoricalAccuracy(2), metrics.CategoricalAccuracy, lambda: metrics.OneHotMeanIoU(3)])
def test_no_op_of_a_metric_runs_whole(make):
    _check(_model(layers.Dense(3, "sigmoid"), (5,)), metric=make())


@pytest.mark.parametrize("optimizer", [
    optimizers.SGD(0.1, momentum=0.9, nesterov=True), optimizers.Adam(amsgrad=True), optimizers.AdamW(),
    optimizers.RMSprop(centered=True), optimizers.Adafactor(), optimizers.Lion(), optimizers.Lamb(), optimizers.Ftrl(),
    optimizers.SGD(0.1, clipnorm=1.0), optimizers.Adam(global_clipnorm=1.0), optimizers.SGD(0.1, use_ema=True),
    optimizers.Adam(gradient_accumulation_steps=3), optimizers.LossScaleOptimizer(optimizers.Adam())],
    ids=lambda optimizer: optimizer.name)
def test_no_op_of_an_optimizer_runs_whole(optimizer):
    _check(_model(_chain(layers.Dense(4), layers.Dense(2)), (5,)), optimizer=optimizer)


def test_no_op_of_a_transformer_runs_whole():
    model = _model(_transformer, (12,), dtype="int32")
    report = _check(model, losses.SparseCategoricalCrossentropy(), optimizers.Adam(global_clipnorm=1.0),
                    metrics.SparseCategoricalAccuracy(), tf.TensorSpec([None, 12], "int32"))
    assert len(report.exchanges) <= len(model.trainable_variables) + 4


def test_no_op_of_resnet_runs_whole():
    model = keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10)
    report = _check(model, losses.SparseCategoricalCrossentropy(), labels=_classes)
    moments = [exchange for exchange in report.exchanges if "/moments/" in exchange.tensor]
    assert len(moments) == 2 * 53
    assert len(report.exchanges) <= len(moments) + len(model.trainable_variables) + 3
