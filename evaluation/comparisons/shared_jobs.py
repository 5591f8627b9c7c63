"""Jobs that share the hosts of an emulated cluster, and what bench_crossover.py has measured of them."""

import dataclasses
import statistics

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


EFFICIENCY = 0.94  # of links, TCP's

_VGG19, _RESNET50 = SharedJob("vgg19", 16), SharedJob("resnet50", 12, "titan_x_tf")
_OVERLAP = {"overlaps": True}
CELLS = {cell.name: cell for cell in (
    Cell("two VGG19", (_VGG19,) * 2, 1, dilation=1, shrink=16),
    Cell("two ResNet-50", (_RESNET50,) * 2, 2.5, dilation=4, shrink=4),
    Cell("two overlapping VGG19", (dataclasses.replace(_VGG19, **_OVERLAP),) * 2, 1, dilation=1, shrink=16),
    Cell("two overlapping ResNet-50", (dataclasses.replace(_RESNET50, steps=16, **_OVERLAP),) * 2, 2.5,
         dilation=4, shrink=4),
    Cell("VGG19 and ResNet-50", (dataclasses.replace(_VGG19, steps=12, profile="titan_x_tf"),
                                 dataclasses.replace(_RESNET50, steps=12)), 1, dilation=2, shrink=8),
    Cell("three VGG19", (dataclasses.replace(_VGG19, steps=12),) * 3, 1, dilation=1.5, shrink=16),
)}


@dataclasses.dataclass(frozen=True)
class Gain:
    """What it brings to let some jobs train at the same time: seconds of whole measurements, undilated.

    Attributes:
        step_s, compute_s, wire_s: Of each job: T, C and N.
        sequential: By round: of all jobs, one after the other.
        together: By round: of all jobs, at the same time.
        bound: By how much they could be faster so.
    """

    step_s: list[float]
    compute_s: list[float]
    wire_s: list[float]
    sequential: list[float]
    together: list[float]
    bound: float

    @property
    def ratios(self):
        return [alone / together for alone, together in zip(self.sequential, self.together, strict=True)]


def gain(entry, way):
    """Returns the `Gain` of an entry of the file in a way, "without" or "with" turns."""
    cell, jobs = Cell.of(entry["cell"]), entry[way]
    steps = [job.steps for job in cell.jobs]
    alone = [[t / cell.dilation for t in job["alone"]] for job in jobs]
    compute = [job["compute_s"] / cell.dilation for job in jobs]
    wire = [8 * job["planned_bytes"] / 2 / (EFFICIENCY * cell.gbps * 1e9) for job in jobs]
    # Of all jobs the first begin and the last end.
    together = [(max(end for _, end in spans) - min(begin for begin, _ in spans)) / cell.dilation
                for spans in zip(*(job["together"] for job in jobs), strict=True)]
    busiest = max(sum(n * t for n, t in zip(steps, times)) for times in (compute, wire))
    step = [statistics.median(times) / n for times, n in zip(alone, steps)]
    sequential = [sum(times) for times in zip(*alone, strict=True)]
    return Gain(step, compute, wire, sequential, together, sum(n * t for n, t in zip(steps, step)) / busiest)


def table(results):
    """Returns a header, and a row for each entry and way."""
    header = ["jobs", "Gbit/s", "turns", "T, ms", "C, ms", "N, ms", "steps", "T to that without",
              "one after the other, s", "together, s", "as fast", "bound", "of it"]
    rows = []
    for entry in results:
        cell = Cell.of(entry["cell"])
        for way in ("without", "with"):
            if way in entry:
                found, without = gain(entry, way), gain(entry, "without") if "without" in entry else None
                ratio = statistics.median(found.ratios)
                rows.append([
                    cell.name, f"{cell.gbps:g}", way, *(" ".join(dict.fromkeys(f"{1e3 * t:,.0f}" for t in times))
                                                        for times in (found.step_s, found.compute_s, found.wire_s)),
                    " ".join(dict.fromkeys(str(job.steps) for job in cell.jobs)),
                    f"{sum(found.step_s) / sum(without.step_s):.3f}" if without else "",
                    f"{statistics.median(found.sequential):.2f}", _spread(found.together, ".2f"),
                    _spread(found.ratios, ".3f"), f"{found.bound:.2f}", f"{ratio / found.bound:.3f}"])
    return header, rows


def _spread(values, form):
    """Returns the median of values, and the least and the most, as text."""
    median, least, most = (format(value, form) for value in (statistics.median(values), min(values), max(values)))
    return f"{median} ({least} to {most})"
