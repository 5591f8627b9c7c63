"""The versions of the weights that ranks have read: all that stale training leaves to chance.

A run that is given the log of another reads the same versions, and so computes the same bits.

Tests: tests/unit/test_staleness.py, tests/training/test_clocks.py.
"""

import collections
import dataclasses
import hashlib
import json
import os

from tf_poseidon.base import files
from tf_poseidon.base import tables
from tf_poseidon.errors import ConfigurationError

_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class VersionLog:
    """Which version each rank has read at each clock.

    Attributes:
        synchrony: The bounds, as text.
        versions: By rank, and then by clock.
        waiting_seconds: By rank: how long it has waited for versions.
    """

    synchrony: str
    versions: tuple[tuple[int, ...], ...]
    waiting_seconds: tuple[float, ...] = ()

    def staleness(self) -> list[dict[int, int]]:
        """Returns by rank how often a version was read that was so many clocks old."""
        return [dict(sorted(collections.Counter(clock - version for clock, version in enumerate(versions)).items()))
                for versions in self.versions]

    def __str__(self) -> str:
        counts = self.staleness()
        ages = sorted(set().union(*counts))
        rows = [("clocks old", *(f"rank {rank}" for rank in range(len(counts))))]
        rows += [(str(age), *(f"{of_rank.get(age, 0):,}" for of_rank in counts)) for age in ages]
        if self.waiting_seconds:
            rows.append(("waited", *(f"{seconds:.3g} s" for seconds in self.waiting_seconds)))
        return "\n".join([f"Versions of the weights that ranks have read, by {self.synchrony}:",
                          *tables.aligned(rows, left=[0], indent="  ")])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the log to a file, for `PoseidonStrategy(versions=path)`."""
        text = json.dumps({"format": _FORMAT, **dataclasses.asdict(self)})
        files.write(path, text.encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "VersionLog":
        """Reads a log.

        Raises:
            ConfigurationError: If the file has none.
        """
        try:
            with open(path, encoding="utf-8") as file:
                fields = json.load(file)
            if fields.pop("format") != _FORMAT:
                raise ValueError("it is of another format")
            versions = tuple(tuple(map(int, of_rank)) for of_rank in fields["versions"])
            log = cls(str(fields["synchrony"]), versions, tuple(map(float, fields["waiting_seconds"])))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"'{os.fspath(path)}' has no versions to read, since {error}; give a file of "
                                     "VersionLog.save.") from error
        return log

    @property
    def digest(self) -> str:
        """A text that is the same for the same versions."""
        return hashlib.sha256(repr(self.versions).encode()).hexdigest()

    def check(self, ranks: int, most: int) -> None:
        """Refuses a log that a job cannot follow.

        Args:
            ranks: The number of ranks of the job.
            most: The most clocks that a version may be old.

        Raises:
            ConfigurationError: If it cannot.
        """
        if len(self.versions) != ranks:
            raise ConfigurationError(f"versions= has those of {len(self.versions)} ranks, but this job has {ranks}; "
                                     "start as many.")
        for rank, versions in enumerate(self.versions):
            for clock, version in enumerate(versions):
                if not max(0, clock - most) <= version <= clock:
                    raise ConfigurationError(f"versions= says that rank {rank} has read version {version} at clock "
                                             f"{clock}, expected {max(0, clock - most)} to {clock}; give the synchrony "
                                             f"of that run, {self.synchrony}.")
