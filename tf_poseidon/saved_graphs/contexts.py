"""Loops and branches of TensorFlow 1, as a MetaGraph remembers them beside its graph.

TensorFlow 1 does not import a MetaGraph whose contexts name nodes that its graph lacks, and rewriting removes nodes.

Tests: tests/saved/test_saved_programs.py.
"""

from collections.abc import Callable
from typing import TypeAlias

from tensorflow.core.protobuf import control_flow_pb2
from tensorflow.core.protobuf import meta_graph_pb2

_Context: TypeAlias = control_flow_pb2.WhileContextDef | control_flow_pb2.CondContextDef

_COLLECTIONS: dict[str, type[_Context]] = {
    "while_context": control_flow_pb2.WhileContextDef, "cond_context": control_flow_pb2.CondContextDef}
# The fields of a context that name a node; it means nothing without one of these.
_NAMES = ("pred_name", "pivot_name", "pivot_for_pred_name", "pivot_for_body_name", "maximum_iterations_name")
_LISTS = ("loop_exit_names", "loop_enter_names")


def forget_removed(meta_graph: meta_graph_pb2.MetaGraphDef) -> None:
    """Removes from the contexts of a MetaGraph what its graph does not have."""
    names = {node.name for node in meta_graph.graph_def.node}

    def is_there(name: str) -> bool:
        return name.lstrip("^").partition(":")[0] in names

    for key, kind in _COLLECTIONS.items():
        if key in meta_graph.collection_def:
            contexts = meta_graph.collection_def[key].bytes_list.value
            kept = [context.SerializeToString(deterministic=True) for data in contexts
                    if _is_kept(context := kind.FromString(data), is_there)]
            contexts[:] = kept


def _is_kept(context: _Context, is_there: Callable[[str], bool]) -> bool:
    """Whether a context is still one; removes from it what is not there."""
    values = context.values_def
    values.values[:] = [name for name in values.values if is_there(name)]
    for key in [key for key, name in values.external_values.items() if not is_there(name)]:
        del values.external_values[key]
    for i in reversed(range(len(context.nested_contexts))):
        inner = context.nested_contexts[i]
        kind = inner.WhichOneof("ctxt")
        if kind is None or not _is_kept(getattr(inner, kind), is_there):
            del context.nested_contexts[i]
    needed = [name for field in _NAMES if (name := getattr(context, field, ""))]
    needed += [name for field in _LISTS for name in getattr(context, field, ())]
    return all(map(is_there, needed))
