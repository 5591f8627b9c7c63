"""Where PoseidonStrategy differs from TensorFlow's strategies, and why."""

import fnmatch

# (pattern of checks, numbers of replicas, reason): the first that matches a check explains it.
DIFFERENCES: tuple[tuple[str, tuple[int, ...], str], ...] = (
)


def reason(name: str, replicas: int) -> str:
    """Returns why a check may differ; "" if no reason is known."""
    return next((text for pattern, numbers, text in DIFFERENCES
                 if fnmatch.fnmatchcase(name, pattern) and replicas in numbers), "")
