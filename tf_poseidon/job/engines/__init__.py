"""Engines move bytes between the processes of a job: one module per engine, found by its name.

To add one: a module in this package that implements `Engine`.

Tests: tests/unit/test_package.py, tests/unit/test_gpus.py.
"""

from collections.abc import Mapping
import importlib
import os
import pathlib
import typing

from tf_poseidon.errors import ConfigurationError

if typing.TYPE_CHECKING:  # it imports TensorFlow, which the names of engines can do without
    import numpy as np

    from tf_poseidon.graph_passes.write.site_writer import SiteWriter
    from tf_poseidon.job.communicator import Communicator
    from tf_poseidon.options import JobOptions

DEFAULT = "mpi"


class Engine(typing.Protocol):
    """The interface of a module of this package.

    Attributes:
        writer: Writes the ops by which gradients travel into a graph, a subclass of
            `graph_passes.write.site_writer.SiteWriter`.
    """

    writer: "type[SiteWriter]"

    def library(self) -> str:
        """Returns the library that moves bytes, with its version; this process need not have joined a job.

        Raises:
            PoseidonError: If it cannot be loaded.
        """

    def launched_size(self, environment: Mapping[str, str]) -> tuple[int, str | None]:
        """Returns (processes, variable): how many its launcher has started, and the environment variable with it.

        Without its launcher this is (1, None).
        """

    def local_rank(self, environment: Mapping[str, str]) -> int | None:
        """Returns this process's number on its machine, according to its launcher; None if it does not say."""

    def join(self, size: int, options: "JobOptions") -> "Communicator":
        """Returns the `Communicator` of this process in a job of `size` processes, with these `JobOptions`.

        Raises:
            PoseidonError: If the job cannot be joined.
        """

    def register_ops(self) -> None:
        """Registers the engine's own ops with TensorFlow; starts nothing.

        Raises:
            PoseidonError: If they are not installed.
        """

    def start_alone(self) -> None:
        """Makes the engine's own ops run in a process that was launched alone."""

    def disconnect(self) -> None:
        """Closes the connection to the launcher of a process that is about to end because its job has failed."""

    def end_launcher(self) -> None:
        """Ends the launcher, and with it all other processes of the job, if it would wait for a host that is gone."""

    def sum_in_place(self, communicator: "Communicator", site: str, value: "np.ndarray") -> None:
        """Sums an array over all ranks the way gradients are summed, for measurements."""


class Launch(typing.NamedTuple):
    """How this process was started.

    Attributes:
        engine: Name of the engine.
        size: Number of processes.
    """

    engine: str
    size: int


def names() -> list[str]:
    """Returns the names of all engines."""
    return sorted(path.stem for path in pathlib.Path(__file__).parent.glob("[a-z]*.py"))


def load(name: str) -> Engine:
    """Returns the module of an engine."""
    return importlib.import_module(f"{__name__}.{name}")


def launch(engine: str | None = None, environment: Mapping[str, str] = os.environ) -> Launch:
    """Returns the `Launch` of this process.

    Args:
        engine: Name of the engine to use; None for that of the launcher.
        environment: The process's environment variables.

    Raises:
        PoseidonError: If there is no such engine, or two launchers disagree.
    """
    if engine is not None and engine not in names():
        raise ConfigurationError(f"engine={engine!r}, expected one of {', '.join(names())}, or None for that of "
                                 "the launcher.")
    launched = {name: load(name).launched_size(environment) for name in names()}
    # A launcher that has started one process may have started another launcher in it.
    launched = {name: (size, variable) for name, (size, variable) in launched.items() if size > 1}
    if len({size for size, _ in launched.values()}) > 1:
        sizes = " but ".join(f"{variable}={size}" for size, variable in launched.values())
        raise ConfigurationError(f"Two launchers have started this process and disagree, {sizes}: use one of "
                                 "them, mpiexec or horovodrun.")
    launchers = [name for name in launched if name != DEFAULT] or [DEFAULT]
    size = max((size for size, _ in launched.values()), default=1)
    if engine == DEFAULT and launched and DEFAULT not in launched:
        (launcher, (_, variable)), = launched.items()
        raise ConfigurationError(
            f"engine='{DEFAULT}', but this is one of {size} processes that another launcher has started "
            f"({variable}={size}): launch with mpiexec, or omit engine to use '{launcher}'.")
    return Launch(engine or launchers[0], size)
