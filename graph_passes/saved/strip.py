"""A rewritten graph holds the one that it was made of, which `strip` takes out again."""

import zlib

from google.protobuf import message
from tensorflow.core.framework import graph_pb2

from tf_poseidon.errors import PoseidonError

# The node that says so, and the attribute with the original GraphDef: serialized, and compressed.
NODE, _ORIGINAL = "poseidon/original", "_poseidon_original"


def is_rewritten(graph_def):
    """Whether a GraphDef was rewritten."""
    return any(node.name == NODE for node in graph_def.node)


def compressed(graph_def):
    """Returns a GraphDef as bytes."""
    return zlib.compress(graph_def.SerializeToString(deterministic=True))


def note_original(graph_def, original):
    """Lets a GraphDef hold the one that it was made of, `compressed`."""
    node = graph_def.node.add(name=NODE, op="NoOp")
    node.attr[_ORIGINAL].s = original


def strip(graph_def):
    """Returns the GraphDef that a rewritten one was made of.

    Raises:
        PoseidonError: If it is damaged.
    """
    node = next(node for node in graph_def.node if node.name == NODE)
    try:
        return graph_pb2.GraphDef.FromString(zlib.decompress(node.attr[_ORIGINAL].s))
    except (zlib.error, message.DecodeError) as error:
        raise PoseidonError(f"What node '{NODE}' says about the graph that was rewritten is damaged; take that "
                            "graph, or rewrite it anew.") from error
