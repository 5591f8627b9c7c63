"""Describes gradients for the planner, which does not know TensorFlow.

Requires: a match for each marker. Ensures: a `Site` for each marker, in the same order.

Tests: tests/graphs/test_passes.py, tests/training/test_explaining.py.
"""

import dataclasses
import math

import tensorflow as tf

from tf_poseidon import planning
from tf_poseidon.graph_passes import passes
from tf_poseidon.graph_passes.find.markers import Marker
from tf_poseidon.graph_passes.find.training_step import StepFacts
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.match.matches import BiasMatch
from tf_poseidon.graph_passes.match.matches import GradientMatch
from tf_poseidon.graph_passes.match.matches import NarrowGradient
from tf_poseidon.graph_passes.match.matches import Product
from tf_poseidon.graph_passes.match.matches import Refusal
from tf_poseidon.graph_passes.match.matches import SlicesMatch


class DescribeSites(passes.Pass):
    """Makes a `Site` from each marker and its match."""

    def __init__(self, usual: graph_lib.Graph | None = None) -> None:
        """Makes the pass; `usual` is the graph with the shapes of a usual batch, by default its own."""
        self._usual = usual

    def requires(self, training: passes.TrainingGraph) -> str:
        missing = [marker.site for marker in training.markers if marker.site not in training.matches]
        return f"nothing was found out about '{missing[0]}'" if missing else ""

    def call(self, training: passes.TrainingGraph) -> passes.TrainingGraph:
        return dataclasses.replace(training, sites=tuple(
            _site(self._usual or training.graph, marker, training.matches[marker.site], training.facts,
                  training.narrow.get(marker.site))
            for marker in training.markers))

    def ensures(self, training: passes.TrainingGraph, result: passes.TrainingGraph) -> str:
        is_same = [site.name for site in result.sites] == [marker.site for marker in training.markers]
        return "" if is_same else "the sites are not those of the markers"


def _site(usual: graph_lib.Graph, marker: Marker, match: GradientMatch, facts: StepFacts,
          narrow: NarrowGradient | None) -> planning.Site:
    dtype, shape = tf.as_dtype(marker.dtype), marker.shape
    if not graph_lib.is_known(shape):
        shape = usual.shape(marker.gradient)
    site = planning.Site(marker.site, dtype.name, _itemsize(marker, marker.dtype),
                         shape if graph_lib.is_known(shape) else None,
                         is_waited_for=marker.meanwhile == "waits",
                         cast_from=None if narrow is None else tf.as_dtype(narrow.dtype).name)
    if isinstance(match, Refusal):
        return dataclasses.replace(site, refusal=str(match))
    if isinstance(match, BiasMatch):
        return dataclasses.replace(
            site, bias_of=match.leader,
            refusal=f"it is computed from the factors of '{match.leader}', which are not sent")
    if isinstance(match, SlicesMatch):
        assert graph_lib.is_known(shape)  # that of a variable
        row_bytes = math.prod(shape[1:]) * dtype.size + tf.as_dtype(match.index_dtype).size
        numbers = (graph_lib.num_elements(usual.shape(tensor)) for tensor in match.indices)
        k = next((number for number in numbers if number is not None), None)
        return dataclasses.replace(site, slices=planning.Slices(facts.usual_rows(k), row_bytes))
    first = match.products[0]
    rows_of_products = [_rows(usual, product) for product in match.products]
    if any(len(rows) > 1 for rows in rows_of_products):
        return dataclasses.replace(site, refusal="one of its factors is broadcast")
    rows = [facts.usual_rows(min(rows, default=None)) for rows in rows_of_products]
    known_rows = [k for k in rows if k is not None]
    factors = planning.Factors(
        m=first.u.columns, n=first.v.columns, k=sum(known_rows) if len(known_rows) == len(rows) else None,
        itemsize=_itemsize(marker, first.dtype), extra_bytes=len(match.terms) * dtype.size)
    return dataclasses.replace(site, factors=factors, is_divided=marker.kept is not None and marker.kept.is_of(
        factors.m, factors.n))


def _rows(usual: graph_lib.Graph, product: Product) -> set[int]:
    """Returns the numbers of rows of the factors of a product, as far as they are known."""
    numbers = ((graph_lib.num_elements(usual.shape(factor.tensor)), factor.columns)
               for factor in (product.u, product.v))
    return {number // columns for number, columns in numbers if number is not None}


def _itemsize(marker: Marker, dtype: int) -> int:
    """Returns the bytes of an element of `dtype` on the wire."""
    size = tf.as_dtype(dtype).size
    return size if marker.wire_dtype is None else min(size, tf.as_dtype(marker.wire_dtype).size)
