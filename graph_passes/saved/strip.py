"""A rewritten graph holds the one that it was made of, which `strip` takes out again."""

import zlib

from google.protobuf import message
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.graph import provenance

# Name of the node that says so, and its attribute with the original GraphDef: serialized, and compressed.
_NAME, _ORIGINAL = "poseidon/original", "_poseidon_original"


def is_rewritten(graph_def: graph_pb2.GraphDef) -> bool:
    """Whether a GraphDef was rewritten."""
    return _note(graph_def) is not None


def compressed(graph_def: graph_pb2.GraphDef) -> bytes:
    """Returns a GraphDef as bytes."""
    return zlib.compress(graph_def.SerializeToString(deterministic=True))


def note_original(graph_def: graph_pb2.GraphDef, original: bytes) -> None:
    """Lets a GraphDef hold the one that it was made of, `compressed`."""
    node = graph_def.node.add(name=_NAME, op="NoOp")
    provenance.Provenance(provenance.ORIGINAL).note(node)
    node.attr[_ORIGINAL].s = original


def strip(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """Returns the GraphDef that a rewritten one was made of.

    Raises:
        GraphError: If it is damaged, or was made by another version.
    """
    node = _note(graph_def)
    assert node is not None
    provenance.of(node)  # checks the version
    try:
        return graph_pb2.GraphDef.FromString(zlib.decompress(node.attr[_ORIGINAL].s))
    except (zlib.error, message.DecodeError) as error:
        raise GraphError(f"What node '{node.name}' says about the graph that was rewritten is damaged; take that "
                         "graph, or rewrite it anew.") from error


def _note(graph_def: graph_pb2.GraphDef) -> node_def_pb2.NodeDef | None:
    """Returns the node that holds the original graph, None if there is none; other nodes may be damaged."""
    return next((node for node in graph_def.node if _ORIGINAL in node.attr), None)
