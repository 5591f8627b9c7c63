"""Inlines calls, and makes flat control flow of conditions and loops, as TensorFlow does before it runs a graph.

Requires: a GraphDef with functions. Ensures: what is kept, and what it needs, without calls but of functions that
ask not to be inlined.
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
        keep: Names of the nodes that must stay, with all that they depend on.

    Raises:
        PoseidonError: If TensorFlow cannot do it.
    """
    meta_graph = meta_graph_pb2.MetaGraphDef()
    meta_graph.graph_def.CopyFrom(graph_def)
    for function in meta_graph.graph_def.library.function:
        # Another implementation for GPUs (of an LSTM, say), for which this one would not be inlined.
        function.attr.pop("api_implements", None)
    # What Grappler takes for the graph's outputs.
    meta_graph.collection_def["train_op"].node_list.value.extend(keep)
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.min_graph_nodes = -1
    config.graph_options.rewrite_options.optimizers.append("function")
    try:
        return tf_compat.optimize(config, meta_graph)
    except (tf.errors.OpError, ValueError) as error:
        text = str(error).splitlines()[0]
        raise GraphError(f"TensorFlow cannot inline the functions of the graph: {text}") from error

