"""Names of exchanges, which are the same on all ranks.

Tests: tests/training/test_training.py.
"""

import collections
import weakref

import tensorflow as tf

from tf_poseidon.compat import tensorflow as tf_compat

# By graph of an outermost function: how often it uses each name.
_occurrences: weakref.WeakKeyDictionary[tf.Graph, collections.Counter[str]] = weakref.WeakKeyDictionary()


def unique_site(name: str) -> str:
    """Returns `name`, numbered if the outermost function under construction has used it before.

    Every exchange of a function has its own name, so they may run in any order. Eager code makes one
    exchange after the other, so it can use a name again and again.
    """
    if tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    while (outer := tf_compat.outer_graph(graph)) is not None and outer.building_function:
        graph = outer
    counter = _occurrences.setdefault(graph, collections.Counter())
    counter[name] += 1
    return f"{name}#{counter[name] - 1}" if counter[name] > 1 else name


def variable_path(variable: tf.Variable) -> str:
    """Returns the Keras path of a variable, or the name of a `tf.Variable`."""
    return getattr(variable, "path", None) or variable.name.partition(":")[0]
