"""Takes bundles apart: gradients that a program reduces with one op, if some of them travel as factors.

Tests: tests/engines/test_drop_in.py, tests/engines/test_horovod.py.
"""

from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon import planning
from tf_poseidon.graph_passes.find.markers import Marker
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.write import collectives

_INT32 = types_pb2.DT_INT32


def open_bundle(graph: graph_lib.Graph, markers: Sequence[Marker],
                decisions: Mapping[str, planning.Decision]) -> list[node_def_pb2.NodeDef]:
    """Returns the nodes that replace a bundle, of which some parts may travel as factors.

    Args:
        graph: The `Graph`.
        markers: Its `Marker`s, all of one bundle.
        decisions: The plan's `Decision`s by site.
    """
    bundle, node = markers[0].bundle, graph.nodes[markers[0].node]
    assert bundle is not None
    writer = graph_lib.Writer(node.name, node.device)
    left = [marker for marker in markers if decisions[marker.site].scheme == planning.PS]
    if len(left) == len(markers):
        writer.copy(node, **graph_lib.DECIDED)
        return writer.nodes
    dtype, sums = markers[0].dtype, {marker.part: f"{marker.prefix}/sum" for marker in markers}
    tensors = [bundle.gradients[marker.part] for marker in left]
    others = list(node.input)[len(bundle.gradients) if bundle.output == node.name else 1:]
    if bundle.output == node.name:
        if left:
            rest = writer.add(f"poseidon.{collectives.encoded(node.name)}", node.op, [*tensors, *others])
            graph_lib.copy_attributes(writer.nodes[-1], node, num_tensors=len(left), ignore_name_scope=True,
                                      **graph_lib.DECIDED)
            sums |= {marker.part: f"{rest}:{i}" for i, marker in enumerate(left)}
    elif left:
        if len(left) > 1:
            axis = writer.constant("rest_axis", np.int32(0), tensors[0])
            tensors = [writer.add("rest", "ConcatV2", [*tensors, axis], T=dtype, N=len(tensors),
                                  Tidx=_INT32)]
        writer.copy(node, inputs=[*tensors, *others], **graph_lib.DECIDED)
        lengths = [graph_lib.num_elements(graph.shape(bundle.gradients[m.part])) for m in left]
        sizes = writer.constant("rest_sizes", np.array(lengths, np.int32), node.name)
        axis = writer.constant("rest_sizes_axis", np.int32(0), node.name)
        pieces = writer.add("rest_pieces", "SplitV", [node.name, sizes, axis], T=dtype, Tlen=_INT32,
                            num_split=len(left))
        sums |= {marker.part: f"{pieces}:{i}" for i, marker in enumerate(left)}
    else:  # other nodes may wait for it
        writer.add("", "NoOp", [tensor for tensor in others if graph_lib.is_control(tensor)])
    writer.nodes.append(type(node)(
        name=bundle.output, op="IdentityN", device=graph.node(bundle.gradients[0]).device,
        input=[sums[part] for part in range(len(markers))]))
    graph_lib.set_attribute(writer.nodes[-1].attr["T"], "T", [dtype] * len(markers))
    return writer.nodes
