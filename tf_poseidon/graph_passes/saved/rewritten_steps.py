"""Runs the passes over a saved training graph.

Requires: a GraphDef as it was saved, for one process. Ensures: a GraphDef that computes the same on any number of ranks
with the same inputs. Its functions and nodes keep their names and their values.

A step is either a function, as saved by TensorFlow 2, or some nodes of the main graph, as saved by TensorFlow 1. It is
partitioned by rows (`partition/`), and its sums are planned and rewritten as in any other graph (`session.py`).

Tests: tests/saved/test_saved_graphs.py, tests/saved/test_saved_programs.py, tests/saved/test_saved_damage.py.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools

from tensorflow.core.framework import attr_value_pb2
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon import planning
from tf_poseidon.base import tables
from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes import session
from tf_poseidon.graph_passes.find import training_step as step_lib
from tf_poseidon.graph_passes.graph import check
from tf_poseidon.graph_passes.graph import functions as functions_lib
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import provenance
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition import partitioner
from tf_poseidon.graph_passes.partition import report
from tf_poseidon.graph_passes.partition.preparation import inline
from tf_poseidon.graph_passes.saved import check_types
from tf_poseidon.graph_passes.saved import inputs as inputs_lib
from tf_poseidon.graph_passes.saved import inserted
from tf_poseidon.graph_passes.saved import strip
from tf_poseidon.graph_passes.write.send_receive import SendReceive
from tf_poseidon.graph_passes.write.site_writer import SiteWriter

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_HANDLES = ("VarHandleOp",)
_PREFIX = "poseidon/step"


@dataclasses.dataclass(frozen=True)
class RewriteOptions:
    """How a graph is rewritten.

    Attributes:
        planner: The `planning.Planner`.
        add_shapes: A function that infers shapes, as `grappler.add_shapes`.
        inputs: "rows", "same", or the dimension of the rows, by name of an input.
        rows: Rows of a full batch on each worker, for planning; None if unknown.
        wire_dtype, strict: Same as in `PoseidonStrategy`.
        writer: Same as in `engines.Engine`.
        progress: Called with the name of each phase.
    """

    planner: planning.Planner
    add_shapes: graph_lib.AddShapes
    inputs: Mapping[str, inputs_lib.Mark]
    rows: int | None = None
    wire_dtype: str | None = None
    strict: bool = False
    writer: type[SiteWriter] = SendReceive
    progress: Callable[[str], object] = staticmethod(lambda what: None)

    @property
    def global_rows(self) -> int | None:
        """Rows of a full batch of all workers, None if unknown."""
        return self.rows and self.rows * self.planner.cluster.workers


@dataclasses.dataclass(frozen=True)
class RewrittenStep:
    """A step that was rewritten.

    Attributes:
        inputs: The `inputs_lib.Input`s.
        plan: The `planning.Plan` that its sums follow.
        exchanges: The `partition.report.PartitionReport` of its exchanges and of the ops that run whole.
    """

    inputs: tuple[inputs_lib.Input, ...]
    plan: planning.Plan
    exchanges: report.PartitionReport

    def __str__(self) -> str:
        inputs = tables.aligned([(entry.name, entry.text()) for entry in self.inputs], left=(0, 1), indent="  ")
        return "\n".join([str(self.plan), "", str(self.exchanges), "inputs:", *inputs])


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A saved graph that was rewritten.

    Attributes:
        graph_def: The GraphDef.
        steps: The `RewrittenStep`s, by name.
    """

    graph_def: graph_pb2.GraphDef
    steps: dict[str, RewrittenStep]


def rewrite(graph_def: graph_pb2.GraphDef, steps: Mapping[str, Sequence[str]], has_functions: bool,
            options: RewriteOptions) -> Rewritten:
    """Rewrites a saved graph.

    Args:
        graph_def: The GraphDef, with its functions.
        steps: The names of the tensors or nodes that define each step, by its name.
        has_functions: Whether each step is the result of one function (TensorFlow 2), which is rewritten; otherwise
            the main graph is rewritten.
        options: The `RewriteOptions`.

    Raises:
        PoseidonError: If the graph cannot be rewritten.
    """
    if strip.is_rewritten(graph_def):
        raise GraphError("The graph was rewritten before; undo that with `tf-poseidon strip`, or use the "
                         "original graph.")
    options.progress("reading the graph")
    original = strip.compressed(graph_def)
    library = functions_lib.Library(graph_def)
    result = graph_pb2.GraphDef()
    rewritten: dict[str, RewrittenStep] = {}
    taken: set[str] = set()
    result.CopyFrom(graph_def)
    if has_functions:
        by_function: dict[str, RewrittenStep] = {}  # signatures may share one
        for name, targets in steps.items():
            function, arguments = _function_of(library, name, targets)
            if function not in by_function:
                by_function[function] = _rewrite_function(result, library, name, function, arguments, options, taken)
            rewritten[name] = by_function[function]
    else:  # steps of one graph share nodes
        targets = tuple(dict.fromkeys(itertools.chain.from_iterable(steps.values())))
        rewritten[", ".join(steps)] = _rewrite_main(result, library, targets, options, taken)
    inputs_lib.check_names([entry for step in rewritten.values() for entry in step.inputs], options.inputs)
    inserted.note_step(graph_def, result)
    strip.note_original(result, original)
    return Rewritten(result, rewritten)


# ---- functions --------------------------------------------------------------------------------------


def _rewrite_function(result: graph_pb2.GraphDef, library: functions_lib.Library, name: str, function: str,
                      arguments: "Sequence[_Argument]", options: RewriteOptions, taken: set[str]) -> RewrittenStep:
    """Rewrites a function in `result`, given its `_Argument`s; returns the `RewrittenStep`."""
    _check_bodies(library, function)
    body, main = library.body(function), library.main
    by_name = {argument: given for (argument, _), given in zip(body.arguments, arguments)}
    function_def = library.functions[function]
    shapes = {argument.name: function_def.arg_attr[i].attr["_output_shapes"].list.shape[0]
              for i, argument in enumerate(function_def.signature.input_arg)
              if i in function_def.arg_attr and "_output_shapes" in function_def.arg_attr[i].attr
              and function_def.arg_attr[i].attr["_output_shapes"].list.shape}

    def describe(argument: str) -> dict[str, attr_value_pb2.AttrValue]:
        """Returns attributes for an argument's placeholder: the type and shape of a variable's value, or a shape."""
        source = main.nodes[graph_lib.node_of(by_name[argument].source)]
        if source.op in _HANDLES and {"dtype", "shape"} <= set(source.attr):
            return {"_handle_dtypes": attr_value_pb2.AttrValue(list={"type": [source.attr["dtype"].type]}),
                    "_handle_shapes": attr_value_pb2.AttrValue(list={"shape": [source.attr["shape"].shape]})}
        return {"shape": attr_value_pb2.AttrValue(shape=shapes[argument])} if argument in shapes else {}

    graph_def = functions_lib.to_graph(body, result, describe)
    functions_lib.add_defaults(graph_def)
    _check_flat(graph_def, library)
    returned, controls = functions_lib.returned(body), body.control_returns
    inputs = [inputs_lib.of_placeholder(node, by_name[node.name].name) for node in graph_def.node[:len(arguments)]
              if node.attr["dtype"].type not in (types_pb2.DT_RESOURCE, types_pb2.DT_VARIANT)]
    inputs = inputs_lib.decide(inputs, options.inputs)
    marked = inputs_lib.with_rows_node(graph_def, inputs)
    options.progress("partitioning by rows")
    flat = inline.inline(marked, [*returned.values(), *controls, *(argument for argument, _ in body.arguments)])
    fetches = list(dict.fromkeys(map(_full, returned.values())))
    paths = {argument: given.source for argument, given in by_name.items()}
    partitioned = partitioner.partition(flat, fetches, options.add_shapes, partitioner.KnownVariables(paths),
                                        rows=options.global_rows)
    partitioned, agree = _with_comparison(_renamed_sites(partitioned, name, taken), inputs, options)
    planned, plan = _planned(partitioned, options)
    whole = dict(zip(fetches, partitioned.fetches))
    new = functions_lib.with_graph(library.functions[function], planned,
                                   {key: whole[_full(tensor)] for key, tensor in returned.items()}, [*controls, *agree])
    for old in result.library.function:
        if old.signature.name == function:
            old.CopyFrom(new)
    _make_stateful(result, function)
    return RewrittenStep(tuple(inputs), plan, partitioned.report)


@dataclasses.dataclass(frozen=True)
class _Argument:
    """An argument of a call.

    Attributes:
        name: Its name in the signature.
        source: The tensor of the main graph.
    """

    name: str
    source: str


def _function_of(library: functions_lib.Library, name: str, targets: Sequence[str]) -> tuple[str, list[_Argument]]:
    """Returns (name, `_Argument`s) of the function that a signature calls.

    Signatures call functions that only wrap those that programs call too; the innermost one is returned.
    """
    call = _call_of(library, name, targets)
    function, sources = call.attr["f"].func.name, graph_lib.data_inputs(call)
    own = [argument for argument, _ in library.body(function).arguments]
    if len(sources) != len(own):
        raise GraphError(f"Function '{function}' is called with {len(sources)} arguments, and takes {len(own)}.")
    arguments = [_Argument(argument, source) for argument, source in zip(own, sources)]
    seen = {function}
    while True:
        body = library.body(function)
        calls = [node for node in body.nodes.values() if node.op in _CALLS]
        others = {node.op for node in body.nodes.values()} - {*_CALLS, "Identity", "NoOp"}
        if len(calls) != 1 or others:
            return function, arguments
        inner, given = calls[0].attr["f"].func.name, graph_lib.data_inputs(calls[0])
        by_name = dict(zip((argument for argument, _ in body.arguments), arguments))
        if inner not in library.functions or inner in seen or not by_name.keys() >= set(given) or (
                len(given) != len(library.body(inner).arguments)):
            return function, arguments  # errors in it are reported later
        function, arguments = inner, [by_name[tensor] for tensor in given]
        seen.add(function)


def _call_of(library: functions_lib.Library, name: str, targets: Sequence[str]) -> node_def_pb2.NodeDef:
    """Returns the node of the main graph that calls the function of a signature."""
    main = library.main
    calls = {main.parse(target)[0] for target in targets}
    nodes = [main.nodes[call] for call in calls]
    if len(nodes) != 1 or nodes[0].op not in _CALLS:
        raise GraphError(f"Signature '{name}' is not the result of one function, as tf.saved_model.save writes it; "
                         "save the step as one tf.function.")
    return nodes[0]


def _make_stateful(graph_def: graph_pb2.GraphDef, function: str) -> None:
    """Makes calls of a function stateful, and its callers' calls, since it now exchanges something."""
    for body in (graph_def, *graph_def.library.function):
        is_changed = False
        for node in body.node if body is graph_def else body.node_def:
            if node.op == "PartitionedCall" and node.attr["f"].func.name == function:
                node.op, is_changed = "StatefulPartitionedCall", True
        if is_changed and body is not graph_def and not body.signature.is_stateful:
            body.signature.is_stateful = True
            _make_stateful(graph_def, body.signature.name)


# ---- the main graph ---------------------------------------------------------------------------------


def _rewrite_main(result: graph_pb2.GraphDef, library: functions_lib.Library, targets: Sequence[str],
                  options: RewriteOptions, taken: set[str]) -> RewrittenStep:
    """Rewrites the nodes of the main graph in `result` that steps need; returns the `RewrittenStep`.

    Other nodes are unchanged and have the same inputs: tensors that the step computes by rows are gathered if such a
    node reads them.
    """
    main = library.main
    _check_flat(result, library)
    names = [_node_of_target(library, target) for target in targets]
    frames = frames_lib.find_frames(graph_lib.in_order(result))
    replaced = frames_lib.needed(main.nodes, names, frames)
    needed = [node for name, node in main.nodes.items() if name in replaced]
    called = {function: None for node in needed for function in functions_lib.called(node)}
    _check_bodies(library, *called)
    step = graph_lib.with_nodes(result, needed)
    functions_lib.add_defaults(step)
    inputs_lib.say_shapes(step)
    inputs = inputs_lib.decide(inputs_lib.of_main(step), options.inputs)
    marked = inputs_lib.with_rows_nodes(step, inputs)
    options.progress("partitioning by rows")
    flat = inline.inline(marked, [node.name for node in marked.node]) if called else marked
    outside = [node.name for node in needed if frames[node.name] == frames_lib.ROOT]
    fetches = [target for target in dict.fromkeys(targets)
               if _num_outputs(library, main.nodes[_node_of_target(library, target)])]
    partitioned = partitioner.partition(flat, fetches, options.add_shapes, kept=outside, rows=options.global_rows)
    partitioned, _ = _with_comparison(_renamed_sites(partitioned, "", taken), inputs, options)
    planned, plan = _planned(partitioned, options)
    placeholders = {node.name: type(node).FromString(node.SerializeToString()) for node in needed
                    if _is_placeholder(node)}
    nodes = [*(node for node in result.node if node.name not in replaced),
             *(placeholders.get(node.name, node) for node in planned.node)]
    for node in nodes:
        # As saved: those of rewritten outputs may have changed. A placeholder's may be all that says its shape.
        if "_output_shapes" in node.attr and not _is_placeholder(node):
            del node.attr["_output_shapes"]
    del result.node[:]
    result.node.extend(nodes)
    inserted.note_targets(result, names)
    return RewrittenStep(tuple(inputs), plan, partitioned.report)


def _is_placeholder(node: node_def_pb2.NodeDef) -> bool:
    return node.op.startswith("Placeholder")


def _node_of_target(library: functions_lib.Library, target: str) -> str:
    """Returns the name of the node of a target that a user gives."""
    name, output = library.main.parse(target)
    if output is None or ":" in target and output >= _num_outputs(library, library.main.nodes[name]):
        raise GraphError(f"The step is made of {target!r}, which is not a node or tensor of the graph.")
    return name


def _num_outputs(library: functions_lib.Library, node: node_def_pb2.NodeDef) -> int:
    return len(library.types(node))


# ---- both -------------------------------------------------------------------------------------------


def _check_flat(graph_def: graph_pb2.GraphDef, library: functions_lib.Library) -> None:
    """Refuses graphs that TensorFlow cannot read, some of which would make it end the process."""
    if problem := check.problem_of(graph_lib.Graph(graph_def)):
        raise GraphError(f"The graph is not valid: {problem}.")
    check_types.check_types(graph_def, library)


def _check_bodies(library: functions_lib.Library, *functions: str) -> None:
    """Checks some functions and all functions that they call."""
    done, path = set(), []

    def visit(function: str) -> None:
        if function in path:
            raise GraphError(f"Function '{function}' calls itself; such a step cannot be partitioned.")
        if function in done:
            return
        path.append(function)
        body = library.body(function)
        _check_flat(functions_lib.to_graph(body), library)
        for node in body.nodes.values():
            for called in functions_lib.called(node):
                visit(called)
        done.add(path.pop())

    for function in functions:
        visit(function)


def _full(tensor: str) -> str:
    return tensor if ":" in tensor else f"{tensor}:0"


def _renamed_sites(partitioned: partitioner.PartitionedGraph, name: str,
                   taken: set[str]) -> partitioner.PartitionedGraph:
    """Prefixes sites with the step's name if another step has sites of the same name."""
    new = {exchange.site: f"{name}/{exchange.site}" for exchange in partitioned.report.exchanges
           if exchange.site in taken}
    taken.update(new.get(exchange.site, exchange.site) for exchange in partitioned.report.exchanges)
    if not new:
        return partitioned
    graph_def = graph_pb2.GraphDef()
    graph_def.CopyFrom(partitioned.graph_def)
    for node in graph_def.node:
        about = provenance.of(node)
        if about is not None and about.site in new:
            provenance.rename_site(node, new[about.site])
    exchanges = tuple(dataclasses.replace(exchange, site=new.get(exchange.site, exchange.site))
                      for exchange in partitioned.report.exchanges)
    return dataclasses.replace(partitioned, graph_def=graph_def,
                               report=dataclasses.replace(partitioned.report, exchanges=exchanges))


def _with_comparison(partitioned: partitioner.PartitionedGraph, inputs: Sequence[inputs_lib.Input],
                     options: RewriteOptions) -> tuple[partitioner.PartitionedGraph, list[str]]:
    """Adds nodes by which ranks compare their graphs and inputs before anything is cut into rows.

    Returns:
        (partitioned, names of the nodes that compare).
    """
    writer = graph_lib.Writer(_PREFIX, "/device:CPU:0")
    agree = writer.add("agree", "PoseidonAgree", [], sites=partitioned.report.agreement_text(), rows=options.rows or -1,
                       global_rows=options.global_rows or -1, static_rows=-1, strict=options.strict)
    result = graph_pb2.GraphDef()
    result.CopyFrom(partitioned.graph_def)
    wired = partitioned.report.gradient_sites
    compared = []

    def compare(name: object, values: Sequence[inputs_lib.Input]) -> str:
        compared.append(writer.add(f"compare{name}", "PoseidonCompare", [entry.tensor for entry in values],
                                   T=[entry.dtype for entry in values], site=f"{_PREFIX}/compare{name}"))
        graph_lib.set_names(writer.nodes[-1].attr["names"], [entry.name for entry in values])
        return f"^{compared[-1]}"

    parts = [node for node in result.node if node.op == "PoseidonPart"]
    for i, part in enumerate(parts):
        names = {name.decode() for name in part.attr["names"].list.s}
        part.input.append(f"^{agree}")
        own = [entry for entry in inputs if not entry.is_read and (entry.name in names or not entry.is_fed_alone)]
        if own and part.name != partitioner.OF_NO_ROWS:
            part.input.append(compare(i, own))
    passed_on = {}
    for i, entry in enumerate(inputs):
        if entry.dimension is None and entry.is_fed_alone and not entry.is_read:
            passed_on[entry.tensor] = writer.add(f"same{i}", "Identity", [
                entry.tensor, compare(f"_same{i}", [entry])], T=entry.dtype)
    for node in result.node:
        node.input[:] = [passed_on.get(tensor.removesuffix(":0"), tensor) for tensor in node.input]
    if options.wire_dtype:
        for node in result.node:
            if node.op == "PoseidonSync" and node.attr["site"].s.decode() in wired:
                node.attr["wire_dtype"].s = options.wire_dtype.encode()
    result.node.extend(writer.nodes)
    return dataclasses.replace(partitioned, graph_def=result), [agree, *compared]


def _planned(partitioned: partitioner.PartitionedGraph,
             options: RewriteOptions) -> tuple[graph_pb2.GraphDef, planning.Plan]:
    """Returns (GraphDef, plan): the partitioned graph, rewritten so that its sums travel as planned."""
    options.progress("recognising factors and planning")
    outcome = session.RewriteSession(options.planner, options.writer).rewrite(
        partitioned.graph_def, add_shapes=options.add_shapes)
    if outcome.cause is not None:
        raise outcome.cause
    result = graph_pb2.GraphDef()
    result.CopyFrom(outcome.graph_def or partitioned.graph_def)
    plan = outcome.plan or options.planner.plan(())
    agree = step_lib.node_of(result)
    assert agree is not None  # `_with_comparison` has added it
    agree.attr["plan"].s = plan.agreement_text().encode()
    return result, plan
