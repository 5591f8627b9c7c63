"""The command `tf-poseidon`.

    tf-poseidon explain MODEL.keras --batch_size 32 --workers 8 --bandwidth_gbps 10 --html plan.html
    tf-poseidon rewrite IN OUT --workers 4 --batch_size 32 --inputs x=rows,y=rows,rate=same
    tf-poseidon diff IN OUT
    tf-poseidon strip OUT BACK
    mpiexec -n 2 tf-poseidon verify IN OUT
    tf-poseidon run -n 4 --restarts 3 -- python train.py
    tf-poseidon doctor --hosts a,b
    mpiexec -n 4 -hosts a,b tf-poseidon selftest

Exit statuses are those of `Status`.

Tests: tests/saved/test_saved_commands.py, tests/training/test_explaining.py, tests/unit/test_interrupts.py.
"""

import argparse
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import enum
import importlib.metadata
import json
import os
import signal
import sys
import traceback
from typing import Any
from typing import NoReturn
from typing import TYPE_CHECKING
import zipfile

from tf_poseidon import planning
from tf_poseidon import supported
from tf_poseidon.base import files
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.errors import PoseidonError
from tf_poseidon.errors import shown
from tf_poseidon.explanations import plan_page
from tf_poseidon.job import engines
from tf_poseidon.job.host import interrupts
from tf_poseidon.job.host import launching
from tf_poseidon.options import PlanOptions
from tf_poseidon.reports import page

if TYPE_CHECKING:
    import numpy as np


class Status(enum.IntEnum):
    """How the command ended."""

    DONE = 0
    DIFFERS = 1  # graphs, or what verify, doctor or selftest looks at from what it should be
    MISTAKE = 2  # in the command line; argparse has the same
    REFUSED = 3
    OWN_ERROR = 70  # EX_SOFTWARE of sysexits.h
    INTERRUPTED = 128 + signal.SIGINT


_STATUSES = """exit status: 0 done; 1 graphs differ, or verify, doctor or selftest found an error; 2 a mistake in the
command line; 3 refused, with the reason; 70 an error of tf-poseidon itself; 130 interrupted; that of the job for run"""


def explain(given: argparse.Namespace) -> Status:
    """Prints how the gradients of a saved model would travel."""
    PlanOptions(**_plan_options(given)).planner()  # which checks them
    _check_output("--json", given.json)
    _check_output("--plan", given.plan)
    _check_report(given.html)
    _check_source(given.model, "give explain a model that was saved with model.save('model.keras')")
    if given.model.endswith(".keras") and not zipfile.is_zipfile(given.model):
        raise ConfigurationError(f"'{given.model}' is not what model.save writes into a .keras file: it is damaged or "
                                 "incomplete, or another kind of file; save the model again.")
    # Late: it imports TensorFlow, which takes seconds; errors in the command should appear at once.
    from tf_poseidon.commands import progress
    with progress.shown() as show:
        from tf_poseidon.explanations import explaining
        show(f"loading {given.model}")
        model = explaining.load(given.model)
        show("tracing and planning a training step")
        plan = explaining.explain(model, given.batch_size, steps_per_execution=given.steps_per_execution,
                                  **_plan_options(given))
    if unmatched := planning.unmatched_pins(given.pin, plan):
        raise ConfigurationError(unmatched)
    with _printing(plan):
        _save("--json", given.json, lambda: json.dumps(plan.predictions(), indent=1))
        _save("--html", given.html, lambda: plan_page.html_report({"": plan}))
        if given.plan:
            plan.save(given.plan)
    return Status.DONE


def rewrite(given: argparse.Namespace) -> Status:
    """Rewrites a saved training step, and prints what it exchanges."""
    if given.workers is None and given.plan is None:
        raise _Mistake("--workers is missing; give rewrite a number of --workers, and a --batch_size (rows "
                       "on each of them), or a --plan.")
    _check_source(given.source, _GRAPH)
    plan = None
    if given.plan:
        _check_source(given.plan, "give rewrite a plan that explain or Plan.save has written")
        plan = planning.Plan.load(given.plan)
    elif given.workers:
        PlanOptions(**_plan_options(given)).planner()  # which checks them
    _check_target(given.target)
    _check_output("--json", given.json)
    _check_report(given.html)
    from tf_poseidon.commands import progress
    with progress.shown() as show:
        from tf_poseidon.saved_graphs import rewriting
        report = rewriting.rewrite(
            given.source, given.target, given.signature or None, given.train_op, batch_size=given.batch_size, plan=plan,
            inputs=dict(mark for marks in given.inputs for mark in marks), engine=given.engine or engines.DEFAULT,
            progress=show, **_plan_options(given))
    plans = {name: step.plan for name, step in report.steps.items()}
    predictions = {name: plan.predictions() for name, plan in plans.items()}
    with _printing(report):
        _save("--json", given.json,
              lambda: json.dumps(predictions if len(plans) > 1 else report.plan.predictions(), indent=1))
        _save("--html", given.html, lambda: plan_page.html_report(plans))
    return Status.DONE


def diff(given: argparse.Namespace) -> Status:
    """Prints what was inserted into a rewritten graph."""
    _check_source(given.source, _GRAPH)
    _check_source(given.target, _GRAPH)
    from tf_poseidon.saved_graphs import differences
    difference = differences.diff(given.source, given.target)
    with _printing(difference):
        pass
    return Status.DIFFERS if difference.others else Status.DONE


def strip(given: argparse.Namespace) -> Status:
    """Writes the original of a rewritten graph."""
    _check_source(given.source, _GRAPH)
    _check_target(given.target)
    from tf_poseidon.saved_graphs import rewriting
    rewriting.strip(given.source, given.target)
    return Status.DONE


def verify(given: argparse.Namespace) -> Status:
    """Compares a rewritten graph, on the ranks that mpiexec has started, with the original in one process."""
    _check_source(given.source, _GRAPH)
    _check_source(given.target, _GRAPH)
    arrays = _arrays(given.arrays)
    import tensorflow as tf

    from tf_poseidon.job import ending
    ending.failure_status = Status.OWN_ERROR  # 1 is for graphs that differ
    # One thread: several may sum in a different order every time.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # TensorFlow warns about gradients of loaded functions, which this program never takes.
    tf.get_logger().setLevel("ERROR")
    from tf_poseidon.saved_graphs import load_ops
    from tf_poseidon.saved_graphs import verifying
    verification = verifying.verify(given.source, given.target, given.signature, given.train_op, given.initializer,
                                    given.batch_size, given.steps, arrays, given.seed, given.engine)
    if load_ops.load_ops(given.engine).rank == 0:
        with _printing(verification):
            pass
    return Status.DIFFERS if verification.failures else Status.DONE


def run(given: argparse.Namespace) -> int:
    """Starts a job with mpiexec, and starts it again when it fails."""
    program = given.program[given.program[:1] == ["--"]:]
    if not program:
        raise _Mistake("there is no program; give run a command: tf-poseidon run -n 4 -- python train.py.")
    return launching.run(program, given.n, given.hosts, given.restarts, given.mpiexec,
                         lambda text: print(f"tf-poseidon run: {text}", file=sys.stderr, flush=True))


def doctor(given: argparse.Namespace) -> Status:
    """Prints what is installed, and what would keep a job from running here and on other hosts, with remedies."""
    from tf_poseidon.commands import progress
    with progress.shown() as show:
        show("looking")
        from tf_poseidon.commands import doctor as doctor_lib
        report = doctor_lib.examine(given.hosts, given.mpiexec)
    with _printing(report):
        pass
    return Status.DIFFERS if report.has_problems else Status.DONE


def selftest(given: argparse.Namespace) -> int:
    """Compares every scheme with one process, and measures links: on the ranks that mpiexec has started, or its own."""
    launched, ranks = engines.launch(given.engine).size > 1, given.n or max(2, len(given.hosts))
    is_started = launched or _IS_STARTED in os.environ
    if is_started and (given.n or given.hosts):
        raise _Mistake("-n and --hosts are for a selftest that starts its ranks itself; omit them, or mpiexec.")
    if not is_started and (ranks > 1 or given.hosts):
        engine = ["--engine", given.engine] if given.engine else []
        again = [sys.executable, "-m", "tf_poseidon", "selftest", *engine]
        return launching.run(again, ranks, given.hosts, 0, given.mpiexec,
                             lambda text: None)  # its ranks have said everything
    from tf_poseidon.job import ending
    from tf_poseidon.job import runtime
    ending.failure_status = Status.OWN_ERROR  # 1 is for what is wrong
    import tensorflow as tf
    tf.get_logger().setLevel("ERROR")
    from tf_poseidon.commands.selftest import run_selftest
    report = run_selftest.run(given.engine)
    communicator = runtime.communicator()
    if communicator is None or communicator.rank == 0:
        with _printing(report):
            pass
    return Status.DIFFERS if report.problems else Status.DONE


class _Mistake(Exception):
    """A mistake in the command line that argparse cannot find."""


_IS_STARTED = "PMI_SIZE"  # mpiexec gives it to each process

# Before TensorFlow is imported, which takes seconds.
_GRAPH = "give a SavedModel's directory, a MetaGraph (.meta) or a GraphDef (.pb)"


def _check_source(path: str, instead: str) -> None:
    if not os.path.exists(path):
        raise ConfigurationError(f"There is no file '{path}'; {instead}.")


def _check_target(path: str) -> None:
    if os.path.lexists(path):
        raise ConfigurationError(f"'{path}' exists already; remove it, or name another.")
    _check_output("OUT", path)


def _check_output(option: str, path: str | None) -> None:
    if path:
        try:
            files.check(path)
        except (OSError, ValueError) as error:
            raise _cannot_write(option, path, error) from error


def _check_report(path: str | None) -> None:
    _check_output("--html", path)
    if path:
        page.check(path)


def _cannot_write(option: str, path: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"{option}={path} cannot be written: {files.reason(error)}; name a file in a directory "
                              "that exists, with room for it.")


def _plan_options(given: argparse.Namespace) -> dict[str, Any]:
    """Returns the values of the `PlanOptions`, by name."""
    return {field.name: dict(given.pin) if field.name == "pins" else getattr(given, field.name)
            for field in dataclasses.fields(PlanOptions)}


@contextlib.contextmanager
def _printing(result: object) -> Iterator[None]:
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


def _check_alone(command: str) -> None:
    if (size := int(os.environ.get(_IS_STARTED, 1))) > 1:
        raise ConfigurationError(f"{size} processes were started, but {command} runs in one; omit mpiexec.")


def _pin(text: str) -> tuple[str, str]:
    pattern, separator, scheme = text.rpartition("=")
    if not separator or scheme not in planning.SCHEMES:
        raise argparse.ArgumentTypeError(f"'{text}', expected PATTERN=SCHEME, such as '*/embeddings=ps', with a scheme "
                                         f"of {', '.join(planning.SCHEMES)}")
    return pattern, scheme


def _marks(text: str) -> list[tuple[str, str | int]]:
    marks = []
    for part in text.split(","):
        name, _, mark = part.rpartition("=")
        if not name or mark not in ("rows", "same") and not mark.isdecimal():
            raise argparse.ArgumentTypeError(
                f"'{part}', expected NAME=rows, NAME=same or NAME=DIMENSION, such as 'x=rows'")
        marks.append((name, int(mark) if mark.isdecimal() else mark))
    return marks


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _arrays(path: str | None) -> "dict[str, np.ndarray] | None":
    if path is None:
        return None
    import numpy as np
    try:
        with np.load(path) as arrays:  # an .npy has one, without a name
            return dict(arrays)
    except Exception as error:  # NumPy raises many kinds
        raise ConfigurationError(f"--arrays={path} cannot be read as a file of numpy.savez: {files.reason(error)}; "
                                 "write it with numpy.savez.") from error


def _save(option: str, path: str | None, text: Callable[[], str]) -> None:
    if path:
        try:
            files.write(path, text().encode())
        except OSError as error:
            raise _cannot_write(option, path, error) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "tf-poseidon", description="Plans, rewrites and checks training steps for several processes.",
        epilog=f"`tf-poseidon COMMAND --help` describes a command.\n{_STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=importlib.metadata.version("tf_poseidon"))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(runs: Callable[[argparse.Namespace], int], example: str,
                *positional: tuple[str, str, str]) -> argparse.ArgumentParser:
        added = commands.add_parser(
            runs.__name__, help=runs.__doc__, description=runs.__doc__, allow_abbrev=False,
            epilog=f"example:\n  {example}\n\n{_STATUSES}", formatter_class=argparse.RawDescriptionHelpFormatter)
        for name, metavar, what in positional:
            added.add_argument(name, metavar=metavar, help=what)
        added.set_defaults(run=runs, command=runs.__name__)
        return added

    graph = "a SavedModel, MetaGraph (.meta) or GraphDef (.pb)"
    explains = command(explain, "tf-poseidon explain model.keras --batch_size 32 --workers 8 --bandwidth_gbps 10",
                       ("model", "MODEL.keras", "a model that model.save has written"))
    explains.add_argument("--batch_size", type=_at_least(1), required=True, help="rows of a full batch on each worker")
    explains.add_argument("--workers", type=_at_least(1), required=True, help="number of ranks")
    explains.add_argument("--steps_per_execution", type=_at_least(1), default=1,
                          help="same as in compile: how many steps may overlap (%(default)s)")
    explains.add_argument("--plan", help="file for the plan, which PoseidonStrategy and rewrite can follow")
    rewrites = command(rewrite, "tf-poseidon rewrite step step_for_4 --workers 4 --batch_size 32",
                       ("source", "IN", f"the training step: {graph}"), ("target", "OUT", "the rewritten one"))
    rewrites.add_argument("--batch_size", type=_at_least(1), help="rows of a full batch on each worker")
    rewrites.add_argument("--workers", type=_at_least(1), help="number of ranks; that of the plan if there is one")
    rewrites.add_argument("--plan", help="file of a plan to follow")
    rewrites.add_argument("--inputs", type=_marks, action="append", default=[], metavar="NAME=MARK,...",
                          help="which inputs have rows: NAME=rows, NAME=same or NAME=DIMENSION; by default those whose "
                          "first dimension is unknown")
    rewrites.add_argument("--signature", type=_names, default=[], metavar="NAME,...",
                          help="signatures that run a training step, by default 'train' if it exists")
    for planned in (explains, rewrites):
        _add_planning(planned)
    command(diff, "tf-poseidon diff step step_for_4", ("source", "IN", "the original"),
            ("target", "OUT", "the rewritten one"))
    command(strip, "tf-poseidon strip step_for_4 back", ("source", "OUT", "a rewritten training step"),
            ("target", "BACK", "its original"))
    verifies = command(verify, "mpiexec -n 2 tf-poseidon verify step step_for_4", ("source", "IN", "the original"),
                       ("target", "OUT", "the rewritten one"))
    verifies.add_argument("--batch_size", type=_at_least(1), default=4, help="rows of a batch per rank (%(default)s)")
    verifies.add_argument("--steps", type=_at_least(1), default=2, help="number of steps to run (%(default)s)")
    verifies.add_argument("--signature", help="the signature to run, by default 'train' if it exists")
    verifies.add_argument("--arrays", metavar="FILE.npz", help="file of numpy.savez: the global batch, an array per "
                          "input, by its name; random numbers by default")
    verifies.add_argument("--seed", type=_at_least(0), default=0, help="seed of these random numbers (%(default)s)")
    verifies.add_argument("--initializer", type=_names, default=[], metavar="NAME,...",
                          help="ops that initialise variables")
    starts = command(run, "tf-poseidon run -n 4 --hosts a,b --restarts 3 -- python train.py")
    starts.add_argument("-n", type=_at_least(1), default=1, metavar="RANKS", help="number of ranks (%(default)s)")
    starts.add_argument("--hosts", "-hosts", type=_names, default=[], metavar="HOST,...",
                        help="where they run, by default here; each host takes an equal part")
    starts.add_argument("--restarts", type=_at_least(0), default=0, metavar="TIMES",
                        help="how often the job may be started again, without hosts that are gone; the program resumes "
                        "where its BackupAndRestore has written (%(default)s). TF_POSEIDON_RESTARTS tells it how often "
                        "it was")
    starts.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ...", help="what each rank runs")
    examines = command(doctor, "tf-poseidon doctor --hosts a,b")
    examines.add_argument("--hosts", "-hosts", type=_names, default=[], metavar="HOST,...",
                          help="other hosts of a job: can they be reached, and have they the same versions?")
    tests = command(selftest, "mpiexec -n 4 -hosts a,b tf-poseidon selftest")
    tests.add_argument("-n", type=_at_least(1), default=0, metavar="RANKS",
                       help="number of ranks to start, without mpiexec (2, or as many as hosts)")
    tests.add_argument("--hosts", "-hosts", type=_names, default=[], metavar="HOST,...",
                       help="where to start them, by default here")
    for launches in (starts, examines, tests):
        launches.add_argument("--mpiexec", default="", metavar="PATH",
                              help="the launcher, by default that of this Python")
    for runs in (rewrites, verifies, tests):
        runs.add_argument("--engine", choices=engines.names(), help="engine whose ops move gradients; by default "
                          "'mpi', and for verify and selftest that of the launcher")
    for runs in (rewrites, verifies):
        runs.add_argument("--train_op", type=_names, default=[], metavar="NAME,...",
                          help="ops that make a training step, of TensorFlow 1")
    return parser


def _add_planning(command: argparse.ArgumentParser) -> None:
    """Adds the options by which gradients are planned."""
    planned = command.add_argument_group("planning")
    planned.add_argument("--policy", choices=sorted(planning.POLICIES), default="auto",
                         help="rule that chooses how each gradient travels (%(default)s)")
    planned.add_argument("--pin", type=_pin, action="append", default=[], metavar="PATTERN=SCHEME",
                         help="scheme of variables whose paths match; may be given several times")
    planned.add_argument("--merge", action="store_true", help="whether small gradients travel together")
    planned.add_argument("--wire_dtype", choices=["bfloat16"], help="type to which wider gradients are rounded for "
                         "the wire")
    planned.add_argument("--json", metavar="FILE", help="file for the predictions, as JSON")
    planned.add_argument("--html", metavar="FILE", help="file for a page with figures, for a browser; needs plotly")
    cluster = command.add_argument_group("cluster")
    cluster.add_argument("--servers", type=_at_least(0), default=0,
                         help="number of ranks that hold KV pairs; 0 for all (0)")
    cluster.add_argument("--bandwidth_gbps", type=float, default=10.0, help="bandwidth at which a node sends, and "
                         "receives at the same time, in Gbit/s (%(default)s)")
    cluster.add_argument("--latency_us", type=float, default=50.0, help="latency of a message in µs (%(default)s)")
    cluster.add_argument("--gflops", type=float, default=1000.0, help="how fast a rank computes, in 10^9 operations/s "
                         "(%(default)s)")
    cluster.add_argument("--accelerators", action=argparse.BooleanOptionalAction, default=False,
                         help="whether ranks compute on accelerators, which exchanges do not slow down")
    cluster.add_argument("--ranks_per_node", type=_at_least(1), default=1,
                         help="how many ranks share a node and its link (%(default)s)")
    cluster.add_argument("--gpus_per_node", type=_at_least(1), default=1, help="how many ranks of a node have linked "
                         "GPUs: all that combine, or 1 for none (%(default)s)")
    cluster.add_argument("--gpu_link_gbps", type=float, default=0.0, help="rate at which a GPU gives to the others of "
                         "its node, and takes from them at the same time, in Gbit/s; 0 through the host (%(default)s)")


def _at_least(smallest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            fewer = " of fewer digits" if text.isdecimal() else ""
            raise argparse.ArgumentTypeError(f"{shown(text)}, expected a whole number{fewer}") from None
        if value < smallest:
            raise argparse.ArgumentTypeError(f"{value}, expected at least {smallest}")
        return value

    return number


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command of this process, and exits with its `Status`."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow logs several lines at startup
    parser = _parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        parser.print_help(sys.stderr)
        sys.exit(Status.MISTAKE)
    given = parser.parse_args(arguments)
    interrupts.note()
    try:
        if given.run not in (verify, run, selftest):
            _check_alone(given.command)
        status = given.run(given)
    except (PoseidonError, _Mistake) as error:
        print(f"tf-poseidon {given.command}: {error}", file=sys.stderr)
        status = Status.MISTAKE if isinstance(error, _Mistake) else Status.REFUSED
    except BaseException as error:
        if sys.excepthook is not sys.__excepthook__ or isinstance(error, SystemExit):
            raise  # a rank ends its job with the cause
        if interrupts.is_interrupt(error):
            print(f"tf-poseidon {given.command}: interrupted", file=sys.stderr)
            sys.exit(Status.INTERRUPTED)
        if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("tensorflow"):
            print(f"tf-poseidon {given.command}: TensorFlow is not installed; run pip install "
                  f"'tensorflow-cpu=={supported.TENSORFLOW_SERIES[-1]}.*'. `tf-poseidon doctor` says whether anything "
                  "else is missing.", file=sys.stderr)
            sys.exit(Status.REFUSED)
        traceback.print_exc()
        print(f"tf-poseidon {given.command}: this is an error of tf-poseidon itself; please report it with the lines "
              "above.", file=sys.stderr)
        status = Status.OWN_ERROR
    sys.exit(status)
