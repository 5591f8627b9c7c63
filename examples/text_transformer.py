"""Trains a small causal transformer on characters of Python's own standard library, and lets it write.

    python examples/text_transformer.py                  # alone
    mpiexec -n 2 python examples/text_transformer.py     # on two processes, the same training

What to look at: the plan. A transformer's dense layers have a row per character, here 64 for each of 32 texts. These
rows outnumber the width of the layers, so factors would be larger than gradients, and the plan sums gradients (ps).
Likewise, the rows of the embedding's gradient would be larger than its table.

The last lines say how many bits the model needs for a character of a module that it was not trained on, and what it
writes after "def ". Releases of Python differ in these texts, and all ranks need the same ones.
"""

import argparse
import math
import pathlib

from absl import app
from absl import flags
import keras
from keras import layers
import numpy as np

import tf_poseidon as poseidon

_STEPS = flags.DEFINE_integer("steps", 250, "Steps to train.")
_WRITE = flags.DEFINE_integer("write", 100, "Characters to write.")

_MODULES = ("argparse", "ast", "configparser", "dataclasses", "doctest", "inspect", "optparse", "pdb", "pickle",
            "tarfile", "threading", "typing")
_TEST_MODULE = "shlex"
_CHARACTERS = 128  # other than ASCII becomes "?"
_LENGTH, _WIDTH, _HEADS, _BLOCKS = 64, 96, 4, 2
_BATCH = 32  # texts, of all processes


def characters_of(modules):
    """Returns the numbers of the characters in the sources of modules."""
    library = pathlib.Path(argparse.__file__).parent
    text = "".join((library / f"{module}.py").read_text(encoding="utf-8") for module in modules)
    return np.frombuffer(text.encode("ascii", "replace"), np.uint8)


def examples_of(characters):
    """Returns texts of a fixed length, and for each character the next one."""
    count = (len(characters) - 1) // _LENGTH
    return (characters[:count * _LENGTH].reshape(count, _LENGTH),
            characters[1:count * _LENGTH + 1].reshape(count, _LENGTH))


class Positions(layers.Layer):
    """Adds a trained vector to each position of a text."""

    def build(self, shape):
        self.vectors = self.add_weight(shape=shape[1:], initializer="uniform", name="vectors")

    def call(self, x):
        return x + self.vectors


def transformer():
    """Returns a model from characters to logits of the next ones: blocks that normalise first, as in GPT-2."""
    tokens = keras.Input((_LENGTH,), dtype="int32")
    x = Positions(name="positions")(layers.Embedding(_CHARACTERS, _WIDTH, name="characters")(tokens))
    for _ in range(_BLOCKS):
        y = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(_HEADS, _WIDTH // _HEADS)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * _WIDTH, activation="gelu")(y)
        x += layers.Dense(_WIDTH)(y)
    return keras.Model(tokens, layers.Dense(_CHARACTERS, name="next")(layers.LayerNormalization()(x)))


def written(model, begin, count):
    """Returns text by the model: each character is drawn by its probability.

    Unlike `model.predict`, in which all ranks take part, a direct call of the model computes on this rank alone.
    """
    rng = np.random.default_rng(0)
    text = list(begin.encode())
    for _ in range(count):
        context = text[-_LENGTH:]
        padded = np.zeros((1, _LENGTH), np.uint8)  # characters behind the last one change nothing: it is causal
        padded[0, :len(context)] = context
        logits = model(padded, training=False).numpy()[0, len(context) - 1].astype("float64")
        probabilities = np.exp((logits - logits.max()) / 0.7)
        text.append(rng.choice(_CHARACTERS, p=probabilities / probabilities.sum()))
    return bytes(text).decode("ascii")


def main(_):
    x, y = examples_of(characters_of(_MODULES))
    test_x, test_y = examples_of(characters_of([_TEST_MODULE]))

    keras.utils.set_random_seed(1)
    strategy = poseidon.PoseidonStrategy()
    with strategy.scope():
        model = transformer()
        model.compile(
            optimizer=keras.optimizers.Adam(
                keras.optimizers.schedules.CosineDecay(0.0, _STEPS.value, warmup_target=3e-3, warmup_steps=30),
                global_clipnorm=1.0),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    order = np.random.default_rng(0).permutation(len(x))[:_STEPS.value * _BATCH]
    model.fit(x[order], y[order], batch_size=_BATCH, verbose=2)
    loss = model.evaluate(test_x, test_y, batch_size=_BATCH, verbose=0)

    if strategy.rank == 0:
        if strategy.plan:
            print(strategy.plan)
        print(written(model, "def ", _WRITE.value))
        frequencies = np.bincount(test_y.ravel()) / test_y.size
        entropy = -sum(f * math.log2(f) for f in frequencies if f)
        print(f"Bits per character with {strategy.num_replicas_in_sync} process(es): {loss / math.log(2):.4f}; "
              f"by frequencies of characters: {entropy:.2f}")


if __name__ == "__main__":
    app.run(main)
