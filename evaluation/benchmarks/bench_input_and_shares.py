"""Measures what is gained where ranks make their own rows, and have shares of rows that suit their speeds.

    sudo env "PATH=$PATH" python -m evaluation.benchmarks.bench_input_and_shares \
        --json docs/results/input_and_shares.json --markdown docs/results/input_and_shares.md

Ranks that decode have a part of a processor each, so that a machine with 2 of them carries 4 hosts. Where ranks have
other speeds, they wait for emulated accelerators. Each measurement is a job of its own (shares_rank.py); those that are
compared take turns, and are verified before they are reported: their weights are one process's, and each rank has
decoded the images that it should. Parts that are not measured keep what the file of --json says of them.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sysconfig
import tempfile
from typing import Any

from absl import app
from absl import flags
import numpy as np
import rich.progress

from evaluation import modules
from evaluation import output
from evaluation import timing
from evaluation.clusters import processor_parts
from tf_poseidon import ops
from tf_poseidon.data import parts as parts_lib
from tf_poseidon.job.communicator import join_loopback
from tf_poseidon.stragglers import balancing
from tf_poseidon.stragglers import judgement

RANKS = 4
IMAGES, SIDE = 512, 160
INPUT_BATCHES = 256, 512
# Rows of a batch, by how many times slower the last rank is: ideal shares need no rounding, nor do equal ones.
BATCHES = {2: 112, 4: 104}
ROW_MS = 6.0
TURNS = 50  # of watching ranks and not
BOUNDS = {"rtol": 2e-4, "atol": 2e-5}  # those of tests/training/test_own_rows.py
_TIMEOUT_S = 600


@dataclasses.dataclass(frozen=True)
class Job:
    """A job of ranks of shares_rank.py.

    Attributes:
        ranks: How many; 1 runs without mpiexec.
        rows: Same as in PoseidonStrategy.
        slower: How many times slower the accelerator of the last rank is.
        row_ms: How long the others need for a row.
        has_images: Whether it decodes images, and has no accelerators.
        own_rows: Whether each rank may decode its own rows only.
        is_watched_in_turns: Whether two of four epochs do without what is done because ranks may be unequal.
        epochs, steps, batch: Of what is measured: epochs, their steps, rows of a global batch.
        part: Of a processor, for each rank.
    """

    ranks: int = RANKS
    rows: Any = None
    slower: float = 1
    row_ms: float = 0
    has_images: bool = False
    own_rows: bool = True
    is_watched_in_turns: bool = False
    epochs: int = 4
    steps: int = 20
    batch: int = 256
    part: float = 1


@dataclasses.dataclass
class Measured:
    """What a job has noted: by rank what it has written, and its weights."""

    ranks: list[dict[str, Any]]
    weights: list[list[np.ndarray]]

    def steps(self, job: Job, name: str = "seconds", rank: int = 0, first: int = 1) -> list[float]:
        """Returns a time of a step, in each epoch from `first` on."""
        return [epoch[name] / job.steps for epoch in self.ranks[rank]["epochs"][first:]]


def run(job: Job, images: str = "") -> Measured:
    """Runs a job, in which each rank has its part of a processor."""
    launcher = [os.path.join(sysconfig.get_path("scripts"), "mpiexec"), "-n", str(job.ranks)] if job.ranks > 1 else []
    with tempfile.TemporaryDirectory() as name, processor_parts.made([job.part] * job.ranks) as folders:
        directory = pathlib.Path(name)
        (directory / "options.json").write_text(json.dumps(dataclasses.asdict(job) | {
            "images": images if job.has_images else "", "parts": list(map(str, folders)), "weights_after": 1}))
        done = subprocess.run([*launcher, *modules.command("benchmarks.shares_rank"), name], capture_output=True,
                              text=True, timeout=_TIMEOUT_S, env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"})
        if done.returncode:
            raise SystemExit(f"{job} ended with status {done.returncode}, expected 0:\n{done.stderr[-4000:]}")
        ranks = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(job.ranks)]
        weights = []
        for rank in range(job.ranks):
            with np.load(directory / f"{rank}.npz") as file:
                weights.append([file[f"arr_{i}"] for i in range(len(file.files))])
    return Measured(ranks, weights)


def verify(job: Job, measured: Measured, expected: Measured) -> None:
    """Checks that a job has trained what one process has, and decoded what it should."""
    for rank, weights in enumerate(measured.weights):
        for value, of_rank_0, alone in zip(weights, measured.weights[0], expected.weights[0], strict=True):
            np.testing.assert_array_equal(value, of_rank_0, f"{job}, rank {rank}")
            np.testing.assert_allclose(value, alone, **BOUNDS, err_msg=f"{job}, rank {rank}")
    if not job.has_images:
        return
    decoded = [0] * job.ranks
    for begin in range(0, IMAGES, job.batch):
        total = min(job.batch, IMAGES - begin)
        counts = parts_lib.counts_of(total, [1] * job.ranks) if job.own_rows else [total] * job.ranks
        decoded = [before + count for before, count in zip(decoded, counts)]
    found = [rank["decoded"] for rank in measured.ranks]
    if found != decoded:
        raise AssertionError(f"{job}: the ranks have decoded {found} images, expected {decoded}.")


def in_turns(jobs: Mapping[str, Job], rounds: int, title: str, images: str = "", alone: Job | None = None,
             ) -> dict[str, list[Measured]]:
    """Runs jobs that take turns, and verifies each before anything is reported.

    Args:
        jobs: By name.
        rounds: How often each runs.
        title: For the progress.
        images: The folder of the images.
        alone: The same training by one process, if none of the jobs is that.
    """
    expected = run(alone, images) if alone else None
    systems = {name: lambda job=job: run(job, images) for name, job in jobs.items()}
    found = timing.in_turns(systems, rich.progress.track(range(rounds), title, transient=True),
                            clock=lambda system: system())
    for name, job in jobs.items():
        for measured in found[name]:
            verify(job, measured, expected or next(iter(found.values()))[0])
    return found


def write_images(folder: pathlib.Path) -> None:
    """Writes images that look like photographs: smooth, with some noise."""
    import tensorflow as tf  # late: only here
    rng = np.random.default_rng(4)
    for number in range(IMAGES):
        rough = tf.image.resize(rng.integers(0, 256, (20, 20, 3)).astype(np.float32), [SIDE, SIDE], "bicubic")
        pixels = np.clip(rough + rng.normal(0, 8, (SIDE, SIDE, 3)), 0, 255).astype(np.uint8)
        (folder / f"{number:04}.jpg").write_bytes(tf.io.encode_jpeg(pixels).numpy())


def _summary(values: Sequence[float]) -> dict[str, Any]:
    """Returns median and quartiles; of few values, the least and the greatest instead."""
    found = timing.summary(values) | {"samples": len(values)}
    return found if len(values) >= 4 else found | {"quartiles": [min(values), max(values)]}


def _milliseconds(found: Sequence[Measured], job: Job, name: str, first: int = 1) -> list[float]:
    """Returns by rank the median of a time of a step, in milliseconds."""
    return [1e3 * statistics.median(sum((each.steps(job, name, rank, first) for each in found), []))
            for rank in range(job.ranks)]


def measure_input(rounds: int) -> dict[str, Any]:
    """Measures rows per second of a job that mostly decodes images, by one rank and by several, by rows of a batch."""
    results = {}
    with tempfile.TemporaryDirectory() as images:
        write_images(pathlib.Path(images))
        for batch in INPUT_BATCHES:
            common = {"has_images": True, "epochs": 3, "steps": 8192 // batch, "batch": batch, "part": 0.3}
            jobs = {"1 rank": Job(ranks=1, **common), f"{RANKS} ranks": Job(**common),
                    f"{RANKS} ranks, each decodes all rows": Job(own_rows=False, **common)}
            if batch != INPUT_BATCHES[0]:
                jobs.popitem()  # once is enough to see that nothing is gained
            found = in_turns(jobs, rounds, f"input, {batch} rows", images)
            results[f"{batch}"] = {name: _of_input(job, found[name], found["1 rank"]) for name, job in jobs.items()}
    return results


def _of_input(job: Job, found: Sequence[Measured], of_one: Sequence[Measured]) -> dict[str, Any]:
    """Returns what is reported of a job, given what one rank has done in the same rounds."""
    seconds, base = [measured.steps(job) for measured in found], [measured.steps(job) for measured in of_one]
    return {
        "rows_per_s": _summary([job.batch / each for times in seconds for each in times]),
        "to_1_rank": _summary(_ratios(base, seconds)),
        **{part: _milliseconds(found, job, part) for part in ("processor_seconds", "input_seconds",
                                                              "waiting_seconds")},
        "decoded": [rank["decoded"] for rank in found[0].ranks], "input": found[0].ranks[0]["input"]}


def _ratios(times: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> list[float]:
    """Returns the ratios of medians of runs in the same round: the machine's speed drifts."""
    return [statistics.median(a) / statistics.median(b) for a, b in zip(times, base, strict=True)]


def measure_shares(rounds: int) -> dict[str, Any]:
    """Measures steps per second with a slower rank, by the shares of rows."""
    results = {}
    for slower, batch in BATCHES.items():
        common = {"slower": slower, "row_ms": ROW_MS, "batch": batch}
        jobs = {"equal": Job(epochs=3, **common), "balanced": Job(rows="balanced", epochs=6, **common),
                "ideal": Job(rows=[slower] * (RANKS - 1) + [1], epochs=3, **common)}
        found = in_turns(jobs, rounds, f"{slower} times slower", alone=Job(ranks=1, epochs=2, batch=batch))
        # The epochs after the last decision; the first has windows of steps before the rank was slower.
        first = {name: [_last_decision(measured) if name == "balanced" else 1 for measured in found[name]]
                 for name in jobs}
        seconds = {name: [measured.steps(job, first=begin) for measured, begin in zip(found[name], first[name])]
                   for name, job in jobs.items()}
        results[f"{slower}"] = {name: {
            "ms": _summary([1e3 * each for times in seconds[name] for each in times]),
            "to_equal": _summary(_ratios(seconds["equal"], seconds[name])),
            "to_ideal": _summary(_ratios(seconds[name], seconds["ideal"])),
            **{part: _milliseconds(found[name], jobs[name], part, max(first[name]))
               for part in ("processor_seconds", "waiting_seconds")},
            "shares": [parts_lib.counts_of(batch, measured.ranks[0]["epochs"][-1]["shares"] or [1] * RANKS)
                       for measured in found[name]],
            "measured_from_epoch": [begin + 1 for begin in first[name]],
            "steps": jobs[name].epochs * jobs[name].steps,
            "warnings": [_warnings(measured) for measured in found[name]]} for name in jobs}
    return results


def _last_decision(measured: Measured) -> int:
    """Returns the first epoch with the shares that a job ended with, counted from 0, at least 1."""
    shares = [epoch["shares"] for epoch in measured.ranks[0]["epochs"]]
    return max(1, next(i for i in range(len(shares)) if all(each == shares[-1] for each in shares[i:])))


def _warnings(measured: Measured) -> list[list[Any]]:
    """Returns the step and the text of each warning of a straggler."""
    return [message for message in measured.ranks[0]["messages"] if message[1].startswith("Rank ")]


def measure_cost(rounds: int) -> dict[str, Any]:
    """Measures what equal ranks pay for being watched, and for decisions about shares, in turns within a job."""
    job = Job(rows="balanced", is_watched_in_turns=True, epochs=4 * (TURNS + 1), steps=20, batch=16, row_ms=4)
    found = in_turns({"watched": job}, rounds, "cost", alone=Job(ranks=1, epochs=2, steps=job.steps, batch=job.batch))
    runs = found["watched"]

    def of_turns(name: str) -> tuple[list[float], list[float]]:
        """Returns milliseconds of a step that is watched, and of one that is not, in each four epochs."""
        watched, others = [], []
        for measured in runs:
            by_rank = [measured.steps(job, name, rank, first=4) for rank in range(RANKS)]
            times = [1e3 * statistics.mean(each) for each in zip(*by_rank, strict=True)]
            watched += [(times[i] + times[i + 3]) / 2 for i in range(0, 4 * TURNS, 4)]
            others += [(times[i + 1] + times[i + 2]) / 2 for i in range(0, 4 * TURNS, 4)]
        return watched, others

    watched, others = of_turns("seconds")
    processor, of_others = of_turns("processor_seconds")
    return {
        "ms": _summary(watched), "others_ms": _summary(others),
        "to_others": _interval([a / b for a, b in zip(watched, others)]),
        "processor_ms": _summary(processor), "others_processor_ms": _summary(of_others),
        "added_processor_ms": _interval([a - b for a, b in zip(processor, of_others)]),
        "watching_ms": _summary(of_turns("watching_seconds")[0]),
        "decisions": [len({tuple(epoch["shares"]) for epoch in measured.ranks[0]["epochs"]}) - 1 for measured in runs],
        "decision_ms": _summary([1e3 * timing.seconds(_decide) for _ in range(100)]), "timed_us": _timed_us()}


def _interval(values: Sequence[float]) -> dict[str, Any]:
    """Returns Hodges' and Lehmann's estimate of the middle; in place of quartiles, Wilcoxon's 95 % interval around it.

    Both need values that spread alike to both sides, as differences of what takes turns do, but no normal distribution.
    """
    count = len(values)
    means = sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2))
    outside = max(0, round(count * (count + 1) / 4 - 1.96 * math.sqrt(count * (count + 1) * (2 * count + 1) / 24)))
    return {"median": statistics.median(means), "quartiles": [means[outside], means[-1 - outside]], "samples": count}


def _timed_us() -> dict[str, Any]:
    """Measures microseconds by which a batch is later where the communicator counts waits for it."""
    import tensorflow as tf  # late: only here
    batches = 100_000
    communicator, = join_loopback(1)
    communicator.use_for_ops()
    try:
        data = tf.data.Dataset.from_tensors(0).repeat()
        systems = {name: lambda each=each: next(iter(each)) for name, each in {
            "timed": ops.timed(data).skip(batches), "plain": data.skip(batches)}.items()}
        found = timing.in_turns(systems, range(40))
    finally:
        communicator.leave()
    return _interval([1e6 * (a - b) / batches for a, b in zip(found["timed"], found["plain"])])


def _decide() -> None:
    """Decides once, as at the end of an epoch of equal ranks, by as many windows as are kept."""
    windows = [judgement.Window(7 * i, 7, 0, 0.2, (0.05 + 0.0001 * (i % 7),) * RANKS, (0,) * RANKS, (0,) * RANKS)
               for i in range(judgement.KEPT)]
    _, shares = balancing.decide(balancing.Balance(), windows, (1,) * RANKS,
                                 lambda shares: parts_lib.counts_of(16 * RANKS, shares))
    assert shares is None


def _aim(what: str, found: Mapping[str, Any], limit: float, is_least: bool, digits: int = 2) -> str:
    """Returns a sentence that says whether an aim was met: not where quartiles, or an interval, are on both sides."""
    are_met = {value >= limit if is_least else value <= limit for value in (found["median"], *found["quartiles"])}
    verdict = "is open, since values are on both sides of it" if len(are_met) == 2 else (
        "is met" if are_met == {True} else "is **not met**")
    aim = f"{'at least' if is_least else 'at most'} {limit:g}"
    return f"* {what}: {timing.text(found, digits)}. The aim, {aim}, {verdict}."


def _by_rank(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in values)


def _input_lines(found: Mapping[str, Any]) -> list[str]:
    rows = [(batch, name, timing.text(each["rows_per_s"], 0), timing.text(each["to_1_rank"]),
             _by_rank(each["processor_seconds"]), _by_rank(each["decoded"]))
            for batch, jobs in found.items() for name, each in jobs.items()]
    several, aims = f"{RANKS} ranks", []
    for batch, jobs in found.items():
        aims.append(_aim(f"Batches of {batch}, rows per second of {several} to those of one",
                         jobs[several]["to_1_rank"], 3.6, True))
        alone, own = (statistics.mean(jobs[name]["processor_seconds"]) for name in ("1 rank", several))
        aims.append(f"  A step takes each rank's processor {own:.1f} ms, and that of one rank {alone:.1f} ms, "
                    f"{alone / own:.2f} times as long: {own - alone / RANKS:.1f} ms are not divided.")
    return ["## Own rows of images", "",
            f"{IMAGES} JPEGs of {SIDE} x {SIDE} are decoded and resized for a model of one layer. Each rank has 0.3 of",
            "a processor, so a step takes at least its processor's time divided by 0.3.", "",
            *output.markdown_table(("rows of a batch", "job", "rows/s", "to 1 rank", "processor, ms of a step by rank",
                                    f"images decoded of {IMAGES}"), rows), "", *aims, ""]


def _shares_lines(found: Mapping[str, Any]) -> list[str]:
    lines = ["## Shares of rows where a rank is slower", "",
             f"Emulated accelerators need {ROW_MS:g} ms for a row, and no processor; that of the last rank is slower.",
             "Ideal shares are as their speeds.", ""]
    rows, aims = [], []
    for slower, least in (("2", 1.6), ("4", 2.9)):
        for name, each in found[slower].items():
            rows.append((slower, name, timing.text(each["ms"], 0), timing.text(each["to_equal"]),
                         timing.text(each["to_ideal"]), "; ".join(_by_rank(counts) for counts in each["shares"]),
                         _by_rank(each["processor_seconds"]), _by_rank(each["waiting_seconds"]),
                         "; ".join(f"{len(warned)} ({warned[0][0]})" if warned else "0"
                                   for warned in each["warnings"])))
        balanced = found[slower]["balanced"]
        aims += [_aim(f"{slower} times slower, a balanced step to one with ideal shares",
                      balanced["to_ideal"], 1.1, False),
                 _aim(f"{slower} times slower, speed of balanced to equal shares", balanced["to_equal"], least,
                      True)]
        first = [warned[0][0] if warned else float("inf")
                 for name in ("equal", "balanced") for warned in found[slower][name]["warnings"]]
        aims.append(_aim(f"{slower} times slower, steps before a warning names the rank", _summary(first), 20, False,
                         0))
        says = [text for name in ("equal", "balanced") for warned in found[slower][name]["warnings"]
                for _, text in warned if not text.startswith(f"Rank {RANKS - 1} ")]
        aims.append(f"* {slower} times slower, warnings that name another rank: {len(says)}.")
    return [*lines, *output.markdown_table((
        "times slower", "shares", "step, ms", "speed to equal", "step to ideal", "rows by rank, of each run",
        "processor, ms of a step by rank", "waits for others, ms", "warnings of each run (steps before the first)"),
        rows), "",
        f"Runs have {' or '.join(sorted({str(each['steps']) for jobs in found.values() for each in jobs.values()}))} "
        "steps; times are those after the last decision. The first warning:", "",
        *(f"> {found[slower]['equal']['warnings'][0][0][1]}\n" for slower in found
          if found[slower]["equal"]["warnings"][0]), *aims, ""]


def _cost_lines(found: Mapping[str, Any]) -> list[str]:
    return ["## Watching ranks that are equal", "",
            "In two of each four epochs of a job, the first and the last, ranks are watched, and shares decided at the",
            "end, after 20 steps. The others do without. Compared is within these four: by Hodges' and Lehmann's",
            "estimate, with Wilcoxon's 95 % interval. Times in the table are medians (quartiles).", "",
            *output.markdown_table(("epochs", "step, ms", "processor of a rank, ms of a step"), [
                ("watched", timing.text(found["ms"]), timing.text(found["processor_ms"])),
                ("others", timing.text(found["others_ms"]), timing.text(found["others_processor_ms"]))]), "",
            _aim("A watched step to another", found["to_others"], 1.01, False, 4),
            f"* The processor's time of a step grows by {timing.text(found['added_processor_ms'], 3)} ms.",
            f"* Watching takes {timing.text(found['watching_ms'], 3)} ms of a step, with waits for other ranks,",
            f"  a decision {timing.text(found['decision_ms'], 3)} ms. {sum(found['decisions'])} were for other shares.",
            "* Counting how long a batch was waited for, which is done in all epochs, takes "
            f"{timing.text(found['timed_us'])} us.", ""]


_PARTS = {"input": (measure_input, _input_lines), "shares": (measure_shares, _shares_lines),
          "cost": (measure_cost, _cost_lines)}


def report(results: Mapping[str, Any]) -> str:
    """Returns the page in Markdown."""
    lines = ["# Own rows, and shares of rows", "",
             "Written by `evaluation.benchmarks.bench_input_and_shares --markdown`: medians (quartiles; of less",
             "than four values, the least and the greatest). Ratios are of runs in the same round.", ""]
    for name, (_, described) in _PARTS.items():
        if name in results:
            lines += described(results[name])
    return "\n".join(lines).rstrip() + "\n"


def main(_):
    unknown = set(_MEASURED.value) - set(_PARTS)
    if unknown:
        raise app.UsageError(f"--parts has '{min(unknown)}', expected some of {', '.join(_PARTS)}.")
    path = pathlib.Path(_JSON.value or "")
    results = json.loads(path.read_text()) if path.is_file() else {}
    for name in _MEASURED.value:
        rounds = _ROUNDS.value or {"input": 3, "shares": 2, "cost": 3}[name]
        results[name] = _PARTS[name][0](rounds)
        output.write_json(_JSON.value, results)
    text = report(results)
    print(text)
    if _MARKDOWN.value:
        pathlib.Path(_MARKDOWN.value).write_text(text)


if __name__ == "__main__":
    _JSON = output.json_flag(what="File for the results; of parts that are not measured, it is kept.")
    _MARKDOWN = output.markdown_flag()
    _MEASURED = flags.DEFINE_list("parts", list(_PARTS), "What to measure.")
    _ROUNDS = flags.DEFINE_integer("rounds", None, "Runs of each job; by default as many as its spread needs.",
                                   lower_bound=2)
    app.run(main)
