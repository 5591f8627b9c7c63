"""Jobs that tests share: programs on some ranks, each run once; and what it means to compute the same as one process.

A file of programs is started as FILE OUT POLICY [OPTION...] NAME..., and each rank writes the arrays of each program to
OUT/NAME.RANK.npz. Importing TensorFlow takes longer than most programs, so a job runs all programs that the selected
tests of a module name: in the parameter "case", or by the mark `needs`.
"""

from concurrent import futures
import dataclasses
import pathlib

import launch
import numpy as np

ONE = "ps"  # the policy of a single process, where there is nothing to decide
# How far values of one process and of several may be apart by rounding, relative to the largest of an array.
BOUNDS = {"float64": 1e-8, "float32": 1e-3}


@dataclasses.dataclass(frozen=True)
class Case:
    """A program on some ranks.

    Attributes:
        file: The file of the program.
        name: Its name there.
        ranks: Number of processes; one is started without a launcher.
        policy: The policy of the strategy.
        options: Further arguments of the file.
        repeat: Distinguishes jobs that are otherwise the same.
        launcher: What starts several ranks.
    """

    file: str
    name: str
    ranks: int
    policy: str
    options: tuple[str, ...] = ()
    repeat: int = 0
    launcher: str = "mpiexec"

    def __str__(self):
        return "-".join([self.name, *(option.strip("-") for option in self.options), str(self.ranks), self.policy])

    def alone(self):
        """Returns the case of one process with which this one is compared."""
        return Case(self.file, self.name, 1, ONE)

    def again(self):
        """Returns the case of another run."""
        return dataclasses.replace(self, repeat=self.repeat + 1)

    @property
    def job(self):
        """The same for all cases that one job runs."""
        return dataclasses.replace(self, name="")


def cases_of(items):
    """Returns the cases that tests name, in their order, and the first runs of those that are repeated.

    Their values say whether a test compares them with one process: all but those of the mark `between_ranks`.
    """
    found = {}
    for item in items:
        named = [case for mark in item.iter_markers("needs") for case in mark.args]
        named += [value for value in getattr(getattr(item, "callspec", None), "params", {}).values()
                  if isinstance(value, Case)]
        is_compared = item.get_closest_marker("between_ranks") is None
        for case in [*named, *(dataclasses.replace(case, repeat=0) for case in named)]:
            found[case] = found.get(case, False) or is_compared
    return found


class Jobs:
    """The results of cases, one job for all that can share it.

    Ranks leave the processor idle while they wait for each other, so two jobs run at a time: when the first result of
    several ranks is requested, all such jobs are started, in the order of the tests.
    """

    def __init__(self, folder, cases):
        self._folder = folder
        self._wanted, self._alone = {}, {}  # names of programs, by job
        for case, is_compared in cases.items():
            self._wanted.setdefault(case.job, {})[case.name] = None
            if is_compared:
                self._alone.setdefault(case.alone().job, {})[case.name] = None
        self._started = {}
        self._pool = futures.ThreadPoolExecutor(2)

    def arrays(self, case):
        """Returns the arrays of a case, a dictionary for each rank."""
        folder = self.folder(case)
        return [dict(np.load(folder / f"{case.name}.{rank}.npz")) for rank in range(case.ranks)]

    def one_process(self, case):
        """Returns the arrays of one process."""
        job = case.alone().job
        assert case.name in self._alone.get(job, ()), "the test has the mark between_ranks"
        self._start(job, self._alone[job])
        return self.arrays(case.alone())[0]

    def folder(self, case):
        """Returns the folder that the job of a case has written to."""
        return self._run(case)[0]

    def output(self, case):
        """Returns what all processes of the job of a case have printed."""
        return self._run(case)[1]

    def _run(self, case):
        for job, names in self._wanted.items():
            if case.ranks > 1 or job == case.job:
                self._start(job, names)
        folder, parts = self._started[case.job]
        return folder, "".join(part.result().output for part in parts)

    def _start(self, job, names):
        """Starts a job once, as soon as earlier ones leave room."""
        if job in self._started:
            return
        folder = self._folder / f"{pathlib.Path(job.file).stem}{job}-{job.repeat}-{job.launcher}"
        folder.mkdir()
        names = list(names)
        # One process keeps one core busy: two share the programs.
        parts = [names] if job.ranks > 1 or len(names) == 1 else [names[::2], names[1::2]]
        self._started[job] = folder, [self._pool.submit(
            launch.run_ok, [job.file, folder, job.policy, *job.options, *part], job.ranks if job.ranks > 1 else 0,
            timeout_s=120 + 20 * len(part), launcher=job.launcher) for part in parts]

    def stop(self):
        """Starts no more jobs, and waits for the running ones."""
        self._pool.shutdown(cancel_futures=True)


def assert_same_bits(ranks):
    """Asserts that all ranks hold the same bits, except in arrays that are named local/…."""
    for rank, other in enumerate(ranks[1:], 1):
        assert ranks[0].keys() == other.keys()
        for key, value in ranks[0].items():
            if not key.startswith("local/"):
                assert value.tobytes() == other[key].tobytes(), f"{key}: ranks 0 and {rank}"


def assert_same_as_one_process(one, ranks, bounds=BOUNDS, least=1e-3):
    """Asserts that several ranks have computed what one process has, up to rounding, and the same bits.

    Arrays "before/variable…" and "step N/variable…" are the state of a program before its first step and after each:
    of these, updates are compared. A gradient of half the length is an update that is off by half.

    Args:
        one: The arrays of one process, by name.
        ranks: The arrays of each rank. Those that are named local/… are not compared.
        bounds: How far values may be apart, relative to the largest of an array; by its type in one process.
        least: Values smaller than this count as this large.
    """
    assert_same_bits(ranks)
    assert list(one) == list(ranks[0]), "ranks have other arrays"
    before, trained = {}, []
    for key, want in one.items():
        have, variable = ranks[0][key], key.partition("/variable")[2]
        if key.startswith("local/"):
            continue
        if want.dtype.kind not in "fc":  # exact: numbers, texts
            np.testing.assert_array_equal(have, want, err_msg=key)
            continue
        if variable:
            start = before.get(variable)
            before[variable] = want, have
            if start is not None:
                want, have = want - start[0], have - start[1]
                trained.append(np.any(want))
        assert have.shape == want.shape, key
        np.testing.assert_array_equal(np.isfinite(have), np.isfinite(want), err_msg=key)
        finite = np.isfinite(want)
        scale = np.abs(want[finite]).max(initial=least)
        difference = np.abs(have[finite] - want[finite]).max(initial=0)
        assert difference <= bounds[want.dtype.name] * scale, (
            f"{key} is off by {difference:.1e}: {have.ravel()[:4]}, one process has {want.ravel()[:4]}")
    assert not before or any(trained), "nothing was trained"
