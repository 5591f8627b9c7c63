"""What several hooks use.

Tests: tests/unit/test_keras_hook.py, tests/training/test_training.py.
"""

from collections.abc import Iterator
import contextlib

import tensorflow as tf


def is_ours(strategy: tf.distribute.Strategy) -> bool:
    """Whether a strategy is a PoseidonStrategy in a job of several processes."""
    # By its attributes, since poseidon_strategy.py imports the hooks.
    return getattr(strategy.extended, "job", None) is not None


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """A context in which an attribute of a Keras object is replaced, without Keras, which would track it."""
    attributes = vars(owner)
    own = {name: attributes[name]} if name in attributes else {}
    attributes[name] = value
    try:
        yield
    finally:
        del attributes[name]
        attributes.update(own)
