"""Where PoseidonStrategy differs from TensorFlow's strategies, and why."""

import fnmatch

_TWO = (2,)
_REFUSED = "what a rank cannot compute as one process does is refused by name"
_ONCE = "the initial value and what is assigned outside of steps count once, as in one process, not once per replica"
_OWN = "without an aggregation each process keeps and reads what its own replica has assigned"
_MORE = "PoseidonStrategy takes what MirroredStrategy refuses"
_PROCESSES = "each replica has a process of its own: it reads its part of the input, and rank 0 alone writes files"
_MERGED = "a merged call runs in each process, which has one replica; MirroredStrategy runs it once"
_PARTS = "each part of a structure is gathered; MirroredStrategy returns the first replica's"
_RULES = "gradients are summed before they are clipped, and moving statistics are averaged (docs/semantics.md)"

# (pattern of checks, numbers of replicas, reason): the first that matches a check explains it.
DIFFERENCES: tuple[tuple[str, tuple[int, ...], str], ...] = (
    ("context/merge_call*", _TWO, _MERGED),
    ("reduce/reduce_other_types*", _TWO, _REFUSED),
    ("variables/scattered_in_a_step*", _TWO, _REFUSED),
    ("datasets/sharding_policy*", _TWO, _REFUSED),
    ("reduce/reduce_a_python_number*", _TWO, "a Python number is reduced as a tensor that all replicas have"),
    ("gather/gather[[]*", _TWO, _MORE),  # "[[]" is "[" in patterns
    ("gather/all_gather*", _TWO, _MORE),
    ("gather/gather_structure*", _TWO, _PARTS),
    ("variables/assigned_outside[[]ON_READ-NONE*", _TWO, _MORE),
    ("variables/used_under_another_strategy", _TWO, _MORE),
    ("training/optimizers[[]ema*", _TWO, _MORE),
    ("variables/*ON_READ-SUM*", _TWO, _ONCE),
    ("variables/ways_to_read[[]ON_READ*", _TWO, _ONCE),
    ("checkpoints/*SUM*", _TWO, _ONCE),
    ("variables/read_after_a_step[[]*NONE*", _TWO, _OWN),
    ("datasets/input_context*", _TWO, _PROCESSES),
    ("interfaces/files*", _TWO, _PROCESSES),
    ("training/optimizers*clipnorm*", _TWO, _RULES),
    ("training/batch_normalisation*", _TWO, _RULES),
)


def reason(name: str, replicas: int) -> str:
    """Returns why a check may differ; "" if no reason is known."""
    return next((text for pattern, numbers, text in DIFFERENCES
                 if fnmatch.fnmatchcase(name, pattern) and replicas in numbers), "")
