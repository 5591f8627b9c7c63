"""A rank of a job that shares emulated accelerators with other jobs: what bench_crossover.py starts.

Jobs meet in a folder before each part of a round: in some parts one of them trains alone while the others wait, in one
all train at the same time.
"""

import hashlib
import json
import os
import pathlib
import time

from absl import app
from absl import flags
from absl import logging
import numpy as np
import tensorflow as tf

from evaluation import output
from evaluation.comparisons import shared_jobs
from evaluation.comparisons import systems as systems_lib
from evaluation.workloads import emulation
from evaluation.workloads import profiles
from evaluation.workloads import zoo
import tf_poseidon as poseidon
from tf_poseidon import planning
from tf_poseidon.job import runtime

_CELL = flags.DEFINE_string("cell", None, "The `shared_jobs.Cell`, as JSON.", required=True)
_JOB = flags.DEFINE_integer("job", 0, "Which of its jobs this rank belongs to.")
_FOLDER = flags.DEFINE_string("folder", None, "Where jobs meet and leave results.", required=True)
_CROSSOVER = flags.DEFINE_string("crossover", None, "As of PoseidonStrategy.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Measurements of each job alone, and of all together.")

_LONGEST_S = 600.0  # for which a job waits for others


class Meetings:
    """Where jobs wait for each other; the first rank of each tells the others."""

    def __init__(self, folder, job, jobs, communicator):
        self._folder, self._job, self._jobs, self._communicator = pathlib.Path(folder), job, jobs, communicator

    def wait(self, name):
        """Returns when all ranks of all jobs are here."""
        self.wait_for_ranks()
        if self._communicator.rank == 0:
            (self._folder / f"{name}.{self._job}").touch()
            end = time.monotonic() + _LONGEST_S
            while missing := [j for j in range(self._jobs) if not (self._folder / f"{name}.{j}").exists()]:
                if time.monotonic() > end:
                    raise SystemExit(f"Job {missing[0]} has not come to '{name}' for {_LONGEST_S:.0f} s, expected it "
                                     "beside this one; see what it has printed.")
                time.sleep(0.002)
        self.wait_for_ranks()

    def wait_for_ranks(self):
        """Returns when all ranks of this job are here."""
        self._communicator.sum("barrier", np.zeros(1, np.float32))


class Trained:
    """The steps of this job: they are timed, and have the same sums each time."""

    def __init__(self, system, steps, meetings):
        self._system, self._steps, self._meetings = system, steps, meetings
        self._sums = None

    def warm_up(self):
        self._system.step()

    def span(self, part):
        """Makes the steps of a measurement; returns when they began and ended.

        Raises:
            AssertionError: If a sum has other bits than in the first part, in which the job was alone.
        """
        begin, digest = time.monotonic(), hashlib.blake2b()
        for _ in range(self._steps // self._system.steps):
            digest.update(np.asarray(self._system.step()).tobytes())
        self._meetings.wait_for_ranks()
        end = time.monotonic()
        self._sums = self._sums or digest.hexdigest()
        if digest.hexdigest() != self._sums:
            raise AssertionError(f"The sums of part '{part}' have other bits than those of the first part, expected "
                                 "the same, whatever other jobs do; one of its exchanges is wrong.")
        return begin, end


def train(cell, job, meetings, strategy):
    """Returns what was measured of a job: seconds are those of the emulation."""
    own = cell.jobs[job]
    if own.steps % (systems_lib.OVERLAPPING if own.overlaps else 1):
        raise SystemExit(f"steps={own.steps} of {own.model}, expected whole functions of {systems_lib.OVERLAPPING}.")
    model = emulation.EmulatedModel(own.model, zoo.MODELS[own.model].batch_size, profiles.PROFILES[own.profile],
                                    cell.dilation, cell.shrink)
    # Not as measured, which would depend on what other jobs do.
    cluster = planning.Cluster(cell.hosts, bandwidth_gbps=cell.link_gbps, latency_us=shared_jobs.LATENCY_US,
                               gflops=model.operations_per_second / 1e9, accelerators=True)
    options = {"takes_turns": True} if _CROSSOVER.value else {}
    system, = systems_lib.make([own.system], lambda prefix: systems_lib.EmulatedReplica(prefix, model, cell.hosts),
                               cluster, strategy, {}, **options).values()
    system.replica.check(system.step(), system.plan, runtime.communicator(), None)
    trained = Trained(system, own.steps, meetings)
    alone, together = [], []
    jobs = list(range(len(cell.jobs)))
    for number in range(_ROUNDS.value):
        parts = [*((f"{number}-{j}", [j]) for j in jobs), (f"{number}-all", jobs)]
        first = number % len(parts)
        for part, taking_part in parts[first:] + parts[:first]:
            meetings.wait(part)
            if job in taking_part:
                trained.warm_up()
            meetings.wait(f"{part}-warm")
            if job in taking_part:
                (together if len(taking_part) > 1 else alone).append(trained.span(part))
    meetings.wait("end")  # nobody is alone with a step that another one makes meanwhile
    system.replica.check(system.step(), system.plan, runtime.communicator(), None)
    products = sum(2 * site.factors.k * site.factors.m * site.factors.n * (cell.hosts - 1)
                   for site, decision in zip(system.plan.sites, system.plan.decisions)
                   if decision.scheme == "sfb" and not decision.leader)
    return {"compute_s": model.step_seconds + products / model.operations_per_second,
            "planned_bytes": system.plan.total_bytes * cell.shrink,
            "alone": [end - begin for begin, end in alone], "together": together, "turns": strategy.stats()["turns"]}


def main(_):
    logging.set_verbosity(logging.WARNING)
    tf.config.threading.set_inter_op_parallelism_threads(max(8, os.cpu_count()))  # as in benchmark.py
    cell = shared_jobs.Cell.of(json.loads(_CELL.value))
    options = {"crossover": _CROSSOVER.value} if _CROSSOVER.value else {}
    strategy = poseidon.PoseidonStrategy("ps", timeout_s=_LONGEST_S, kv_pair_bytes=emulation.kv_pair_bytes(cell.shrink),
                                         **options)
    meetings = Meetings(_FOLDER.value, _JOB.value, len(cell.jobs), runtime.communicator())
    measured = train(cell, _JOB.value, meetings, strategy)
    if strategy.rank == 0:
        output.write_json(pathlib.Path(_FOLDER.value) / f"{_JOB.value}.json", measured)


if __name__ == "__main__":
    app.run(main)
