"""Finds the gradients that a training graph synchronises.

Requires: a flat graph. Ensures: the markers in the order of the graph, each with a name of its own.

A marker is the op that our strategy puts over each gradient: `PoseidonSync`, or `PoseidonSyncSlices`
where the gradient is slices. Graphs that were made without them have other marks; a function for each
kind returns the same `Marker`s.
"""

import dataclasses

import tensorflow as tf

from tf_poseidon.graph_passes import graph as graph_lib

# The ops that our strategy puts over gradients.
MARKERS = ("PoseidonSync", "PoseidonSyncSlices")


@dataclasses.dataclass(frozen=True)
class Marker:
    """Where a gradient is synchronised.

    Attributes:
        site: Name of the site.
        node: Name of the node that synchronises it.
        gradient: This rank's gradient, a tensor; of slices, their values.
        contributes: Whether this rank has rows of its own, a tensor.
        shape: The gradient's shape, None if it is unknown.
        dtype: The gradient's `types_pb2.DataType`.
        indices: The indices of slices, a tensor; None of a dense gradient.
        wire_dtype: The `types_pb2.DataType` in which it travels if it is wider; None for its own.
        is_foreign: Whether it is of a program that another library synchronises; then `contributes` is None.
        is_flat: Whether its sum is a vector, whatever shape the gradient has.
        bundle: The `Bundle` that it is in, None if it is by itself.
        part: Which part of it.
        refusal: Why factors cannot take its place, whatever the gradient is; None if they could.
        meanwhile: What the step does meanwhile, see `graph.MEANWHILE`; "" where that is not said.
    """

    site: str
    node: str
    gradient: str
    contributes: str | None
    shape: tuple[int | None, ...] | None
    dtype: int
    indices: str | None = None
    wire_dtype: int | None = None
    is_foreign: bool = False
    is_flat: bool = False
    bundle: "Bundle | None" = None
    part: int = 0
    refusal: str | None = None
    meanwhile: str = ""

    @property
    def prefix(self):
        """What the names of the nodes begin with that stand for this marker."""
        return self.node if self.bundle is None else f"{self.node}/part{self.part}"


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Several gradients that a program reduces by one op.

    Attributes:
        reduce: Name of the node that does.
        gradients: What it is given of each part.
        output: Name of the node whose outputs are the sums of the parts.
    """

    reduce: str
    gradients: tuple[str, ...]
    output: str


def find_sites(graph):
    """Returns the `Marker`s of a graph.

    Raises:
        ValueError: If two gradients have the same name.
    """
    markers = [marker for node in graph.graph_def.node
               if (marker := _marker(graph, node)) is not None]
    by_site = {}
    for marker in markers:
        other = by_site.setdefault(marker.site, marker)
        if other is not marker:
            raise ValueError(f"the nodes '{other.node}' and '{marker.node}' synchronise the same "
                             f"site '{marker.site}'; give each synchronisation a name of its own")
    return markers


def _marker(graph, node):
    """Returns the `Marker` that a node is, or None."""
    if node.op not in MARKERS or graph_lib.is_planned(node):
        return None
    site, dtype = node.attr["site"].s.decode(), node.attr["T"].type
    if node.op == "PoseidonSync":
        wire = node.attr["wire_dtype"].s.decode() if "wire_dtype" in node.attr else ""
        return Marker(site, node.name, *graph_lib.data_inputs(node), graph.shape(node.name), dtype,
                      wire_dtype=tf.as_dtype(wire).as_datatype_enum if wire else None,
                      meanwhile=graph_lib.meanwhile(node))
    indices, values, contributes = graph_lib.data_inputs(node)
    shape = tuple(dim.size for dim in node.attr["shape"].shape.dim)
    return Marker(site, node.name, values, contributes, shape, dtype, indices)
