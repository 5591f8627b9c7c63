"""Guards the list of hooks into Keras."""

import dataclasses
import types

import keras
from keras.src.trainers.data_adapters import py_dataset_adapter
import numpy as np
import pytest
import tensorflow as tf

from tf_poseidon import keras_hook
from tf_poseidon import supported
from tf_poseidon.data import datasets
from tf_poseidon.data import parts
from tf_poseidon.data import row_selection
from tf_poseidon.errors import PoseidonError
from tf_poseidon.keras_hook import hooks
from tf_poseidon.keras_hook.batch_loops import building
from tf_poseidon.keras_hook.batch_loops import py_dataset_rows
from tf_poseidon.keras_hook.batch_loops import trainer


@pytest.mark.parametrize("hook", keras_hook.HOOKS, ids=lambda hook: hook.name)
def test_keras_has_what_we_hook(hook):
    keras_hook.resolve(hook)


def test_hook_that_keras_lacks_is_refused():
    missing = dataclasses.replace(keras_hook.HOOKS[0], name="TensorFlowTrainer.teach")
    with pytest.raises(PoseidonError, match=r"TensorFlowTrainer\.teach.*install 'keras>="):
        keras_hook.resolve(missing)


def test_hook_with_other_parameters_is_refused():
    other = dataclasses.replace(keras_hook.HOOKS[0], parameters=("verbosity",))
    with pytest.raises(PoseidonError, match=r"fit\(verbosity\)"):
        keras_hook.resolve(other)


def test_installed_keras_is_one_that_is_supported():
    numbers = [tuple(int(part) for part in version.split(".")[:2]) for version in
               (supported.KERAS_FROM, keras.__version__, supported.KERAS_BELOW)]
    assert numbers[0] <= numbers[1] < numbers[2]


def test_installing_twice_wraps_once():
    names = [(hook.module, hook.name) for hook in keras_hook.HOOKS]
    assert len(set(names)) == len(names)
    originals = [keras_hook.resolve(hook)[2] for hook in keras_hook.HOOKS]
    try:
        keras_hook.install()
        once = [keras_hook.resolve(hook)[2] for hook in keras_hook.HOOKS]
        keras_hook.install()
        assert [keras_hook.resolve(hook)[2] for hook in keras_hook.HOOKS] == once
    finally:
        for hook, original in zip(keras_hook.HOOKS, originals):
            owner, attribute, _ = keras_hook.resolve(hook)
            setattr(owner, attribute, original)


def test_hooks_leave_plain_keras_alone():
    """With the hooks installed, code outside of our strategy gives the bits that it gave before."""
    def train():
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3),
                                  keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)])
        optimizer, loss = keras.optimizers.Adam(), keras.losses.MeanSquaredError()
        x = tf.ones((8, 4))
        for _ in range(3):
            with tf.GradientTape() as tape:
                value = loss(tf.zeros((8, 3)), model(x, training=True))
            optimizer.apply(tape.gradient(value, model.trainable_variables),
                            model.trainable_variables)
        return [w.tobytes() for w in model.get_weights()]

    before = train()
    originals = [keras_hook.resolve(hook) for hook in keras_hook.HOOKS]
    try:
        keras_hook.install()
        assert train() == before
    finally:
        for owner, attribute, function in originals:
            setattr(owner, attribute, function)


def _model(kind=keras.Sequential):
    return kind([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])


class _OwnStep(keras.Sequential):

    def train_step(self, data):
        return super().train_step(data)


class _OwnSgd(keras.optimizers.SGD):

    def apply(self, grads, trainable_variables=None):
        return super().apply(grads[:1], trainable_variables[:1])


class _Subclassed(keras.Model):

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x)


@pytest.mark.parametrize("build, optimizer, builds", [
    (_model, keras.optimizers.Adam, True), (_model, _OwnSgd, False), (_Subclassed, keras.optimizers.Adam, False),
    (lambda: _model(_OwnStep), keras.optimizers.Adam, False)], ids=["plain", "own optimizer", "subclassed", "own step"])
def test_what_a_step_would_create_is_built_before(build, optimizer, builds):
    """It is built as the step would, so all variables have the same paths and shapes; what may differ is left to it."""
    def variables(model):
        return [(variable.path, variable.shape) for variable in (*model.optimizer.variables, *model.metrics_variables)]

    models, x, y = [], tf.ones((8, 4)), tf.ones((8, 1))
    for _ in range(2):
        keras.backend.clear_session()
        models.append(build())
        models[-1].compile(optimizer(momentum=0.9) if optimizer is _OwnSgd else optimizer(),
                           keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        if len(models) == 1:
            dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
            building.build(models[0], dataset.element_spec, True)
            assert models[0].optimizer.built == builds
    if builds:
        models[1].fit(x, y, verbose=0)
        assert variables(models[0]) == variables(models[1])


def _chosen_position():
    """What is chosen is a position, of which the model does not know how many there are."""
    x = keras.Input((None, 4))
    return keras.Model(x, keras.layers.Softmax()(keras.layers.Flatten()(keras.layers.Dense(1)(x)))), ["accuracy"]


def _nested(structure, metrics):
    def build():
        x = keras.Input((3, 4))
        a, b = (keras.layers.Dense(1, name=name)(x) for name in "ab")
        return keras.Model(x, structure(a, b)), metrics
    return build


@pytest.mark.parametrize("build", [
    _chosen_position, _nested(lambda a, b: [a], ["mae"]), _nested(lambda a, b: [a, b], [["mae"], ["mse"]]),
    _nested(lambda a, b: [[a, b]], [["mae"], ["mse"]]),
    _nested(lambda a, b: [{"a": a, "b": b}], {"a": ["mae"], "b": ["mse"]})])
def test_metrics_are_those_that_keras_chooses(build):
    found = []
    for is_built_before in (True, False):
        model, metrics = build()
        x = tf.ones((8, 3, 4))
        labels = tf.nest.map_structure(lambda _: tf.zeros((8, 1)), model(x))
        model.compile("sgd", "mse", metrics=metrics)
        dataset = tf.data.Dataset.from_tensors((x, keras.tree.lists_to_tuples(labels)))
        if is_built_before:
            building.build(model, dataset.element_spec, True)
        model.fit(dataset, verbose=0)
        found.append([(type(metric), metric.name, [v.shape for v in metric.variables]) for metric in model.metrics])
    assert found[0] == found[1]


class _Batches(keras.utils.PyDataset):
    """Batches of 4, 4 and 2 rows, which remembers which rows it has made."""

    def __init__(self, seed=0, extra=0, **options):
        super().__init__(**options)
        self.values, self.extra, self.made = np.random.default_rng(seed).normal(size=10).astype(np.float32), extra, []

    def __len__(self):
        return 3

    def num_rows(self, index):
        return len(self[index][1])

    def __getitem__(self, index):
        return self.values[4 * index:4 * index + 4], np.arange(10)[4 * index:4 * index + 4]

    def rows(self, index, start, stop):
        self.made.append((index, start, stop))
        return tuple(part[start:stop + self.extra] for part in self[index])


@pytest.fixture
def hooked():
    with hooks.installed():
        yield


def _read(batches, shares, rank, **options):
    """Returns (parts, fingerprints, batches) of the dataset of a rank's rows."""
    source = py_dataset_rows.RowsOfRank(batches, 0, (1,) * len(shares))
    dataset = py_dataset_adapter.PyDatasetAdapter(source, **options).get_tf_dataset()
    datasets.select(dataset, row_selection.Ranks(rank, shares, "data"))
    tags, rows = zip(*dataset, strict=True)
    return np.array(tags)[:, :3].tolist(), np.array(tags)[:, 3:], rows


@pytest.mark.parametrize("options", [{}, {"workers": 2}], ids=str)
@pytest.mark.parametrize("shares", [(1, 1), (4, 1, 2)], ids=str)
def test_ranks_make_their_rows_of_a_py_dataset(shares, options, hooked):
    fingerprints = []
    for rank in range(len(shares)):
        batches = _Batches(**options)
        found, fingerprint, rows = _read(batches, shares, rank, class_weight={i: 2.0 * i for i in range(10)})
        assert len(found) == 3
        for index, (total, begin, count) in enumerate(found):
            x, y = batches[index]
            assert (total, count) == (len(y), parts.of_rank(len(y), rank, shares)[1])
            begin = parts.of_rank(len(y), rank, shares)[0] if count else 0
            for values, whole in zip(rows[index], (x, y, 2.0 * y), strict=True):
                np.testing.assert_array_equal(values, whole[begin:begin + max(count, 1)])
        fingerprints.append(fingerprint)
    np.testing.assert_array_equal(fingerprints[0][0], fingerprints[-1][0])
    assert not np.array_equal(_read(_Batches(seed=1), shares, 0)[1][0], fingerprints[0][0])


def test_py_datasets_that_make_other_rows_are_refused(hooked):
    with pytest.raises(PoseidonError, match=r"_Batches\.rows\(0, 0, 2\) .* of shape \(3,\), expected 2 rows; return"):
        _read(_Batches(extra=1), (1, 1), 0)


class _Padded(_Batches):
    """Pads texts to the longest of those that it is asked for."""

    def rows(self, index, start, stop):
        lengths = 1 + np.arange(10)[4 * index:4 * index + 4][start:stop]
        return np.ones((stop - start, lengths.max())), lengths


def test_py_datasets_whose_rows_depend_on_others_are_refused(hooked):
    with pytest.raises(tf.errors.OpError, match=r"_Padded\.rows\(0, 0, 1\) .* shape \(1,\), .* shape \(2,\); re"):
        _read(_Padded(), (1, 1), 0)


@pytest.mark.parametrize("methods, says", [
    ({"rows": lambda self, index, start, stop: None},
     "Own has rows(index, start, stop), but every rank makes whole batches: how many rows a batch has is not known; "
     "add num_rows(index)."),
    ({"rows": lambda self, i, start, stop: None, "num_rows": lambda self, i: 4},
     "Own has rows(i, start, stop) and num_rows, but every rank makes whole batches: expected rows(index, start, "
     "stop); name its parameters so."),
    ({"rows": lambda self: None}, None), ({"num_rows": lambda self, index: 4}, None), ({"rows": 4}, None)])
def test_py_datasets_that_seem_to_make_rows_are_warned_of(methods, says, caplog):
    assert not py_dataset_rows._makes_rows(type("Own", (keras.utils.PyDataset,), methods)(), 0)
    assert [record.getMessage() for record in caplog.records] == ([says] if says else [])


@pytest.mark.parametrize("steps_per_epoch, expected", [(None, "new"), (3, "old")])
def test_rows_that_may_be_made_ahead_keep_their_shares(steps_per_epoch, expected, monkeypatch):
    monkeypatch.setattr(trainer, "is_ours", lambda strategy: True)
    strategy = types.SimpleNamespace(extended=types.SimpleNamespace(with_present_shares=lambda dataset: "new"))
    iterator = types.SimpleNamespace(steps_per_epoch=steps_per_epoch, _distribute_strategy=strategy,
                                     _distributed_dataset="old")
    list(trainer.enumerate_iterator(lambda iterator: iter(()), iterator))
    assert iterator._distributed_dataset == expected


def test_py_datasets_of_texts_are_refused(hooked):
    batches = _Batches()
    batches.values = tf.constant(list("abcdefghij"))
    with pytest.raises(PoseidonError, match=r"_Batches\.rows cannot be divided: .* string.*rename `rows`"):
        _read(batches, (1, 1), 0)
