"""Files that are complete or as they were before, whenever the process ends or the disk is full.

Imports nothing of this project, so any module may use it.

Tests: tests/unit/test_files.py, tests/unit/test_plan.py, tests/saved/test_saved_damage.py.
"""

from collections.abc import Iterator
import contextlib
import os
import shutil
import stat
import tempfile

# Of a file's name; file systems take 255 bytes, and the name of the file beside it is longer.
_NAME_BYTES = 200


def no_temporary_folder() -> str:
    """Returns why nothing temporary can be written, and what to do, as an error's text; "" if a folder can be.

    TensorFlow cannot be imported then: a container's root file system may be read-only, or a disk full.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        tried = str(error.strerror).partition(" in ")[2].strip("[]").replace("'", "")
        return (f"No temporary file can be written in {tried}, expected room for some in one of these folders, without "
                "which TensorFlow cannot be imported; mount one at /tmp (Kubernetes: an emptyDir, Docker: --tmpfs "
                "/tmp), make room there, or set TMPDIR to another folder.")
    return ""


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], writer: int = 0) -> Iterator[str]:
    """A context with a path to write to; what is there at the end takes the place of a file.

    What is not a file, such as a pipe, is written in place.

    Args:
        path: The file; if it is a link, what it refers to.
        writer: A number that no other process has that writes the file at the same time.

    Raises:
        OSError: If the file cannot be written; it is as it was before.
        ValueError: If the path has a null byte.
    """
    target = os.path.realpath(path)
    if _is_special(target):
        yield target
        return
    directory, name = os.path.split(target)
    # The same name in every run: what a run has left that was ended while it wrote is overwritten by the next.
    name = os.fsencode(name)[-_NAME_BYTES:].decode(errors="ignore")
    partial = os.path.join(directory, f".partial-{writer}.{name}")
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        if os.path.exists(target):
            shutil.copymode(target, partial)
        os.replace(partial, target)
    finally:
        with contextlib.suppress(OSError):
            os.remove(partial)


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file completely, or leaves it as it was; raises as `replacing`."""
    with replacing(path) as partial, open(partial, "wb") as file:
        file.write(data)


def check(path: str | os.PathLike[str]) -> None:
    """Checks that a file can be written, and changes nothing.

    Raises:
        OSError: If it cannot be.
        ValueError: If the path has a null byte.
    """
    target = os.path.realpath(path)
    if os.path.isdir(target):
        raise IsADirectoryError(None, "Is a directory")
    if not _is_special(target):
        with tempfile.TemporaryFile(dir=os.path.dirname(target), buffering=0) as file:
            file.write(bytes(4096))


def reason(error: Exception) -> str:
    """Returns what an exception of these functions says, as a clause without the path."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return (text.splitlines() or [type(error).__name__])[0].rstrip(".")


def quoted(path: object) -> str:
    """Returns a path for a message: in quotes, and on one line."""
    text = str(path)
    return f"'{text}'" if text.isprintable() else repr(text)


def _is_special(target: str) -> bool:
    """Whether something is there that is not a file."""
    try:
        return not stat.S_ISREG(os.stat(target).st_mode)
    except FileNotFoundError:
        return False
