"""The commands about training steps: explain, rewrite, diff, strip, verify.

TensorFlow is imported late, which takes seconds: errors in a command appear at once.

Tests: tests/saved/test_saved_commands.py, tests/training/test_explaining.py.
"""

import argparse
import dataclasses
import json
from typing import Any
from typing import TYPE_CHECKING
import zipfile

from tf_poseidon import planning
from tf_poseidon.base import files
from tf_poseidon.commands import command_files
from tf_poseidon.commands import startup_lines
from tf_poseidon.commands.status import Mistake
from tf_poseidon.commands.status import Status
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.explanations import plan_page
from tf_poseidon.job import engines
from tf_poseidon.options import PlanOptions

if TYPE_CHECKING:
    import numpy as np

# What to give instead of a file that does not exist.
_GRAPH = "give a SavedModel's directory, a MetaGraph (.meta) or a GraphDef (.pb)"


def explain(given: argparse.Namespace) -> Status:
    """Prints what a saved model would gain on several ranks, and how its gradients would travel."""
    PlanOptions(**_plan_options(given)).planner()  # which checks them
    command_files.check_output("--json", given.json)
    command_files.check_output("--plan", given.plan)
    command_files.check_report(given.html)
    command_files.check_source(given.model, "give explain a model that was saved with model.save('model.keras')")
    if given.model.endswith(".keras") and not zipfile.is_zipfile(given.model):
        raise ConfigurationError(f"'{given.model}' is not what model.save writes into a .keras file: it is damaged or "
                                 "incomplete, or another kind of file; save the model again.")
    from tf_poseidon.commands import progress
    with progress.shown() as show:
        from tf_poseidon.explanations import explaining
        show(f"loading {given.model}")
        model = explaining.load(given.model)
        show("tracing and planning a training step")
        advice = explaining.advise(model, given.batch_size, steps_per_execution=given.steps_per_execution,
                                   shard_update=given.shard_update, synchrony=given.synchrony, **_plan_options(given))
    plan = advice.plan
    if unmatched := planning.unmatched_pins(given.pin, plan):
        raise ConfigurationError(unmatched)
    with command_files.printing(plan if given.all else advice):
        command_files.save("--json", given.json, lambda: json.dumps(advice.predictions(), indent=1))
        command_files.save("--html", given.html, lambda: plan_page.html_report({"": plan}))
        if given.plan:
            plan.save(given.plan)
    return Status.DONE


def rewrite(given: argparse.Namespace) -> Status:
    """Rewrites a saved training step, and prints what it exchanges."""
    if given.workers is None and given.plan is None:
        raise Mistake("--workers is missing; give rewrite a number of --workers, and a --batch_size (rows "
                      "on each of them), or a --plan.")
    command_files.check_source(given.source, _GRAPH)
    plan = None
    if given.plan:
        command_files.check_source(given.plan, "give rewrite a plan that explain or Plan.save has written")
        plan = planning.Plan.load(given.plan)
    elif given.workers:
        PlanOptions(**_plan_options(given)).planner()  # which checks them
    command_files.check_target(given.target)
    command_files.check_output("--json", given.json)
    command_files.check_report(given.html)
    from tf_poseidon.commands import progress
    with progress.shown() as show:
        from tf_poseidon.saved_graphs import rewriting
        report = rewriting.rewrite(
            given.source, given.target, given.signature or None, given.train_op, batch_size=given.batch_size, plan=plan,
            inputs=dict(mark for marks in given.inputs for mark in marks), engine=given.engine or engines.DEFAULT,
            progress=show, **_plan_options(given))
    plans = {name: step.plan for name, step in report.steps.items()}
    predictions = {name: plan.predictions() for name, plan in plans.items()}
    with command_files.printing(report):
        command_files.save("--json", given.json,
                           lambda: json.dumps(predictions if len(plans) > 1 else report.plan.predictions(), indent=1))
        command_files.save("--html", given.html, lambda: plan_page.html_report(plans))
    return Status.DONE


def diff(given: argparse.Namespace) -> Status:
    """Prints what was inserted into a rewritten graph."""
    command_files.check_source(given.source, _GRAPH)
    command_files.check_source(given.target, _GRAPH)
    with startup_lines.left_out():
        from tf_poseidon.saved_graphs import differences
    difference = differences.diff(given.source, given.target)
    with command_files.printing(difference):
        pass
    return Status.DIFFERS if difference.others else Status.DONE


def strip(given: argparse.Namespace) -> Status:
    """Writes the original of a rewritten graph."""
    command_files.check_source(given.source, _GRAPH)
    command_files.check_target(given.target)
    with startup_lines.left_out():
        from tf_poseidon.saved_graphs import rewriting
    rewriting.strip(given.source, given.target)
    return Status.DONE


def verify(given: argparse.Namespace) -> Status:
    """Compares a rewritten graph, on the ranks that mpiexec has started, with the original in one process."""
    command_files.check_source(given.source, _GRAPH)
    command_files.check_source(given.target, _GRAPH)
    arrays = _arrays(given.arrays)
    import tensorflow as tf

    # One thread: several may sum in a different order every time.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # TensorFlow warns about gradients of loaded functions, which this program never takes.
    tf.get_logger().setLevel("ERROR")
    from tf_poseidon.saved_graphs import load_ops
    from tf_poseidon.saved_graphs import verifying
    verification = verifying.verify(
        given.source, given.target, signature=given.signature, train_op=given.train_op, initializer=given.initializer,
        batch_size=given.batch_size, steps=given.steps, inputs=arrays, seed=given.seed, engine=given.engine)
    if load_ops.load_ops(given.engine).rank == 0:
        with command_files.printing(verification):
            pass
    return Status.DIFFERS if verification.failures else Status.DONE


def _plan_options(given: argparse.Namespace) -> dict[str, Any]:
    """Returns the values of the `PlanOptions`, by name."""
    return {field.name: dict(given.pin) if field.name == "pins" else getattr(given, field.name)
            for field in dataclasses.fields(PlanOptions)}


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
