"""Rewrites saved training graphs of one process so that they train on several ranks.

Tests: tests/saved/test_saved_graphs.py, tests/saved/test_saved_damage.py.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import os
from typing import Any
from typing import TypeVar

from tf_poseidon import grappler
from tf_poseidon import planning
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.graph import garbage
from tf_poseidon.graph_passes.saved import rewritten_steps
from tf_poseidon.graph_passes.saved import strip as strip_lib
from tf_poseidon.job import engines
from tf_poseidon.ops import library
from tf_poseidon.options import check_divides_nothing
from tf_poseidon.options import PlanOptions
from tf_poseidon.saved_graphs import formats

S = TypeVar("S", bound=formats.Saved)


@dataclasses.dataclass(frozen=True)
class RewriteReport:
    """The exchanges of a rewritten graph. `print(report)` shows them.

    Attributes:
        steps: The `graph_passes.saved.rewritten_steps.RewrittenStep`s by name: that of a signature, or "train_op".
    """

    steps: dict[str, rewritten_steps.RewrittenStep]

    @property
    def plan(self) -> planning.Plan:
        """The `Plan` of the first step."""
        return next(iter(self.steps.values())).plan

    def __str__(self) -> str:
        if len(self.steps) == 1:
            return str(next(iter(self.steps.values())))
        return "\n\n".join(f"{name}:\n{step}" for name, step in self.steps.items())


def rewrite_saved_model(source: str | os.PathLike[str], target: str | os.PathLike[str],
                        signature: str | Sequence[str] = "train", **options: Any) -> RewriteReport:
    """Rewrites a SavedModel for several ranks.

    ```python
    print(poseidon.rewrite_saved_model("step", "step_for_4", workers=4, batch_size=32))
    ```

    Every rank then loads the result, after `poseidon.load_ops()`, and calls the same signature with the same
    global batch, as one process would; each rank computes its rows.

    Args:
        source: The directory of a SavedModel with a signature that runs a training step: forward,
            backward, and the update of the variables.
        target: The directory to write; it must not exist.
        signature: Name of that signature, or a list of several.
        **options: How to rewrite it, by name:

            * `workers`: Number of ranks to plan for; any number can run the result. Required without `plan`.
            * `inputs`: Which inputs have rows, by name: "rows", "same", or the dimension of the rows. By
              default those whose first dimension is unknown; if there are none, all that have a
              dimension, if their first ones are the same.
            * `batch_size`: Rows of a full batch on each worker, K; factors are exchanged only if it is known.
            * `bandwidth_gbps`, `latency_us`, `gflops`, `accelerators`, `servers`, `ranks_per_node`, `gpus_per_node`,
              `gpu_link_gbps`, `dedicated_servers`, `network`, `accelerator`: Same as in `poseidon.explain`.
            * `policy`, `pins`, `merge`, `wire_dtype`, `strict`: Same as in `PoseidonStrategy`.
            * `engine`: "mpi", the default, or "horovod": the result contains that engine's ops, and runs after
              `poseidon.load_ops(engine=...)` for it.
            * `plan`: A `Plan`, or its file, to follow instead; for a single step only.
            * `progress`: A function that is called with the name of each phase.

    Returns:
        A `RewriteReport`.

    Raises:
        PoseidonError: If the graph cannot be rewritten; nothing is written then.
    """
    return _rewrite(_of_kind(source, formats.SavedModel), target, signature, (), SavedGraphOptions(**options))


def rewrite_meta_graph(source: str | os.PathLike[str], target: str | os.PathLike[str],
                       train_op: str | Sequence[str] = (), signature: str | Sequence[str] | None = None,
                       **options: Any) -> RewriteReport:
    """Rewrites a MetaGraph of TensorFlow 1, with the checkpoint of the same name.

    Args:
        source: A file "PREFIX.meta"; the checkpoint PREFIX is copied if there is one.
        target: The file to write, "PREFIX.meta" too.
        train_op: Names of the ops, or tensors, that make a step; by default those of `signature`, or else of
            the collection "train_op", which optimizers fill. Everything else that the program fetches keeps
            its name, and the value that it has in one process.
        signature: Name of a signature, or a list of several.
        **options: Same as in `rewrite_saved_model`.

    Returns:
        A `RewriteReport`.

    Raises:
        PoseidonError: If the graph cannot be rewritten; nothing is written then.
    """
    return _rewrite(_of_kind(source, formats.MetaGraph), target, signature, train_op, SavedGraphOptions(**options))


def rewrite_graph_def(source: str | os.PathLike[str], target: str | os.PathLike[str], train_op: str | Sequence[str],
                      **options: Any) -> RewriteReport:
    """Rewrites a GraphDef.

    The program that runs it must give all ranks the same initial values: only values that a step assigns are kept
    equal.

    Args:
        source: A file of a GraphDef, .pb or .pbtxt.
        target: The file to write.
        train_op: Names of the ops that make a step.
        **options: Same as in `rewrite_saved_model`.

    Returns:
        A `RewriteReport`.

    Raises:
        PoseidonError: If the graph cannot be rewritten; nothing is written then.
    """
    if not train_op:
        raise GraphError("A GraphDef does not say what makes a training step; name its update ops: train_op.")
    return _rewrite(_of_kind(source, formats.GraphDef), target, None, train_op, SavedGraphOptions(**options))


def rewrite(source: str | os.PathLike[str], target: str | os.PathLike[str],
            signature: str | Sequence[str] | None = None, train_op: str | Sequence[str] = (),
            **options: Any) -> RewriteReport:
    """Rewrites a graph of any kind; arguments as in the functions above."""
    graph = formats.read(source)
    if isinstance(graph, formats.GraphDef) and not train_op:
        raise GraphError(f"'{source}' does not say what makes a training step; name its update ops with "
                         "--train_op.")
    return _rewrite(graph, target, signature, train_op, SavedGraphOptions(**options))


def strip(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Writes the original of a rewritten graph: the same, node for node.

    Raises:
        PoseidonError: If it was not rewritten.
    """
    graph = formats.read(source)
    graph.check_target(target)
    if not strip_lib.is_rewritten(graph.graph_def):
        raise GraphError(f"'{source}' was not rewritten, so there is nothing to strip.")
    graph.graph_def.CopyFrom(strip_lib.strip(graph.graph_def))
    graph.write(target)


def _of_kind(path: str | os.PathLike[str], kind: type[S]) -> S:
    graph = formats.read(path)
    if not isinstance(graph, kind):
        raise ConfigurationError(f"'{path}' is a {graph.kind}, expected a {kind.kind}.")
    return graph


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedGraphOptions(PlanOptions):
    """How a saved graph is rewritten.

    Attributes:
        batch_size, plan, inputs, strict, engine, progress: Same as in `rewrite_saved_model`.

    Raises:
        ConfigurationError: If a value is out of range, or not possible with the engine.
    """

    batch_size: int | None = None
    plan: planning.Plan | str | os.PathLike[str] | None = None
    inputs: Mapping[str, str | int] | None = None
    strict: bool = False
    engine: str = engines.DEFAULT
    progress: Callable[[str], object] = lambda what: None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine not in engines.names():
            raise ConfigurationError(f"engine={self.engine!r}, expected one of {', '.join(engines.names())}.")
        for name, default in (("wire_dtype", None), ("ranks_per_node", 1), ("gpus_per_node", 1)):
            if getattr(self, name) != default and engines.load(self.engine).writer.has_to_agree:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r} is for the engine 'mpi' only; omit it.")
        if self.batch_size is not None and (not isinstance(self.batch_size, int) or isinstance(self.batch_size, bool)
                                            or not 1 <= self.batch_size < 1 << 31):
            raise ConfigurationError(f"batch_size={self.batch_size!r}, expected a whole number, at least one row per "
                                     "worker.")
        if not isinstance(self.inputs or {}, Mapping):
            raise ConfigurationError(f"inputs={self.inputs!r}, expected a dictionary: 'rows', 'same' or a dimension "
                                     "per name.")
        if self.plan is not None and not isinstance(self.plan, planning.Plan):
            object.__setattr__(self, "plan", planning.Plan.load(self.plan))
        check_divides_nothing((self.pins or {}).items(), self.plan if isinstance(self.plan, planning.Plan) else None)

    def planner(self) -> planning.Planner:
        """Returns what makes the plan, or follows the given one."""
        plan = self.plan
        return planning.Planner(plan.cluster, given=plan) if isinstance(plan, planning.Plan) else super().planner()


def _rewrite(graph: formats.Saved, target: str | os.PathLike[str], signature: str | Sequence[str] | None,
             train_op: str | Sequence[str], options: SavedGraphOptions) -> RewriteReport:
    train_op = (train_op,) if isinstance(train_op, str) else train_op or ()
    if not isinstance(train_op, (list, tuple)) or not all(isinstance(name, str) for name in train_op):
        raise ConfigurationError(f"train_op={train_op!r}, expected names of ops.")
    planner = options.planner()
    graph.check_target(target)
    if not graph.graph_def.node:
        raise GraphError(f"'{graph.path}' holds a graph without nodes; it is damaged, or another kind of file.")
    library.load()  # TensorFlow must know our ops, and those of the engine
    engine = engines.load(options.engine)
    engine.register_ops()
    steps = graph.steps(signature, train_op)
    if options.plan is not None and len(steps) > 1:
        raise ConfigurationError(f"A plan is given, but {len(steps)} steps are rewritten ({', '.join(steps)}); a plan "
                                 "is for a single step.")
    with garbage.unsearched():
        rewritten = rewritten_steps.rewrite(graph.graph_def, steps, graph.has_functions, rewritten_steps.RewriteOptions(
            planner, grappler.add_shapes, options.inputs or {}, options.batch_size, options.wire_dtype, options.strict,
            engine.writer, options.progress))
    plans = [step.plan for step in rewritten.steps.values()]
    unmatched = [planning.unmatched_pins(planner.pins, plan) for plan in plans]
    if plans and all(unmatched):
        raise ConfigurationError(unmatched[0])
    graph.graph_def.CopyFrom(rewritten.graph_def)
    options.progress("writing files")
    graph.write(target)
    return RewriteReport(rewritten.steps)
