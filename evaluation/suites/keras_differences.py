"""Tests of Keras that pass plainly and fail in the scope of a PoseidonStrategy, and why."""

import fnmatch
from typing import NamedTuple

_BOTH, _TWO = (1, 2), (2,)
_OTHER = "the test enters the scope of a MirroredStrategy of its own, which TensorFlow refuses inside any other scope"
_HALF = ("outside of a step, Keras divides a loss by the number of replicas under every strategy, so these fail under "
         "MirroredStrategy with two replicas too")
_WRITERS = ("callbacks that write files run on rank 0 only, and the test uses them, or looks for what they have done, "
            "on all ranks")


class Difference(NamedTuple):
    """A kind of failure.

    Attributes:
        tests: Pattern of the names of tests, after "keras/src/".
        error: What their errors contain.
        ranks: Numbers of ranks.
        reason: Why they may fail.
    """

    tests: str
    error: str
    ranks: tuple[int, ...]
    reason: str


# The first that matches a failure explains it.
DIFFERENCES: tuple[Difference, ...] = (
    Difference("*", "jit_compile=True, but XLA cannot compile the exchange", _TWO,
               "XLA cannot compile the exchange with other processes: jit_compile=True is refused by name"),
    Difference("*", "Mixing different tf.distribute.Strategy objects", _BOTH, _OTHER),
    Difference("*", "was asked to apply gradients outside strategy.run", _TWO,
               "gradients that an optimizer applies outside of a step cannot be synchronised: refused by name"),
    Difference("optimizers/*", "apply() must be called in a replica context", _BOTH,
               "in any strategy's scope, Keras' LossScaleOptimizer refuses to apply gradients outside strategy.run"),
    Difference("callbacks/backup_and_restore_test.py::*", "AssertionError: 0 != ", _TWO, _WRITERS),
    Difference("callbacks/model_checkpoint_test.py::*", "DID NOT WARN", _TWO, _WRITERS),
    Difference("callbacks/orbax_checkpoint_test.py::*", "", _TWO, _WRITERS),
    Difference("callbacks/remote_monitor_test.py::*", "Called 0 times", _TWO, _WRITERS),
    *(Difference(f"callbacks/{name}_test.py::*", "Rank 1 has different data than rank 0", _TWO,
                 "the test seeds its data by the operating system, so ranks have different ones: refused by name")
      for name in ("learning_rate_scheduler", "reduce_lr_on_plateau")),
    Difference("saving/saving_lib_test.py::*test_save_model_exception_raised*", "False is not true", _BOTH,
               "files are written completely or not at all, and the test wants to see an incomplete one"),
    Difference("losses/*", "Mismatched elements", _TWO, _HALF),
    Difference("trainers/compile_utils_test.py::TestCompileLoss::*", "Mismatched elements", _TWO, _HALF),
    Difference("trainers/compile_utils_test.py::TestCompileLoss::test_struct_loss_valid_weights", "!= 4", _TWO, _HALF),
)


def reason(test: str, ranks: int, error: str) -> str:
    """Returns why a test may fail; "" if no reason is known."""
    return next((difference.reason for difference in DIFFERENCES
                 if fnmatch.fnmatchcase(test.removeprefix("keras/src/"), difference.tests)
                 and difference.error in error and ranks in difference.ranks), "")
