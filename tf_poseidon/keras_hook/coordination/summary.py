"""`Summary`: a callback that says after `fit` how long steps took and waited, and what several ranks gain.

Tests: tests/training/test_summary.py.
"""

import os
import time
from typing import Any

import keras

from tf_poseidon import planning
from tf_poseidon.reports.texts import duration

_NOTICEABLE, _LONG = 0.01, 0.05  # parts of a step that wait for data


class Summary(keras.callbacks.Callback):
    """Prints at the end of `fit` where the time of its steps went, and what several ranks gain.

    ```python
    model.fit(x, y, batch_size=256, callbacks=[poseidon.Summary()])
    ```

    ```
    118 steps of 51.8 ms on 4 ranks, after the first
    of a step 4.9 ms (9.4 %) wait for other ranks, longest for rank 2
    about 3.62 times as fast as one process, if that has the work of 4 ranks; the plan expects 3.7 at 10 Gbit/s
    ```

    Where steps of rank 0 wait for their batches, another line says how long:

    ```
    of a step 12.3 ms (24 %) wait for data; read it with num_parallel_calls=tf.data.AUTOTUNE, or cache it
    ```

    The first execution is left out, since tracing it takes longer than many steps. Rank 0 prints, the other ranks do
    nothing; `text` keeps what was printed.

    Attributes:
        text: What the last `fit` has printed; "" before its end, or if it had a single execution.
    """

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self._in_tests, self._test_from = 0.0, 0.0  # seconds in which validation waited for data; before this one

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._steps, self._seconds, self._executions = 0, 0.0, 0  # without the first execution, which is counted
        self._begin, self._from = 0.0, 0
        self.text = ""
        self._before: dict[str, Any] = {}
        self._in_tests = 0.0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._begin, self._from = time.perf_counter(), batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._executions += 1
        if self._executions == 1:
            self._before = self._stats()
            return
        self._seconds += time.perf_counter() - self._begin
        self._steps += batch - self._from + 1

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._test_from = self._stats().get("input_seconds", 0.0)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self._in_tests += self._stats().get("input_seconds", 0.0) - self._test_from

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        strategy = self.model.distribute_strategy
        if not self._steps or getattr(strategy, "rank", 0) != 0:
            return
        after = self._stats()
        data, waited = (after.get(name, 0.0) - self._before.get(name, 0.0)
                        for name in ("input_seconds", "waiting_seconds"))
        waited_for = {rank: seconds - self._before["waited_for"].get(rank, 0.0)
                      for rank, seconds in after.get("waited_for", {}).items()}
        self.text = summary(getattr(strategy, "num_replicas_in_sync", 1), self._steps, self._seconds,
                            data - self._in_tests, waited, waited_for, getattr(strategy, "plan", None),
                            "TF_POSEIDON_EMULATED_GBPS" in os.environ) + self._verified()
        print(self.text, flush=True)

    def _stats(self) -> dict[str, Any]:
        """Returns `strategy.stats()`; nothing where the model is not of a PoseidonStrategy."""
        stats = getattr(self.model.distribute_strategy, "stats", None)
        return stats() if stats else {}

    def _verified(self) -> str:
        """Returns a line on verify mode, whose first difference ends the job; "" if it has compared nothing."""
        job = getattr(self.model.distribute_strategy.extended, "job", None)
        if job is None or job.verifier is None or job.verifier.every > self._steps:
            return ""
        return (f"\nverify has compared every {job.verifier.every} steps, gradients with plain sums and weights "
                "between ranks: no difference")


def summary(ranks: int, steps: int, seconds: float, data: float, waited: float, waited_for: dict[int, float],
            plan: planning.Plan | None, is_emulated: bool = False) -> str:
    """Returns what `Summary` prints.

    Args:
        ranks: Number of ranks.
        steps: Number of steps.
        seconds: How long they took.
        data: How many seconds of these they have waited for their batches.
        waited: How many seconds of these they have waited for other ranks.
        waited_for: By rank, how long exchanges have waited for it last.
        plan: The `Plan` of the steps; None if unknown.
        is_emulated: Whether `tf-poseidon emulate` runs the job.
    """
    step = seconds / steps
    where = f"on {ranks} ranks" if ranks > 1 else "in one process"
    lines = [f"{steps} steps of {duration(step)} {where}, after the first"]
    if ranks == 1:
        return lines[0]
    of_data = min(max(data / seconds, 0.0), 1.0)
    if of_data >= _NOTICEABLE:
        lines.append(f"of a step {duration(data / steps)} ({100 * of_data:.2g} %) wait for data"
                     + ("; read it with num_parallel_calls=tf.data.AUTOTUNE, or cache it" if of_data >= _LONG else ""))
    expected, speeds = "", ""
    if plan is not None and plan.step_seconds and plan.compute_seconds is not None:
        expected = f"; the plan expects {ranks * plan.compute_seconds / plan.step_seconds:.3g}"
        speeds = f" at {plan.cluster.bandwidth_gbps:g} Gbit/s"
    if plan is not None and plan.steps > 1:
        # Only what the last step of an execution waits for is counted.
        lines.append(f"{plan.steps} steps overlap, of which strategy.timeline shows who waits for whom"
                     + (f"{expected} times the speed of one process{speeds}" if expected else ""))
        return "\n".join(lines)
    share = min(max(waited / seconds, 0.0), 1.0)
    slowest = max(waited_for, key=lambda rank: waited_for[rank], default=None)
    lines.append(f"of a step {duration(waited / steps)} ({100 * share:.2g} %) wait for other ranks"
                 + (f", longest for rank {slowest}" if slowest is not None and waited_for[slowest] > 0 else ""))
    # Data that come too late for several ranks come too late for one.
    gain = max(ranks * (1 - share - of_data), 1.0 if of_data >= _NOTICEABLE else 0.0)
    lines.append(f"about {gain:.3g} times as fast as one process, if that has the work of {ranks} ranks"
                 f"{expected}{speeds}")
    if is_emulated:
        lines.append("hosts are emulated, and share this machine's processors: explain says what real ones would gain")
    elif gain < 1:
        lines.append("that is slower than one process: larger batches, fewer ranks or steps_per_execution may help; "
                     "poseidon.advise says how much")
    return "\n".join(lines)
