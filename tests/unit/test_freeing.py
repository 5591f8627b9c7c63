"""Tests that iterators are freed by threads (tf_poseidon/keras_hook/batch_loops/freeing.py)."""

import threading
import time

import tensorflow as tf

from tf_poseidon.keras_hook.batch_loops import freeing

_BUSY_S = 1.0  # how long freeing an iterator waits for its map


def test_an_iterator_that_takes_long_to_be_freed_does_not_stop_the_program():
    is_busy = threading.Event()

    def busy(x):
        if x > 0:
            is_busy.set()
            time.sleep(_BUSY_S)
        return x

    dataset = tf.data.Dataset.range(9).map(lambda x: tf.py_function(busy, [x], tf.int64)).prefetch(1)
    iterators = [iter(dataset)]
    (_, _, iterator), = freeing.steps((0, 0, iterator) for iterator in iterators)
    next(iterator)
    assert is_busy.wait(60)

    begin = time.monotonic()
    iterators.clear()
    del iterator
    assert time.monotonic() - begin < _BUSY_S / 2
    for thread in threading.enumerate():
        if thread.name == freeing.THREAD:
            thread.join()
    assert time.monotonic() - begin > _BUSY_S / 2, "the thread has not freed it"


def test_an_iterator_of_several_epochs_is_freed_once_and_calls_its_generator_to_the_end():
    ends = []

    def rows():
        try:
            while True:
                yield 1.0
        finally:
            ends.append(threading.current_thread())

    def epoch(iterator):
        for _, _, batches in freeing.steps((step, step, iterator) for step in range(2)):
            next(batches)

    def run():
        iterator = iter(tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([])))
        epoch(iterator)
        epoch(iterator)
        known = set(threading.enumerate())
        del iterator
        return [thread for thread in threading.enumerate() if thread not in known and thread.name == freeing.THREAD]

    threads = run()
    for thread in threads:
        thread.join()
    assert len(threads) <= 1
    assert len(ends) == 1
