"""One step of one rank: which rows it computes, and what it exchanges by which name.

A step is what runs inside one `strategy.run`. It exists while that code runs eagerly or is traced.
"""

import collections
import contextlib
import threading

import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon.errors import PoseidonError

_current = threading.local()


def current():
    """Returns the innermost step of this thread, or None outside of `strategy.run`."""
    return getattr(_current, "step", None)


class Step:
    """What one rank does in one step.

    Attributes:
        size: Number of ranks.
        contributes: Scalar bool (tensor or Python): whether this rank has rows of its own. One
            that has none runs a borrowed row, and nothing that it computes from it may count.
        is_replicated: Whether all ranks compute the same rows, as in `predict`.
        is_keras_step: Whether this is a train or test step of Keras, where we scale losses. In
            loops of their own, users scale, as everywhere in tf.distribute.
        has_scaled_loss: Whether a loss of this step has been given its share.
        is_applying: Whether an optimizer is applying gradients that are synchronised already.
    """

    def __init__(self, size, rows=None, is_replicated=False):
        """Makes a step.

        Args:
            size: Number of ranks.
            rows: `data.Rows` that the step works on, or None when it was given none: then all
                ranks are taken to work on equally many.
            is_replicated: As the attribute.
        """
        self.size = size
        self._count = tf.constant(1) if rows is None else rows.count
        self._total = tf.constant(size) if rows is None else rows.total
        self.contributes = True if rows is None or rows.never_empty else rows.count > 0
        self.is_replicated = is_replicated
        self.is_keras_step = False
        self.has_scaled_loss = False
        self.is_applying = False
        self._occurrences = collections.Counter()
        self.unscaled_losses = []  # tensors that unscaling has returned
        self._state = {}  # (path, variable) assigned in this step, by identity

    @contextlib.contextmanager
    def active(self):
        """Makes this the current step of the thread."""
        outer, _current.step = current(), self
        try:
            yield self
        finally:
            _current.step = outer

    @contextlib.contextmanager
    def applying(self):
        """While an optimizer applies synchronised gradients."""
        self.is_applying = True
        try:
            yield
        finally:
            self.is_applying = False

    def site(self, name):
        """Returns the name of the next exchange of `name` in this step.

        It depends on the program alone: the path of a variable and how often the step has used it
        before, never on what other functions or steps have done.
        """
        occurrence = self._occurrences[name]
        self._occurrences[name] += 1
        return f"{name}#{occurrence}" if occurrence else name

    def share(self, dtype):
        """Returns this rank's part of the global batch's rows, a scalar of `dtype`, K_r / K."""
        wide = tf.float64 if dtype == tf.float64 else tf.float32
        return tf.cast(tf.cast(self._count, wide) / tf.cast(self._total, wide), dtype)

    def share_of(self, part):
        """Returns this rank's part of a quantity: `part` over the sum of it over all ranks.

        Args:
            part: Floating scalar, such as the number of valid entries or the sum of the weights
                of this rank's rows.
        """
        return tf.math.divide_no_nan(part, self.all_reduce(part, "loss_weight"))

    def select(self, value, otherwise):
        """Returns `value` if this rank contributes, else `otherwise`."""
        if self.contributes is True:
            return value
        return tf.where(self.contributes, value, otherwise)

    def all_reduce(self, value, name):
        """Returns the sum of `value` over the ranks that contribute."""
        return ops.all_reduce(value, self.site(name), self.contributes)

    def mean(self, value, name):
        """Returns the mean of `value` over the ranks that contribute."""
        contributors = self.size if self.contributes is True else tf.minimum(self._total, self.size)
        return self.all_reduce(value, name) / tf.cast(contributors, value.dtype)

    def synchronize(self, gradients, variables, is_mean_of_rank=False):
        """Returns the gradients summed over all ranks.

        Args:
            gradients: Dense tensors, IndexedSlices or None, one per variable.
            variables: The variables; their paths name the sites.
            is_mean_of_rank: Whether the gradients are those of a mean over this rank's rows, and so
                need its share.

        Returns:
            A list of dense tensors, with None where there was None.
        """
        return [None if gradient is None else
                self._synchronize_one(gradient, variable, is_mean_of_rank)
                for gradient, variable in zip(gradients, variables, strict=True)]

    def _synchronize_one(self, gradient, variable, is_mean_of_rank):
        path = variable_path(variable)
        if isinstance(gradient, tf.IndexedSlices):
            gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices,
                                                    variable.shape[0])
        if gradient.dtype not in (tf.float16, tf.bfloat16, tf.float32, tf.float64):
            raise PoseidonError(
                f"The gradient of '{path}' has dtype {gradient.dtype.name}, which cannot be "
                "summed over ranks; use float16, bfloat16, float32 or float64.")
        if is_mean_of_rank:
            gradient *= self.share(gradient.dtype)
        return ops.sync(gradient, self.site(path), self.contributes)

    def note_state(self, path, variable):
        """Remembers that a `tf.Variable` was assigned a value that depends on this rank's rows."""
        self._state[id(variable)] = path, variable

    def average_state(self):
        """Sets every noted variable to its mean over ranks, weighted by rows.

        This is what keeps moving statistics equal on all ranks: (sum of K_r v_r) / K. Where all
        ranks hold the same integers, as in counters, the result is exact.
        """
        for path, variable in self._state.values():
            wide = tf.float64 if variable.dtype == tf.float64 else tf.float32
            weighted = tf.cast(variable, wide) * tf.cast(self._count, wide)
            total = self.all_reduce(weighted, f"state/{path}")
            variable.assign(tf.cast(total / tf.cast(self._total, wide), variable.dtype))
        self._state.clear()


def variable_path(variable):
    """Returns the Keras path of a variable, or the name of a `tf.Variable`."""
    return getattr(variable, "path", None) or variable.name.partition(":")[0]
