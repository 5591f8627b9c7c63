"""Writes the nodes of one site with the collectives of another library.

Which ops these are, horovod_ops.py and tensorflow_ops.py know.

By "ps", a site becomes an all-reduce, and by "sfb"

    U, V -> all-gather -> outer product

Slices that stay such are gathered too, and those of the same index added up. Such collectives want that
all ranks call the same ones, so ranks agree on the rewritten graph before they run it (agreement.py): no
branch is left for a rank that could not give factors.

Two kinds of markers are written about. Our own become collectives altogether. In a program that was
written for another library its all-reduce is the marker, and stays where it was if the plan says "ps".
"""

import abc
from collections.abc import Iterable
from collections.abc import Sequence
import re

from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.graph import graph as graph_lib
from tf_poseidon.graph_passes.match.matches import Match
from tf_poseidon.graph_passes.write import site_writer

_INT32 = types_pb2.DT_INT32


class Collectives(site_writer.SiteWriter, abc.ABC):
    """Writes the nodes of one site; what the ops of a library are, its subclasses know."""

    has_to_agree = True

    # ---- forms ----------------------------------------------------------------------------------

    def summed(self) -> None:
        """gradient -> all-reduce, the last under the marker's name."""
        if self.marker.indices is not None:
            self._as_slices(self._all_reduced("sum", self._dense_of_slices()))
            self._verify_by_magnitudes()
        elif not self.marker.is_foreign:
            self._all_reduced("", self.marker.gradient)
            self._verify_by_magnitudes()
        elif self.marker.bundle is None:  # those of a bundle are for `bundles.py`
            self.writer.copy(self._node, **graph_lib.DECIDED)

    def slices(self) -> None:
        """Gathers all slices, and under the marker's name those with the same index added up."""
        marker = self.marker
        indices, values = self._gathered([self._indices, marker.gradient],
                                         [self._index_type, marker.dtype], [None, None], ())
        unique = self.writer.add("unique", "Unique", [indices], T=self._index_type, out_idx=_INT32)
        number = self.writer.add("number", "Size", [unique], T=self._index_type, out_type=_INT32)
        total = self.writer.add("total", "UnsortedSegmentSum", [values, f"{unique}:1", number],
                                T=marker.dtype, Tindices=_INT32, Tnumsegments=_INT32)
        self.writer.add("", "IdentityN", [unique, total], T=[self._index_type, marker.dtype])
        self._verify_by_magnitudes()

    def factors(self) -> None:
        """Gathers the factors of all ranks; or makes something of what another site has gathered.

        This rank's own gradient is not needed, and so not computed.
        """
        leader, match = self.leader
        if self.decision.leader:
            self._bias(leader, match)
            return
        parts, types, columns = self._parts(match)
        gathered = self._gathered(parts, types, columns, match.others())
        for i, tensor in enumerate(gathered):  # where riders find them
            self.writer.add(f"recv{i}", "Identity", [tensor], T=types[i])
        with self.writer.placed(self._where_rebuilt(types[0])):
            masks = self._masks(match)
            self._finish(self._after_controls(self._rebuild(match, masks, gathered, types[0]), match))
        self._verify_by(gathered[:2], types[:2], masks)

    def _bias(self, leader: str, match: Match) -> None:
        """Adds up the rows of a factor that another site has gathered."""
        dtype, bias = self._on_wire(match.products[0].dtype), self._bias_match
        gathered = f"{leader}/recv{0 if bias.factor == 'u' else 1}"
        self._verify_by([gathered], [dtype])
        self._finish(self._after_controls(self._sum_of_rows(gathered, dtype), bias))

    def _verify_by_magnitudes(self) -> None:
        """Tells verify mode how rounding shows in a sum whose order is the library's.

        The sum of the magnitudes of all ranks stands for a factor with a single row.
        """
        if self._verifier is None:
            return
        dtype = self.marker.dtype
        magnitude = self.writer.add("magnitude", "Abs", [graph_lib.data_inputs(self._verifier)[0]], T=dtype)
        magnitude = self._all_reduced("magnitudes", magnitude, what="magnitude")
        self._verify_by([self._reshaped("magnitudes_row", magnitude, [1, -1], dtype)], [dtype])

    def _finish(self, total: str) -> None:
        """Puts a rebuilt gradient in the marker's place; of a bundle, where `bundles.py` finds it."""
        dtype = self.marker.dtype
        total = self._rescaled(total)
        if self.marker.is_flat:
            total = self._reshaped("flat", total, [-1], dtype)
        self.writer.add("sum" if self.marker.bundle else "", "Identity", [total], T=dtype)

    # ---- what libraries differ in ----------------------------------------------------------------

    @abc.abstractmethod
    def _all_reduced(self, suffix: str, tensor: str, what: str = "") -> str:
        """Returns the sum of a tensor of the marker's type over all ranks, at `suffix`.

        `what` tells it apart from the sum of the gradient itself.
        """

    @abc.abstractmethod
    def _gathered(self, tensors: Sequence[str], types: Sequence[int], columns: Sequence[int | None],
                  others: Sequence[str]) -> list[str]:
        """Returns tensors with the rows of all ranks; `columns` are None of slices.

        Nothing may be gathered before all of `tensors` and `others` are there, whatever the gradient depends
        on: the next step of a loop could gather under the same name while this one does.
        """

    @abc.abstractmethod
    def _rescaled(self, total: str) -> str:
        """Returns a sum as the all-reduce of the program would have returned it."""


def after(tensors: Iterable[str]) -> list[str]:
    """Returns control inputs that wait for tensors."""
    return list(dict.fromkeys(f"^{graph_lib.node_of(tensor)}" for tensor in tensors))


def encoded(site: str) -> str:
    """Returns a site's name with characters that names of nodes may have, different for each."""
    return re.sub(r"[^A-Za-z0-9_]", lambda c: "." if c[0] == "/" else f"-{ord(c[0]):x}-", site)
