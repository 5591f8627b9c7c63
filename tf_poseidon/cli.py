"""The command `tf-poseidon`.

    tf-poseidon explain MODEL.keras --batch_size 32 --workers 8 --bandwidth_gbps 10
"""

import json
import os
import sys

from absl import app
from absl import flags

from tf_poseidon import planning
from tf_poseidon.errors import PoseidonError

_BATCH_SIZE = flags.DEFINE_integer("batch_size", None, "Rows of a full batch on each worker.")
_WORKERS = flags.DEFINE_integer("workers", None, "Number of ranks.")
_SERVERS = flags.DEFINE_integer("servers", 0, "Number of ranks that hold KV pairs; 0 for all.")
_BANDWIDTH = flags.DEFINE_float("bandwidth_gbps", 10.0,
                                "What a rank sends, and receives at the same time, in Gbit/s.")
_LATENCY = flags.DEFINE_float("latency_us", 50.0, "Latency of a message in microseconds.")
_GFLOPS = flags.DEFINE_float("gflops", 1000.0, "How fast a rank computes, in 10^9 operations/s.")
_POLICY = flags.DEFINE_enum("policy", "auto", ["auto", "paper", "ps", "sfb"],
                            "What chooses how each gradient travels.")
_PINS = flags.DEFINE_multi_string("pin", [], "PATTERN=SCHEME: decides the variables whose paths fit "
                                  "the pattern; may be given several times.")
_WIRE_DTYPE = flags.DEFINE_enum("wire_dtype", None, ["bfloat16"],
                                "What wider gradients are rounded to on their way.")
_JSON = flags.DEFINE_string("json", None, "File for the predictions, as JSON.")
_PLAN = flags.DEFINE_string("plan", None, "File for the plan, which PoseidonStrategy(plan=...) takes.")


def explain(path):
    """Prints how the gradients of a saved model would travel."""
    for flag in (_BATCH_SIZE, _WORKERS):
        if flag.value is None:
            raise PoseidonError(f"--{flag.name} is missing; give explain a --batch_size (rows on each "
                                "worker) and a number of --workers.")
    pins = {}
    for pin in _PINS.value:
        pattern, separator, scheme = pin.rpartition("=")
        if not separator:
            raise PoseidonError(f"--pin={pin}, expected PATTERN=SCHEME, such as '*/embeddings=ps'.")
        pins[pattern] = scheme
    planning.Cluster(_WORKERS.value, _SERVERS.value, _BANDWIDTH.value, _LATENCY.value, _GFLOPS.value)
    for flag in (_JSON, _PLAN):
        if flag.value and not os.access(os.path.dirname(flag.value) or ".", os.W_OK):
            raise PoseidonError(f"--{flag.name}={flag.value} cannot be written; name a file in a folder "
                                "that exists.")
    if not os.path.exists(path):
        raise PoseidonError(f"There is no file '{path}'; give explain a model that was saved with "
                            "model.save('model.keras').")
    # Late: it imports TensorFlow, which takes seconds, and mistakes in the command should not.
    from tf_poseidon.keras_hook import explaining
    plan = explaining.explain(
        explaining.load(path), _BATCH_SIZE.value, _WORKERS.value, _BANDWIDTH.value, policy=_POLICY.value,
        servers=_SERVERS.value, latency_us=_LATENCY.value, gflops=_GFLOPS.value, pins=pins,
        wire_dtype=_WIRE_DTYPE.value)
    print(plan)
    if _JSON.value:
        with open(_JSON.value, "w") as file:
            json.dump(plan.predictions(), file, indent=1)
    if _PLAN.value:
        plan.save(_PLAN.value)


_COMMANDS = {"explain": explain}


def _main(arguments):
    if len(arguments) != 3 or arguments[1] not in _COMMANDS:
        raise app.UsageError("tf-poseidon explain MODEL.keras --batch_size K --workers P "
                             "[--bandwidth_gbps B] [--policy auto|paper|ps|sfb] [--json FILE] "
                             "[--plan FILE]")
    try:
        _COMMANDS[arguments[1]](arguments[2])
    except PoseidonError as error:
        print(f"tf-poseidon {arguments[1]}: {error}", file=sys.stderr)
        return 1
    return 0


def main():
    """Runs the command that the process was started with."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow greets in several lines
    app.run(_main)


if __name__ == "__main__":
    main()
