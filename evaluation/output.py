"""What commands print and write, alike for all of them: tables to look at, Markdown, JSON."""

from collections.abc import Iterable
from collections.abc import Sequence
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import sys
from typing import Any
from typing import TextIO

from absl import flags
import rich.console
import rich.table

flags.disclaim_key_flags()  # --help of a command lists those that it has defined by these functions

_PACKAGES = "tf_poseidon", "tensorflow-cpu", "tensorflow", "keras", "mpich", "horovod", "numpy"


def json_flag(default: str | None = None, what: str = "File for the results.") -> flags.FlagHolder[str | None]:
    """Defines the flag --json."""
    return flags.DEFINE_string("json", default, what)


def markdown_flag(what: str = "File for the table.") -> flags.FlagHolder[str | None]:
    """Defines the flag --markdown."""
    return flags.DEFINE_string("markdown", None, what)


def write_json(path: str | pathlib.Path | None, values: Any) -> None:
    """Writes values, which may be dataclasses, as JSON, if there is a path."""
    if path:
        pathlib.Path(path).write_text(json.dumps(values, indent=1, default=dataclasses.asdict) + "\n")


def made_by() -> dict[str, Any]:
    """Returns with what results were made, so that they can be cited: the command, versions and the machine."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {"command": shlex.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]), "versions": versions,
            "machine": platform.machine(), "processors": len(os.sched_getaffinity(0))}


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table in Markdown."""
    head, *body = [f"| {' | '.join(row)} |" for row in (header, *rows)]
    return [head, "|" + "---|" * len(header), *body]


def show(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1,
         file: TextIO | None = None) -> None:
    """Prints a table, as wide as it is; all columns but the first few (`left`) are right-aligned."""
    table = rich.table.Table(title=title)
    for number, column in enumerate(header):
        table.add_column(column, justify="left" if number < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    widest = rich.console.Console(width=1000).measure(table).maximum
    rich.console.Console(width=max(widest, len(title)), file=file).print(table)
