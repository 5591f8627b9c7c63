"""Rewrites saved training graphs, which know nothing of other ranks, so that they train on several."""

import collections
import contextlib
import dataclasses
import gc
import json
import os

from tf_poseidon import engines
from tf_poseidon import grappler
from tf_poseidon import planning
from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes import find_gradients
from tf_poseidon.graph_passes import saved
from tf_poseidon.graph_passes import strip as strip_lib
from tf_poseidon.saved_graphs import formats


@dataclasses.dataclass(frozen=True)
class Report:
    """What a rewritten graph exchanges. `print(report)` shows it.

    Attributes:
        plan: The `Plan` that it follows.
        synchronised: A (site, tensor, rule) for each gradient, and each state that is averaged: the tensor
            by the function that it is in and its name there, and "mean" or "sum".
        local: Why the variables that are updated, but not synchronised, need not be; by name.
    """

    plan: planning.Plan
    synchronised: tuple
    local: dict

    def __str__(self):
        width = max((len(s.site) for s in self.synchronised), default=0)
        lines = [str(self.plan), "", "what is taken over all ranks:"]
        for s in self.synchronised:
            also = f", which also updates {', '.join(s.also)}" if s.also else ""
            rows = ", the rows of all ranks by themselves" if s.is_gathered else ""
            lines.append(f"  {s.site:{width}}  {s.rule} of {s.tensor}{rows}{also}")
        by_reason = collections.defaultdict(list)
        for variable, reason in self.local.items():
            by_reason[reason].append(variable)
        if by_reason:
            lines.append("what stays as it is on each rank:")
        for reason, variables in by_reason.items():
            lines.append(f"  {', '.join(variables)}: {reason}")
        return "\n".join(lines)


def rewrite_saved_model(source, target, signature="train", **options):
    """Rewrites a SavedModel for several ranks.

    ```python
    print(poseidon.rewrite_saved_model("step", "step_for_4", workers=4, batch_size=32))
    ```

    Every rank then loads the result, after `poseidon.load_ops()`, and calls the same signature with its
    own rows: `rank, size = poseidon.load_ops()` says which these are.

    Args:
        source: The folder of a SavedModel with a signature that runs a training step: forward,
            backward, and the update of the variables.
        target: The folder to write; it must not exist.
        signature: Name of that signature.
        **options:
            workers: Number of ranks to plan for; any number can run the result. Needed without `plan`.
            batch_size: Rows of a full batch on each worker, K; needed to exchange factors where the graph
                leaves the number of rows open.
            bandwidth_gbps, latency_us, gflops, accelerators, servers, ranks_per_node: As of
                `poseidon.explain`.
            policy, pins, merge, wire_dtype, strict: As of `PoseidonStrategy`.
            engine: "mpi", the default, or "horovod": the result holds that engine's ops, and runs after
                `poseidon.load_ops(engine=...)` for it.
            plan: A `Plan`, or the file of one, to follow instead.
            rule: "mean" over ranks, where the loss is one over rows; "sum" where it is a sum.
            gradients: By variable, where the search fails: the name of its gradient's tensor, or a
                dictionary {"tensor": name, "rule": "mean" or "sum"}. Or a JSON file with that.
            progress: A function called with what is done next.

    Returns:
        A `Report`.

    Raises:
        PoseidonError: If the graph cannot be rewritten; nothing is written then.
    """
    return _rewrite(_of_kind(source, formats.SavedModel), target, signature, (), **options)


def rewrite_meta_graph(source, target, train_op=(), signature=None, **options):
    """Rewrites a MetaGraph of TensorFlow 1, with the checkpoint of the same name.

    Args:
        source: A file "PREFIX.meta"; the checkpoint PREFIX is copied if there is one.
        target: The file to write, "PREFIX.meta" too.
        train_op: Names of the ops that make a step; by default those of `signature`, or else of the
            collection "train_op", which optimizers fill.
        signature: Name of a signature.
        **options: As of `rewrite_saved_model`.

    Returns, Raises: As `rewrite_saved_model`.
    """
    return _rewrite(_of_kind(source, formats.MetaGraph), target, signature, train_op, **options)


def rewrite_graph_def(source, target, train_op, **options):
    """Rewrites a GraphDef.

    Whoever runs it gives all ranks the same initial values: only what a step assigns is kept equal.

    Args:
        source: A file of a GraphDef, .pb or .pbtxt.
        target: The file to write.
        train_op: Names of the ops that make a step.
        **options: As of `rewrite_saved_model`.

    Returns, Raises: As `rewrite_saved_model`.
    """
    if not train_op:
        raise PoseidonError("A GraphDef does not say what makes a training step; name its update ops: train_op.")
    return _rewrite(_of_kind(source, formats.GraphDef), target, None, train_op, **options)


def rewrite(source, target, signature=None, train_op=(), **options):
    """Rewrites whatever a path holds; arguments as those of the functions above."""
    graph = formats.read(source)
    if isinstance(graph, formats.GraphDef) and not train_op:
        raise PoseidonError(f"'{source}' does not say what makes a training step; name its update ops with "
                            "--train_op.")
    return _rewrite(graph, target, signature, train_op, **options)


def strip(source, target):
    """Writes the graph that a rewritten one was made of: the same, node for node.

    Raises:
        PoseidonError: If it was not rewritten.
    """
    graph = formats.read(source)
    if not strip_lib.is_rewritten(graph.graph_def):
        raise PoseidonError(f"'{source}' was not rewritten, so there is nothing to strip.")
    graph.graph_def.CopyFrom(strip_lib.strip(graph.graph_def))
    graph.write(target)


def _of_kind(path, kind):
    graph = formats.read(path)
    if not isinstance(graph, kind):
        raise PoseidonError(f"'{path}' is a {graph.kind}, expected a {kind.kind}.")
    return graph


def _rewrite(graph, target, signature, train_op, *, workers=None, batch_size=None, bandwidth_gbps=10.0,
             latency_us=50.0, gflops=1000.0, accelerators=False, servers=0, ranks_per_node=1,
             policy="auto", pins=None, merge=False, plan=None, rule="mean", gradients=None, wire_dtype=None,
             strict=False, engine=engines.DEFAULT, progress=lambda what: None):
    train_op = (train_op,) if isinstance(train_op, str) else train_op or ()
    if not isinstance(train_op, (list, tuple)) or not all(isinstance(name, str) for name in train_op):
        raise PoseidonError(f"train_op={train_op!r}, expected names of ops.")
    if rule not in find_gradients.RULES:
        raise PoseidonError(f"rule={rule!r}, expected 'mean' or 'sum'.")
    if wire_dtype not in (None, "bfloat16"):
        raise PoseidonError(f"wire_dtype={wire_dtype!r}, expected 'bfloat16' or None.")
    if engine not in engines.names():
        raise PoseidonError(f"engine={engine!r}, expected one of {', '.join(engines.names())}.")
    engine = engines.load(engine)
    engine.register_ops()
    for name, value, default in (("wire_dtype", wire_dtype, None), ("ranks_per_node", ranks_per_node, 1)):
        if value != default and engine.collective_ops:
            raise PoseidonError(f"{name}={value!r} is for the engine 'mpi' only; leave it away.")
    if batch_size is not None and (not isinstance(batch_size, int) or isinstance(batch_size, bool)
                                   or not 1 <= batch_size < 1 << 31):
        raise PoseidonError(f"batch_size={batch_size!r}, expected at least one row for each worker.")
    if not isinstance(pins or {}, dict):
        raise PoseidonError(f"pins={pins!r}, expected a dictionary of patterns and schemes.")
    if plan is not None:
        plan = plan if isinstance(plan, planning.Plan) else planning.Plan.load(plan)
        planner = planning.Planner(plan.cluster, given=plan)
    elif workers is None:
        raise PoseidonError("Neither a number of workers nor a plan is given; say for how many ranks to plan.")
    else:
        cluster = planning.Cluster(workers, servers, bandwidth_gbps, latency_us, gflops, accelerators,
                                   ranks_per_node)
        planner = planning.Planner(cluster, policy, tuple((pins or {}).items()), merge)
        planner.plan(())  # checks policy and pins before anything takes long
    given = _given(gradients, rule)
    if os.path.lexists(target):
        raise PoseidonError(f"'{target}' exists already; remove it, or name another.")
    if not graph.graph_def.node:
        raise PoseidonError(f"'{graph.path}' holds a graph without nodes; it is damaged, or another kind of file.")
    targets = graph.targets(signature, train_op)
    with _no_garbage():
        rewritten = saved.rewrite(graph.graph_def, targets, planner, grappler.add_shapes, batch_size, given, rule,
                                  wire_dtype, strict, progress, engine.collective_ops)
    graph.graph_def.CopyFrom(rewritten.graph_def)
    progress("writing files")
    graph.write(target)
    return Report(rewritten.plan, rewritten.synchronised, rewritten.local)


@contextlib.contextmanager
def _no_garbage():
    """While Python does not search for garbage: it takes a third of the time, and there is none in graphs."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _given(gradients, rule):
    """Returns what the user has decided: (tensor, rule) by variable."""
    if gradients is None:
        return {}
    if not isinstance(gradients, dict):
        if not isinstance(gradients, (str, os.PathLike)):
            raise PoseidonError(f"gradients={gradients!r}, expected a dictionary or the name of a file.")
        try:
            with open(gradients) as file:
                gradients = json.load(file)
        except (OSError, ValueError, RecursionError) as error:
            raise PoseidonError(f"The file of gradients '{gradients}' cannot be read: {error}; it is JSON, a "
                                "tensor's name for each variable's.") from error
    given = {}
    if not isinstance(gradients, dict):
        raise PoseidonError(f"The gradients are given as {gradients!r}, expected an object: a tensor's name for each "
                            "variable's.")
    for variable, value in gradients.items():
        entry = {"tensor": value} if isinstance(value, str) else value
        if not isinstance(variable, str) or not isinstance(entry, dict) or (
                not {"tensor"} <= set(entry) <= {"tensor", "rule"}) or not isinstance(entry["tensor"], str) or (
                entry.get("rule", rule) not in find_gradients.RULES):
            raise PoseidonError(f"The gradient of {variable!r} is given as {value!r}, expected a tensor's name, or "
                                "{'tensor': name, 'rule': 'mean' or 'sum'}.")
        given[variable] = entry["tensor"], entry.get("rule", rule)
    return given
