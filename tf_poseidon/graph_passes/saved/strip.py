"""Stores the original graph in a rewritten one, and extracts it again (`strip`).

Tests: tests/saved/test_saved_graphs.py, tests/saved/test_saved_damage.py.
"""

import zlib

from google.protobuf import message
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.graph import provenance

# The node that holds the original, and its attribute with the serialized and compressed GraphDef.
_NAME, _ORIGINAL = "poseidon/original", "_poseidon_original"


def is_rewritten(graph_def: graph_pb2.GraphDef) -> bool:
    """Whether a GraphDef was rewritten."""
    return _note(graph_def) is not None


def compressed(graph_def: graph_pb2.GraphDef) -> bytes:
    """Returns a GraphDef as compressed bytes."""
    return zlib.compress(graph_def.SerializeToString(deterministic=True))


def note_original(graph_def: graph_pb2.GraphDef, original: bytes) -> None:
    """Stores the original of a GraphDef in it, `compressed`."""
    node = graph_def.node.add(name=_NAME, op="NoOp")
    provenance.Provenance(provenance.ORIGINAL).note(node)
    node.attr[_ORIGINAL].s = original


def strip(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """Returns the original of a rewritten GraphDef.

    Raises:
        GraphError: If it is damaged, or was made by another version.
    """
    node = _note(graph_def)
    assert node is not None
    provenance.of(node)  # checks the version
    try:
        return graph_pb2.GraphDef.FromString(zlib.decompress(node.attr[_ORIGINAL].s))
    except (zlib.error, message.DecodeError) as error:
        raise GraphError(f"The original graph in node '{node.name}' is damaged; use the original file, "
                         "or rewrite it again.") from error


def _note(graph_def: graph_pb2.GraphDef) -> node_def_pb2.NodeDef | None:
    """Returns the node that holds the original graph, None if none does; other nodes may be damaged."""
    return next((node for node in graph_def.node if _ORIGINAL in node.attr), None)
