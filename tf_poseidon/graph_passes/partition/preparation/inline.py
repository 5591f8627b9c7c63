"""Inlines calls, and lowers conditions and loops to flat control flow, as TensorFlow does before it runs a graph.

Requires: a GraphDef. Ensures: the kept nodes, and what they need, without calls except of functions that
must not be inlined.

Tests: tests/graphs/test_partition_functions.py, tests/graphs/test_partition_held.py.
"""

from collections.abc import Iterable

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import config_pb2
from tensorflow.core.protobuf import meta_graph_pb2

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import GraphError


def inline(graph_def: graph_pb2.GraphDef, keep: Iterable[str]) -> graph_pb2.GraphDef:
    """Returns the flat GraphDef.

    Args:
        graph_def: A GraphDef.
        keep: Names of the nodes that must remain, with everything that they need.

    Raises:
        PoseidonError: If TensorFlow cannot inline the functions.
    """
    if not graph_def.library.function:  # nothing is called, and the detour through TensorFlow takes long
        return graph_def
    meta_graph = meta_graph_pb2.MetaGraphDef()
    meta_graph.graph_def.CopyFrom(graph_def)
    for function in meta_graph.graph_def.library.function:
        # Names alternative implementations, such as an LSTM's for GPUs; with it, this one would not be inlined.
        function.attr.pop("api_implements", None)
    # Grappler treats these as the graph's outputs.
    meta_graph.collection_def["train_op"].node_list.value.extend(keep)
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.min_graph_nodes = -1
    config.graph_options.rewrite_options.optimizers.append("function")
    try:
        return tf_compat.optimize(config, meta_graph)
    except (tf.errors.OpError, ValueError) as error:
        text = str(error).splitlines()[0]
        raise GraphError(f"TensorFlow cannot inline the functions of the graph: {text}") from error
