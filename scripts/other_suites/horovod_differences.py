"""Where Horovod's tests and examples fail after `poseidon.enable()` but not without it, and why; and why both fail."""

import fnmatch
import re

# (pattern of suite::test, reason): the first that matches explains a failure that plain Horovod does not have.
DIFFERENCES: tuple[tuple[str, str], ...] = ()

# (regular expression in the text of a failure, cause): what plain Horovod fails for, too.
CAUSES: tuple[tuple[str, str], ...] = ()


def reason(name: str) -> str:
    """Returns why a test may fail after `enable()` only; "" if no reason is known."""
    return next((text for pattern, text in DIFFERENCES if fnmatch.fnmatchcase(name, pattern)), "")


def cause(text: str) -> str:
    """Returns why plain Horovod fails with a text; its first line if no cause is known."""
    return next((known for pattern, known in CAUSES if re.search(pattern, text)), text.partition("\n")[0][:200])
