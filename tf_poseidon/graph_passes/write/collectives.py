"""Writes the nodes of one site with the collectives of another library.

horovod_ops.py and tensorflow_ops.py have the ops of each library.

Under "ps", a site becomes an all-reduce, and under "sfb"

    U, V -> all-gather -> outer product

All ranks must call the same collectives, so they agree on the rewritten graph before they run it
(`agreement_text.py`): there is no branch for a rank without factors.

There are two kinds of markers. Our own are replaced by collectives. In a program for another library, its own
all-reduce is the marker, which stays in its place if the plan says "ps".

Tests: tests/engines/test_drop_in.py, tests/engines/test_horovod.py.
"""

import abc
from collections.abc import Iterable
from collections.abc import Sequence
import re

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.match.matches import Match
from tf_poseidon.graph_passes.write import site_writer


class Collectives(site_writer.SiteWriter, abc.ABC):
    """Writes the nodes of one site; there is a subclass for the ops of each library."""

    has_to_agree = True

    # ---- schemes --------------------------------------------------------------------------------

    def summed(self) -> None:
        """Keeps the all-reduce of a program for another library."""
        if self.marker.bundle is None:  # `bundles.py` writes those of bundles
            self.writer.copy(self._node, **graph_lib.DECIDED)

    def factors(self) -> None:
        """Gathers the factors of all ranks; or uses those that another site has gathered.

        This rank's own gradient is not needed, so it is not computed.
        """
        leader, match = self.leader
        if self.decision.leader:
            self._bias(leader, match)
            return
        parts, types, columns = self._parts(match)
        gathered = self._gathered(parts, types, columns, match.others())
        for i, tensor in enumerate(gathered):  # under the names that riders read
            self.writer.add(f"recv{i}", "Identity", [tensor], T=types[i])
        with self.writer.placed(self._where_rebuilt(types[0])):
            masks = self._masks(match)
            self._finish(self._after_controls(self._rebuild(match, masks, gathered, types[0]), match))
        self._verify_by(gathered[:2], types[:2], masks)

    def _bias(self, leader: str, match: Match) -> None:
        """Sums the rows of a factor that another site has gathered."""
        dtype, bias = self._on_wire(match.products[0].dtype), self._bias_match
        gathered = f"{leader}/recv{0 if bias.factor == 'u' else 1}"
        self._verify_by([gathered], [dtype])
        self._finish(self._after_controls(self._sum_of_rows(gathered, dtype), bias))

    def _finish(self, total: str) -> None:
        """Puts a rebuilt gradient in the marker's place; if it is in a bundle, where `bundles.py` finds it."""
        dtype = self.marker.dtype
        total = self._rescaled(total)
        if self.marker.is_flat:
            total = self._reshaped("flat", total, [-1], dtype)
        self.writer.add("sum" if self.marker.bundle else "", "Identity", [total], T=dtype)

    # ---- the ops of a library --------------------------------------------------------------------

    @abc.abstractmethod
    def _gathered(self, tensors: Sequence[str], types: Sequence[int], columns: Sequence[int | None],
                  others: Sequence[str]) -> list[str]:
        """Returns tensors with the rows of all ranks; `columns` are None for slices.

        Nothing may be gathered before all of `tensors` and `others` are computed, whatever the gradient depends on: the
        next round of a loop could otherwise gather under the same name at the same time.
        """

    @abc.abstractmethod
    def _rescaled(self, total: str) -> str:
        """Returns a sum, scaled as the program's own all-reduce scales it."""


def after(tensors: Iterable[str]) -> list[str]:
    """Returns control inputs that wait for tensors."""
    return list(dict.fromkeys(f"^{graph_lib.node_of(tensor)}" for tensor in tensors))


def encoded(site: str) -> str:
    """Returns a site's name in characters that names of nodes may have; different sites get different names."""
    return re.sub(r"[^A-Za-z0-9_]", lambda c: "." if c[0] == "/" else f"-{ord(c[0]):x}-", site)
