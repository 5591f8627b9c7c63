"""Runs the original of a rewritten graph in one process, as the reference for each step of the rewritten graph.

Tests: tests/saved/test_saved_commands.py.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tf_poseidon.base import rounding
from tf_poseidon.saved_graphs import formats
from tf_poseidon.saved_graphs import running

# For each run with other last places: whether it is optimised. TensorFlow optimises the rewritten graph otherwise than
# the original, which then rounds in other places.
_RERUNS = (True, False)
# By name.
Arrays = Mapping[str, np.ndarray]


class Reference:
    """The original graph in this process."""

    def __init__(self, original: formats.Saved, what: Mapping[str, Any], epsilon: float, seed: int) -> None:
        """Loads the graph.

        Args:
            original: The graph, of `formats.read`.
            what: The keyword arguments of `running.runner` that define a step.
            epsilon: The last place of 1 in the numbers of the rewritten step, see `rounding.epsilon`.
            seed: Seed for the choice of numbers that are a last place larger or smaller.
        """
        # Each run has its own runner, so that seeded random ops have the same state as in the rewritten graph.
        self._runners = [running.runner(original, **what, is_optimised=is_optimised)
                         for is_optimised in (True, *_RERUNS)]
        self._epsilon = epsilon
        self._rng = np.random.default_rng([seed, 1])

    def differs_at_first(self, state: Arrays) -> list[str]:
        """Returns a sentence per variable whose value in the file is another than in `state`, at most three."""
        runner = self._runners[0]
        names = [name for name, value in zip(runner.variables, runner.state())
                 if name in state and value.tobytes() != state[name].tobytes()]
        return [f"variable '{name}' begins with other values than in the original" for name in names[:3]]

    def step(self, batch: Arrays,
             state: Arrays) -> tuple[dict[tuple[str, str], np.ndarray], dict[tuple[str, str], float]]:
        """Runs a step.

        Args:
            batch: The inputs, arrays by name.
            state: The variables before the step, arrays by name.

        Returns:
            (values, bounds), both by (kind, name): the one-process value of each variable and output after the step,
            and how far floats may be from that.
        """
        exact, *others = [self._run(runner, batch, state, is_exact=not i) for i, runner in enumerate(self._runners)]
        return exact, rounding.measured(exact, others, self._epsilon)

    def _run(self, runner: running.Runner, batch: Arrays, state: Arrays,
             is_exact: bool) -> dict[tuple[str, str], np.ndarray]:
        def change(value: np.ndarray) -> np.ndarray:
            return value if is_exact else rounding.changed(value, self._epsilon, self._rng)

        runner.set_state([change(state[name]) for name in runner.variables])
        return run_step(runner, {name: change(value) for name, value in batch.items()})


def run_step(runner: running.Runner, batch: Arrays) -> dict[tuple[str, str], np.ndarray]:
    """Runs a step; returns its variables and outputs afterwards, arrays by ("variable" or "output", name)."""
    outputs = runner.run(batch)
    return {**{("variable", name): value for name, value in zip(runner.variables, runner.state())},
            **{("output", name): value for name, value in outputs.items()}}
