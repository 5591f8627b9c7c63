"""One step of one rank: which rows it computes, and what it exchanges under which name.

A step is what runs inside one `strategy.run` of a program's own loop; `fit` has none. It exists while that code runs
eagerly or is traced.

Tests: tests/training/test_training.py, tests/faults/test_failures.py.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import contextvars
import dataclasses
from typing import Any
from typing import TypeAlias

import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon.base.context_values import holding
from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.data import datasets
from tf_poseidon.errors import GraphError
from tf_poseidon.job.verify import Verifier
from tf_poseidon.ops import sites

_current: "contextvars.ContextVar[Step | None]" = contextvars.ContextVar("step", default=None)

# Of one variable; None if the loss does not depend on it.
Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None


def current() -> "Step | None":
    """Returns the innermost step of this thread, or None outside `strategy.run`."""
    return _current.get()


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of a global batch that one rank computes.

    Attributes:
        count: Scalar int32: the rank's rows, 0 for a padding row. K_r.
        total: Scalar int32: rows of the global batch. K.
        contributors: Scalar int32: ranks that have rows.
        contributes: Scalar bool (tensor or Python): whether this rank has rows of its own. A rank
            without rows computes a padding row, whose results must be discarded.
        static_rows: Rows that this rank's tensors are known to have, None if unknown.
        usual_rows: Rows of this rank in a full batch, rounded up, for which gradients are planned; None if unknown.
        batches: The batches that the step was given; without any, all ranks are assumed to have equally many rows. The
            other attributes are those of the first one.
    """

    count: tf.Tensor
    total: tf.Tensor
    contributors: tf.Tensor
    contributes: tf.Tensor | bool
    static_rows: int | None
    usual_rows: int | None
    batches: tuple[datasets.OwnRows, ...]

    @classmethod
    def of(cls, batches: Sequence[datasets.OwnRows], size: int) -> "Share":
        """Returns the share of a step on batches in a job of `size` ranks.

        Raises:
            GraphError: If this rank has rows of one batch, and none of another.
        """
        if not batches:
            return cls(tf.constant(1), tf.constant(size), tf.constant(size), True, None, None, ())
        rows, checks = batches[0], []
        if not all(batch.never_empty for batch in batches):
            checks = datasets.check_divided_alike(batches, lambda parts: parts[:, 2] > 0, (
                "A step of strategy.run got rows of one batch and none of another, so its results can neither count "
                "nor be left out; zip the datasets in front of batch, or give all of them batch sizes of at least the "
                "number of ranks, with drop_remainder=True."))
        for check in checks:
            # TensorFlow initializes variables that the step creates outside its function, where nothing can come first.
            tf_compat.run_independently(check)
        with tf.control_dependencies(checks):
            count = tf.identity(rows.count)
        return cls(count, rows.total, rows.contributors, True if rows.never_empty else count > 0,
                   rows.shape[0], -(-rows.usual_total // size) if rows.usual_total > 0 else None, tuple(batches))


class Step:
    """One step of one rank.

    Attributes:
        share: The `Share` of the rank.
    """

    def __init__(self, share: Share, verifier: Verifier | None = None, wire_dtype: str | None = None) -> None:
        """Makes a step.

        Args:
            share: The `Share` of the rank.
            verifier: The `verify.Verifier` of the strategy, if it has one.
            wire_dtype: The strategy's option: the type in which gradients travel.
        """
        self.share = share
        self._is_applying = False
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._gradients: list[str] = []  # a line of text per gradient site, in the order of the trace
        self._verifier = verifier
        self._wire_dtype = wire_dtype
        self._weights: dict[str, tf.Variable] = {}  # variables whose gradients were synchronised in this step, by path
        self._state: dict[int, tuple[str, Any]] = {}  # (path, variable) assigned in this step, by identity

    @contextlib.contextmanager
    def active(self) -> "Iterator[Step]":
        """A context in which this is the current step of the thread."""
        with holding(_current, self):
            yield self

    @property
    def is_applying(self) -> bool:
        """Whether an optimizer is running; its gradients are already synchronised."""
        return self._is_applying

    @contextlib.contextmanager
    def applying(self) -> Iterator[None]:
        """A context in which an optimizer applies synchronised gradients."""
        self._is_applying = True
        try:
            yield
        finally:
            self._is_applying = False

    def site(self, name: str) -> str:
        """Returns the name of the next exchange of `name` in this step.

        It only depends on the program: on the path of a variable, and on how often the function under
        construction has used it before, never on other functions.
        """
        self._check_graph()
        return sites.unique_site(name)

    def select(self, value: tf.Tensor, otherwise: tf.Tensor) -> tf.Tensor:
        """Returns `value` if this rank contributes, else `otherwise`."""
        if self.share.contributes is True:
            return value
        return tf.where(self.share.contributes, value, otherwise)

    def all_reduce(self, value: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the sum of `value` over the ranks that contribute."""
        return ops.all_reduce(value, self.site(name), self.share.contributes)

    def mean(self, value: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the mean of `value` over the ranks that contribute."""
        return self.all_reduce(value, name) / tf.cast(self.share.contributors, value.dtype)

    def synchronize(self, gradients: Iterable[Gradient], variables: Iterable[tf.Variable]) -> list[Gradient]:
        """Returns the gradients summed over all ranks.

        Args:
            gradients: Tensors, IndexedSlices or None, one per variable.
            variables: The variables; their paths name the sites.

        Returns:
            A list of tensors, IndexedSlices in which each index occurs once, and None, as given.
        """
        is_due = None
        result: list[Gradient] = []
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is None:
                result.append(None)
                continue
            path = sites.variable_path(variable)
            site = self.site(path)
            result.append(self._synchronize_one(gradient, path, variable.shape, site))
            if self._verifier:
                is_due = self._verifier.is_due(site) if is_due is None else is_due
                self._verifier.check_gradient(gradient, result[-1], variable.shape, site, self.share.contributes,
                                              is_due)
                self._weights[path] = variable
        return result

    def _synchronize_one(self, gradient: tf.Tensor | tf.IndexedSlices, path: str, shape: tf.TensorShape,
                         site: str) -> tf.Tensor | tf.IndexedSlices:
        if gradient.dtype not in (tf.float16, tf.bfloat16, tf.float32, tf.float64):
            raise GraphError(
                f"The gradient of '{path}' has dtype {gradient.dtype.name}, which cannot be "
                "summed over ranks; use float16, bfloat16, float32 or float64.")
        is_slices = isinstance(gradient, tf.IndexedSlices)
        self._gradients.append(f"'{site}' {gradient.dtype.name}{list(shape)}"
                               + (" slices" if is_slices else ""))
        if is_slices:
            return ops.sync_slices(gradient, shape, site, self.share.contributes, self._wire_dtype)
        return ops.sync(gradient, site, self.share.contributes, shape, self._wire_dtype)

    def verify_weights(self) -> None:
        """In verify mode, compares the variables that were trained in this step."""
        if self._verifier and self._weights:
            self._verifier.check_weights(self._weights, self.site)

    def agree(self, strict: bool) -> bool:
        """Has ranks compare what this step synchronises, when its function first runs.

        Returns:
            Whether a function is under construction and synchronises anything.
        """
        if not self._gradients or tf.executing_eagerly():
            return False
        ops.agree(self._gradients, self.share.usual_rows, self.share.static_rows, strict)
        return True

    def note_state(self, path: str, variable: tf.Variable) -> None:
        """Notes that a `tf.Variable` was assigned a value that depends on this rank's rows."""
        self._check_graph()
        self._state[id(variable)] = path, variable

    def average_state(self) -> None:
        """Sets every noted variable to its mean over ranks, weighted by rows.

        This keeps moving statistics equal on all ranks: (sum of K_r v_r) / K. It is computed in
        float64, so that single-precision values that are equal on all ranks do not change.

        Raises:
            GraphError: If the step's batches have several K_r / K.
        """
        if self._state:
            path, _ = next(iter(self._state.values()))
            datasets.check_divided_alike(self.share.batches, lambda parts: (
                parts[:, 2] * parts[0, 0] - parts[0, 2] * parts[:, 0]), (
                    f"A step of strategy.run got batches that ranks divide in different proportions, by one of which "
                    f"'{path}' must be averaged; give it batches with as many rows, or with multiples of the number "
                    "of ranks and drop_remainder=True."))
        for path, variable in self._state.values():
            weighted = tf.cast(variable, tf.float64) * tf.cast(self.share.count, tf.float64)
            total = ops.all_reduce(weighted, self.site(f"state/{path}"), self.share.contributes,
                                   ordered=False)
            mean = total / tf.cast(self.share.total, tf.float64)
            variable.assign(tf.cast(mean, variable.dtype))
        self._state.clear()

    def _check_graph(self) -> None:
        """Refuses to build this step's number of rows into a function that outlives it."""
        if self.share.batches and self._graph is None and not tf.executing_eagerly():
            raise GraphError(
                "A tf.function was called inside a strategy.run that runs eagerly; it would keep "
                "this batch's number of rows for all later batches. Decorate the function that calls "
                "strategy.run with tf.function, not the inner one, or the training step with @poseidon.distribute.")

    def check_unconditional(self, what: str) -> None:
        """Refuses an exchange inside a tf.cond, whose condition could differ between ranks."""
        graph = tf.compat.v1.get_default_graph()
        while not tf.executing_eagerly() and graph is not self._graph:
            if tf_compat.is_branch(graph):
                raise GraphError(
                    f"{what} inside a tf.cond, which only some ranks may enter: all ranks would "
                    "wait for each other. Do it unconditionally (to accumulate gradients, use "
                    "the optimizer's gradient_accumulation_steps), or decorate the training step with "
                    "@poseidon.distribute instead of calling it by strategy.run: ranks then take the same branch.")
            graph = tf_compat.outer_graph(graph)
            if graph is None:
                return
