"""What a rank is about to do with a model, as text: ranks compare it, and name the line in which they differ.

Without that, ranks whose models have other activations or losses would train a mixture of both, without a word; and
ranks that make other numbers of steps would wait for each other.

Tests: tests/faults/test_failures.py.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import re
from typing import Any
import warnings

import keras

from tf_poseidon.errors import GraphError
from tf_poseidon.job import agreement
from tf_poseidon.job.communicator import Communicator

# Names of layers count what a process has built before; variables, whose names matter, are compared where they are
# made. A learning rate is state, of which all ranks take rank 0's.
_UNCOMPARED = {"name", "registered_name", "shared_object_id", "build_config", "input_layers", "output_layers",
               "inbound_nodes", "learning_rate"}
_UNCOMPARED_ARGUMENTS = {"x", "y", "sample_weight", "validation_data", "callbacks", "verbose", "self", "kwargs"}
# An address in memory, as in the text of an object without one of its own.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def compare(model: keras.Model, method: str, arguments: Mapping[str, Any], is_new: bool,
            communicator: Communicator) -> None:
    """Ends the job unless all ranks are about to do the same with a model.

    Args:
        model, method, arguments, is_new: As in `describe`.
        communicator: This rank's communicator.

    Raises:
        GraphError: On all ranks, if they are not.
    """
    difference = agreement.CommunicatorComparison(communicator).difference(
        "methods of models", describe(model, method, arguments, is_new))
    if difference is not None:
        raise GraphError(f"Before '{model.name}.{method}', {difference}. Build the same models, and call the same "
                         "methods with the same arguments, on all ranks.")


def describe(model: keras.Model, method: str, arguments: Mapping[str, Any], is_new: bool) -> str:
    """Returns a line for everything that must be the same on all ranks.

    Args:
        model: The model.
        method: Name of its method that is called.
        arguments: Its arguments, by their names.
        is_new: Whether Keras will make the function of its steps; the model is described then, which takes long.
    """
    lines = [f"{method} is called"]
    given = {name: value for name, value in arguments.items() if name not in _UNCOMPARED_ARGUMENTS}
    lines += [f"{name}={text}" for name, text in _leaves(given)]
    lines += [f"{name}={'None' if arguments.get(name) is None else '...'}"
              for name in ("validation_data", "sample_weight")]
    lines.append(f"its steps are {'new' if is_new else 'those of a call before'}")
    if not is_new:
        return "\n".join(lines)
    lines += [f"{name} of the model is {text}" for name, text in _leaves(_config(model))]
    lines += [f"{name} of compile is {text}" for name, text in _leaves(_compiled(model))]
    return "\n".join(lines)


def _config(model: keras.Model) -> Any:
    """Returns a model's configuration; of a model that has none, its class and its layers'."""
    try:
        with _no_warnings():  # of what could not be loaded again
            return {"class": type(model).__name__, **keras.saving.serialize_keras_object(model)["config"]}
    except Exception:  # whatever a user's get_config raises
        return {"class": type(model).__name__, "layers": [type(layer).__name__ for layer in model.layers]}


def _compiled(model: keras.Model) -> Any:
    """Returns the arguments of `compile`, None if they have no configuration."""
    try:
        with _no_warnings():
            return model.get_compile_config()
    except Exception:  # as above
        return None


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields (name, text) of every part of a nested configuration."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            if key not in _UNCOMPARED:
                yield from _leaves(value[key], f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple | set | frozenset):
        for number, part in enumerate(sorted(value, key=repr) if isinstance(value, set | frozenset) else value):
            yield from _leaves(part, f"{name}[{number}]")
    else:
        yield name, _ADDRESS.sub("", repr(value))
