"""Which processors of a host each of its ranks takes, and how many threads compute on them.

Tests: tests/unit/test_processors.py.
"""

from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import math
import os
import pathlib

_ROOT = pathlib.Path("/")


@dataclasses.dataclass(frozen=True)
class Processors:
    """What a process may compute on.

    Attributes:
        cores: For each core, by NUMA node, the kernel's numbers of its processors, of which hyperthreading makes two.
        quota: How many processors' time it, with others of its container, may take; infinite if nothing limits that.
    """

    cores: tuple[tuple[int, ...], ...]
    quota: float = math.inf

    @property
    def numbers(self) -> frozenset[int]:
        """The kernel's numbers of the processors."""
        return frozenset(number for core in self.cores for number in core)


@dataclasses.dataclass(frozen=True)
class Sharer:
    """A rank that shares processors.

    Attributes:
        host: A number that other hosts do not have.
        allowed: A number for the processors that it may use: ranks of a host have the same if they may use the same.
            Ranks that have only some in common have different ones, as if they had none: whoever has bound them so has
            chosen what each takes.
        cores: How many cores these are.
        quota: Same as in `Processors`.
    """

    host: int
    allowed: int
    cores: int
    quota: float = math.inf


@dataclasses.dataclass(frozen=True)
class ProcessorShare:
    """What a rank takes of the processors that it may use.

    Attributes:
        threads: How many threads compute an op.
        cores: The first and last of its cores, by their order in `Processors`; None for all that it may use.
    """

    threads: int
    cores: tuple[int, int] | None = None


def found(allowed: Collection[int] | None = None, root: pathlib.Path = _ROOT) -> Processors:
    """Returns what this process may compute on.

    Args:
        allowed: The numbers of processors that it may use; None asks the kernel.
        root: Where the kernel's file systems are.
    """
    folders = root.glob("sys/devices/system/node/node[0-9]*")
    nodes = {number: int(folder.name.removeprefix("node"))
             for folder in folders for number in _numbers(_text(folder / "cpulist"))}
    cores: dict[tuple[int, str], list[int]] = {}
    for number in sorted(os.sched_getaffinity(0) if allowed is None else allowed):
        topology = root / f"sys/devices/system/cpu/cpu{number}/topology"
        siblings = _text(topology / "thread_siblings_list") or str(number)
        cores.setdefault((nodes.get(number, 0), siblings), []).append(number)
    by_node = sorted((node, tuple(numbers)) for (node, _), numbers in cores.items())
    return Processors(tuple(numbers for _, numbers in by_node), min(_quotas(root), default=math.inf))


def shares(ranks: Sequence[Sharer], may_bind: bool) -> list[ProcessorShare | None]:
    """Returns what each rank of a job takes; None for one that shares its processors with no other, and may take all.

    Args:
        ranks: All ranks, in their order.
        may_bind: Whether a rank may keep to some cores. If it may, those of a host have as many, up to one, unless
            their container has a quota: then others use these cores, too.
    """
    taken: list[ProcessorShare | None] = []
    for number, rank in enumerate(ranks):
        sharing = [other for other, sharer in enumerate(ranks) if (sharer.host, sharer.allowed) == (
            rank.host, rank.allowed)]
        count, position = len(sharing), sharing.index(number)
        quota = rank.quota * count / sum(sharer.host == rank.host for sharer in ranks)  # of all ranks of the host
        if count == 1 and quota >= rank.cores:
            taken.append(None)
            continue
        threads = max(1, int(min(rank.cores, quota)) // count)
        first, end = position * rank.cores // count, (position + 1) * rank.cores // count
        binds = may_bind and quota >= rank.cores
        taken.append(ProcessorShare(threads, (first, max(first, end - 1)) if binds else None))
    return taken


def _quotas(root: pathlib.Path) -> Iterator[float]:
    """Yields the limits of the processors' time of this process's control groups, in processors."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # the second version
            place, read = root / "sys/fs/cgroup", _quota
        elif "cpu" in controllers.split(","):
            place, read = root / "sys/fs/cgroup" / controllers, _quota_of_first_version
        else:
            continue
        parts = pathlib.PurePosixPath(path.lstrip("/")).parts
        for depth in range(len(parts) + 1):  # a container may see its own group as the root
            if (quota := read(place.joinpath(*parts[:depth]))) is not None:
                yield quota


def _quota(group: pathlib.Path) -> float | None:
    limit, _, period = _text(group / "cpu.max").partition(" ")
    return int(limit) / int(period) if limit.isdecimal() else None


def _quota_of_first_version(group: pathlib.Path) -> float | None:
    limit, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
    return int(limit) / int(period) if limit.isdecimal() else None  # -1 if there is none


def _numbers(text: str) -> Iterator[int]:
    """Yields the numbers of a list of the kernel's, such as "0-3,8"."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
