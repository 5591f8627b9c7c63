"""The arguments of all commands.

Tests: tests/saved/test_saved_commands.py, tests/unit/test_options.py.
"""

import argparse
from collections.abc import Callable
import importlib.metadata

from tf_poseidon import planning
from tf_poseidon.commands import emulation_command
from tf_poseidon.commands import graph_commands
from tf_poseidon.commands import job_commands
from tf_poseidon.commands import status
from tf_poseidon.emulation import emulated_cluster
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.errors import shown
from tf_poseidon.job import engines
from tf_poseidon.staleness import bounds


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands; what it returns has the function of the command as `run`."""
    all_commands = argparse.ArgumentParser(
        "tf-poseidon", description="Plans, rewrites and checks training steps for several processes.",
        epilog="`tf-poseidon COMMAND --help` describes a command. TF_POSEIDON_... variables give options of the\n"
               "strategy defaults, and choose logs and ports (docs/clusters.md); `tf-poseidon doctor` lists those that "
               f"are set.\n{status.STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    all_commands.add_argument("--version", action="version", version=importlib.metadata.version("tf_poseidon"))
    commands = all_commands.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(runs: Callable[[argparse.Namespace], int], example: str,
                *positional: tuple[str, str, str]) -> argparse.ArgumentParser:
        added = commands.add_parser(
            runs.__name__, help=runs.__doc__, description=runs.__doc__, allow_abbrev=False,
            epilog=f"example:\n  {example}\n\n{status.STATUSES}", formatter_class=argparse.RawDescriptionHelpFormatter)
        for name, metavar, what in positional:
            added.add_argument(name, metavar=metavar, help=what)
        added.set_defaults(run=runs, command=runs.__name__)
        return added

    graph = "a SavedModel, MetaGraph (.meta) or GraphDef (.pb)"
    explains = command(graph_commands.explain,
                       "tf-poseidon explain model.keras --batch_size 32 --workers 8 --bandwidth_gbps 10",
                       ("model", "MODEL.keras", "a model that model.save has written"))
    explains.add_argument("--batch_size", type=_at_least(1), required=True, help="rows of a full batch on each worker")
    explains.add_argument("--workers", type=_at_least(1), required=True, help="number of ranks")
    explains.add_argument("--shard_update", action="store_true", help="whether each rank updates a part of every "
                          "variable, and holds that part of the optimizer's")
    explains.add_argument("--synchrony", type=_synchrony, default=bounds.BSP, metavar="BOUNDS",
                          help="how stale the weights may be that ranks read: ssp:STALENESS or dssp:LOWER,UPPER "
                          "(%(default)s: not at all)")
    explains.add_argument("--steps_per_execution", type=_at_least(1), default=1,
                          help="same as in compile: how many steps may overlap (%(default)s)")
    explains.add_argument("--all", action="store_true", help="whether to print all gradients, with reasons")
    explains.add_argument("--plan", help="file for the plan, which PoseidonStrategy and rewrite can follow")
    rewrites = command(graph_commands.rewrite, "tf-poseidon rewrite step step_for_4 --workers 4 --batch_size 32",
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
    command(graph_commands.diff, "tf-poseidon diff step step_for_4", ("source", "IN", "the original"),
            ("target", "OUT", "the rewritten one"))
    command(graph_commands.strip, "tf-poseidon strip step_for_4 back", ("source", "OUT", "a rewritten training step"),
            ("target", "BACK", "its original"))
    verifies = command(graph_commands.verify, "mpiexec -n 2 tf-poseidon verify step step_for_4",
                       ("source", "IN", "the original"), ("target", "OUT", "the rewritten one"))
    verifies.add_argument("--batch_size", type=_at_least(1), default=4, help="rows of a batch per rank (%(default)s)")
    verifies.add_argument("--steps", type=_at_least(1), default=2, help="number of steps to run (%(default)s)")
    verifies.add_argument("--signature", help="the signature to run, by default 'train' if it exists")
    verifies.add_argument("--arrays", metavar="FILE.npz", help="file of numpy.savez: the global batch, an array per "
                          "input, by its name; random numbers by default")
    verifies.add_argument("--seed", type=_at_least(0), default=0, help="seed of these random numbers (%(default)s)")
    verifies.add_argument("--initializer", type=_names, default=[], metavar="NAME,...",
                          help="ops that initialise variables")
    starts = command(job_commands.run, "tf-poseidon run -n 4 --hosts a,b --restarts 3 -- python train.py")
    starts.add_argument("-n", type=_at_least(1), default=1, metavar="RANKS", help="number of ranks (%(default)s)")
    starts.add_argument("--hosts", "-hosts", type=_names, default=[], metavar="HOST,...",
                        help="where they run, by default here; each host takes an equal part")
    starts.add_argument("--restarts", type=_at_least(0), default=0, metavar="TIMES",
                        help="how often the job may be started again, without hosts that are gone; the program resumes "
                        "where its BackupAndRestore has written (%(default)s). TF_POSEIDON_RESTARTS tells it how often "
                        "it was")
    starts.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ...", help="what each rank runs")
    emulates = command(emulation_command.emulate, "tf-poseidon emulate --hosts 4 --gbps 1 -- python train.py")
    emulates.add_argument("--hosts", type=_at_least(1), default=4, help="number of hosts (%(default)s)")
    emulates.add_argument("--gbps", type=_names, default=["1"], metavar="RATE,...", help="rate of their links in each "
                          "direction, Gbit/s: one for all, or one for each host (1)")
    emulates.add_argument("--ranks_per_host", type=_at_least(1), default=1,
                          help="number of ranks on each (%(default)s)")
    emulates.add_argument("--delay_us", type=_at_least(0), default=0, help="delay of each link in each direction, in "
                          "µs; a message passes two links (%(default)s)")
    emulates.add_argument("--loss", type=float, default=0.0, help="share of packets that each link drops in each "
                          "direction, in %%, at random (%(default)s)")
    emulates.add_argument("--launcher", choices=emulated_cluster.LAUNCHERS, default="mpiexec", help="what starts the "
                          "program: horovodrun for one of Horovod, over Gloo; mwms for one of tf.distribute's "
                          "MultiWorkerMirroredStrategy, which finds TF_CONFIG (%(default)s)")
    emulates.add_argument("--json", metavar="FILE", help="file for bytes, time and exit status")
    emulates.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ...", help="what each rank runs")
    examines = command(job_commands.doctor, "tf-poseidon doctor --hosts a,b")
    examines.add_argument("--hosts", "-hosts", type=_names, default=[], metavar="HOST,...",
                          help="other hosts of a job: can they be reached, and have they the same versions?")
    tests = command(job_commands.selftest, "mpiexec -n 4 -hosts a,b tf-poseidon selftest")
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
    return all_commands


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
    cluster.add_argument("--dedicated_servers", type=_at_least(0), default=0,
                         help="number of ranks that only serve, in addition to the workers (0)")
    cluster.add_argument("--network", choices=list(planning.NETWORKS), help="a network by name, in place of "
                         "--bandwidth_gbps and --latency_us")
    cluster.add_argument("--accelerator", choices=list(planning.ACCELERATORS), help="an accelerator by name, in place "
                         "of --gflops and --accelerators: its rate in training")
    cluster.add_argument("--bandwidth_gbps", type=float, help="bandwidth at which a node sends, and receives at the "
                         f"same time, in Gbit/s ({planning.Cluster.bandwidth_gbps:g})")
    cluster.add_argument("--latency_us", type=float,
                         help=f"latency of a message in µs ({planning.Cluster.latency_us:g})")
    cluster.add_argument("--gflops", type=float, help="how fast a rank computes, in 10^9 operations/s "
                         f"({planning.Cluster.gflops:g})")
    cluster.add_argument("--accelerators", action=argparse.BooleanOptionalAction, default=None,
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


def _pin(text: str) -> tuple[str, str]:
    pattern, separator, scheme = text.rpartition("=")
    schemes = (*planning.SCHEMES, planning.COLUMNS)
    if not separator or scheme not in schemes:
        raise argparse.ArgumentTypeError(f"'{text}', expected PATTERN=SCHEME, such as '*/embeddings=ps', with a scheme "
                                         f"of {', '.join(schemes)}")
    return pattern, scheme


def _synchrony(text: str) -> str | bounds.Synchrony:
    try:
        return bounds.from_text(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from None


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
