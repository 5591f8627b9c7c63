"""The iterators of epochs are freed by threads, not between epochs.

An iterator of `tf.data` is freed when its thread that tunes has ended. TensorFlow wakes that thread before it marks it
as cancelled (`Model::OptimizeLoop` in tensorflow/core/framework/model.cc), so on a busy machine it often sleeps on
until it would tune again: for about as long as the iterator has lived, at most a minute. Ranks wait for the slowest, so
all wait if this happens to one.

Tests: tests/unit/test_freeing.py.
"""

from collections.abc import Iterator
import threading
from typing import Any
import weakref

import tensorflow as tf

from tf_poseidon.compat import tensorflow as tf_compat

THREAD = "tf_poseidon frees an iterator"
_freed_by_thread: weakref.WeakSet[tf.data.Iterator] = weakref.WeakSet()


def steps(epoch: Iterator[Any]) -> Iterator[Any]:
    """Yields the steps of an epoch of Keras; threads free their iterators."""
    for step in epoch:
        *_, iterator = step
        free_by_thread(iterator)
        yield step


def free_by_thread(iterator: Any) -> None:
    """Lets a thread free what an iterator of `tf.data` holds, once the iterator itself is freed."""
    if isinstance(iterator, tf.data.Iterator) and iterator not in _freed_by_thread:
        _freed_by_thread.add(iterator)
        # The dict outlives the iterator. At exit nothing is to be gained.
        weakref.finalize(iterator, _start_thread, vars(iterator)).atexit = False


def _start_thread(attributes: dict[str, Any]) -> None:
    threading.Thread(target=_free, args=(attributes,), name=THREAD, daemon=True).start()


def _free(attributes: dict[str, Any]) -> None:
    # Before the dataset, whose Python functions the end of the iterator may call.
    attributes.pop(tf_compat.ITERATOR_RESOURCE)
    attributes.clear()
