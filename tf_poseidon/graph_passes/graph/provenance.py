"""The provenance of inserted nodes: an attribute, since names are for people and may change.

`strip`, `diff`, and the kernels whose events a timeline shows read it. Its text is the version, followed by one line
per field; kernels/provenance.h reads the same text.

Tests: tests/graphs/test_passes.py, tests/saved/test_saved_graphs.py.
"""

import dataclasses

from tensorflow.core.framework import node_def_pb2

from tf_poseidon.errors import GraphError

ATTRIBUTE = "_poseidon_inserted"
_VERSION = "1"

# Roles of nodes that exchange nothing: they partition a step, or hold the original graph.
STEP, ORIGINAL = "step", "original"


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Why a node was inserted.

    Attributes:
        role: What ranks do with the site: the `kind` of a `partition.report.ExchangedTensor`; or STEP or ORIGINAL.
        site: Name of the site, "" without one.
        scheme: The scheme of the exchange, "" if undecided.
        leader: The site whose exchange it uses, "" if it has its own.
        is_fetched: Whether the exchange happens only if a program fetches a tensor that the step does not need whole.
    """

    role: str
    site: str = ""
    scheme: str = ""
    leader: str = ""
    is_fetched: bool = False

    def note(self, node: node_def_pb2.NodeDef) -> None:
        """Stores the provenance in a node."""
        fields = (_VERSION, self.role, self.site, self.scheme, self.leader, "fetched" if self.is_fetched else "")
        node.attr[ATTRIBUTE].s = "\n".join(fields).encode()


def of(node: node_def_pb2.NodeDef) -> Provenance | None:
    """Returns the provenance of an inserted node; None for other nodes.

    Raises:
        PoseidonError: If the node was inserted by another version.
    """
    if ATTRIBUTE not in node.attr:
        return None
    version, *fields = node.attr[ATTRIBUTE].s.decode(errors="replace").split("\n")
    if version != _VERSION or len(fields) != 5:
        raise GraphError(f"The provenance of node '{node.name}' has version {version!r}, but this tf_poseidon reads "
                         f"{_VERSION}; rewrite the original graph again.")
    role, site, scheme, leader, fetched = fields
    return Provenance(role, site, scheme, leader, is_fetched=bool(fetched))


def rename_site(node: node_def_pb2.NodeDef, site: str) -> None:
    """Renames the site that a node serves."""
    if "site" in node.attr:
        node.attr["site"].s = site.encode()
    provenance = of(node)
    if provenance is not None and provenance.site:
        dataclasses.replace(provenance, site=site).note(node)
