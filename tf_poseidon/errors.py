"""The exceptions that tf_poseidon raises: all of them are `PoseidonError`s."""
# Tests: tests/unit/test_errors.py.


class PoseidonError(Exception):
    """An error that the user can fix; the text names subject, value, expectation and remedy.

    Derived from Exception itself: only for such classes does AutoGraph keep the type when it adds the
    location in the user's code.
    """


class ConfigurationError(PoseidonError):
    """An invalid option or argument, or an unsuitable installation."""


class PlanError(PoseidonError):
    """A plan that is damaged, or was made for something else."""


class GraphError(PoseidonError):
    """A model, program or graph that cannot be trained on several ranks unmodified."""


class JobError(PoseidonError):
    """Ranks that cannot join their job, or cannot continue it."""


class JobEndedError(JobError):
    """The job was ended: by a failure of this or another rank, or by a rank that left early."""


def shown(value: object) -> str:
    """Returns a value for a message: its text as in Python, which may be long, or too long for Python."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number of more than 4300 digits; a list in a list in a list ...
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:97]}..."


# The characters of an error's text that are sent to other ranks or printed, of which it may have any number. What is
# said around it has room for as many.
LONGEST = 4000


def shortened(text: str, most: int = LONGEST) -> str:
    """Returns a text of at most about `most` characters: the beginning and the end of a longer one."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters are left out) ... {text[-half:]}"


def encoded(text: str) -> bytes:
    """Returns a text as UTF-8, in which what UTF-8 does not have is escaped: names of files that are not UTF-8."""
    return text.encode(errors="backslashreplace")
