"""PoseidonStrategy: the tf.distribute strategy with which Keras trains on several processes.

Tests: tests/training/test_training.py, tests/faults/test_failures.py, tests/scripts/test_distribute_contract.py.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import logging
import os
from typing import Any
from typing import cast

import tensorflow as tf

from tf_poseidon import environment
from tf_poseidon import grappler
from tf_poseidon import keras_hook
from tf_poseidon import options
from tf_poseidon import planning
from tf_poseidon.data import input_report
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes import session as session_lib
from tf_poseidon.job import agreement
from tf_poseidon.job import calibration
from tf_poseidon.job import row_shares
from tf_poseidon.job import runtime
from tf_poseidon.job import verify as verify_lib
from tf_poseidon.job import worker_clocks
from tf_poseidon.job.communicator import Communicator
from tf_poseidon.job.communicator import STAGING_COUNTERS
from tf_poseidon.job.host import accelerator_turns
from tf_poseidon.job.host import kernel_settings
from tf_poseidon.job.host import thread_shares
from tf_poseidon.job.job_variables import held_variables
from tf_poseidon.job.job_variables import new_variables
from tf_poseidon.job.job_variables import shard_service
from tf_poseidon.job.joined_job import Job
from tf_poseidon.loops import step as step_lib
from tf_poseidon.staleness import bounds
from tf_poseidon.staleness import version_log
from tf_poseidon.stragglers import watch
from tf_poseidon.strategy import extended
from tf_poseidon.timelines import recording

_log = logging.getLogger("tf_poseidon")

_latest = None
# What ranks exchange besides what the program's steps do.
_SITES_OF_NO_STEP = calibration.SITES | recording.SITES | watch.SITES | accelerator_turns.SITES


def of_process() -> "PoseidonStrategy":
    """Returns the latest strategy of this process; creates one with default options if there is none."""
    return _latest or PoseidonStrategy()


class PoseidonStrategy(tf.distribute.Strategy):
    """Synchronous data-parallel training on the processes that `mpiexec` has started.

    ```python
    strategy = poseidon.PoseidonStrategy()
    with strategy.scope():
        model = keras.Sequential([...])
        model.compile(...)
    model.fit(x, y, batch_size=256)  # the global batch: each process computes its part
    ```

    `python train.py` runs alone, `mpiexec -n 4 python train.py` on four processes. Each process
    uses one device: a GPU of its own if its machine has any, else the CPU. N processes compute
    what one process would: the step of one process is partitioned by the rows of the global batch.
    All ranks hold the same bits after every step.

    TensorFlow's graph optimizer rewrites each training function so that every gradient travels by
    the scheme that a plan has chosen for it: over the parameter server or, if it is a product of
    factors, as its factors.

    Args:
        policy: The rule that chooses schemes: "auto", the fastest by measured speeds; "ps", always the
            parameter server; "sfb", factors wherever possible; "paper", whichever sends fewer numbers
            (Algorithm 1 of Zhang et al.).
        plan: A `Plan`, or its file, to follow instead of a policy. Training functions that it was not
            made for fail. The same plan gives the same bits in every run whose ranks are placed alike.
        pins: {pattern: scheme}: the first pattern that matches a variable's path decides its scheme, if
            possible, before the policy does: {"*/kernel": "ps"}. With "columns" each rank holds and computes with some
            columns of a weight, or rows of a table, and no rank has its gradient.
        cluster: The `Cluster` to plan for, with its speeds. None measures them when the policy is
            "auto"; `poseidon.calibrate()` returns what was measured.
        wire_dtype: "bfloat16" rounds gradients and factors of wider types for the wire: half the bytes
            of single precision, and results that differ from those of one process by these roundings.
            None never rounds.
        merge: Whether small messages wait for each other, to travel as one (after MG-WFBP). Messages that
            are ready at the same time always travel as one; waiting has not been measured to be faster yet.
        servers: Ranks that hold the KV pairs of the parameter server; None for all ranks, dedicated servers included.
        ranks_per_node: Hierarchical aggregation: how many ranks of a node combine their contributions before
            these leave the node. They sum dense gradients, and concatenate factors. 1 disables it. None takes
            the value of a given plan, or of a cluster with more than one rank per node; otherwise all ranks of
            a node combine. It changes the order in which gradients are summed, and so their last bits.
        strict: Whether to end the job if a training function cannot be rewritten, instead of logging a
            warning and running it unmodified, which computes the same.
        global_batch_norm: Whether all batch normalisations in `fit` take their moments over all rows of a global batch,
            as in one process. Otherwise those of Keras that are not `synchronized` take them over each rank's rows.
            Costs two exchanges per batch normalisation: one in the forward pass, which nothing hides, and one in the
            backward pass.
        verify: Interval in steps at which synchronised gradients are compared with a plain sum over the
            ranks: bit by bit or, if rebuilt from factors, within the rounding bound; and the weights
            between ranks. Steps of `fit` and `evaluate`, and functions of `distribute`, are also compared with one
            process, on rank 0. A difference ends the job, with its name, rank and size. None never compares.
            Gradients that travel as factors are computed here too, so all steps take longer.
        rows: How ranks share the rows of each global batch. None gives all as many, up to one; (3, 1, 1) gives rank 0
            three times as many as the others; "balanced" begins with as many, and at the end of each epoch of `fit`
            follows the measured speeds of the ranks. What is computed is the same. A saved plan has them, and a later
            strategy of the job that gives none.
        input: "exact" gives every step the batches of one process. Then maps of a dataset that draw random numbers from
            a common state, or call Python, run for all rows on every rank; with "independent" each rank runs them for
            its own rows alone, so that what they draw depends on the number of ranks.
        shard_update: Whether each rank updates a part of every variable, and optimizers hold only that part of their
            own variables (as ZeRO-1, and weight-update sharding, do): in proportion to the number of ranks, that saves
            memory and arithmetic. Updates that are not computed element by element are made by one rank each. What is
            computed is the same, files too. In mixed precision, weights come back in 16 bits, and each rank holds its
            part of those in float. Any rank can read such variables, alone too. "auto" does so unless the plan says
            that steps are longer for it; it does anyway if the variables of a step would take more than half of the
            memory that some rank has. A given plan was made with it, or without, which "auto" follows.
        synchrony: "bsp", or how stale the weights may be that `fit` computes gradients with: `poseidon.SSP(staleness)`
            or `poseidon.DSSP(lower, upper)`. A rank then does not wait for slower ones as long as the version of the
            weights that it has is no more steps old than that. This is the one mode that does not compute what one
            process does, and the results differ from run to run; docs/synchrony.md says when it pays.
        versions: A `VersionLog`, or its file, of a run with the same `synchrony`: every rank reads the versions that it
            read in that run, and gets the same bits. `version_log` returns that of this run.
        engine: The library that moves gradients: "mpi", our own communicator over MPI, or "horovod",
            Horovod's ops over whatever it was built with (MPI, Gloo, NCCL). None takes that of the
            launcher: "horovod" under horovodrun, else "mpi".
        kv_pair_bytes: Largest size of a KV pair; None for 2 MiB, or 512 KiB with dedicated servers.
        timeout_s: Longest wait for another rank, in seconds. A rank that takes longer ends the job
            with a message that names it.
        startup_timeout_s: Longest wait, in seconds, for all ranks to create their strategy.
        heartbeat_timeout_s: Longest silence of another rank, in seconds, more than 1. A rank that computes is not
            silent; one is whose host is down, frozen or cut off, and then the job ends with a message that names it.
            Heartbeats wait behind what is under way, of which each piece counts as heard: of transfers of more than
            16 MiB these have up to 16 MiB. Give more where one takes that long.
        staging_bytes: Memory of the host for the pieces of a GPU's gradients that leave, which is taken as it is
            needed; None for 24 times kv_pair_bytes. What arrives, and factors, have memory beside it. A smaller number
            also limits the GPU's memory that other ranks of the node read.
        dedicated_servers: That many ranks, the last ones that were launched, only serve: they hold KV pairs, as many
            as keep the busiest link least busy, and do not train. On such a rank the first strategy serves until all
            other ranks have reached their end, and then ends the process: nothing behind it in the program runs. For
            hosts without accelerator. `num_replicas_in_sync`, and whatever is divided or given by rank, counts the
            others alone.
        crossover: A name, the same in several programs that run on the same hosts at the same time: they take turns on
            each accelerator, so that one computes while the others exchange gradients. What they compute stays the
            same. None, the default, shares with no other program on purpose. docs/synchrony.md says when it gains.

    What a program does not give comes from the environment, if it has a variable of that name: TF_POSEIDON_TIMEOUT_S=60
    (docs/clusters.md).

    Raises:
        PoseidonError: If an option is out of range, or the job cannot be joined: no engine, a rank that never
            joins, an op library built for another TensorFlow; or if Keras is not one of the versions in `supported`.
    """

    @environment.is_asked
    def __init__(self, policy: str = "auto", plan: planning.Plan | str | os.PathLike[str] | None = None,
                 pins: Mapping[str, str] | None = None, cluster: planning.Cluster | None = None,
                 wire_dtype: str | None = None, merge: bool = False, servers: Iterable[int] | None = None,
                 ranks_per_node: int | None = None, strict: bool = False, global_batch_norm: bool = False,
                 verify: int | None = None, rows: Sequence[int] | str | None = None, input: str = "exact",
                 shard_update: bool | str = False, synchrony: str | bounds.Synchrony = bounds.BSP,
                 versions: version_log.VersionLog | str | os.PathLike[str] | None = None, crossover: str | None = None,
                 engine: str | None = None, kv_pair_bytes: int | None = None,
                 timeout_s: float = options.JobOptions.timeout_s,
                 startup_timeout_s: float = options.JobOptions.startup_timeout_s,
                 heartbeat_timeout_s: float = options.JobOptions.heartbeat_timeout_s,
                 staging_bytes: int | None = None, dedicated_servers: int = 0) -> None:
        if plan is not None and not isinstance(plan, planning.Plan):
            plan = planning.Plan.load(plan)
        if versions is not None and not isinstance(versions, version_log.VersionLog):
            versions = version_log.VersionLog.load(versions)
        training = options.TrainingOptions(policy, plan, tuple((pins or {}).items()), cluster, wire_dtype, merge,
                                           strict, global_batch_norm, verify, rows, input, shard_update,
                                           bounds.of(synchrony), versions, crossover)
        job_options = options.JobOptions(engine, cast(Any, servers or ()), ranks_per_node, kv_pair_bytes, timeout_s,
                                         startup_timeout_s, heartbeat_timeout_s, staging_bytes, dedicated_servers)
        runtime.check(job_options, training)
        if training.plan or ranks_per_node is None:
            job_options = dataclasses.replace(job_options, ranks_per_node=training.ranks_per_node)
        communicator = runtime.start(job_options, planned_threads=training.plan.threads if training.plan else 0)
        keras_hook.install(alone=communicator is None)
        job = None if communicator is None else _job(communicator, training, timeout_s)
        super().__init__(extended.Extended(self, job, training))
        global _latest
        if _latest is None and (unknown := environment.unknown()) and self.rank == 0:
            _log.warning("The environment has %s, which nothing reads; `tf-poseidon doctor` says what it may mean.",
                         ", ".join(unknown))
        if job is not None and _latest is None:
            runtime.announce(training.described(job.graph_pass.session.planner.cluster) + environment.described())
        _latest = self

    @property
    def rank(self) -> int:
        """This process, 0 to num_replicas_in_sync - 1."""
        return self.extended.rank

    @contextlib.contextmanager
    def scope(self) -> "Iterator[PoseidonStrategy]":
        """Makes this the current strategy; variables created inside start with the same values on all ranks."""
        with super().scope():
            yield self
        if self.extended.job is not None:
            self.extended.job.new_variables.broadcast()

    @tf.autograph.experimental.do_not_convert
    def synchronize(self, gradients: Iterable[step_lib.Gradient],
                    variables: Iterable[tf.Variable]) -> list[step_lib.Gradient]:
        """Returns gradients summed over all ranks, for optimizers that are not Keras'.

        Keras' optimizers synchronise gradients themselves: give them the local ones. Call this in
        the function that `strategy.run` runs. As everywhere in tf.distribute, scale the loss so that
        the sum over the ranks is what you want.

        ```python
        gradients = strategy.synchronize(tape.gradient(loss, variables), variables)
        for gradient, variable in zip(gradients, variables):
            variable.assign_sub(0.1 * gradient)
        ```

        Args:
            gradients: Tensors, `tf.IndexedSlices` or None, one per variable.
            variables: The variables.

        Returns:
            A list like `gradients`.

        Raises:
            PoseidonError: If called outside `strategy.run`.
        """
        if self.num_replicas_in_sync == 1:
            return list(gradients)
        step = step_lib.current()
        if step is None:
            raise GraphError("strategy.synchronize was called outside strategy.run; call it in the function that "
                             "strategy.run(function, args=(batch,)) runs, or leave it out and decorate the training "
                             "step with @poseidon.distribute, which takes it as written for one process.")
        step.check_unconditional("strategy.synchronize was called")
        return step.synchronize(gradients, variables)

    @property
    def plan(self) -> planning.Plan | None:
        """How the latest rewritten training function synchronises: a `planning.Plan`.

        `print(strategy.plan)` shows a line per variable, with scheme, bytes and reason; or why the
        function was not rewritten. None before the first training function, and in a job of one process.
        It assumes that factors have no zeros; `strategy.plan.measured(strategy.stats())` has the bytes that they had.
        """
        job = self.extended.job
        plan = job and job.graph_pass.plan
        return plan and dataclasses.replace(plan, threads=kernel_settings.threads(), **(
            {} if job.row_shares.are_equal else {"row_shares": job.row_shares.current}))

    def stats(self) -> dict[str, Any]:
        """Returns what this rank has exchanged, and how long it has waited.

        Returns:
            {"header_bytes": bytes of frame headers sent, "packets": messages that carried them,
            "waiting_seconds": how long steps have waited for other ranks after their last gradient was ready (of steps
            that overlap, only the last one), and what is done between steps, such as callbacks' agreements; with stale
            weights, how long this rank has waited for versions of them,
            "waited_for": {rank: how long sums and factors of this rank have waited for those of that rank, which came
            last, since those of all others were there; each of the exchanges in flight at a time counts, in seconds},
            "input_seconds": how long steps of this rank have waited for their batches, of datasets that Keras or
            the strategy distributes,
            "staging": {"pinned_bytes", "gpu_bytes": memory of the host and of the GPU for what is copied, "down_bytes",
            "up_bytes": what was copied from the GPU and to it, "across_bytes": what was copied from other ranks' GPUs},
            "sites": {site: {"count": exchanges, "sent_bytes", "received_bytes": payload, "network_bytes": the
            part of it sent to ranks that this one does not combine with, "seconds": from the gradient being
            ready to its sum being available, over all exchanges, "factor_bytes": of the factors of all ranks, the
            same on each, "short_factor_bytes": of these as they travel, without zeros}},
            "late_seconds": {rank: how much later than the median rank's its parts of sums and factors came to this
            rank, in each step the latest; steps that overlap count as one},
            "stragglers": [{"rank", "host", "cause": "arithmetic", "input" or "link", "share": of each step that it
            costs the others, "since_step", "since", "last": `time.time`, "own_seconds", "median_seconds": of a step,
            what the cause names, for this rank and the others}], the ranks that `fit`, `train_on_batch` and functions
            of `distribute` wait for, "turns": {"count": turns that this rank has had on an accelerator that other jobs
            share, "agreeing_seconds": how long it has waited for the other ranks before them, "waiting_seconds": and
            for other jobs, "holding_seconds": how long it has had it}, {} without `crossover`}. A job of one process
            exchanges nothing, and measures nothing.
        """
        if self.extended.job is None:
            return {"header_bytes": 0, "packets": 0, "waiting_seconds": 0.0, "waited_for": {}, "input_seconds": 0.0,
                    "staging": dict.fromkeys(STAGING_COUNTERS, 0), "sites": {}, "late_seconds": {}, "stragglers": [],
                    "turns": {}}
        statistics = self.extended.job.communicator.statistics()
        statistics["sites"] = {site: counts for site, counts in statistics["sites"].items()
                               if site not in _SITES_OF_NO_STEP}
        clocks = self.extended.job.clocks
        if clocks.synchrony is not None:  # the server's exchanges hide behind the worker's steps
            statistics["waiting_seconds"] = clocks.waiting_seconds
        statistics["turns"] = self.extended.job.communicator.turns()
        statistics["stragglers"] = watch.of(self.extended.job).values()
        return statistics

    def version_log(self) -> version_log.VersionLog:
        """Returns which versions of the weights all ranks have read; all ranks call this, outside of `fit`.

        Raises:
            PoseidonError: If all ranks have read the latest ones, with synchrony="bsp".
        """
        job = self.extended.job
        if job is None or job.clocks.synchrony is None:
            raise ConfigurationError("There are no versions of the weights to tell apart with synchrony='bsp', or in a "
                                     "job of one process; give several processes another synchrony.")
        return worker_clocks.log_of_ranks(job.clocks, job.communicator)

    def explain_input(self, dataset: tf.data.Dataset) -> input_report.InputReport:
        """Returns what of a dataset each rank runs for its own rows, what for all rows of a batch, and why.

        ```python
        print(strategy.explain_input(dataset))
        ```

        ```
        Each rank makes its own rows of batches of 256:
          TFRecord           all rows
          shuffle            all rows
          map (decode_jpeg)  own rows
          batch              own rows
        ```

        Args:
            dataset: A dataset of global batches, as it is given to `fit`. Nothing is read from it.
        """
        return self.extended.explain_input(dataset)

    def timeline(self, path: str | os.PathLike[str]) -> contextlib.AbstractContextManager[recording.Timeline]:
        """Returns a context manager that records every step inside, on all ranks.

        ```python
        with strategy.timeline("trace.json") as timeline:
            model.fit(...)
        print(timeline)
        ```

        All ranks must enter and leave it. Rank 0 then writes a Chrome trace, which chrome://tracing and
        Perfetto open, and `print(timeline)` shows a table on every rank. It has for each variable: how long
        backpropagation took until its gradient was ready, how much of its exchange the rest of backpropagation
        hid, how long the step then waited for it, how long its gradient took to rebuild, which rank's
        gradient came last, and the plan's prediction; and below, how long steps waited for data.
        docs/performance.md explains the columns.

        Args:
            path: File of the trace, on rank 0's host; compressed if it ends in ".gz". If it ends in
                ".xplane.pb", it is written for TensorBoard's profiler instead, which looks for
                LOGDIR/plugins/profile/RUN/HOST.xplane.pb; if in ".html", as a page with figures, which needs plotly:
                pip install "tf_poseidon[report]".

        Returns:
            A context manager that yields a `timelines.recording.Timeline`.

        Raises:
            PoseidonError: If the job has one process, gradients travel by Horovod, weights may be stale, the file
                cannot be written, plotly is missing for it, or another timeline is being recorded.
        """
        if self.extended.job is None:
            raise ConfigurationError(f"strategy.timeline('{path}') records what ranks exchange, but this process "
                                     "runs alone; launch several with mpiexec, or use tf.profiler for one.")
        if runtime.engine().writer.has_to_agree:
            raise ConfigurationError(f"strategy.timeline('{path}') cannot see gradients that travel by Horovod's "
                                     "ops; use mpiexec and engine='mpi', or Horovod's own HOROVOD_TIMELINE=FILE.")
        if (synchrony := self.extended.job.clocks.synchrony) is not None:
            raise ConfigurationError(f"strategy.timeline('{path}') shows what each step waits for, but with "
                                     f"synchrony={synchrony} steps wait for versions of the weights, and not for their "
                                     "exchanges; print strategy.version_log(), or record with synchrony='bsp'.")
        return recording.record(self.extended.job.communicator, path, lambda: self.plan)


def _job(communicator: Communicator, training: options.TrainingOptions, timeout_s: float) -> Job:
    """Has ranks agree, and TensorFlow rewrite functions; returns the `Job`."""
    synchrony = bounds.BSP if training.synchrony is None else str(training.synchrony)
    agreement.agree_on_options(communicator, synchrony=synchrony, **{  # first, as the policy follows from it
        field.name: getattr(training, field.name) for field in dataclasses.fields(training) if field.name != "synchrony"
    } | {"plan": training.plan and training.plan.digest, "cluster": repr(training.cluster),
         "versions": training.versions and training.versions.digest})
    if training.plan is not None and communicator.rank == 0:
        thread_shares.compare_with_plan(training.plan.threads)
    training.check_links(communicator.most_on_a_node)
    if training.crossover is not None:
        accelerator_turns.take(communicator, training.crossover, timeout_s)
    cluster = training.cluster
    if cluster is None:
        is_measured = training.policy == "auto" and training.plan is None
        cluster = calibration.calibrate() if is_measured else runtime.cluster()
    cluster = dataclasses.replace(cluster, ranks_per_node=runtime.ranks_that_combine())
    verifier = None if training.verify is None else verify_lib.Verifier(training.verify, communicator.rank)
    agreement.agree_on_seed(communicator)
    writer = runtime.engine().writer
    comparison = agreement.CommunicatorComparison(communicator) if writer.has_to_agree else None
    planner = planning.Planner(cluster, training.policy, training.pins, training.merge, training.plan)
    session = session_lib.RewriteSession(planner, writer, comparison=comparison,
                                         takes_turns=training.crossover is not None)
    graph_pass = grappler.enable(communicator.rank, session, training.strict)
    is_auto = training.shard_update == options.AUTO
    return Job(communicator, graph_pass, training.wire_dtype, verifier, held_variables.Held(communicator),
               new_variables.NewVariables(communicator), runtime.errors(),
               row_shares.of(communicator, training.given_row_shares, training.rows == options.BALANCED),
               shard_service.ShardService(communicator, runtime.servers()), bool(training.shard_update), is_auto,
               agreement.least_memory(communicator) if is_auto or planner.may_divide else None,
               worker_clocks.Clocks(training.synchrony, None if training.versions is None
                            else training.versions.versions[communicator.rank]))
