"""One rank's end of a job, as a Python object over the op library's C functions.

Tests: tests/communicator/test_communicator.py, tests/communicator/test_factors.py.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import ctypes
import functools
import json
import os
import socket
from typing import Any
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tf_poseidon.errors import encoded
from tf_poseidon.errors import JobEndedError
from tf_poseidon.errors import JobError
from tf_poseidon.errors import LONGEST
from tf_poseidon.errors import shortened
from tf_poseidon.graph_passes.graph import graph_steps
from tf_poseidon.graph_passes.partition.states import Division
from tf_poseidon.ops import library
from tf_poseidon.options import JobOptions

T = TypeVar("T")

_TEXT_BYTES = 32768  # kPoseidonTextBytes
_SILENT = "has heard nothing of rank"  # in Protocol::CheckHeartbeats; all ranks get that rank's words

# DataType in kernels/communicator/sum.h, by NumPy's name.
_SUMMABLE = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3, "int32": 4, "int64": 5}
_BYTES = 6


class _Options(ctypes.Structure):
    _fields_ = [
        ("kv_pair_bytes", ctypes.c_int64),
        ("timeout_s", ctypes.c_double),
        ("startup_timeout_s", ctypes.c_double),
        ("heartbeat_timeout_s", ctypes.c_double),
        ("servers", ctypes.POINTER(ctypes.c_int32)),
        ("num_servers", ctypes.c_int32),
        ("ranks_per_node", ctypes.c_int32),
        ("staging_bytes", ctypes.c_int64),
        ("dedicated_servers", ctypes.c_int32),
    ]


def _c_options(options: JobOptions) -> _Options:
    """Returns `JobOptions` as the library takes them."""
    servers = (ctypes.c_int32 * len(options.servers))(*options.servers)
    return _Options(options.kv_pair_bytes, options.timeout_s, options.startup_timeout_s,
                    options.heartbeat_timeout_s, servers, len(options.servers), options.ranks_per_node or 0,
                    options.staging_bytes or 0, options.dedicated_servers)


@functools.cache
def _functions() -> ctypes.CDLL:
    """Returns the library with the argument types of its functions declared."""
    _, lib = library.load()
    text, handle, number = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int32
    for name, result, arguments in (
        ("join_mpi", handle, [text, ctypes.POINTER(_Options), text]),
        ("join_sockets", handle, [number, number, ctypes.POINTER(number), ctypes.POINTER(_Options),
                                  text]),
        ("join_loopback", ctypes.c_bool,
         [number, ctypes.POINTER(number), ctypes.POINTER(_Options), ctypes.POINTER(handle), text]),
        ("set_process_communicator", None, [handle]),
        ("set_process_ranks", None, [number, ctypes.POINTER(handle)]),
        ("rank", number, [handle]),
        ("size", number, [handle]),
        ("nodes", None, [handle, ctypes.POINTER(number)]),
        ("hosts", ctypes.c_bool, [handle, ctypes.POINTER(number)]),
        ("submit", handle, [handle, text, number, number, ctypes.c_int64, handle, handle, ctypes.c_bool,
                            number, ctypes.c_bool]),
        ("submit_factors", handle, [handle, text, text, number, ctypes.POINTER(handle),
                                    ctypes.POINTER(ctypes.c_int64),
                                    ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_int64)]),
        ("submit_ping", handle, [handle, number, ctypes.c_int64]),
        ("ping_seconds", ctypes.c_double, [handle]),
        ("ask", handle, [handle, number, text, handle, ctypes.c_int64]),
        ("next_question", number, [handle, ctypes.c_double, ctypes.POINTER(number), ctypes.POINTER(ctypes.c_int64),
                                   text]),
        ("reply", None, [handle, number, ctypes.c_int64, handle, ctypes.c_int64, ctypes.c_bool]),
        ("shards", ctypes.c_int64, [handle, text, number, number, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64,
                                    ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(number),
                                    ctypes.POINTER(ctypes.c_int64)]),
        ("wait", number, [handle, ctypes.c_double, text]),
        ("has_factors", ctypes.c_bool, [handle]),
        ("factor_bytes", ctypes.c_int64, [handle, number]),
        ("copy_factor", None, [handle, number, handle]),
        ("release", None, [handle]),
        ("leave_out_zeros", handle, [handle, ctypes.c_int64, ctypes.c_int64]),
        ("put_back_zeros", None, [handle, ctypes.c_int64, handle]),
        ("bytes_without_zeros", ctypes.c_int64, [handle]),
        ("release_without_zeros", None, [handle]),
        ("abort", None, [handle, text, ctypes.c_double]),
        ("serve", ctypes.c_bool, [handle, ctypes.c_double]),
        ("goodbye", ctypes.c_bool, [handle, text]),
        ("failure", ctypes.c_bool, [handle, text]),
        ("statistics", ctypes.c_size_t, [handle, ctypes.c_bool, text, ctypes.c_size_t]),
        ("set_row_shares", None, [handle, ctypes.POINTER(ctypes.c_int64)]),
        ("record_events", None, [handle, ctypes.c_int64]),
        ("events", ctypes.c_size_t, [handle, text, ctypes.c_size_t]),
        ("take_turns", ctypes.c_bool, [handle, text, text, text, ctypes.c_uint64, ctypes.c_uint64, text, number,
                                       ctypes.c_double, text]),
        ("end_turns", None, []),
        ("leave_turns", None, []),
        ("turns", ctypes.c_size_t, [text, ctypes.c_size_t]),
        ("describe_turns", ctypes.c_size_t, [text, text, ctypes.c_size_t]),
        ("leave", None, [handle]),
    ):
        function = getattr(lib, f"poseidon_{name}")
        function.restype, function.argtypes = result, arguments
    return lib


# What a rank counts of its GPU: memory of the host and of the GPU, and bytes that were copied, across from other GPUs.
STAGING_COUNTERS = ("pinned_bytes", "gpu_bytes", "down_bytes", "up_bytes", "across_bytes")


class Communicator:
    """Exchanges arrays with the other ranks of a job.

    Attributes:
        rank: This rank, 0 to size - 1; of a dedicated server, size or more.
        size: The number of ranks, without dedicated servers.
        nodes: The node number of each of these; ranks of one node combine their contributions.
        hosts: The number of the host of each, None where that is unknown. Ranks of a host may be several nodes.
        has_reached_end: Whether this rank's program has reached its end.
    """

    def __init__(self, handle: int | None) -> None:
        self._lib = _functions()
        self._handle = handle
        self._in_flight: dict[object, Sequence[np.ndarray]] = {}  # arrays of each exchange that has not succeeded
        self._awaited: dict[object, Callable[[], Any]] = {}  # by exchange that nobody has waited for, what does
        self._is_recording = False
        self.has_reached_end = False
        self.rank = self._lib.poseidon_rank(handle)
        self.size = self._lib.poseidon_size(handle)
        nodes = (ctypes.c_int32 * self.size)()
        self._lib.poseidon_nodes(handle, nodes)
        self.nodes = tuple(nodes)
        hosts = (ctypes.c_int32 * self.size)()
        self.hosts = tuple(hosts) if self._lib.poseidon_hosts(handle, hosts) else None

    @property
    def is_recording(self) -> bool:
        """Whether events are recorded, see `record_events`."""
        return self._is_recording

    @property
    def most_on_a_node(self) -> int:
        """The largest number of ranks that share a node."""
        return max(collections.Counter(self.nodes).values())

    def submit(self, name: str, value: npt.ArrayLike, contributes: bool = True, root: int | None = None,
               is_gradient: bool = False, out: np.ndarray | None = None) -> Callable[[], np.ndarray]:
        """Starts exchanging one array with all ranks.

        Args:
            name: Name of the exchange, the same on all ranks and not in flight twice; of a gradient, its site.
            value: Array; its dtype and size are the same on all ranks. Must not be changed before
                the exchange is complete.
            contributes: False leaves this rank's value out of the sum.
            root: None to sum over ranks, or the rank whose value all ranks get.
            is_gradient: Whether other ranks may try to exchange factors under this name.
            out: Array like `value` for the result, possibly `value` itself; None allocates one. For a sum of half or
                bfloat16 it may be float32: then `value` travels as it is, and sums are not rounded.

        Returns:
            A function that waits for the exchange and returns its result, `out` or an array like `value`.
            It raises JobEndedError if the job was ended.
        """
        value = np.asarray(value, order="C")
        output = np.empty_like(value) if out is None else out
        if root is None and value.dtype.name not in _SUMMABLE:
            raise JobError(f"'{name}' has dtype {value.dtype}, which cannot be summed over "
                           f"ranks; cast it to one of {', '.join(_SUMMABLE)}.")
        is_widened = root is None and value.dtype.itemsize == 2 and output.dtype == np.float32
        if output.dtype != value.dtype and not is_widened:
            raise JobError(f"'{name}' has dtype {value.dtype}, and `out` has {output.dtype}, expected the same, or "
                           "float32 for a sum of float16 or bfloat16.")
        dtype, sum_dtype, count = (
            (_SUMMABLE[value.dtype.name], _SUMMABLE[output.dtype.name], value.size) if root is None else
            (_BYTES, _BYTES, value.nbytes))
        handle = self._lib.poseidon_submit(
            self._handle, encoded(name), dtype, sum_dtype, count, value.ctypes.data, output.ctypes.data,
            contributes, -1 if root is None else root, is_gradient)
        return self._waiting(handle, (value, output), lambda: output)

    def submit_factors(self, name: str, parts: Iterable[npt.ArrayLike], form: str = "",
                       leave_out_zeros: bool = False) -> Callable[[], list[np.ndarray] | None]:
        """Starts giving all ranks the factors of all ranks.

        Args:
            name: Same as in `submit`.
            parts: Matrices, as many as on the other ranks and with as many columns; the number of rows
                may differ. Must not be changed before the exchange is complete.
            form: Text that says what this rank will make of them; ranks with different forms do not
                exchange factors.
            leave_out_zeros: Whether this rank's matrices travel without their zeros where that is shorter.

        Returns:
            A function that waits for the exchange. It returns the matrices, with the rows of all
            ranks in rank order; or None if a rank has refused, or has a different form. It raises
            JobEndedError if the job was ended.
        """
        matrices = [np.asarray(part, order="C") for part in parts]
        columns = [matrix.shape[1] * matrix.itemsize for matrix in matrices]
        handle = self._lib.poseidon_submit_factors(
            self._handle, encoded(name), encoded(form), len(matrices),
            (ctypes.c_void_p * len(matrices))(*(matrix.ctypes.data for matrix in matrices)),
            (ctypes.c_int64 * len(matrices))(*map(len, matrices)),
            (ctypes.c_int64 * len(matrices))(*columns),
            (ctypes.c_int64 * len(matrices))(*(matrix.itemsize if leave_out_zeros else 0 for matrix in matrices)))

        def result() -> list[np.ndarray] | None:
            if not self._lib.poseidon_has_factors(handle):
                return None
            gathered = []
            for i, matrix in enumerate(matrices):
                rows = self._lib.poseidon_factor_bytes(handle, i) // max(columns[i], 1)
                gathered.append(np.empty((rows, matrix.shape[1]), matrix.dtype))
                self._lib.poseidon_copy_factor(handle, i, gathered[-1].ctypes.data)
            return gathered

        return self._waiting(handle, matrices, result)

    def _waiting(self, handle: int, arrays: Sequence[np.ndarray], result: Callable[[], T]) -> Callable[[], T]:
        """Returns a function that waits for the exchange `handle` and then calls `result`."""
        # Unless the exchange succeeds, the network may use this memory until the process ends.
        memory = object()
        self._in_flight[memory] = arrays

        def wait() -> T:
            self._awaited.pop(memory, None)
            error = ctypes.create_string_buffer(_TEXT_BYTES)
            # Short waits, so that a keyboard interrupt gets through.
            while (state := self._lib.poseidon_wait(handle, 0.1, error)) == 0:
                pass
            try:
                if state < 0:
                    # Otherwise, the rank that was asked has refused.
                    kind = JobEndedError if self.failure or self.has_reached_end else JobError
                    raise kind(error.value.decode(errors="replace"))
                del self._in_flight[memory]
                return result()
            finally:
                self._lib.poseidon_release(handle)

        self._awaited[memory] = wait
        return wait

    def sum(self, name: str, value: npt.ArrayLike, contributes: bool = True) -> np.ndarray:
        """Returns the sum of `value` over all ranks, added in the order of ranks, then of nodes."""
        return self.submit(name, value, contributes)()

    def gather(self, name: str, matrix: npt.ArrayLike) -> np.ndarray:
        """Returns the rows of the matrices of all ranks, in rank order; they have as many columns."""
        gathered = self.submit_factors(name, [matrix])()
        if gathered is None:
            raise JobError(f"Ranks have matrices of other types for '{name}', expected those of rank {self.rank}.")
        return gathered[0]

    def broadcast(self, name: str, value: npt.ArrayLike, root: int = 0) -> np.ndarray:
        """Returns the value of rank `root`."""
        return self.submit(name, value, root=root)()

    def broadcast_text(self, name: str, text: str, root: int = 0) -> str:
        """Returns the text of rank `root`."""
        data = text.encode(errors="surrogatepass")  # all that Python has, such as names of files that are not UTF-8
        length = int(self.broadcast(f"{name}/length", np.int64(len(data)), root))
        buffer = np.zeros(length, np.uint8)
        if self.rank == root:
            buffer[:] = np.frombuffer(data, np.uint8)
        return self.broadcast(f"{name}/text", buffer, root).tobytes().decode(errors="surrogatepass")

    def ping(self, peer: int, num_bytes: int = 0) -> float:
        """Returns the seconds from sending bytes to another rank to hearing that it has them.

        Args:
            peer: The other rank, which need not do anything.
            num_bytes: How many, at most 64 MiB.
        """
        handle = self._lib.poseidon_submit_ping(self._handle, peer, num_bytes)
        return self._waiting(handle, (), lambda: self._lib.poseidon_ping_seconds(handle))()

    def ask(self, peer: int, text: str, out: np.ndarray) -> Callable[[], np.ndarray]:
        """Asks another rank, which answers by `reply` while its program does anything else.

        Args:
            peer: The other rank.
            text: What to ask, of at most 32 KiB; errors have its first line.
            out: Array for the answer, of as many bytes.

        Returns:
            A function that waits for the answer and returns `out`. It raises JobError if the other rank refuses,
            JobEndedError if the job was ended.
        """
        handle = self._lib.poseidon_ask(self._handle, peer, encoded(text), out.ctypes.data, out.nbytes)
        return self._waiting(handle, (out,), lambda: out)

    def next_question(self, seconds: float) -> tuple[int, int, str] | None:
        """Returns what another rank asks: its rank, the question's number, and its text.

        Returns None if nothing is asked for some seconds.

        Raises:
            JobEndedError: If nothing will be asked any more.
        """
        peer, number, text = ctypes.c_int32(), ctypes.c_int64(), ctypes.create_string_buffer(_TEXT_BYTES)
        state = self._lib.poseidon_next_question(self._handle, seconds, ctypes.byref(peer), ctypes.byref(number), text)
        if state < 0:
            raise JobEndedError("No rank asks any more, since the job has ended.")
        return (peer.value, number.value, text.value.decode()) if state else None

    def reply(self, peer: int, number: int, answer: np.ndarray) -> None:
        """Answers a question of `next_question`."""
        answer = np.ascontiguousarray(answer)
        self._lib.poseidon_reply(self._handle, peer, number, answer.ctypes.data, answer.nbytes, False)

    def refuse(self, peer: int, number: int, reason: str) -> None:
        """Says why a question of `next_question` has no answer."""
        text = encoded(shortened(reason))
        self._lib.poseidon_reply(self._handle, peer, number, text, len(text), True)

    def shards(self, elements: int, division: Division) -> tuple[int, list[tuple[int, slice]]]:
        """Returns which elements of a tensor make up the shards of ranks, in order.

        Args:
            elements: The number of elements of the tensor.
            division: How ranks divide it.

        Returns:
            (number of lines of elements, all of the same length, of which the tensor consists; (the rank, a run of
            elements of each line) for each run).
        """
        number, lines = 0, ctypes.c_int64()
        layout, owner, divided, columns = division
        while True:
            ranks, ends = (ctypes.c_int32 * number)(), (ctypes.c_int64 * number)()
            needed = self._lib.poseidon_shards(self._handle, encoded(layout), owner, divided, columns, elements, number,
                                               lines, ranks, ends)
            if needed <= number:
                return lines.value, [(rank, slice(begin, end)) for rank, begin, end in zip(ranks, [0, *ends], ends)]
            number = needed

    def use_for_ops(self) -> None:
        """Makes the ops of this process exchange over this communicator."""
        self._lib.poseidon_set_process_communicator(self._handle)

    def take_turns(self, path: str, name: str, accelerator: str, job: int, accelerators: int, program: str,
                   coordinator: int, deadline_s: float) -> str:
        """Has this process take turns with other jobs on its accelerator; returns why it cannot, "" if it can.

        Args:
            path: The file of the accelerator's table.
            name: The name that these jobs have in common.
            accelerator: That of the accelerator.
            job: The number of this job, not 0.
            accelerators: A digest of the names of all accelerators of the job.
            program: The name of the program, for messages.
            coordinator: The rank that gives turns their numbers.
            deadline_s: For how long a process of another job is waited for in a turn.
        """
        error = ctypes.create_string_buffer(_TEXT_BYTES)
        has_entered = self._lib.poseidon_take_turns(
            self._handle, encoded(path), encoded(name), encoded(accelerator), job, accelerators, encoded(program),
            coordinator, deadline_s, error)
        return "" if has_entered else error.value.decode(errors="replace")

    def end_turns(self) -> None:
        """Gives back the turn that this process has on its accelerator, if it has one."""
        self._lib.poseidon_end_turns()

    def leave_turns(self) -> None:
        """Has this process take turns no more."""
        self._lib.poseidon_leave_turns()

    def turns(self) -> dict[str, Any]:
        """Returns how many turns this process has had, and for how long, as `PoseidonStrategy.stats`; {} for none."""
        return _json(self._lib.poseidon_turns)

    def abort(self, reason: str, seconds: float = 2.0) -> None:
        """Ends the job on all ranks; waits at most `seconds` until the reason has reached them."""
        self._lib.poseidon_abort(self._handle, encoded(shortened(reason, 2 * LONGEST)), seconds)

    def serve(self) -> None:
        """Serves the other ranks, on a dedicated server, until they have reached their end or the job has failed."""
        while not self._lib.poseidon_serve(self._handle, 0.1):  # short waits, as above
            pass

    def goodbye(self) -> None:
        """Waits until all ranks have reached their end, and for what was begun to be exchanged, as all ranks have done.

        Raises:
            JobEndedError: If a rank failed, or did not reach its end within the time limit.
        """
        self.has_reached_end = True
        for wait in list(self._awaited.values()):
            wait()
        error = ctypes.create_string_buffer(_TEXT_BYTES)
        if not self._lib.poseidon_goodbye(self._handle, error):
            raise JobEndedError(error.value.decode(errors="replace"))

    @property
    def failure(self) -> str | None:
        """Why the job was ended, or None."""
        error = ctypes.create_string_buffer(_TEXT_BYTES)
        failed = self._lib.poseidon_failure(self._handle, error)
        return error.value.decode(errors="replace") if failed else None

    @property
    def has_lost_a_host(self) -> bool:
        """Whether the job was ended because nothing was heard of a rank."""
        return _SILENT in (self.failure or "")

    def statistics(self, has_sites: bool = True) -> dict[str, Any]:
        """Returns counters of this rank's exchanges. Those of several steps in one graph are added up.

        Args:
            has_sites: Whether to count by site, which takes longer; otherwise "sites" is empty.

        Returns:
            {"header_bytes": bytes of frame headers sent, "sites": {site: {"count": exchanges,
            "sent_bytes", "received_bytes": payload, "network_bytes": the part sent to other nodes,
            "seconds": from submission to completion, "factor_bytes": of the factors of all ranks,
            "short_factor_bytes": of these as they travel, without zeros}}, "waited_for": {rank: seconds},
            "input_seconds": how long this rank has waited for batches, "late_seconds": {rank: seconds}}.
        """
        statistics = _json(self._lib.poseidon_statistics, self._handle, has_sites)
        counts: dict[str, Any] = statistics["sites"]
        sites: dict[str, Any] = {}
        names = graph_steps.in_any(counts)
        for site, counters in counts.items():
            total = sites.setdefault(names[site][0], dict.fromkeys(counters, 0))
            for name, value in counters.items():
                total[name] += value
        return {**statistics, "sites": sites, "waited_for": dict(statistics["waited_for"]),
                "late_seconds": dict(enumerate(statistics["late_seconds"]))}

    def set_row_shares(self, shares: Sequence[int]) -> None:
        """Sets how ranks share the rows of global batches that every rank has, from the next step on.

        Args:
            shares: A positive number for each rank, the same on all ranks; see `data.parts`.
        """
        self._lib.poseidon_set_row_shares(self._handle, (ctypes.c_int64 * self.size)(*shares))

    def record_events(self, capacity: int) -> None:
        """Discards recorded events, and records at most `capacity` new ones; 0 stops recording and keeps the events."""
        self._lib.poseidon_record_events(self._handle, capacity)
        self._is_recording = capacity > 0

    def events(self) -> dict[str, Any]:
        """Returns what was recorded.

        Returns:
            {"begin": when recording began, "dropped": number of events beyond the capacity,
            "events": [[row, site, begin, end, bytes of this rank's tensor or factors, whether the step
            did nothing else meanwhile, number of the step in an unrolled graph], …]}, with times in
            nanoseconds of this host's monotonic clock.
            Rows are "ps", "sfb", "hfb" and "sparse" for exchanges of gradients, "calls" for others,
            "rebuild" for rebuilding a gradient from the factors of other ranks, and of a GPU "down", "up" and "across"
            for copies to the host, from it, and what happens between GPUs; and "data" for waits for a batch.
        """
        recorded = _json(self._lib.poseidon_events, self._handle)
        names = graph_steps.in_any({site for _, site, *_ in recorded["events"]})
        return {**recorded, "events": [[row, name, *rest, step] for row, site, *rest in recorded["events"]
                                       for name, step in [names[site]]]}

    def events_of(self, site: str, exchange: Callable[[], object], capacity: int) -> list[list[Any]]:
        """Returns the events of a site that are recorded while something is exchanged, as in `events`.

        Args:
            site: Name of the site, which has no other events.
            exchange: Exchanges it.
            capacity: How many events of all sites are recorded at most; a recording that is under way keeps its own
                capacity, and has these events too.
        """
        is_recording = self._is_recording
        if not is_recording:
            self.record_events(capacity)
        try:
            exchange()
        finally:
            if not is_recording:
                self.record_events(0)
        return [event for event in self.events()["events"] if event[1] == site]

    def leave(self) -> None:
        """Leaves the job and frees the communicator."""
        handle, self._handle = self._handle, None
        self._lib.poseidon_leave(handle)


def turn_table(path: str) -> dict[str, Any] | None:
    """Returns who takes turns on an accelerator, see `TurnTable::Describe`; None if a file is no such table."""
    return _json(_functions().poseidon_describe_turns, encoded(path))


def _json(function: Callable[..., int], *arguments: object) -> Any:
    """Returns the value of the JSON that a function of the library writes; None if it writes none."""
    size = 0
    while True:
        text = ctypes.create_string_buffer(max(size, 1))
        needed = function(*arguments, text, size)
        if needed <= size:
            return json.loads(text.value) if text.value else None
        size = 2 * needed


class WithoutZeros:
    """A matrix without its zeros, as it travels where it is a factor.

    Attributes:
        num_bytes: Its bytes; None if it would not be shorter than the matrix, so that there is none.
    """

    def __init__(self, matrix: np.ndarray) -> None:
        self._lib, self._itemsize = _functions(), matrix.itemsize
        self._handle = self._lib.poseidon_leave_out_zeros(matrix.ctypes.data, matrix.nbytes, matrix.itemsize)
        self.num_bytes = self._lib.poseidon_bytes_without_zeros(self._handle) if self._handle else None

    def put_back(self, matrix: np.ndarray) -> None:
        """Writes the matrix, zeros included, to an array like it."""
        self._lib.poseidon_put_back_zeros(self._handle, self._itemsize, matrix.ctypes.data)

    def __del__(self) -> None:
        if self._handle:
            self._lib.poseidon_release_without_zeros(self._handle)


def use_ranks_for_ops(communicators: Sequence[Communicator]) -> None:
    """Makes the ops of this process whose nodes have the attribute `_poseidon_rank` exchange as that rank.

    Args:
        communicators: All ranks of one job, in rank order; empty for none. A rank that leaves its job is removed
            from them.
    """
    handles = (ctypes.c_void_p * len(communicators))(*(rank._handle for rank in communicators))
    _functions().poseidon_set_process_ranks(len(communicators), handles)


def join_loopback(size: int, options: JobOptions | list[JobOptions] = JobOptions(),
                  nodes: Sequence[int] | None = None) -> list[Communicator]:
    """Returns the communicators of a job whose ranks are threads of this process, in rank order.

    Args:
        size: Number of ranks.
        options: The `JobOptions`; or a list of those that each rank is given. Without `nodes`, each `ranks_per_node`
            consecutive ranks combine.
        nodes: The node number of each rank; None for that of `options`.
    """
    given = options if isinstance(options, list) else [options] * size
    handles = (ctypes.c_void_p * size)()
    error = ctypes.create_string_buffer(_TEXT_BYTES)
    numbers = None if nodes is None else (ctypes.c_int32 * size)(*nodes)
    c_options = (_Options * size)(*map(_c_options, given))
    if not _functions().poseidon_join_loopback(size, numbers, c_options, handles, error):
        raise JobError(error.value.decode(errors="replace"))
    return [Communicator(handle) for handle in handles]


def join_sockets(rank: int, sockets: Sequence[socket.socket | None], options: JobOptions) -> Communicator:
    """Returns the communicator of a rank that is connected to all others.

    Args:
        rank: This rank.
        sockets: A connected stream `socket.socket` per rank, in order; None for this one. The
            communicator takes ownership of them.
        options: The `JobOptions`; consecutive ranks combine.
    """
    error = ctypes.create_string_buffer(_TEXT_BYTES)
    files = (ctypes.c_int32 * len(sockets))(*(-1 if s is None else s.detach() for s in sockets))
    handle = _functions().poseidon_join_sockets(rank, len(sockets), files, _c_options(options), error)
    if not handle:
        raise JobError(error.value.decode(errors="replace"))
    return Communicator(handle)


def join_mpi(transport_library: str | os.PathLike[str], options: JobOptions) -> Communicator:
    """Joins the MPI job that this process was started in.

    Args:
        transport_library: Path of the MPI transport.
        options: The `JobOptions`.

    Raises:
        PoseidonError: If MPI cannot be started, or the ranks do not meet in time.
    """
    error = ctypes.create_string_buffer(_TEXT_BYTES)
    handle = _functions().poseidon_join_mpi(os.fsencode(transport_library), _c_options(options), error)
    if not handle:
        raise JobError(error.value.decode(errors="replace"))
    return Communicator(handle)
