"""Where Horovod's tests and examples fail after `poseidon.enable()` but not without it, and why; and why both fail."""

import fnmatch
import re

# (pattern of suite::test, reason): the first that matches explains a failure that plain Horovod does not have.
DIFFERENCES: tuple[tuple[str, str], ...] = (
    ("examples::tensorflow/*", "programs without eager execution are refused by name (docs/engines.md)"),
)

# (regular expression in the text of a failure, cause): what plain Horovod fails for, too.
_KERAS_3 = "written for Keras 2, run with Keras 3"
CAUSES: tuple[tuple[str, str], ...] = (
    (r"missing 1 required positional argument: 'learning_rate'|has no attribute 'compute_gradients'", _KERAS_3),
    (r"not recognized: \{'lr'|keras.optimizers.legacy|_tf_keras.*has no attribute", _KERAS_3),
    (r"module 'keras.backend' has no attribute", _KERAS_3),
    (r"All local variables must be of tf.Variable type", _KERAS_3),
    (r"'list' object is not callable", "`optimizer.variables()` of Keras 2, now a property"),
    (r"float16\(0.0\) not less than 1e-08", "NumPy 2 rounds the bound 1e-8 to half precision, which is 0"),
)


def reason(name: str) -> str:
    """Returns why a test may fail after `enable()` only; "" if no reason is known."""
    return next((text for pattern, text in DIFFERENCES if fnmatch.fnmatchcase(name, pattern)), "")


def cause(text: str) -> str:
    """Returns why plain Horovod fails with a text; its first line if no cause is known."""
    return next((known for pattern, known in CAUSES if re.search(pattern, text)), text.partition("\n")[0][:200])
