"""Jobs that share the hosts of an emulated cluster, as bench_crossover.py measures them."""

import dataclasses

LATENCY_US = 200.0  # between emulated hosts, about


@dataclasses.dataclass(frozen=True)
class SharedJob:
    """A job of several that run on the same hosts.

    Attributes:
        model: One of `zoo.MODELS`.
        steps: How many steps it makes in a measurement; as long, alone, as those of the others.
        profile: One of `profiles.PROFILES`.
        overlaps: Whether its steps overlap, in functions of some.
    """

    model: str
    steps: int
    profile: str = "titan_x"
    overlaps: bool = False

    @property
    def system(self):
        return "poseidon+overlap" if self.overlaps else "poseidon"


@dataclasses.dataclass(frozen=True)
class Cell:
    """Jobs that share the accelerators and links of an emulated cluster.

    Attributes:
        name: What tables call it.
        jobs: Each has a rank on each host.
        gbps: Rate of links in the target cluster.
        dilation, shrink: Same as in benchmark.py.
        hosts: How many.
    """

    name: str
    jobs: tuple[SharedJob, ...]
    gbps: float
    dilation: float = 1.0
    shrink: float = 1.0
    hosts: int = 4

    @property
    def link_gbps(self):
        return self.gbps / (self.dilation * self.shrink)

    @classmethod
    def of(cls, fields):
        """Returns the cell that has been written as JSON."""
        return cls(**fields | {"jobs": tuple(SharedJob(**job) for job in fields["jobs"])})
