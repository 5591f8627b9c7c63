"""Verify mode: compares, at intervals, synchronised gradients with plain sums, and weights between ranks.

Tests: tests/training/test_verify.py.
"""

from collections.abc import Callable
from collections.abc import Mapping
import zlib

import tensorflow as tf

from tf_poseidon import ops

_COUNTS = 4096


class Verifier:
    """Adds checks to the steps of a strategy.

    Attributes:
        every: Synchronisations from one check to the next.
    """

    def __init__(self, every: int, rank: int) -> None:
        self.every = every
        self._rank = rank
        # Functions cannot create variables when they are traced again.
        with tf.device("CPU:0"):
            self._counts = tf.Variable(tf.zeros([_COUNTS], tf.int64), trainable=False)

    def is_due(self, name: str) -> tf.Tensor:
        """Returns whether the check `name` is due, a scalar bool; counts the call."""
        # Names may share a count: it only must be the same on all ranks.
        count = zlib.crc32(name.encode()) % _COUNTS
        with tf.device("CPU:0"):
            # Reads the count that it returns: a graph assembled by hand orders nothing else.
            counts = self._counts.scatter_nd_add([[count]], tf.ones([1], tf.int64)).read_value()
            return tf.equal(counts[count] % self.every, 0)

    def check_gradient(self, gradient: tf.Tensor | tf.IndexedSlices, synchronised: tf.Tensor | tf.IndexedSlices,
                       shape: tf.TensorShape, site: str, contributes: tf.Tensor | bool, is_due: tf.Tensor) -> None:
        """Compares a synchronised gradient with the plain sum; see the op PoseidonVerify."""
        if isinstance(gradient, tf.IndexedSlices):
            gradient, synchronised = (ops.dense_slices(g, shape) for g in (gradient, synchronised))
        ops.verify(gradient, synchronised, site, contributes, is_due)

    def check_weights(self, weights: Mapping[str, tf.Variable], site: Callable[[str], str]) -> None:
        """Compares variables with rank 0's by digests, and bit by bit only where these differ.

        Args:
            weights: Variables by path.
            site: A function that makes a name unique in the step.
        """
        names = "verify/digests", "verify/differ", "verify/weights"
        digests_site, differ_site, weights_site = map(site, names)

        def check() -> list[tf.Tensor]:
            own_digests = ops.digests(weights.values())
            differs = tf.not_equal(own_digests, ops.broadcast(own_digests, digests_site))
            somewhere = ops.all_reduce(tf.cast(differs, tf.int32), differ_site) > 0
            return [tf.cond(somewhere[i], lambda v=v, p=p, i=i: compare(v, p, differs[i]),
                            lambda: True) for i, (p, v) in enumerate(weights.items())]

        def compare(variable: tf.Variable, path: str, is_different: tf.Tensor) -> bool:
            own = tf.convert_to_tensor(variable)
            of_rank_0 = ops.broadcast(own, f"{weights_site}/{path}")
            ops.abort_unless(~is_different, tf.strings.format(
                "verify: the variable '" + path + "' is not the same on all ranks: on rank "
                + str(self._rank) + " it is up to {} away from rank 0's. It was changed outside "
                "synchronised steps; assign it on all ranks.",
                tf.cast(tf.reduce_max(tf.abs(tf.cast(own, tf.float64)
                                             - tf.cast(of_rank_0, tf.float64))), tf.float32)))
            return True

        with tf.device("CPU:0"):
            tf.cond(self.is_due("/".join(weights)), check, lambda: [True] * len(weights))
