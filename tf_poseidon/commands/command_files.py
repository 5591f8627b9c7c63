"""What commands read and write: files are checked before anything takes long, and results are printed.

Tests: tests/saved/test_saved_commands.py, tests/unit/test_reports.py.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import os
import sys

from tf_poseidon.base import files
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.reports import page


def check_source(path: str, instead: str) -> None:
    """Refuses a file that does not exist; `instead` says what to give."""
    if not os.path.exists(path):
        raise ConfigurationError(f"There is no file '{path}'; {instead}.")


def check_target(path: str) -> None:
    """Refuses a result that exists, or cannot be written."""
    if os.path.lexists(path):
        raise ConfigurationError(f"'{path}' exists already; remove it, or name another.")
    check_output("OUT", path)


def check_output(option: str, path: str | None) -> None:
    """Refuses the file of an option if it cannot be written."""
    if path:
        try:
            files.check(path)
        except (OSError, ValueError) as error:
            raise _cannot_write(option, path, error) from error


def check_report(path: str | None) -> None:
    """Refuses the file of --html if it cannot be written, or made."""
    check_output("--html", path)
    if path:
        page.check(path)


def _cannot_write(option: str, path: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"{option}={path} cannot be written: {files.reason(error)}; name a file in a directory "
                              "that exists, with room for it.")


@contextlib.contextmanager
def printing(result: object) -> Iterator[None]:
    """A context at whose end a result is printed, even if what else is written with it fails."""
    try:
        yield
    finally:
        try:
            print(result, flush=True)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries again at its end
            raise ConfigurationError(f"The result cannot be printed: {files.reason(error)}; let the output go where "
                                     "there is room for it.") from error


def save(option: str, path: str | None, text: Callable[[], str]) -> None:
    """Writes a text into the file of an option, if it is given."""
    if path:
        try:
            files.write(path, text().encode())
        except OSError as error:
            raise _cannot_write(option, path, error) from error
