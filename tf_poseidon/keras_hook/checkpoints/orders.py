"""How the elements of a dataset change from epoch to epoch: a job that resumes reads past as few as it can.

Tests: tests/unit/test_resuming.py.
"""

import enum

import tensorflow as tf

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.data import element_functions


class EpochOrder(enum.Enum):
    """What the elements of an epoch depend on."""

    SAME = "nothing: they are the same in every epoch"
    RESHUFFLED = "how many iterators have been made before"
    CONTINUED = "what has been read before"


def order(dataset: tf.data.Dataset) -> EpochOrder:
    """Returns what the elements of an epoch depend on, CONTINUED where that is not known."""
    epoch_order, datasets = EpochOrder.SAME, [dataset]
    while datasets:
        current = datasets.pop()
        if not tf_compat.begins_with_its_iterator(current) or not all(map(_is_pure, tf_compat.graphs_of(current))):
            return EpochOrder.CONTINUED
        if tf_compat.reshuffles(current):
            epoch_order = EpochOrder.RESHUFFLED
        datasets += tf_compat.inputs_of(current)
    return epoch_order


def _is_pure(graph: tf.Graph) -> bool:
    """Whether a function returns the same for the same arguments, whatever was read before."""
    return not any(element_functions.stateful_ops(graph))
