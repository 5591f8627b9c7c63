"""How a rank reads variables of which each rank holds a shard: it asks the others, at any time outside of steps.

A thread of each rank answers, whatever its program does meanwhile. The answer is what the reader's program would see in
one process: each rank that is asked may be behind, and then the thread waits until it has come as far; or ahead, in a
step that cannot change its shard before the reader is in it (graph_passes/partition/updates/early_updates.py). An
assignment outside of steps waits for nobody: so a rank keeps what it held before the last one.

Tests: tests/training/test_saving.py, tests/unit/test_shard_service.py.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import json
import threading
import types
import typing
from typing import Any
import weakref

import numpy as np
import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import GraphError
from tf_poseidon.errors import JobEndedError
from tf_poseidon.graph_passes.partition.states import Division
from tf_poseidon.job.communicator import Communicator
from tf_poseidon.job.job_variables.holdings import Extent
from tf_poseidon.job.job_variables.holdings import Holding

_SHARD, _INITIAL, _REACHED, _TAKE, _OFFERED = "shard", "initial value", "assignments", "new value", "offered value"
_PAUSE_S = 0.001  # between two looks whether this rank has come as far as a question asks


class _Question(typing.NamedTuple):
    """What a rank asks about a variable.

    Attributes:
        what: One of the above.
        number: The number of the variable.
        updates: How many runs of functions that update shards the rank has seen.
        assignments: How often its program has assigned the variable outside of steps.
        division: How the rank divides the variable; None asks for the whole.
        part: Where the elements begin and end among those of the shard that are asked for; None asks for all.
    """

    what: str
    number: int
    updates: int
    assignments: int
    division: Division | None
    part: tuple[int, int] | None = None


class _Elements(typing.NamedTuple):
    """Which elements of a variable make up the shard of a rank.

    Attributes:
        lines: The number of lines, all of the same length, of which the variable consists.
        runs: The elements of each line.
    """

    lines: int
    runs: list[slice]

    @property
    def size(self) -> int:
        """How many they are."""
        return self.lines * sum(run.stop - run.start for run in self.runs)

    def of(self, whole: np.ndarray) -> np.ndarray:
        """Returns these elements of a variable."""
        lines = whole.reshape(self.lines, -1)
        return np.concatenate([lines[:, :0], *(lines[:, run] for run in self.runs)], 1).reshape(-1)

    def within(self, first: int, count: int, lines_of_all: bool) -> tuple[int, "_Elements"]:
        """Returns which of them are in a part of a variable, of whole lines if there are several.

        Args:
            first: The number of the part's first line; of its first element if there is one line.
            count: How many lines, or elements, it has.
            lines_of_all: Whether there are several lines.

        Returns:
            (where they begin in the shard, the elements of the part).
        """
        if lines_of_all:
            return first * (self.size // self.lines), _Elements(count, self.runs)
        before = sum(max(0, min(run.stop, first) - run.start) for run in self.runs)
        runs = [slice(max(run.start - first, 0), min(run.stop - first, count)) for run in self.runs]
        return before, _Elements(1, [run for run in runs if run.start < run.stop])

    def put(self, shard: np.ndarray, whole: np.ndarray) -> None:
        """Writes a shard to its place in a variable, which is contiguous."""
        lines, own, begin = whole.reshape(self.lines, -1), shard.reshape(self.lines, -1), 0
        for run in self.runs:
            lines[:, run] = own[:, begin:begin + run.stop - run.start]
            begin += run.stop - run.start


class ShardService:
    """The variables of this process of which it holds shards.

    Attributes:
        changes: How often weights have become shards, or whole again: functions that use them are then partitioned
            anew.
    """

    def __init__(self, communicator: Communicator, servers: Iterable[int] = ()) -> None:
        """Makes a service without variables; `servers` are the ranks that may own variables, by default all."""
        self._communicator = communicator
        ranks = range(communicator.size)
        self._loads = dict.fromkeys([rank for rank in servers if rank in ranks] or ranks, 0)
        self._holdings: list[Holding | None] = []
        self._dropped: list[int] = []  # by the program: numbers of variables
        self._offered: np.ndarray | None = None
        self._restores = False
        self._updates: Any = None
        self.changes = 0
        self._lent: list[Holding] = []

    def note_change(self) -> None:
        """Notes that a weight has become a shard, or whole again."""
        self.changes += 1

    def add(self, variable: object, holding: Holding) -> int:
        """Adds what this rank holds of a variable; returns the variable's number, the same on all ranks."""
        if self._updates is None:
            self._updates = _counter()
            threading.Thread(target=self._answer, name="tf_poseidon shards", daemon=True).start()
        number = len(self._holdings)
        self._holdings.append(holding)
        weakref.finalize(variable, self._dropped.append, number).atexit = False
        return number

    @property
    def loads(self) -> dict[int, int]:
        """The bytes of variables that each rank has come to own that may own some; the same on all ranks."""
        return dict(self._loads)

    def add_bytes(self, owner: int, number: int) -> None:
        """Adds the bytes of a variable to those of its owner; -1 is none."""
        if owner >= 0:
            self._loads[owner] += number

    def count_update(self) -> tf.Operation:
        """Counts, in a graph that updates shards, that it has run."""
        return tf.raw_ops.AssignAddVariableOp(resource=self._updates.handle, value=tf.constant(1, tf.int64))

    # ---- what this rank asks ----

    def whole(self, number: int) -> np.ndarray:
        """Returns the whole of a variable of which this rank holds its shard."""
        holding = self._held(number)
        elements, own = self._elements(holding, holding.division), self._communicator.rank
        parts = {rank: np.empty(of_rank.size, holding.dtype.as_numpy_dtype) for rank, of_rank in elements.items()
                 if rank != own}
        self._ask_others(_SHARD, number, parts)
        holding.former = None  # all have come as far
        parts[own] = holding.read().numpy()
        whole = np.empty(holding.num_elements, holding.dtype.as_numpy_dtype)
        for rank, of_rank in elements.items():
            of_rank.put(parts[rank], whole)
        return whole.reshape(holding.shape)

    def parts(self, number: int, most_bytes: int) -> Iterator[np.ndarray]:
        """Yields the whole of a variable of which this rank holds its shard, some rows at a time.

        Shards do not change meanwhile: what could change them waits for this rank.

        Args:
            number: The number of the variable, which has rows.
            most_bytes: How much to yield at a time, at least one row.
        """
        holding, own = self._held(number), self._communicator.rank
        elements, rows = self._elements(holding, holding.division), int(holding.shape[0])
        of_row, dtype = holding.num_elements // rows, holding.dtype.as_numpy_dtype
        has_lines = elements[own].lines == rows
        assert has_lines or elements[own].lines == 1, "lines are rows, unless shards are runs of elements"
        step = max(1, most_bytes // (of_row * holding.dtype.size))
        for row in range(0, rows, step):
            count = min(step, rows - row)
            place = (row, count) if has_lines else (row * of_row, count * of_row)
            of_ranks = {rank: of_rank.within(*place, has_lines) for rank, of_rank in elements.items()}
            answers = {rank: np.empty(part.size, dtype) for rank, (_, part) in of_ranks.items() if rank != own}
            self._ask_others(_SHARD, number, answers, {
                rank: (begin, begin + part.size) for rank, (begin, part) in of_ranks.items()})
            begin, part = of_ranks[own]
            answers[own] = holding.read()[begin:begin + part.size].numpy()
            result = np.empty(count * of_row, dtype)
            for rank, (_, part) in of_ranks.items():
                part.put(answers[rank], result)
            yield result.reshape(count, *holding.shape[1:])
        holding.former = None  # all have come as far

    def lend(self, number: int, whole: Any) -> None:
        """Lets graphs of this rank's program read the whole of a variable until the next step."""
        self._held(number).lend(tf.convert_to_tensor(whole))
        self._lent.append(self._held(number))

    def take_back(self) -> None:
        """Ends that, before shards change."""
        if not self._lent:  # as in nearly every step
            return
        with tf.init_scope():  # also while a graph is traced
            for holding in self._lent:
                holding.take_back()
        self._lent.clear()

    def initial(self, number: int) -> np.ndarray:
        """Returns the value of rank 0 that a variable begins with."""
        holding = self._held(number)
        if self._communicator.rank == 0:
            return _initial(holding)
        return self._ask(0, _INITIAL, number, np.empty(holding.shape, holding.dtype.as_numpy_dtype))()

    def assign(self, number: int, value: tf.Tensor, shard: tf.Tensor) -> None:
        """Assigns a value, and its `shard` where this rank holds one; in `restoring`, on all ranks."""
        self.take_back()
        holding = self._held(number)
        if holding.former is not None:  # some ranks may still need it
            self._ask_others(_REACHED, number)
            holding.former = None
        if self._restores:
            self._offered = value.numpy().reshape(-1)
            self._ask_others(_TAKE, number)
            self._offered = None
        digest = 0 if self._restores else int(ops.digests([value])[0])
        holding.assign(value if holding.extent is Extent.WHOLE else shard, value, digest)

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """A context in which rank 0 alone assigns variables, for all ranks."""
        self._restores = True
        try:
            yield
        finally:
            self._restores = False

    def _held(self, number: int) -> Holding:
        holding = self._holdings[number]
        assert holding is not None, "the program has dropped the variable"
        return holding

    def _ask_others(self, what: str, number: int, answers: Mapping[int, np.ndarray] = types.MappingProxyType({}),
                    parts: Mapping[int, tuple[int, int]] = types.MappingProxyType({})) -> None:
        """Asks all other ranks for parts of their shards, or all; waits for all `answers`, if there are any."""
        nothing = np.empty(0, np.uint8)
        waits = [self._ask(rank, what, number, answers.get(rank, nothing), part=parts.get(rank))
                 for rank in range(self._communicator.size) if rank != self._communicator.rank]
        for wait in waits:
            wait()

    def _ask(self, rank: int, what: str, number: int, out: np.ndarray, whole: bool = False,
             part: tuple[int, int] | None = None) -> Any:
        holding = self._held(number)
        question = _Question(what, number, int(self._updates.numpy()), holding.assignments,
                             None if whole else holding.division, part)
        # Errors have the first line.
        return self._communicator.ask(rank, f"{what} of {holding.path}\n{json.dumps(question)}", out)

    def _elements(self, holding: Holding, division: Division) -> dict[int, _Elements]:
        """Returns, by rank, the elements of a variable that make up its shard."""
        lines, runs = self._communicator.shards(holding.num_elements, division)
        elements = {rank: _Elements(lines, []) for rank in range(self._communicator.size)}
        for rank, run in runs:
            elements[rank].runs.append(run)
        return elements

    # ---- what this rank answers ----

    def _answer(self) -> None:
        """Answers questions until the job has ended."""
        waiting: list[tuple[int, int, str]] = []  # who asks, the question's number, and its text
        with contextlib.suppress(JobEndedError):
            while True:
                if (question := self._communicator.next_question(_PAUSE_S if waiting else 3600.0)) is not None:
                    waiting.append(question)
                waiting = [question for question in waiting if not self._has_answered(*question)]

    def _has_answered(self, peer: int, question_number: int, text: str) -> bool:
        """Answers a question, if this rank has come as far."""
        title, _, fields = text.partition("\n")
        what, number, updates, assignments, division, part = json.loads(fields)
        question = _Question(what, number, updates, assignments, None if division is None else Division(*division),
                             part)
        try:
            answer = self._answer_to(question, peer)
            if answer is None and self._communicator.has_reached_end:
                raise GraphError(
                    f"Rank {peer} asks for the {title}, but rank {self._communicator.rank} has reached the end of its "
                    "program without the same steps and assignments; train, and load weights and optimizers, on all "
                    "ranks.")
        except JobEndedError:
            raise
        except Exception as error:  # the one who asks has to know
            self._communicator.refuse(peer, question_number, str(error))
            return True
        if answer is not None:
            self._communicator.reply(peer, question_number, answer)
        return answer is not None

    def _answer_to(self, question: _Question, peer: int) -> np.ndarray | None:
        """Returns the answer to a question of `peer`; None if this rank has not come as far."""
        own, nothing = self._communicator.rank, np.empty(0, np.uint8)
        if question.number >= len(self._holdings):
            return None
        holding, part = self._holdings[question.number], slice(*question.part or (0, None))
        if holding is None:
            raise GraphError(f"Rank {own} has dropped a variable that rank {peer} reads; keep models on all ranks.")
        if question.what == _INITIAL:
            return _initial(holding)
        if question.what == _OFFERED:
            assert self._offered is not None, "it is asked for while it is offered"
            return self._offered if question.division is None else self._elements(
                holding, question.division)[peer].of(self._offered)
        with holding.lock:
            ahead = holding.assignments - question.assignments
            if ahead < 0 or int(self._updates.numpy()) < question.updates:
                return None
            if question.what == _REACHED:
                return nothing
            if ahead:
                if ahead == 1 and holding.former is not None:
                    return holding.former[part]
                raise GraphError(f"Rank {own} has assigned '{holding.path}' since, which rank {peer} reads; assign "
                                 "variables on all ranks, outside of what one rank does alone.")
            if question.what == _SHARD:
                shard = self._shard(holding, question.division)
                return None if shard is None else np.array(shard[part])
        return self._taken(question.number, holding, peer)

    def _shard(self, holding: Holding, division: Division | None) -> np.ndarray | tf.Tensor | None:
        """Returns this rank's shard of a variable; None if it has not come as far as to hold it."""
        assert division is not None, "ranks that hold the whole do not ask"
        if holding.extent is Extent.SHARD:
            return holding.read() if holding.division == division else None
        elements = self._elements(holding, division)[self._communicator.rank]
        if holding.extent is Extent.WHOLE:
            return elements.of(holding.read().numpy())
        if holding.initial.of_size is None:
            return None
        return tf.cast(holding.initial.of_size(elements.size), holding.dtype)

    def _taken(self, number: int, holding: Holding, peer: int) -> np.ndarray:
        """Assigns what `peer` offers."""
        own = self._elements(holding, holding.division)[self._communicator.rank]
        takes_whole = holding.extent is Extent.WHOLE or holding.copy is not None
        size = holding.num_elements if takes_whole else own.size
        offered = self._ask(peer, _OFFERED, number, np.empty(size, holding.dtype.as_numpy_dtype), takes_whole)()
        whole = tf.constant(offered.reshape(holding.shape)) if takes_whole else None
        if holding.extent is Extent.WHOLE:
            holding.assign(whole)
        else:
            holding.assign(tf.constant(own.of(offered) if takes_whole else offered), whole)
        holding.former = None
        return np.empty(0, np.uint8)

    # ---- what all ranks do together ----

    def forget(self) -> None:
        """Forgets what no rank reads any more; all ranks have passed what this one has done before."""
        for number in self._dropped[:]:
            self._holdings[number] = None
            self._dropped.remove(number)
        for holding in self._holdings:
            if holding is not None:
                holding.former = None

    def check_assigned(self, numbers: Sequence[int]) -> None:
        """Refuses variables that only some ranks have assigned, or with other values: shards would not belong together.

        Args:
            numbers: Those of the variables, the same on all ranks.

        Raises:
            GraphError: On all ranks.
        """
        communicator = self._communicator
        of_rank_0 = communicator.broadcast("shards/assigned", self._assignments(numbers))
        own = self._assignments(numbers)  # now that rank 0 has restored what it has to
        differ = (own != of_rank_0) & (own[:1] >= 0) & (of_rank_0[:1] >= 0)
        differ = communicator.sum("shards/assigned/differ", differ.astype(np.int64))
        for found, text in zip(differ, (
                "on some ranks only, expected all of them; load weights and optimizers on all ranks, not on rank 0 "
                "alone.",
                "another value on some ranks than on rank 0, expected the same; load it from one file, or draw it with "
                "one seed, on all ranks.")):
            if found.any():
                holding = self._holdings[numbers[int(np.flatnonzero(found)[0])]]
                raise GraphError(f"'{holding and holding.path}', of which each rank holds a shard, was assigned {text}")
        self.forget()

    def _assignments(self, numbers: Sequence[int]) -> np.ndarray:
        """Returns how often the program has assigned variables outside of steps, and digests of what, [2, n] of int64.

        For those that it has dropped, -1.
        """
        holdings = [self._holdings[number] for number in numbers]
        return np.array([[-1, 0] if holding is None else [holding.assignments, holding.digest]
                         for holding in holdings], np.int64).T.copy()


def _counter() -> Any:
    """Returns a variable that counts from 0, made outside of strategies."""
    with tf.init_scope(), tf.device("CPU:0"):
        counter = tf_compat.uninitialized_variable()(
            trainable=False, name="updates_of_shards", shape=tf.TensorShape(()), dtype=tf.int64)
        tf.raw_ops.AssignVariableOp(resource=counter.handle, value=tf.constant(0, tf.int64))
    return counter


def _initial(holding: Holding) -> np.ndarray:
    return tf.cast(holding.initial.whole(), holding.dtype).numpy()
