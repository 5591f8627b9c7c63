"""How published programs are run and compared: on programs of our own, in a checkout of our own."""

import contextlib
import json
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from evaluation import modules
from evaluation.programs import program_recipes
from evaluation.programs import run_program
from evaluation.programs import stand_ins
from evaluation.programs import updates

# In place of one of keras-io: what programs do there.
PROGRAM = """
import keras
import matplotlib.pyplot as plt
from evaluation import modules
(x, y), _ = keras.datasets.mnist.load_data()
x = x.astype("float32") / 255
model = keras.Sequential([keras.Input((28, 28)), keras.layers.Flatten(), keras.layers.Dense(8, "relu"),
                          keras.layers.Dropout(0.3), keras.layers.Dense(10)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", LOSS, metrics=["accuracy"])
history = model.fit(x, y, epochs=50, validation_split=0.1)
plt.plot(history.history["loss"])
model.predict(x)
"""


@pytest.fixture
def checkout(tmp_path):
    """Returns a function that writes a program in place of a published one."""
    def write(text):
        path = tmp_path / "checkout" / program_recipes.RECIPES[0].path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return tmp_path / "checkout"

    return write


def run(checkout, *arguments):
    return subprocess.run([*modules.command("programs.published_programs"), f"--keras_io={checkout}",
                           "--runs=1 sfb,2 sfb", f"--names={program_recipes.RECIPES[0].name}", *arguments],
                          text=True, capture_output=True, timeout=240)


def test_programs_are_run_and_compared(checkout, tmp_path):
    outcome = run(checkout(PROGRAM.replace("LOSS", "loss")), f"--json={tmp_path / 'json'}",
                  f"--markdown={tmp_path / 'page.md'}")
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    runs = json.loads((tmp_path / "json").read_text())[program_recipes.RECIPES[0].name]["runs"]
    assert runs["1 sfb"]["is_equal"] and not runs["2 sfb"]["is_equal"]
    assert runs["2 sfb"]["updates"] == runs["1 sfb"]["updates"] == 3 * 4
    assert "| equal |" in (tmp_path / "page.md").read_text()


def test_program_that_differs_is_found(checkout):
    # The state of a process outside of TensorFlow: another learning rate in the strategy's scope.
    text = PROGRAM.replace("LOSS", "loss").replace(
        "history =", "import sys\nmodel.optimizer.learning_rate.assign(0.011 if 'tf_poseidon' in sys.modules else 0.01)"
        "\nhistory =")
    outcome = run(checkout(text))
    assert outcome.returncode == 1
    assert '"runs": {"1 sfb": {"updates": 12' in outcome.stdout
    assert f"not: {program_recipes.RECIPES[0].name}" in outcome.stdout


@pytest.mark.parametrize(("change", "text"), [
    ({"edits": (("no such text", ""),)}, "has no 'no such text', which its recipe replaces"),
    ({"stretches": (("x = ", "no such text", ""),)}, "has no text from 'x = ' to 'no such text', which its recipe"),
    ({"stretches": (("loss = ", "x = ", ""),)}, "has no text from 'loss = ' to 'x = ', which its recipe"),
])
def test_recipe_that_does_not_fit_is_refused(checkout, change, text):
    recipe = program_recipes.Recipe(program_recipes.RECIPES[0].path, "vision", **change)
    with pytest.raises(ValueError, match=text):
        run_program.program(checkout(PROGRAM), recipe)


def test_recipe_changes_a_program(checkout):
    recipe = program_recipes.Recipe(
        program_recipes.RECIPES[0].path, "vision", edits=(("Dropout(0.3)", "Dropout(0.5)"),),
        stretches=(("loss = ", "model.compile", "loss = 'mse'\n"),), ends_before="history =")
    text = run_program.program(checkout(PROGRAM), recipe)
    assert "Dropout(0.5)" in text and "astype(\"float64\")" in text
    assert text.endswith("loss = 'mse'\nmodel.compile(\"adam\", LOSS, metrics=[\"accuracy\"])\n")


def test_functions_of_tensorflow_give_double_precision():
    from tensorflow.random import gamma
    with run_program._double_precision():
        from tensorflow.random import gamma as patched
        types = [value.dtype for value in (
            tf.random.normal([2]), tf.ones([2]), patched([2], 0.5), tf.zeros([2], tf.int32))]
        assert tf.math.in_top_k([1], tf.zeros([1, 4]), 4).numpy().all()
    assert types == [tf.float64, tf.float64, tf.float64, tf.int32]
    assert tf.ones([2]).dtype == tf.float32 and gamma([2], 0.5).dtype == tf.float32


def test_numbers_in_programs_become_smaller(checkout):
    text = ("BATCH_SIZE = 256\nnum_epochs = 30\nnum_transformer_blocks = 8\nenum_blocks = 8\n"
            "data = data.map(f, num_parallel_calls=tf.data.AUTOTUNE).batch(64).map(g)\n")
    assert run_program.program(checkout(text), program_recipes.RECIPES[0]) == (
        "BATCH_SIZE = 10\nnum_epochs = 1\nnum_transformer_blocks = 2\nenum_blocks = 8\n"
        "data = data.map(f, num_parallel_calls=None).batch(10).map(g)\n")


# A loop of its own, with an optimizer that plain SGD takes the place of.
LOOP = """
import keras
import tensorflow as tf
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)])
optimizer = keras.optimizers.Adam(0.5)
@distributed(model)
@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(x))
    optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
for _ in range(5):
    step(tf.ones([2, 4], tf.float32))
"""


@pytest.mark.parametrize("has_sgd, step", [(True, 0.01 * 2), (False, 0.5)])
def test_loops_of_programs_are_noted(has_sgd, step):
    found = run_program.run(LOOP, contextlib.nullcontext, has_sgd)
    assert [name.partition(" sequential")[0] for name in found] == [
        f"fit 0/step {number}/weight 0" for number in (-1, 0, 1, 2)]
    for number, value in enumerate(found.values()):
        np.testing.assert_allclose(value, 1 - number * step, atol=1e-4)


def test_steps_of_loops_are_distributed():
    steps = []
    run_program.run(LOOP, contextlib.nullcontext, True, distribute=lambda step: steps.append(step) or step)
    assert [step.python_function.__name__ for step in steps] == ["step"]


def test_downloads_have_stand_ins(tmp_path):
    with stand_ins.datasets((120, 40)):
        import tensorflow_datasets as tfds
        (train, test), info = tfds.load("flowers", split=["train", "test"], as_supervised=True, with_info=True)
        assert info.features["label"].num_classes == 3
        assert train.element_spec[0].shape == test.element_spec[0].shape == (40, 48, 3)
        assert tfds.load("flowers", split="train", batch_size=5).element_spec["image"].shape == (None, 40, 48, 3)
        images = keras.utils.image_dataset_from_directory("none", image_size=(8, 9), label_mode=None)
        assert images.element_spec.shape == (None, 8, 9, 3)
        model = keras.applications.MobileNet(input_shape=(32, 32, 3), alpha=0.25, include_top=False)
        path = keras.utils.get_file("photo.jpg", "https://example.com/photo.jpg")
        model.save_weights(tmp_path / "own.weights.h5")
        model.load_weights(tmp_path / "own.weights.h5")
        assert pathlib.Path(path).is_dir() and not list(pathlib.Path(path).iterdir())
    assert "tensorflow_datasets" not in sys.modules


def test_names_of_recipes_differ():
    names = [recipe.name for recipe in program_recipes.RECIPES]
    assert len(set(names)) == len(names)


def arrays(scale=1.0, bits=0.0, steps=3):
    """Returns what a run notes: a variable whose steps are scaled."""
    return {f"{kind}/fit 0/step {step}/weight 0 w": np.arange(1.0, 5) + 0.1 * (step + 1) * scale + bits
            for kind in ("sgd", "own") for step in range(-1, steps)}


@pytest.mark.parametrize("run, ratio, is_equal, is_within", [
    (arrays(), 1, True, True), (arrays(2.0), 2, False, False), (arrays(1 + 1e-4), 1.0001, False, False),
    (arrays(bits=1e-13), 1, False, True), (arrays(0.0), 0, False, False)])
def test_updates_are_compared(run, ratio, is_equal, is_within):
    compared = updates.compare(arrays(), run)
    assert compared.updates == 3 and compared.is_equal == is_equal
    assert compared.ratio == pytest.approx(ratio, abs=1e-9) and compared.within(1e-5) == is_within


@pytest.mark.parametrize("size, is_noise", [(1e-19, True), (1e-11, False)])
def test_updates_of_rounding_have_no_ratio(size, is_noise):
    plain, run = (arrays() | {f"sgd/fit 0/step {step}/weight 1 zero": np.full(3, sign * size * (step + 1))
                              for step in range(-1, 3)} for sign in (1, -1))
    compared = updates.compare(plain, run)
    assert (compared.updates, compared.ratio) == ((3, 1) if is_noise else (6, -1))
    assert compared.within(1e-5) == is_noise


def test_runs_that_noted_other_things_are_not_compared():
    with pytest.raises(ValueError, match="noted different things"):
        updates.compare(arrays(), arrays(steps=2))


def test_nothing_noted_is_not_right():
    assert not updates.compare({}, {}).within(1e-5)
