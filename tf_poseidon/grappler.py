"""Makes TensorFlow's graph optimizer, Grappler, run our passes on functions that synchronise gradients.

The ops that the partitioner or `strategy.run` puts into a function synchronise completely. Passes make that
faster; if they do not run, a warning says so, and the result is the same.

Tests: tests/training/test_rewritten.py, tests/communicator/test_row_ops.py, tests/unit/test_plan.py.
"""

import array
import collections
from collections.abc import Collection
from collections.abc import Iterator
import contextlib
import ctypes
import dataclasses
import itertools
import logging
from typing import Any
from typing import Literal
from typing import overload
import weakref

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon import planning
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.errors import encoded
from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes import session as session_lib
from tf_poseidon.graph_passes.find import poseidon_markers
from tf_poseidon.graph_passes.find import training_step
from tf_poseidon.graph_passes.graph import devices
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.write import turns
from tf_poseidon.ops import library

_log = logging.getLogger("tf_poseidon")

_Passes = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_Take = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)


_enabled = None
_is_plugged_in = False  # whether TensorFlow calls the bridge, with or without passes


def enable(rank: int, session: session_lib.RewriteSession, strict: bool) -> "GraphPass":
    """Starts running the passes on all functions of this process, and returns the `GraphPass`.

    Args:
        rank: This rank; rank 0 logs what is rewritten.
        session, strict: Same as in `GraphPass`.

    Raises:
        PoseidonError: If they already run with different options, or cannot run and `strict` is set.
    """
    global _enabled
    if _enabled is None:
        _enabled = GraphPass(session, strict, logging.INFO if rank == 0 else logging.DEBUG)
        _enabled.register()
        return _enabled
    enabled_session = _enabled.session
    if (enabled_session.planner, _enabled.strict, enabled_session.marker_ops, enabled_session.takes_turns) != (
            session.planner, strict, session.marker_ops, session.takes_turns):
        raise ConfigurationError(
            f"This process rewrites training graphs with {enabled_session.planner}, strict={_enabled.strict}, "
            f"{'with' if enabled_session.takes_turns else 'without'} crossover=, and cannot change that to "
            f"{session.planner}, strict={strict}, {'with' if session.takes_turns else 'without'} crossover=: give "
            "every PoseidonStrategy of a process the same options.")
    return _enabled


def order_sums() -> None:
    """Makes TensorFlow order the sums of partitioned graphs, in a process that need not run the passes.

    A rewritten graph needs that too: its ranks have the same bits only if they sum in the same order.
    """
    # Passes that run do it themselves, and must not be removed.
    if not _is_plugged_in and not _plug_in(_Passes(), ()):
        _log.warning("Ranks may get sums with different bits in graphs that were partitioned by rows: %s.", _NO_PLACE)


_NO_PLACE = ("another plug-in of TensorFlow's graph optimizer is loaded, and TensorFlow takes only one per "
             "device; do not load that one")


_NO_TURNS = ("A training step takes no turns with other jobs, since it hands over its gradients in a branch or in a "
             "loop: it computes the same, while others do. Call a tf.function once for each step, and do not "
             "accumulate gradients.")


def _plug_in(passes: Any, markers: Collection[str]) -> bool:
    """Hands passes, possibly null, to the bridge; returns False if another plug-in has its place."""
    global _is_plugged_in
    _, lib = library.load()
    lib.poseidon_set_passes.argtypes = [_Passes, ctypes.c_char_p]
    lib.poseidon_set_passes.restype = ctypes.c_bool
    _is_plugged_in = lib.poseidon_set_passes(passes, " ".join(markers).encode())
    return _is_plugged_in


class FunctionPlan:
    """The plan of a training function, which changes as TensorFlow optimises the function's graphs.

    Attributes:
        overlap: Whether the steps of an execution overlap, a sentence; "" if one step runs at a time.
    """

    def __init__(self, plan: planning.Plan) -> None:
        """Notes a plan, which holds as long as TensorFlow has optimised no graph."""
        self.overlap = ""
        self._plans = {0: plan}  # by the number of steps of its graphs

    @property
    def plan(self) -> planning.Plan:
        """The plan; of several steps rather than of those that are left over."""
        plan = self._plans[max(self._plans)]
        return plan if plan.overlap == self.overlap else dataclasses.replace(plan, overlap=self.overlap)

    def note(self, plan: planning.Plan) -> None:
        """Notes the plan by which TensorFlow has optimised a graph, or why it was not rewritten."""
        self._plans = {0: plan} if plan.refusal else {**self._plans, plan.steps: plan}


class GraphPass:
    """The passes, as TensorFlow calls them.

    Attributes:
        session: The `RewriteSession` that rewrites graphs.
        strict: Same as in `PoseidonStrategy`.
    """

    def __init__(self, session: session_lib.RewriteSession, strict: bool = False,
                 log_level: int = logging.DEBUG) -> None:
        """Makes the passes; `log_level` is the level of messages about rewritten graphs."""
        self.session = session
        self.strict = strict
        self._refusal = ""  # of all graphs
        self._latest: FunctionPlan | None = None
        # By the function's number; each lives as long as its function.
        self._plans: weakref.WeakValueDictionary[int, FunctionPlan] = weakref.WeakValueDictionary()
        self._log_level = log_level
        self._said = {""}
        self._callback = _Passes(self._run)  # kept here, or it would be freed

    def register(self) -> None:
        """Hands the passes to TensorFlow."""
        _, lib = library.load()
        lib.poseidon_set_rewritten.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
        if not _plug_in(self._callback, (*self.session.marker_ops, poseidon_markers.SCATTER)):
            if self.strict:
                raise ConfigurationError(f"strict=True, but graphs cannot be rewritten: {_NO_PLACE}.")
            self._refusal = _NO_PLACE
            self._refuse(_NO_PLACE)

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        """A context in which TensorFlow runs these passes, instead of those of `enable`."""
        self.register()
        try:
            yield
        finally:
            if _enabled is None:
                _plug_in(_Passes(), ())
            else:
                _enabled.register()

    @property
    def plan(self) -> planning.Plan | None:
        """The plan of the training function that was last rewritten or refused; None before the first one."""
        return None if self._latest is None else self._latest.plan

    def expect(self, number: int = -1, facts: planning.PartitionFacts | None = None,
               has_sites: bool = True) -> FunctionPlan:
        """Notes that a training function was traced, which TensorFlow should hand to the passes.

        Args:
            number: The number that its `ops.agree` has, -1 for none.
            facts: Its `planning.PartitionFacts`; none by default.
            has_sites: Whether it synchronises anything; else TensorFlow does not hand it to the passes.

        Returns:
            Its `FunctionPlan`, which the function keeps.
        """
        if number < 0 and has_sites and self._latest is not None:
            return self._latest
        planner, facts = self.session.planner, facts or planning.PartitionFacts()
        plan = FunctionPlan(planner.refusal(
            self._refusal or "TensorFlow has not run the graph pass; enable Grappler (tf.config.optimizer)")
            if has_sites else dataclasses.replace(
                planner.by_policy().plan(()), whole=facts.whole, divided=facts.divided))
        if number >= 0:
            self._plans[number] = plan
        self._latest = plan
        return plan

    def note(self, number: int, plan: planning.Plan) -> None:
        """Notes the plan by which TensorFlow has optimised the function with a number, or why it was not rewritten."""
        of_function = self._plans.get(number)
        if of_function is None:
            of_function = FunctionPlan(plan)
        else:
            of_function.note(plan)
        # What is left over by executions of several steps does not replace them.
        shown = self.plan
        if number < 0 or shown is None or plan.refusal or plan.steps >= shown.steps or not _same_sites(plan, shown):
            self._latest = of_function

    def rewrite(self, graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef | None:
        """Returns the rewritten GraphDef, or None to leave the graph unchanged."""
        agree, session = training_step.node_of(graph_def), self.session
        number = _number_of(graph_def)
        # Otherwise it only sums, for example, metrics, and a given plan was not made for it.
        trains = agree is not None or session.marker_ops != poseidon_markers.OPS
        try:
            outcome = session.rewrite(graph_def, by_policy=not trains, add_shapes=add_shapes)
        except session_lib.CannotFollowError as error:
            self.note(number, session.planner.refusal(str(error)))
            _log.error("%s", error)
            return _failing(graph_def, session.marker_ops, str(error))
        if outcome.refusal:
            if session.has_to_agree:  # a final decision: TensorFlow would try again
                graph_def = _decided(graph_def, session.marker_ops)
            if trains:
                self._refuse(outcome.refusal, number)
                return self._with_refusal(graph_def, outcome.refusal)
            _log.warning("A graph that trains nothing was not rewritten: it computes the same, but slower. %s",
                         outcome.refusal)
            return graph_def if session.has_to_agree else None
        if outcome.plan is not None and trains and (outcome.graph_def is not None or not self._has_rewritten(number)):
            facts = _facts(agree)
            plan = dataclasses.replace(outcome.plan, whole=facts.whole, divided=facts.divided)
            self.note(number, plan)
            schemes = collections.Counter(d.scheme for d in plan.decisions)
            _log.log(self._log_level,
                     "The training graph was rewritten: %s. Its plan shows the reasons.",
                     ", ".join(f"{n} gradients by {scheme}" for scheme, n in sorted(schemes.items())))
            if session.takes_turns and outcome.graph_def is not None and not turns.takes_turns(
                    outcome.graph_def) and _NO_TURNS not in self._said:
                self._said.add(_NO_TURNS)
                _log.log(logging.WARNING if self._log_level == logging.INFO else logging.DEBUG, "%s", _NO_TURNS)
            if (unmatched := planning.unmatched_pins(session.planner.pins, plan)) not in self._said:
                self._said.add(unmatched)  # it may be for another model of the program
                _log.warning("%s", unmatched)
        return outcome.graph_def

    def _has_rewritten(self, number: int) -> bool:
        """Whether the function with a number has a plan for gradients: its graph may come again, rewritten."""
        of_function = self._plans.get(number)
        return of_function is not None and bool(of_function.plan.decisions)

    def _run(self, data: int, size: int, result: int) -> None:
        """Called by the bridge, graph_passes/grappler_bridge.cc; must not raise."""
        number = -1
        try:
            graph_def = graph_pb2.GraphDef.FromString(ctypes.string_at(data, size))
            number = _number_of(graph_def)
            rewritten = self.rewrite(graph_def)
            if rewritten is not None:
                serialized = rewritten.SerializeToString()
                library.load()[1].poseidon_set_rewritten(result, serialized, len(serialized))
        except Exception as error:
            self._refuse(f"{type(error).__name__}: {error}", number)

    def _refuse(self, reason: str, number: int = -1) -> None:
        is_new = reason not in self._said  # TensorFlow tries twice, and other functions may be refused for it
        self._said.add(reason)
        self.note(number, self.session.planner.refusal(reason))
        if is_new and not (self.strict or self.session.planner.given):
            _log.warning("The training graph was not rewritten: it computes the same, but slower. %s",
                         reason)

    def _with_refusal(self, graph_def: graph_pb2.GraphDef, reason: str) -> graph_pb2.GraphDef | None:
        """Returns the graph unchanged, or if it is strict or has a given plan, one that fails with the reason."""
        if not (self.strict or self.session.planner.given):
            return graph_def if self.session.has_to_agree else None
        for node in graph_def.node:
            if node.op == "PoseidonAgree":
                node.attr["refusal"].s = encoded(self.session.planner.refusal(reason).refusal)
        return graph_def


def _number_of(graph_def: graph_pb2.GraphDef) -> int:
    """Returns the number that the function of a graph has for `GraphPass.expect`, -1 if it has none."""
    agree = training_step.node_of(graph_def)
    return agree.attr["function"].i if agree is not None and "function" in agree.attr else -1


def _same_sites(a: planning.Plan, b: planning.Plan) -> bool:
    names = [[(site.name, site.fingerprint()) for site in plan.sites] for plan in (a, b)]
    return names[0] == names[1]


@overload
def add_shapes(graph_def: graph_pb2.GraphDef, alone: Literal[False] = False) -> graph_pb2.GraphDef: ...


@overload
def add_shapes(graph_def: graph_pb2.GraphDef, alone: Literal[True]) -> graph_lib.Shapes: ...


def add_shapes(graph_def: graph_pb2.GraphDef, alone: bool = False) -> graph_pb2.GraphDef | graph_lib.Shapes:
    """Returns a flat GraphDef with the shapes of its tensors, as TensorFlow's graph optimizer infers them.

    For a variable that is a placeholder, the attributes `_handle_shapes` and `_handle_dtypes` describe its value; for a
    table of single keys and values, both of these.

    Args:
        graph_def: The GraphDef.
        alone: Whether to return the shapes without the graph, which is much faster: {name of a node: the shapes of its
            outputs}. Each is a tuple with None for unknown sizes, or None.

    Raises:
        PoseidonError: If TensorFlow finds that shapes are incompatible.
    """
    _, lib = library.load()
    infer = lib.poseidon_infer_shapes if alone else lib.poseidon_add_shapes
    infer.argtypes = [ctypes.c_char_p, ctypes.c_size_t, _Take]
    infer.restype = ctypes.c_bool
    results = []
    take = _Take(lambda data, size: results.append(ctypes.string_at(data, size)))
    serialized = graph_def.SerializeToString()
    if not infer(serialized, len(serialized), take):
        raise GraphError("TensorFlow cannot infer the shapes of the graph; it is not valid.")
    return _shapes_of_nodes(graph_def, results[0]) if alone else graph_pb2.GraphDef.FromString(results[0])


def _shapes_of_nodes(graph_def: graph_pb2.GraphDef, table: bytes) -> graph_lib.Shapes:
    """Returns {name of a node: shapes of its outputs} from the table that `poseidon_infer_shapes` returns."""
    numbers = iter(array.array("q", table))

    def shape() -> graph_lib.Shape | None:
        rank = next(numbers)
        sizes = tuple(itertools.islice(numbers, max(rank, 0)))
        return None if rank < 0 else tuple(None if size < 0 else size for size in sizes) if -1 in sizes else sizes

    return {node.name: [shape() for _ in range(next(numbers))] for node in graph_def.node}


def _failing(graph_def: graph_pb2.GraphDef, markers: Collection[str], reason: str) -> graph_pb2.GraphDef:
    """Returns a graph that fails where it would synchronise, since other ranks have a rewritten graph."""
    device = devices.host_of(next(node.device for node in graph_def.node if node.op in markers))
    writer = graph_lib.Writer("poseidon_refusal", device)
    condition = writer.constant("is_rewritten", False)
    text = writer.constant("reason", reason)
    writer.add("", "Assert", [condition, text], T=[types_pb2.DT_STRING], summarize=3)
    result = _decided(graph_def, markers)
    for node in result.node:
        if node.op in markers:
            node.input.append("^poseidon_refusal")
    result.node.extend(writer.nodes)
    return result


def _decided(graph_def: graph_pb2.GraphDef, markers: Collection[str]) -> graph_pb2.GraphDef:
    """Returns a graph that is marked as decided, so that no pass processes it again."""
    result = graph_pb2.GraphDef()
    result.CopyFrom(graph_def)
    for node in result.node:
        if node.op in markers:
            for name, value in graph_lib.DECIDED.items():
                node.attr[name].b = value
    return result


def _facts(agree: node_def_pb2.NodeDef | None) -> planning.PartitionFacts:
    """Returns the `planning.PartitionFacts` that `ops.agree` was given; none for a graph of another library."""
    return planning.PartitionFacts.from_text("" if agree is None else agree.attr["partition"].s.decode())
