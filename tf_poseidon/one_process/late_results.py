"""What a step returns from variables alone, such as the results of metrics: computed when it is read.

Tests: tests/graphs/test_partition_held.py, tests/training/test_training.py.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_poseidon.graph_passes.partition.preparation import results as results_lib
from tf_poseidon.job.job_variables import held_variables
from tf_poseidon.one_process.graphs import flat_graphs
from tf_poseidon.one_process.graphs import graph_texts
from tf_poseidon.one_process.graphs.flat_graphs import full_name


class LateResults:
    """What a function returns from variables alone: metrics' results. They are computed when they are read.

    Attributes:
        held: The variables that hold summands from step to step.
        variables: The variables from which they are computed.
        numbers: Which of the function's outputs they are.
        reads: Names of the nodes by which the function would read these variables.
        lines: Lines that are the same where they are computed alike.
    """

    def __init__(self, traced: tf.types.experimental.ConcreteFunction, cut: results_lib.Results,
                 held: Sequence[tf.Variable], variables: Mapping[str, tf.Variable]) -> None:
        """Makes results.

        Args:
            traced: The function's ConcreteFunction.
            cut: The `results.Results` of its graph.
            held: The variables that hold summands.
            variables: The function's variables, by name of their resource.
        """
        self.held = tuple(held)
        sources = sorted(set(cut.reads.values()))
        self.variables = tuple(variables[source] for source in sources)
        self.numbers = frozenset(cut.fetches)
        self.reads = cut.reads.keys()
        self.lines = graph_texts.lines(cut.graph_def)
        self._function_type = traced.function_type
        names = flat_graphs.names_of_captures(traced.graph)
        captures = {names[internal.op.name]: external for external, internal in traced.graph.captures}
        captures = {full_name(node.name): captures[node.name] for node in cut.graph_def.node if node.name in captures}

        def compute(*values: tf.Tensor) -> list[tf.Tensor]:
            by_source = dict(zip(sources, values, strict=True))
            inputs = {full_name(name): by_source[source] for name, source in cut.reads.items()} | captures
            graph_def = flat_graphs.without_placeholders(cut.graph_def, inputs)
            return tf.import_graph_def(graph_def, inputs, list(cut.fetches.values()), name="")

        self._compute = tf.function(compute, autograph=False).get_concrete_function(
            *(tf.TensorSpec(variable.shape, variable.dtype) for variable in self.variables)) if sources else None

    def read(self, values: Sequence[np.ndarray], others: Sequence[tf.Tensor]) -> Any:
        """Returns what the function does.

        Args:
            values: The whole values of `variables`.
            others: What the function itself has returned.
        """
        computed = iter(() if self._compute is None else self._compute(*map(tf.constant, values)))
        rest = iter(others)
        number = len(self.numbers) + len(others)
        return self._function_type.pack_output(
            [next(computed if i in self.numbers else rest) for i in range(number)])


class Pending:
    """The results of a step, which are computed when they are read."""

    def __init__(self, results: LateResults, others: Sequence[tf.Tensor], held: held_variables.Held) -> None:
        """Makes pending results.

        Args:
            results: The `LateResults`.
            others: What the step has returned.
            held: The `held_variables.Held` of the job.
        """
        self._results = results
        self._others = others
        self._held = held

    def read(self) -> Any:
        """Returns the results; all ranks call this after the same step, and before the next one."""
        return self._results.read(self._held.whole(self._results.variables), self._others)
