"""Faults that tests plant."""

from tf_poseidon.graph_passes import session
from tf_poseidon.graph_passes import usual_batch
from tf_poseidon.graph_passes.find import training_step


def usual_shapes(find=session.RewriteSession.find):
    """Returns a `RewriteSession.find` by which a graph that runs gets the shapes of one rank's usual rows."""

    def find_with_usual(self, graph_def, add_shapes=None):
        facts = training_step.facts_of(graph_def)
        if facts.rows is None:
            return find(self, graph_def, add_shapes)
        shaped = usual_batch.with_sizes(graph_def, facts)
        for node in shaped.node:
            for size in _first_sizes(node):
                size.size = facts.rows if size.size in (-1, facts.global_rows) else size.size
        return find(self, graph_def, lambda _, alone: add_shapes(shaped, alone))

    return find_with_usual


def _first_sizes(node):
    """Returns the first sizes of the inputs of a graph."""
    if node.op == "Placeholder":
        return node.attr["shape"].shape.dim[:1]
    shapes = node.attr["_output_shapes"].list.shape if node.op == "_Arg" and "_output_shapes" in node.attr else ()
    return [size for shape in shapes for size in shape.dim[:1]]
