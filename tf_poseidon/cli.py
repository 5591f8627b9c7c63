"""The command `tf-poseidon`.

    tf-poseidon explain MODEL.keras --batch_size 32 --workers 8 --bandwidth_gbps 10
    tf-poseidon rewrite IN OUT --workers 4 --batch_size 32 --inputs x=rows,y=rows,rate=same
    tf-poseidon diff IN OUT
    tf-poseidon strip OUT BACK
    mpiexec -n 2 tf-poseidon verify IN OUT
"""

from collections.abc import Mapping
from collections.abc import Sequence
import json
import os
import sys
from typing import Any
from typing import TYPE_CHECKING
import zipfile

from absl import app
from absl import flags
from absl import logging

from tf_poseidon import engines
from tf_poseidon import planning
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.errors import PoseidonError

if TYPE_CHECKING:
    import numpy as np

_BATCH_SIZE = flags.DEFINE_integer("batch_size", None, "Rows of a full batch on each worker; batches of verify have "
                                  "as many per rank, 4 by default.")
_WORKERS = flags.DEFINE_integer("workers", None, "Number of ranks.")
_SERVERS = flags.DEFINE_integer("servers", 0, "Number of ranks that hold KV pairs; 0 for all.")
_BANDWIDTH = flags.DEFINE_float("bandwidth_gbps", 10.0,
                                "Bandwidth at which a node sends, and receives at the same time, in Gbit/s.")
_LATENCY = flags.DEFINE_float("latency_us", 50.0, "Latency of a message in microseconds.")
_GFLOPS = flags.DEFINE_float("gflops", 1000.0, "How fast a rank computes, in 10^9 operations/s.")
_ACCELERATORS = flags.DEFINE_bool("accelerators", False, "Whether ranks compute on accelerators, which "
                                   "exchanges do not slow down.")
_RANKS_PER_NODE = flags.DEFINE_integer("ranks_per_node", 1, "How many ranks share a node and its link.")
_POLICY = flags.DEFINE_enum("policy", "auto", sorted(planning.POLICIES),
                            "The rule that chooses how each gradient travels.")
_PINS = flags.DEFINE_multi_string("pin", [], "PATTERN=SCHEME: the scheme of variables whose paths match "
                                  "the pattern; may be given several times.")
_WIRE_DTYPE = flags.DEFINE_enum("wire_dtype", None, ["bfloat16"],
                                "Type to which wider gradients are rounded for the wire.")
_ENGINE = flags.DEFINE_enum("engine", None, engines.names(),
                            "Engine whose ops rewrite inserts and verify runs; by default 'mpi', or that of the "
                            "launcher.")
_JSON = flags.DEFINE_string("json", None, "File for the predictions, as JSON.")
_PLAN = flags.DEFINE_string("plan", None, "File of the plan: explain writes it, rewrite follows it.")
_MERGE = flags.DEFINE_bool("merge", False, "Whether small gradients travel together.")
_SIGNATURE = flags.DEFINE_list("signature", [], "Signature that runs a training step, by default 'train' if it exists; "
                               "rewrite takes several, separated by commas.")
_TRAIN_OP = flags.DEFINE_list("train_op", [], "Names of the ops that make a training step, of TensorFlow 1.")
_INPUTS = flags.DEFINE_multi_string("inputs", [], "NAME=rows, NAME=same or NAME=DIMENSION, separated by commas: which "
                                    "inputs rewrite takes to have rows, and in which dimension; by default those whose "
                                    "first dimension is unknown")
_STEPS = flags.DEFINE_integer("steps", 2, "Number of steps that verify runs.", lower_bound=1)
_ARRAYS = flags.DEFINE_string("arrays", None, "File of numpy.savez for verify: the global batch, an array per input, "
                              "by its name; random numbers by default.")
_INITIALIZER = flags.DEFINE_list("initializer", [], "Names of ops that initialise variables, for verify.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the random inputs of verify.", lower_bound=0)


def explain(path: str) -> None:
    """Prints how the gradients of a saved model would travel."""
    for flag in (_BATCH_SIZE, _WORKERS):
        if flag.value is None:
            raise ConfigurationError(f"--{flag.name} is missing; give explain a --batch_size (rows on each "
                                     "worker) and a number of --workers.")
    pins = _pins()
    planning.Cluster(_WORKERS.value, _SERVERS.value, _BANDWIDTH.value, _LATENCY.value, _GFLOPS.value,
                     _ACCELERATORS.value, _RANKS_PER_NODE.value)
    for flag in (_JSON, _PLAN):
        if flag.value and not os.access(os.path.dirname(flag.value) or ".", os.W_OK):
            raise ConfigurationError(f"--{flag.name}={flag.value} cannot be written; name a file in a directory "
                                     "that exists.")
    if not os.path.exists(path):
        raise ConfigurationError(f"There is no file '{path}'; give explain a model that was saved with "
                                 "model.save('model.keras').")
    # Late: it imports TensorFlow, which takes seconds; errors in the command should appear at once.
    from tf_poseidon.keras_hook import explaining
    plan = explaining.explain(
        explaining.load(path), _BATCH_SIZE.value, _WORKERS.value, _BANDWIDTH.value, policy=_POLICY.value,
        servers=_SERVERS.value, latency_us=_LATENCY.value, gflops=_GFLOPS.value,
        accelerators=_ACCELERATORS.value, ranks_per_node=_RANKS_PER_NODE.value, pins=pins,
        wire_dtype=_WIRE_DTYPE.value, merge=_MERGE.value)
    print(plan)
    _save_predictions(plan.predictions())
    if _PLAN.value:
        plan.save(_PLAN.value)


def rewrite(source: str, target: str) -> None:
    """Rewrites a saved training graph, and prints its exchanges."""
    if _WORKERS.value is None and _PLAN.value is None:
        raise ConfigurationError("--workers is missing; give rewrite a number of --workers, and a --batch_size (rows "
                                 "on each of them), or a --plan.")
    if not os.path.exists(source):
        raise ConfigurationError(f"There is no file '{source}'; give rewrite a SavedModel, MetaGraph or GraphDef.")
    pins, inputs = _pins(), _inputs()
    from tf_poseidon.saved_graphs import progress
    from tf_poseidon.saved_graphs import rewriting
    with progress.shown() as show:
        report = rewriting.rewrite(
            source, target, _SIGNATURE.value or None, _TRAIN_OP.value, workers=_WORKERS.value,
            batch_size=_BATCH_SIZE.value, bandwidth_gbps=_BANDWIDTH.value, latency_us=_LATENCY.value,
            gflops=_GFLOPS.value, accelerators=_ACCELERATORS.value, servers=_SERVERS.value,
            ranks_per_node=_RANKS_PER_NODE.value, policy=_POLICY.value, pins=pins, merge=_MERGE.value,
            plan=_PLAN.value, inputs=inputs, wire_dtype=_WIRE_DTYPE.value,
            engine=_ENGINE.value or engines.DEFAULT, progress=show)
    print(report)
    plans = {name: step.plan.predictions() for name, step in report.steps.items()}
    _save_predictions(plans if len(plans) > 1 else report.plan.predictions())


def diff(source: str, target: str) -> int:
    """Prints what was inserted into a rewritten graph."""
    from tf_poseidon.saved_graphs import differences
    difference = differences.diff(source, target)
    print(difference)
    return 1 if difference.others else 0


def strip(source: str, target: str) -> None:
    """Writes the original of a rewritten graph."""
    from tf_poseidon.saved_graphs import rewriting
    rewriting.strip(source, target)


def verify(source: str, target: str) -> int:
    """Compares a rewritten graph, on the ranks that mpiexec has started, with the original in one process."""
    if len(_SIGNATURE.value) > 1:
        raise ConfigurationError(f"--signature={','.join(_SIGNATURE.value)} names {len(_SIGNATURE.value)} signatures, "
                                 "expected one; verify them one by one.")
    arrays = _arrays()
    import tensorflow as tf
    # One thread: several may sum in a different order every time.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # TensorFlow warns about gradients of loaded functions, which this program never takes.
    logging.set_verbosity(logging.ERROR)
    from tf_poseidon import job
    from tf_poseidon.saved_graphs import verifying
    found = verifying.verify(source, target, next(iter(_SIGNATURE.value), None), _TRAIN_OP.value,
                             _INITIALIZER.value, _BATCH_SIZE.value or 4, _STEPS.value, arrays, _SEED.value,
                             _ENGINE.value)
    if job.load_ops(_ENGINE.value).rank == 0:
        print(found)
    return 1 if found.failures else 0


def _pins() -> dict[str, str]:
    pins = {}
    for pin in _PINS.value:
        pattern, separator, scheme = pin.rpartition("=")
        if not separator:
            raise ConfigurationError(f"--pin={pin}, expected PATTERN=SCHEME, such as '*/embeddings=ps'.")
        pins[pattern] = scheme
    return pins


def _inputs() -> dict[str, str | int]:
    inputs = {}
    for given in _INPUTS.value:
        for text in given.split(","):
            name, _, mark = text.rpartition("=")
            if not name or mark not in ("rows", "same") and not mark.isdecimal():
                raise ConfigurationError(f"--inputs={text}, expected NAME=rows, NAME=same or NAME=DIMENSION, such as "
                                         "'x=rows'.")
            inputs[name] = int(mark) if mark.isdecimal() else mark
    return inputs


def _arrays() -> "dict[str, np.ndarray] | None":
    if _ARRAYS.value is None:
        return None
    import numpy as np
    try:
        with np.load(_ARRAYS.value) as arrays:  # an .npy has one, without a name
            return dict(arrays)
    except (OSError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise ConfigurationError(f"--arrays={_ARRAYS.value} cannot be read as a file of numpy.savez: "
                                 f"{str(error).splitlines()[0].rstrip('.')}; write it with numpy.savez.") from error


def _save_predictions(predictions: Mapping[str, Any]) -> None:
    if _JSON.value:
        with open(_JSON.value, "w") as file:
            json.dump(predictions, file, indent=1)


# The commands, with their arguments.
_COMMANDS = {explain: ("MODEL.keras",), rewrite: ("IN", "OUT"), diff: ("IN", "OUT"), strip: ("OUT", "BACK"),
             verify: ("IN", "OUT")}


def _main(arguments: Sequence[str]) -> int:
    commands = {command.__name__: command for command in _COMMANDS}
    command = commands.get(arguments[1]) if len(arguments) > 1 else None
    if command is None or len(arguments) - 2 != len(_COMMANDS[command]):
        usages = [f"tf-poseidon {c.__name__} {' '.join(takes)}" for c, takes in _COMMANDS.items()
                  if command in (None, c)]
        raise app.UsageError("; ".join(usages) + "; tf-poseidon --help shows all flags")
    try:
        return command(*arguments[2:]) or 0
    except PoseidonError as error:
        print(f"tf-poseidon {arguments[1]}: {error}", file=sys.stderr)
        return 1


def main() -> None:
    """Runs the command of this process."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow logs several lines at startup
    if __name__ != "__main__":  # absl's help describes the main module
        sys.modules["__main__"].__doc__ = __doc__
        for flag in flags.FLAGS.get_key_flags_for_module(__name__):
            flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    app.run(_main)


if __name__ == "__main__":
    main()
