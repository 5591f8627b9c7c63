"""The command `tf-poseidon`.

    tf-poseidon explain MODEL.keras --batch_size 32 --workers 8 --bandwidth_gbps 10 --html plan.html
    tf-poseidon rewrite IN OUT --workers 4 --batch_size 32 --inputs x=rows,y=rows,rate=same
    tf-poseidon diff IN OUT
    tf-poseidon strip OUT BACK
    mpiexec -n 2 tf-poseidon verify IN OUT
    tf-poseidon run -n 4 --restarts 3 -- python train.py
    tf-poseidon emulate --hosts 4 --gbps 1 -- python train.py
    tf-poseidon doctor --hosts a,b
    mpiexec -n 4 -hosts a,b tf-poseidon selftest

Exit statuses are those of `Status`.

Tests: tests/saved/test_saved_commands.py, tests/training/test_explaining.py, tests/unit/test_interrupts.py.
"""

from collections.abc import Sequence
import os
import sys
import traceback
from typing import NoReturn

from tf_poseidon import supported
from tf_poseidon.base import files
from tf_poseidon.commands import arguments as arguments_lib
from tf_poseidon.commands import graph_commands
from tf_poseidon.commands import job_commands
from tf_poseidon.commands import startup_lines
from tf_poseidon.commands.status import IS_STARTED
from tf_poseidon.commands.status import Mistake
from tf_poseidon.commands.status import Status
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.errors import PoseidonError
from tf_poseidon.job.host import interrupts


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command of this process, and exits with its `Status`."""
    os.environ.setdefault(startup_lines.LEVEL, startup_lines.QUIET)  # TensorFlow logs several lines at startup
    parser = arguments_lib.parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        parser.print_help(sys.stderr)
        sys.exit(Status.MISTAKE)
    given = parser.parse_args(arguments)
    interrupts.note()
    try:
        if given.run not in (graph_commands.verify, job_commands.run, job_commands.selftest):
            _check_alone(given.command)
        status = given.run(given)
    except (PoseidonError, Mistake) as error:
        print(f"tf-poseidon {given.command}: {error}", file=sys.stderr)
        status = Status.MISTAKE if isinstance(error, Mistake) else Status.REFUSED
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        if sys.excepthook is not sys.__excepthook__:
            if runtime := sys.modules.get("tf_poseidon.job.runtime"):  # which loads TensorFlow
                runtime.fail_with(Status.OWN_ERROR)  # 1 is for what the command finds to be wrong
            raise  # a rank ends its job with the cause
        if interrupts.is_interrupt(error):
            print(f"tf-poseidon {given.command}: interrupted", file=sys.stderr)
            sys.exit(Status.INTERRUPTED)
        if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("tensorflow"):
            print(f"tf-poseidon {given.command}: TensorFlow is not installed; run pip install "
                  f"'tensorflow-cpu=={supported.TENSORFLOW_SERIES[-1]}.*'. `tf-poseidon doctor` says whether anything "
                  "else is missing.", file=sys.stderr)
            sys.exit(Status.REFUSED)
        if isinstance(error, FileNotFoundError) and (problem := files.no_temporary_folder()):
            print(f"tf-poseidon {given.command}: {problem}", file=sys.stderr)
            sys.exit(Status.REFUSED)
        traceback.print_exc()
        print(f"tf-poseidon {given.command}: this is an error of tf-poseidon itself; please report it with the lines "
              "above.", file=sys.stderr)
        status = Status.OWN_ERROR
    sys.exit(status)


def _check_alone(command: str) -> None:
    if (size := int(os.environ.get(IS_STARTED, 1))) > 1:
        raise ConfigurationError(f"{size} processes were started, but {command} runs in one; omit mpiexec.")
