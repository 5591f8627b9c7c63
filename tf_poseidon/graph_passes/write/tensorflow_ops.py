"""TensorFlow's collectives, which replace those of tf.distribute.

Tests: tests/engines/test_drop_in.py.
"""

from collections.abc import Sequence

import numpy as np
from tensorflow.core.framework import types_pb2

from tf_poseidon import planning
from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.find.markers import Marker
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.write import collectives
from tf_poseidon.graph_passes.write import site_writer

# How many layers can travel as factors. The keys of tf.distribute count up from 0; those of parts of its bundles count
# down, with this many keys per bundle.
_MOST_LAYERS = 256

_INT32 = types_pb2.DT_INT32


class TensorFlowOps(collectives.Collectives):
    """Writes TensorFlow's collectives in place of those of tf.distribute.

    They require the same shape on all ranks: factors are padded with rows of zeros, which add nothing, to the number of
    rows for which the plan was made. U, V and coefficients travel as one matrix.
    """

    def __init__(self, planned: site_writer.PlannedGraph, marker: Marker) -> None:
        super().__init__(planned, marker)
        layers = [site for site, d in planned.decisions.items() if d.scheme == planning.SFB and not d.leader]
        if len(layers) > _MOST_LAYERS:
            raise GraphError(f"The plan sends {len(layers)} layers as factors, and TensorFlow's collectives tell "
                             f"{_MOST_LAYERS} apart; pin some of them to 'ps'.")
        self._number = layers.index(marker.site) if marker.site in layers else None

    def _gathered(self, tensors: Sequence[str], types: Sequence[int], columns: Sequence[int | None],
                  others: Sequence[str]) -> list[str]:
        site = next(site for site in self.planned.plan.sites if site.name == self.marker.site)
        assert site.factors is not None
        rows, dtype = site.factors.rows, types[0]
        matrix = self._concatenated("parts", [self._filled_up(f"part{i}", tensor, rows, dtype)
                                              for i, tensor in enumerate(tensors)], 1, dtype)
        _, size, group, instance, *token = graph_lib.data_inputs(self._node)
        attr = self._node.attr
        gathered = self.writer.add(
            "gather", "CollectiveGatherV2", [matrix, size, group, self._instance_key(instance), *token,
                                             *collectives.after(others)],
            T=dtype, communication_hint=attr["communication_hint"].s.decode(),
            timeout_seconds=attr["timeout_seconds"].f, is_stateless=attr["is_stateless"].b,
            Nordering_token=len(token))
        sizes = self.writer.constant("columns", np.array(columns, np.int32), gathered)
        axis = self.writer.constant("columns_axis", np.int32(1), gathered)
        pieces = self.writer.add("pieces", "SplitV", [gathered, sizes, axis], T=dtype, Tlen=_INT32,
                                 num_split=len(columns))
        return [f"{pieces}:{i}" for i in range(len(columns))]

    def _filled_up(self, name: str, tensor: str, rows: int, dtype: int) -> str:
        """Returns a matrix, padded to the number of rows that it has on all ranks."""
        shape = self._graph.shape(tensor) if tensor in self._graph.nodes else None
        if shape and shape[0] == rows:
            return tensor
        wanted = self.writer.constant(f"{name}_wanted", np.array([rows, 0], np.int32), tensor)
        sizes = self.writer.add(f"{name}_shape", "Shape", [tensor], T=dtype, out_type=_INT32)
        # [rows, 0] - shape * [1, 0]: only rows are added, and a rank with too many fails.
        first = self.writer.constant(f"{name}_first", np.array([1, 0], np.int32), tensor)
        own = self.writer.add(f"{name}_rows", "Mul", [sizes, first], T=_INT32)
        missing = self.writer.add(f"{name}_missing", "Sub", [wanted, own], T=_INT32)
        zero = self.writer.add(f"{name}_before", "ZerosLike", [missing], T=_INT32)
        paddings = self.writer.add(f"{name}_paddings", "Pack", [zero, missing], T=_INT32, N=2, axis=1)
        return self.writer.add(f"{name}_filled_up_to_{rows}_rows", "Pad", [tensor, paddings], T=dtype,
                               Tpaddings=_INT32)

    def _instance_key(self, key: str) -> str:
        """Returns a key that no other collective in flight has; parts of a bundle get new ones."""
        if self.marker.bundle is None:
            return key
        assert self._number is not None
        factor = self.writer.constant("keys", np.int32(-_MOST_LAYERS), key)
        number = self.writer.constant("key_of_part", np.int32(-self._number), key)
        key = self.writer.add("key_of_bundle", "Mul", [key, factor], T=_INT32)
        return self.writer.add("key", "Add", [key, number], T=_INT32)

    def _rescaled(self, total: str) -> str:
        return total
