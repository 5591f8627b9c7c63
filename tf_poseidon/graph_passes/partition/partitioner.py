"""The partitioner: from the graph of a one-process step to the graph that each rank runs.

Requires: a flat graph with one or more `PoseidonRows`. Ensures: if any number of ranks run the result on the same
inputs, its fetches are those of one process, up to the order of additions; of some, if so wished, each rank has its
own rows.

Tests: tests/graphs/test_partition.py, tests/graphs/test_partition_golden.py, tests/graphs/test_partition_fuzz.py.
"""

from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses

from tensorflow.core.framework import graph_pb2

from tf_poseidon.graph_passes.graph import garbage
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.partition import followers
from tf_poseidon.graph_passes.partition import report as report_lib
from tf_poseidon.graph_passes.partition import states
from tf_poseidon.graph_passes.partition.emit import graph_writer
from tf_poseidon.graph_passes.partition.emit import naming
from tf_poseidon.graph_passes.partition.emit import packing
from tf_poseidon.graph_passes.partition.emit import row_parts
from tf_poseidon.graph_passes.partition.ownership import Ownership
from tf_poseidon.graph_passes.partition.preparation import batches
from tf_poseidon.graph_passes.partition.propagate import dividing
from tf_poseidon.graph_passes.partition.propagate import held_summands
from tf_poseidon.graph_passes.partition.propagate import propagation as propagate_lib
from tf_poseidon.graph_passes.partition.row_loops import loop_outcomes
from tf_poseidon.graph_passes.partition.sizes import graph_sizes

# The PoseidonPart of nodes that depend on no rows.
OF_NO_ROWS = row_parts.OF_NO_ROWS


@dataclasses.dataclass(frozen=True)
class KnownVariables:
    """What is known about a graph's variables, by names of the nodes from which their resources come.

    Attributes:
        paths: The path of each variable; others are named after their node.
        summands: Those that hold summands, see held_summands.py.
        candidates: Those that hold summands if the graph needs none of them whole.
        shards: The layouts of those that hold shards.
        shard_candidates: The layouts of those that hold shards if the graph needs none of these whole; "" of one that
            may belong to those of some layout, see `Ownership`.
        divisions: The `Division`s of layouts of `shards` and `shard_candidates` that servers do not own by KV pairs;
            those that a candidate is to have are of matrices.
        divided: The layouts of trained variables that are among `shards` or `shard_candidates` themselves: what is
            computed from their columns, or rows, is computed by the rank that holds these.
        loads: The bytes that each rank owns that may own layouts of candidates whose update cannot be computed of
            shards; none if there are to be no more owners.
    """

    paths: Mapping[str, str] = dataclasses.field(default_factory=dict)
    summands: Collection[str] = ()
    candidates: Collection[str] = ()
    shards: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shard_candidates: Mapping[str, str] = dataclasses.field(default_factory=dict)
    divisions: Mapping[str, states.Division] = dataclasses.field(default_factory=dict)
    divided: Collection[str] = ()
    loads: Mapping[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class PartitionedGraph:
    """A partitioned graph.

    Attributes:
        graph_def: The GraphDef.
        fetches: The names of the fetches in it.
        report: The `report.PartitionReport`.
        summands: Names of the nodes from which the resources of variables that hold summands come.
        shards: The layouts of variables that hold shards, by the same names.
        divisions: The `Division`s of these layouts.
        own: The numbers of the fetches of which each rank has its own rows; those of all ranks follow one another.
        followers: Names of the nodes from which the resources of whole vectors come that would better be divided as
            the columns that they meet.
        needed_whole: Of layouts whose shards some op needs whole, one such op: its name.
    """

    graph_def: graph_pb2.GraphDef
    fetches: tuple[str, ...]
    report: report_lib.PartitionReport
    summands: frozenset[str]
    shards: Mapping[str, str] = dataclasses.field(default_factory=dict)
    divisions: Mapping[str, states.Division] = dataclasses.field(default_factory=dict)
    own: frozenset[int] = frozenset()
    followers: frozenset[str] = frozenset()
    needed_whole: Mapping[str, str] = dataclasses.field(default_factory=dict)


@garbage.unsearched()
def partition(graph_def: graph_pb2.GraphDef, fetches: Sequence[str], add_shapes: graph_lib.AddShapes,
              variables: KnownVariables = KnownVariables(), kept: Sequence[str] = (), rows: int | None = None,
              runs_whole: bool = False, own: Collection[str] = ()) -> PartitionedGraph:
    """Returns the `PartitionedGraph`.

    Args:
        graph_def: A flat GraphDef: calls are inlined, loops consist of Enter, Merge, Switch, NextIteration and Exit.
        fetches: Names of the tensors that are returned, whole unless they are in `own`.
        add_shapes: A function that infers shapes, such as `grappler.add_shapes`.
        variables: The `KnownVariables`.
        kept: Names of nodes outside loops whose outputs must be available whole under their names. Exchanges for them
            alone are not in the report: they happen only if they are read.
        rows: The usual number of rows of a batch, None if unknown. It decides what is cheaper, and must be the same on
            all ranks.
        runs_whole: Whether the whole graph runs in each step, as a function's does; small sums then travel together.
        own: Those of the fetches of which each rank's own rows suffice.

    Raises:
        PoseidonError: If the graph cannot be partitioned.
    """
    graph_def = batches.together(graph_def, fetches, add_shapes)
    sizes = graph_sizes.Sizes(graph_def, add_shapes, rows)
    loops = loop_outcomes.find(sizes, (*fetches, *kept))
    needed = [fetch for fetch in fetches if fetch not in own]
    given = frozenset(variables.summands)
    summands = given | held_summands.candidates(sizes.graph, variables.candidates)
    ownership = Ownership(sizes, variables.paths, variables.shards, variables.shard_candidates, variables.divisions,
                          variables.loads, variables.divided)
    while True:
        held: dict[str, states.State] = ownership.held()
        propagated = dividing.propagate(sizes, held | dict.fromkeys(summands, states.HELD), needed, kept, loops)
        # What is no rows becomes whole, so that its exchange counts.
        if missing := [fetch for fetch in own if fetch not in needed
                       and propagated.states.get(tensors.canonical(fetch)) != states.Rows(0)]:
            needed += missing
            continue
        whole = held_summands.made_whole(sizes.graph, propagated.states, propagated.outcomes, (*fetches, *kept)) - given
        if not ownership.changed(propagated, fetches) and not whole:
            break
        summands -= whole
    layouts, divisions = ownership.layouts, ownership.divisions()
    writer = graph_writer.GraphWriter(sizes, propagated, *naming.variables_of(propagated, sizes, variables.paths),
                                      divisions)
    nodes, fetched, of_rows = writer.write(fetches, kept, own)
    for node in nodes:
        if "_output_shapes" in node.attr:
            del node.attr["_output_shapes"]
        if node.name in layouts:  # what it holds has another shape on each rank
            for shape in (*node.attr["_handle_shapes"].list.shape, node.attr["shape"].shape):
                shape.Clear()
                shape.dim.add(size=-1)
    graph_def = graph_lib.with_nodes(graph_def, nodes)
    exchanges: Sequence[report_lib.ExchangedTensor] = writer.exchanges
    if runs_whole:
        graph_def, exchanges = packing.pack(graph_def, exchanges, fetched)
    report = report_lib.PartitionReport(
        tuple(exchanges), tuple(_whole(sizes, propagated, name) for name in propagated.without_rule),
        graph_writer.num_by_rows(propagated), len(propagated.ordered))
    return PartitionedGraph(graph_def, tuple(fetched), report, summands, layouts, divisions,
                            frozenset(i for i, fetch in enumerate(fetches) if fetch in of_rows),
                            followers.find(sizes, propagated, variables.paths.keys() - layouts.keys()),
                            ownership.needed_whole)


def _whole(sizes: graph_sizes.Sizes, propagated: propagate_lib.Propagated, name: str) -> report_lib.UndividedOp:
    """Returns the `report.UndividedOp` of a node that runs whole."""
    node = sizes.graph.nodes[name]
    all_bytes = [sizes.bytes(tensor, tensors.dtype_of(sizes.graph.node(tensor), graph_lib.output_of(tensor)))
                 for tensor in sizes.graph.inputs(node)
                 if isinstance(propagated.states.get(tensors.canonical(tensor)), states.Rows)]
    per_row = [tensor_bytes.per_row for tensor_bytes in all_bytes if tensor_bytes.per_row is not None]
    return report_lib.UndividedOp(name, node.op, report_lib.Bytes(
        per_row=sum(per_row) if len(per_row) == len(all_bytes) else None))
