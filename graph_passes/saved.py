"""The passes over a saved training graph in their order."""

import dataclasses

from tf_poseidon import planning
from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes import check
from tf_poseidon.graph_passes import check_types
from tf_poseidon.graph_passes import find_gradients
from tf_poseidon.graph_passes import flatten
from tf_poseidon.graph_passes import graph as graph_lib
from tf_poseidon.graph_passes import insert_markers
from tf_poseidon.graph_passes import pipeline
from tf_poseidon.graph_passes import strip
from tf_poseidon.graph_passes import unflatten


@dataclasses.dataclass(frozen=True)
class Synchronised:
    """What a saved graph synchronises.

    Attributes:
        site: Name of the site.
        tensor: The tensor that is synchronised: the function that it is in, and its name there.
        rule: "mean" or "sum" over ranks.
        also: Other variables that are updated by it.
        is_gathered: Whether it is slices, and the rows of all ranks are kept apart; the plan says nothing then.
    """

    site: str
    tensor: str
    rule: str
    also: tuple[str, ...] = ()
    is_gathered: bool = False


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A saved graph that was rewritten.

    Attributes:
        graph_def: The GraphDef.
        plan: The `planning.Plan` that it follows.
        synchronised: What it synchronises, `Synchronised`s in the order of the plan.
        local: Why variables stay what they are on each rank, by name.
    """

    graph_def: object
    plan: planning.Plan
    synchronised: tuple[Synchronised, ...]
    local: dict


def rewrite(graph_def, targets, planner, add_shapes, rows=None, given=None, rule="mean", wire_dtype=None,
            strict=False, progress=lambda what: None, collective_ops=None):
    """Rewrites a saved graph so that its gradients travel as the plan says.

    Args:
        graph_def: The GraphDef, with its functions.
        targets: Names of tensors or nodes that make a training step.
        planner: The `planning.Planner`.
        add_shapes: A function that returns a GraphDef with the shapes of its tensors.
        rows: Rows of a full batch on each worker; None where the graph says it, or it is not known.
        given: (tensor, rule) by variable, where the user has decided.
        rule: "mean" or "sum" for all others.
        wire_dtype, strict: As of `PoseidonStrategy`.
        progress: Called with what is done next.
        collective_ops: As of `engines.Engine`.

    Returns:
        `Rewritten`.

    Raises:
        PoseidonError: If the graph cannot be rewritten.
    """
    if strip.is_rewritten(graph_def):
        raise PoseidonError("The graph was rewritten before; undo that with `tf-poseidon strip`, or take the "
                            "graph that it was made of.")
    progress("reading functions and loops")
    flat = flatten.flatten(graph_def, targets, rows)
    try:
        check.check_graph(flat.graph_def)
    except check.InvalidGraph as error:
        raise PoseidonError(f"The graph is not valid: {error}.") from error
    check_types.check_types(flat.graph_def, flat.library)
    progress("inferring shapes")
    graph = graph_lib.Graph(add_shapes(flat.graph_def))
    progress("finding gradients")
    given = {variable: (_flat_name(flat, tensor), rule) for variable, (tensor, rule) in (given or {}).items()}
    found = find_gradients.find_gradients(graph, flat.is_saved, given, rule)
    marked, insertions = insert_markers.insert_markers(flat, graph, found, wire_dtype, strict)
    progress("recognising factors and planning")
    passed = pipeline.rewrite(add_shapes(marked), planner, _bodies(flat), collective_ops)
    plan = passed.plan or planner.plan(())  # of gathered slices alone there is nothing to plan
    after = passed.graph_def or marked
    for node in after.node:
        if node.op == "PoseidonAgree":
            node.attr["plan"].s = plan.form().encode()
    progress("writing functions")
    result = unflatten.unflatten(graph_def, flat, after, insertions)
    synchronised = []
    for insertion in insertions:
        body, local = flat.local(insertion.tensors[-1])
        where = f"{body.function}/{local}" if body.function else local
        synchronised.append(Synchronised(insertion.site, where, insertion.rule, insertion.also,
                                         insertion.is_gathered))
    local = {state.variable: state.reason for state in found.states if not state.updates}
    return Rewritten(result, plan, tuple(synchronised), local)


def _flat_name(flat, tensor):
    """Returns the flat name of a tensor that is named as reports do: the function that it is in, and its name there."""
    function, _, local = tensor.partition("/")
    if graph_lib.node_of(tensor) in flat.places or not function:
        return tensor
    body = next((body for body, _, _ in flat.places.values() if body.function == function), None)
    if body is None:
        return tensor
    name, output = flat.library.body(function).parse(local)
    if body.prefix + name not in flat.places:  # a call: nodes stand for what it returns
        return f"{body.prefix}{name}/-out{output}"
    return f"{body.prefix}{name}:{output}" if output else body.prefix + name


def _bodies(flat):
    """Returns a function that says in which body a node is: None of nodes that were inserted."""
    prefixes = {body.prefix: body for body, _, _ in flat.places.values()}
    longest_first = sorted(prefixes, key=len, reverse=True)

    def body_of(name):
        if name in flat.places:
            body, local, _ = flat.places[name]
            return body if local is not None else name  # of no body: what stands for a call's inner life
        return prefixes[next(p for p in longest_first if name.startswith(f"{p}{insert_markers.PREFIX}/"))]

    return body_of
