"""Source lines for tracebacks of ranks: cloudpickle leaves out in which file, or cell, a function was defined.

Tests: tests/training/test_function_jobs.py.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import linecache
import re
import types
from typing import Any

# A frame of a function that cloudpickle has sent, without its line of source.
_FRAME = re.compile(r'^  File "<dynamic-code>", line (\d+), in (\S+)\n(?!    )', re.MULTILINE)


def completed(trace: str, function: Callable[..., Any]) -> str:
    """Returns a traceback in which frames of a function, and of those it uses, name files and show lines.

    Args:
        trace: What a rank has sent of an exception.
        function: The function that it has called.
    """
    files: dict[tuple[str, int], set[str]] = {}
    for code in _codes(function):
        for line in {line for _, _, line in code.co_lines() if line is not None}:
            files.setdefault((code.co_name, line), set()).add(code.co_filename)

    def with_source(frame: re.Match[str]) -> str:
        number, name = int(frame[1]), frame[2]
        found = files.get((name, number), set())
        if len(found) != 1:  # functions of two cells may have the same name
            return frame[0]
        file, = found
        source = linecache.getline(file, number).strip()
        return f'  File "{file}", line {number}, in {name}\n' + (f"    {source}\n" if source else "")

    return _FRAME.sub(with_source, trace)


def _codes(function: Callable[..., Any]) -> Iterator[types.CodeType]:
    """Yields the code of a function, and of all that it names in its module; each once, so it ends."""
    module = getattr(function, "__module__", None)  # what it imports is not sent
    waiting: list[Any] = [function]
    seen: set[Any] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, type) and value.__module__ == module and value not in seen:
            seen.add(value)
            waiting += vars(value).values()
        if isinstance(value, (types.MethodType, staticmethod, classmethod)):
            value = value.__func__
        if not isinstance(value, types.FunctionType) or value.__module__ != module or value.__code__ in seen:
            continue
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty
                waiting.append(cell.cell_contents)
        codes = [value.__code__]
        while codes:
            code = codes.pop()
            seen.add(code)
            yield code
            waiting += [value.__globals__[name] for name in code.co_names if name in value.__globals__]
            codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
