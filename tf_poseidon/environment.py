"""Options from environment variables, so that who runs a cluster sets defaults, and programs stay as they are.

TF_POSEIDON_POLICY=ps is what policy="ps" in a program is, where that gives no policy.

Tests: tests/unit/test_environment.py.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import functools
import inspect
import os
from typing import Any
from typing import ParamSpec
from typing import TypeVar

from tf_poseidon import planning
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.errors import shown
from tf_poseidon.staleness import bounds

P = ParamSpec("P")
R = TypeVar("R")

PREFIX = "TF_POSEIDON_"
# Variables that are no options of a strategy.
_OTHERS = ("ACCELERATOR", "CALLER", "CALLER_KEY", "CUDA", "EMULATED_GBPS", "FIRST_STEP", "INTERFACE", "JOB", "LOGS",
           "OPENMETRICS_PATH", "PORT_RANGE", "RESTARTS", "TENSORFLOW")
_SWITCH = {"1": True, "true": True, "0": False, "false": False}


def _switch(text: str) -> bool:
    if text not in _SWITCH:
        raise ValueError("true or false")
    return _SWITCH[text]


def _switch_or_auto(text: str) -> bool | str:
    if text not in {*_SWITCH, "auto"}:
        raise ValueError("true, false or auto")
    return _SWITCH.get(text, text)


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError("a whole number")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def _wholes(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise ValueError("whole numbers with commas between them")
    return tuple(map(int, parts))


def _rows(text: str) -> tuple[int, ...] | str:
    return text if text.isalpha() else _wholes(text)


def _synchrony(text: str) -> str | bounds.Synchrony:
    try:
        return bounds.from_text(text)
    except ConfigurationError as error:
        raise ValueError(bounds.TEXTS) from error


def _pins(text: str) -> dict[str, str]:
    pins = [part.rpartition("=") for part in text.split(",")]
    if not all(pattern and scheme for pattern, _, scheme in pins):
        raise ValueError("PATTERN=SCHEME with commas between them, such as '*/embeddings=ps'")
    return {pattern: scheme for pattern, _, scheme in pins}


def _cluster(text: str) -> planning.Cluster:
    parsers: dict[Any, Callable[[str], Any]] = {int: _whole, float: _number, bool: _switch}
    of_field = {field.name: parsers[field.type] for field in dataclasses.fields(planning.Cluster)}
    given = {name: value for name, _, value in (part.partition("=") for part in text.split(","))}
    if "workers" not in given or not given.keys() <= of_field.keys():
        raise ValueError("NAME=VALUE with commas between them, such as 'workers=4,bandwidth_gbps=10', where names are "
                         f"fields of poseidon.Cluster: {', '.join(of_field)}")
    return planning.Cluster(**{name: of_field[name](value) for name, value in given.items()})


_PARSERS: dict[str, Callable[[str], Any]] = {
    "policy": str, "plan": str, "pins": _pins, "cluster": _cluster, "wire_dtype": str, "merge": _switch,
    "servers": _wholes, "ranks_per_node": _whole, "strict": _switch, "global_batch_norm": _switch, "verify": _whole,
    "rows": _rows, "input": str, "shard_update": _switch_or_auto, "synchrony": _synchrony, "versions": str,
    "crossover": str, "engine": str, "kv_pair_bytes": _whole, "timeout_s": _number, "startup_timeout_s": _number,
    "heartbeat_timeout_s": _number, "staging_bytes": _whole, "dedicated_servers": _whole}


def variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables that are set, and give options defaults, by name."""
    return {name: environment[name] for name in map(variable_of, _PARSERS) if environment.get(name)}


def described() -> str:
    """Returns in a few words which options have defaults from the environment; "" if none has."""
    texts = [f"{name}={text}" for name, text in variables().items()]
    return f"; the environment has {', '.join(texts)}" if texts else ""


def names() -> list[str]:
    """Returns the names of all variables that mean something."""
    return [*map(variable_of, (*_PARSERS, *_OTHERS))]


def unknown(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the names of variables that begin as ours do, and mean nothing."""
    return sorted(name for name in environment if name.startswith(PREFIX) and name not in names())


def variable_of(option: str) -> str:
    """Returns the name of the variable of an option."""
    return f"{PREFIX}{option.upper()}"


def defaults(options: Iterable[str], environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Returns the values of those options for which a variable is set, by their names.

    Raises:
        ConfigurationError: If such a value is not what its option takes.
    """
    values = {}
    for option in options:
        name = variable_of(option)
        if option not in _PARSERS or not (text := environment.get(name)):
            continue
        try:
            values[option] = _PARSERS[option](text)
        except ValueError as error:
            raise ConfigurationError(f"The environment variable {name} is {shown(text)}, expected {error}; change it, "
                                     "or unset it.") from error
        except ConfigurationError as error:  # a cluster that cannot be
            raise ConfigurationError(f"{error} The environment has {name}={shown(text)}.") from error
    return values


def is_asked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function so that the environment is asked for those options that a call does not give."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind_partial(*args, **kwargs).arguments
        values = defaults(option for option in signature.parameters if option not in given)
        try:
            return function(*args, **kwargs | values)  # type: ignore[arg-type]
        except ConfigurationError as error:
            if not values:
                raise
            texts = [f"{name}={os.environ[name]}" for name in map(variable_of, values)]
            raise ConfigurationError(f"{error} The environment has {', '.join(texts)}.") from error

    return call
