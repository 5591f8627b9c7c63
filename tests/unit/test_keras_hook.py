"""Guards the list of hooks into Keras."""

import dataclasses

import keras
import pytest
import tensorflow as tf

from tf_poseidon import keras_hook
from tf_poseidon import supported
from tf_poseidon.errors import PoseidonError


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
