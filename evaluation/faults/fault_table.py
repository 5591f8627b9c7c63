"""The faults of programs, and how each of them must end a job.

Those of hosts and links are in `hosts.py`, those of ranks that are killed, and start again, in `killing.py`.
"""

import dataclasses
import re
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that goes wrong in a program.

    Attributes:
        name: What it is, for people.
        injected: How it is made to happen.
        program: A function of `faulty_program.py`, and its arguments.
        says: A regular expression of what the job prints; "" if the launcher alone can say anything.
        is_last: Whether that is the last of what our processes print.
        succeeds: Whether the job goes on, and ends well.
        within_s: Longest time from the fault to the end of the job, in seconds.
        ranks: Number of ranks; 0 for a process without a launcher.
        is_slow: Whether it takes so long that only `make faults` runs it.
        horovod: Whether it is run under horovodrun as well, which hides which of the ranks' lines is the last.
        horovod_says: What is said there, if it is something else.
        environment: Added to that of the ranks.
        most_bytes: Longest output, in bytes.
    """

    name: str
    injected: str
    program: tuple[object, ...]
    says: str
    is_last: bool = True
    succeeds: bool = False
    within_s: float = 10
    ranks: int = 2
    is_slow: bool = False
    horovod: bool = False
    horovod_says: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    most_bytes: int = 200_000


class Ended(NamedTuple):
    """How a job ended.

    Attributes:
        status: Its exit status, that of the launcher.
        output: What all ranks printed.
        seconds: From the fault to the end; None if the fault did not happen.
    """

    status: int
    output: str
    seconds: float | None


def own_lines(output: str) -> list[str]:
    """Returns the lines that our processes printed: without TensorFlow's log and the launcher's banner."""
    lines = []
    for line in output.splitlines():
        if line.startswith("=====") or line.startswith("YOUR APPLICATION TERMINATED"):
            break
        line = re.sub(r"^\[\d+\]<std(out|err)>:", "", line)  # horovodrun prefixes lines with their rank
        # "[[" is the second line of some of TensorFlow's, which begin with a date before version 2.21.
        is_log = re.match(r"WARNING|[IWE]0|To enable the|\t \[\[|\d{4}-\d\d-\d\d [\d:.]+ [IWE] ", line)
        if line.strip() and not is_log:
            lines.append(line)
    return lines


def wrong(fault: Fault, ended: Ended, by_mpiexec: bool = True) -> str:
    """Returns what is wrong with the end of a job, or "".

    Args:
        fault: What went wrong in it.
        ended: How it ended.
        by_mpiexec: Whether mpiexec has started it, so that the last line is the last.
    """
    lines = own_lines(ended.output)
    where = "\n".join(lines[-1:] if fault.is_last and by_mpiexec and not fault.succeeds else lines)
    says = fault.says if by_mpiexec or fault.horovod_says is None else fault.horovod_says
    found = []
    if (ended.status == 0) != fault.succeeds:
        found.append(f"the status is {ended.status}")
    if says and not re.search(says, where):
        found.append(f"{says!r} is not said")
    if len(ended.output) > fault.most_bytes:
        found.append(f"the output has {len(ended.output)} bytes, expected {fault.most_bytes} at most")
    if ended.seconds is None:
        found.append("the fault did not happen")
    elif ended.seconds > fault.within_s:
        found.append(f"it took {ended.seconds:.1f} s, expected {fault.within_s:g} at most")
    return ", ".join(found) + (f"; it printed:\n{ended.output}" if found else "")


def _differs(what: str, here: str, there: str, name: str, horovod: bool = False) -> Fault:
    return Fault(
        f"ranks that differ: {name}", "on rank 1", ("differ_on_rank_1", what),
        rf"ranks would do different things: {re.escape(here)}.*{re.escape(there)} on rank 1\. Build the same",
        within_s=15, horovod=horovod)


def _data(how: str, message: str, remedy: str, name: str, horovod: bool = False) -> Fault:
    # What has nothing to do with seeds does not speak of them.
    seeds = "" if remedy == "set_random_seed" else "(?!.*set_random_seed)"
    return Fault(
        f"data that differ: {name}", "on rank 1", ("read_other_data", how),
        rf"{seeds}.*Rank 1 has different data than rank 0: {message}.*{remedy}", within_s=15, horovod=horovod)


FAULTS = (
    Fault("an exception on one rank", "`raise` in a callback", ("raise_on_rank_1",), "ValueError: boom on purpose",
          ranks=3, horovod=True),
    Fault("an exception whose text is not UTF-8", "the name of a file, in a callback",
          ("raise_a_text_on_rank_1", "no UTF-8"),
          r"\[rank 0\] The job has ended\. Rank 1 on \S+ failed: ValueError: cannot read photo\\udce9\.jpg",
          is_last=False),  # mpiexec may read rank 0's line before rank 1's last ones
    Fault("an exception with a text of 3 MB", "`raise` in a callback", ("raise_a_text_on_rank_1", "3 MB"),
          r"ValueError: begin x{1000,4000} \.\.\. \(2\d{6} characters are left out\) "
          r"\.\.\. x+ end$", most_bytes=40_000),
    Fault("an exception on one rank, where the program catches it", "`except`, then 100 s",
          ("raise_and_go_on", "a callback", "one"), r"\[rank 0\] The job has ended\. Rank 1 on \S+ failed: ValueError: "
          "boom on purpose", within_s=20),
    Fault("an op fails on one rank, where the program catches the error", "the same",
          ("raise_and_go_on", "a step", "one"),
          r"\[rank 0\] The job has ended\. Rank 1 .*InvalidArgumentError(?s:.*)boom on purpose.*'step' was partitioned "
          "by rows, so rank 1 computed a part", is_last=False, within_s=25),
    Fault("an exception on all ranks, which catch it", "the same", ("raise_and_go_on", "a callback", "all"),
          r"(?s)caught ValueError in trial 1.*all ranks are done", succeeds=True, within_s=30),
    Fault("an exception in the data of one rank", "`raise` in a generator of `tf.data`", ("raise_in_data_on_rank_1",),
          "boom in the data", is_last=False),
    Fault("an exception in the data of one rank, amid an execution of 8 steps", "the same, of which it has 4 batches",
          ("raise_in_data_on_rank_1", "8"), "Rank 1 has 4 batches .*expected 8: .*boom in the data", is_last=False),
    Fault("the data of one rank end amid an execution of 8 steps", "`return` in a generator of `tf.data`",
          ("end_data_on_rank_1", "8"), "Rank 1 has 5 batches .*expected 8: its data ended; give all ranks as many",
          is_last=False),
    *(Fault(f"the data of one rank end before those of the others, in {method}",
            "`return` in a generator of `tf.data`", ("end_data_of_loop_on_rank_1", method),
            "Rank 1 has made 13 steps, expected 20: its data ended; give all ranks", is_last=False)
      for method in ("evaluate", "predict")),
    Fault("an exception in a layer of one rank", "`raise` while the step is traced", ("raise_while_tracing_on_rank_1",),
          "boom in a layer", is_last=False, within_s=20),
    Fault("an op fails on one rank", "an assertion in the graph", ("fail_in_graph_on_rank_1",), "boom in the graph",
          is_last=False, within_s=15, horovod=True),
    Fault("no memory on one rank", "an array of 8 TiB", ("run_out_of_memory_on_rank_1",),
          r"rank 1 .*MemoryError|Rank 1 .*MemoryError|MemoryError: Unable to allocate"),
    Fault("a full disk", "a backup of rank 0 that may not grow (RLIMIT_FSIZE)", ("write_to_a_full_disk_on_rank_0",),
          "OSError|File too large", is_last=False),
    *(Fault(f"a rank ends early, with status {status} ({policy})", f"`sys.exit({status})`",
            ("exit_on_rank_1", status, policy), "Rank 1 has ended its program, but rank 0 still",
            horovod=policy == "ps") for status, policy in ((0, "ps"), (0, "sfb"), (3, "ps"))),
    *(Fault(f"a rank leaves without a word, with status {status}", f"`os._exit({status})`",
            ("leave_without_a_word_on_rank_1", status),
            "" if status else r"Rank 1 on \S+ called os\._exit\(0\) before the job had ended", is_last=False,
            horovod=True) for status in (0, 3)),
    *(Fault(f"a rank is ended by {name}", f"{name} of rank 1", ("receive_signal_on_rank_1", name), "",
            horovod=name == "SIGKILL") for name in ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM")),
    Fault("a dedicated server is ended by SIGKILL", "SIGKILL of rank 2, which only serves",
          ("signal_dedicated_server", "SIGKILL"), "", ranks=3),
    Fault("Ctrl-C reaches a dedicated server", "SIGINT of rank 2", ("signal_dedicated_server", "SIGINT"),
          "Rank 2 was interrupted|The job was interrupted", is_last=False, ranks=3),
    Fault("a dedicated server is frozen", "SIGSTOP, `heartbeat_timeout_s=3`", ("signal_dedicated_server", "SIGSTOP"),
          r"Rank \d has heard nothing of rank 2 for 3 s: the host is down, frozen or", is_last=False, within_s=15,
          ranks=3),
    *(Fault(f"a rank {name}, which a dedicated server serves", f"`{injected}` of rank 1",
            ("fail_on_rank_1_with_a_dedicated_server", how), says, is_last=False, ranks=3)
      for how, name, injected, says in (
          ("raise", "has an exception", "raise", r"\[rank 2\] The job has ended\. Rank 1 .* failed: ValueError: boom"),
          ("exit", "ends early", "sys.exit(0)", "Rank 1 has ended its program, but rank 0 still"),
          ("kill", "is killed", "SIGKILL", ""))),
    *(Fault(f"a rank {name} while others read its shards", f"`{injected}` of rank 1",
            ("fail_on_rank_1_while_others_read_its_shards", how), says, is_last=False, ranks=3)
      for how, name, injected, says in (
          ("raise", "has an exception", "raise", r"\[rank 0\] The job has ended\. Rank 1 .* failed: ValueError: boom"),
          ("kill", "is killed", "SIGKILL", ""))),
    *(Fault(f"rank {rank} knows of no dedicated server", "`dedicated_servers=0` there",
            ("differ_in_dedicated_servers", rank), r"cut tensors differently: give PoseidonStrategy the same servers, "
            "dedicated_servers, kv_pair_bytes", is_last=False, within_s=20, ranks=3) for rank in (1, 2)),
    Fault("a rank is ended, and its child goes on", "`os.fork`, SIGKILL of rank 1", ("die_with_a_child_on_rank_1",),
          ""),
    Fault("Ctrl-C reaches one rank", "SIGINT of rank 1", ("receive_signal_on_rank_1", "SIGINT"),
          "Rank 1 was interrupted|The job was interrupted", is_last=False),
    *(Fault(f"the launcher is ended by {name}", f"{name} of mpiexec", ("signal_launcher", name), "")
      for name in ("SIGINT", "SIGTERM", "SIGKILL")),
    *(Fault(f"a rank stalls ({policy})", "`time.sleep`, `timeout_s=2`", ("stall_on_rank_1", policy),
            # Whichever of the step's exchanges is the first to have waited so long: they begin within milliseconds.
            r"waited 2 s for rank 1 to exchange '(sequential/\w+/(kernel|bias)|[\w ]+/total[\w ]*)' "
            rf"\(({policy}|gather)\)",
            horovod=policy == "sfb", horovod_says="stall_inspector",
            within_s=20 if policy == "sfb" else 10) for policy in ("ps", "sfb")),
    *(Fault(f"a rank {name} while others run ahead", f"{injected} of rank 1, `synchrony=SSP(3)`",
            ("fail_on_rank_1_while_others_run_ahead", how), says, is_last=False) for how, name, injected, says in (
                ("raise", "has an exception", "`raise`", r"Rank 1 on \S+ failed: .*ValueError: boom on purpose"),
                ("kill", "is killed", "SIGKILL", ""),
                ("stall", "stalls", "`time.sleep`, `timeout_s=3`", r"Rank 0 waited 3 s for rank 1 to exchange 'seq"))),
    Fault("a rank stalls in a callback", "`time.sleep`, `timeout_s=2`", ("stall_in_callback_on_rank_1",),
          "waited 2 s for rank 1 to exchange 'model.stop_training'", horovod=True, within_s=20),
    Fault("a process that prepares batches dies", "SIGKILL in a `PyDataset`, `timeout_s=5`",
          ("lose_a_worker_on_rank_1",), "waited 5 s for rank 1", within_s=15, is_slow=True),
    # It computes for 6 s before. mpiexec, which would wait for it, is ended, and prints lines of its own.
    Fault("a rank is frozen", "SIGSTOP, `heartbeat_timeout_s=3`", ("stop_on_rank_1",),
          "Rank 0 has heard nothing of rank 1 for 3 s: the host is down, frozen or", is_last=False, within_s=15),
    Fault("a rank never comes", "it creates no strategy, `startup_timeout_s=3`", ("never_come",),
          "did not meet within 3 s: start all of them"),
    Fault("a rank comes late", "8 s", ("come_late",), "all ranks are done", succeeds=True, within_s=30,
          is_slow=True),
    Fault("children of a rank end, fail or exchange", "`os.fork`", ("fork_on_rank_1",),
          r"(?s)'x' was submitted in a process that a rank has forked.*boom in the child.*"
          r"children ended with \[7, 7, 0, 1\]", succeeds=True, within_s=20),
    Fault("a rank starts another program of ours", "`subprocess`", ("start_a_subprocess",),
          r"(?s)status 1: .*JobError: This process has the environment of a rank \(PMI_FD=\d+\), but not its "
          r"connection to mpiexec: .*'PMI_'\.\nstatus 0: 1 process", succeeds=True, within_s=60),
    Fault("a loss is NaN", "a row of rank 1, `TerminateOnNaN`", ("diverge_to_nan",), "stopped after 1 epoch",
          succeeds=True, within_s=20),
    *(Fault(f"functions that differ between ranks: {name}", "on rank 1", ("trace_other_graphs", what),
            r"The function '\S+' is not the same on all ranks: ranks would do different things: "
            rf"{here}.* on rank 0, but {there}.* on rank 1\. Make its constants", within_s=20)
      for what, name, here, there in (
          ("constant", "a constant", r"the node '\S+' of the function 'step' is a Const of 0\.1 ",
           r"the node '\S+' of the function 'step' is a Const of 0\.2 "),
          ("op", "an op", "the node 'Sin' of the function 'step' is a Sin ", "the node 'Cos' of .* is a Cos "),
          ("captured", "a tensor that they have captured", r"the captured tensor \d is float64\[200, 1\] ",
           r"the captured tensor \d is float64\[200, 1\] "),
          ("whole", "a constant, where they cannot be partitioned", "the node .* is a Const of 0.1 ",
           "the node .* is a Const of 0.2 "))),
    Fault("functions that cannot be partitioned, with other numbers in their names", "functions that only rank 1 makes",
          ("trace_other_graphs", "numbers"), "(?s)was not partitioned: .*all ranks are done", succeeds=True,
          within_s=20),
    *(Fault(f"other kernels on one rank: {name}", how, ("differ_in_kernels_on_rank_1", what), says, within_s=15)
      for what, name, how, says in (
          ("deterministic", "deterministic ops", "`enable_op_determinism`", r"Ranks differ in deterministic ops "
           r"\(TF_DETERMINISTIC_OPS, .*\): enabled on rank 1, and disabled on rank 0"),
          ("NVIDIA_TF32_OVERRIDE", "an environment variable", "NVIDIA_TF32_OVERRIDE", "Ranks differ in the environment "
           "variable NVIDIA_TF32_OVERRIDE: '0' on rank 1, and not set on rank 0"),
          ("threads", "a chosen number of threads", "`set_intra_op_parallelism_threads`", r"Ranks differ in the number "
           r"of threads of an op: 3 on rank 1 \(as chosen\) and \d+ on rank 0 \(that of its processors\)"))),
    Fault("another number of processors", "a stand-in for `sched_getaffinity`",
          ("differ_in_kernels_on_rank_1", "processors"), r"(?s)Ranks have other numbers of threads in an op: 5 on rank "
          r"1 \(that of its processors\) and \d+ on rank 0.*all ranks are done", succeeds=True, within_s=20),
    Fault("other variables on one rank", "another number of features", ("build_other_variables",),
          r"Rank 1 has created different variables than rank 0: number 0 is '\S*kernel' float32\[5, 3\] on rank 1, and "
          r"'\S*kernel' float32\[4, 3\] on rank 0", within_s=15, horovod=True),
    Fault("the same, where the program catches the error", "`except`, then 5 s", ("build_other_variables_and_go_on",),
          r"\[rank 0\] The job has ended\. Rank 1 failed: GraphError: Rank 1 has created different variables",
          within_s=25),
    *(Fault(f"{name} on one rank, compared every {every} steps", "in a callback", ("change_on_rank_1", what, every),
            rf"'{variable}' differs between rank 1 and rank 0 at {when}.*they were the same at the end of epoch 1",
            ranks=3)
      for what, name, variable, every, when in (
          ("rate", "another learning rate", "sgd/learning_rate", 1000, "the end of epoch 2, and 2 other variables "
           "differ;"),
          ("rate", "another learning rate", "sgd/learning_rate", 3, "the end of call 3 of its steps, and 2 other "
           "variables differ;"),
          ("weights", "other weights", r"sequential/first/(kernel|bias)", 1000, "the end of epoch 2"))),
    Fault("other weights and deterministic ops on one rank", "in a callback", ("change_on_rank_1", "kernels", 1000),
          r"'\S+' differs between rank 1 and rank 0 at .* The kernels of ranks may compute other bits, since ranks "
          r"would do different things: deterministic ops \(.*\) is disabled on rank 0, but deterministic ops \(.*\) is "
          "enabled on rank 1"),
    _differs("activation", "layers[1].config.activation of the model is 'relu'", "is 'tanh'", "an activation", True),
    _differs("trainable", "layers[1].config.trainable of the model is True", "is False", "a frozen layer"),
    _differs("rate", "layers[2].config.rate of the model is 0.1", "is 0.2", "a rate of dropout"),
    _differs("batch", "batch_size=16", "batch_size=32", "`batch_size`"),
    _differs("clipnorm", "optimizer.config.clipnorm of compile is None", "is 1.0", "`clipnorm`"),
    _differs("accumulation", "optimizer.config.gradient_accumulation_steps of compile is None", "is 2",
             "`gradient_accumulation_steps`"),
    _differs("loss", "loss of compile is 'mse'", "is 'mae'", "a loss"),
    _differs("metrics", "metrics[0] of compile is 'mae'", "is 'mse'", "a metric"),
    _differs("epochs", "epochs=2", "epochs=3", "`epochs`", True),
    _differs("steps", "steps_per_epoch=4", "steps_per_epoch=2", "`steps_per_epoch`"),
    _differs("validation", "validation_data=None", "validation_data=...", "`validation_data`"),
    _differs("call", "fit is called", "evaluate is called", "`fit` and `evaluate`"),
    _differs("one batch", "train_on_batch is called", "test_on_batch is called",
             "`train_on_batch` and `test_on_batch`"),
    _data("fit", "the first batch of dataset 0 of fit has other values", "set_random_seed", "values", True),
    _data("fit with another batch size", "the first batch of dataset 0 of fit has 32 rows, rank 0's has 16",
          "same batch size", "the batch size"),
    _data("train_on_batch", r"call 1 of 'sequential\.train_on_batch' has other values", "set_random_seed",
          "values of one batch"),
    _data("third call", r"call 4 of 'sequential\.train_on_batch' has other values", "set_random_seed",
          "values of a later batch"),
    _data("rows", r"call 1 of 'sequential\.test_on_batch' has 63 rows, rank 0's has 64", "same batch size", "rows"),
    _data("shape", r"call 1 of 'sequential\.predict_on_batch' has parts of other shapes", "prepared alike", "shapes"),
    _data("parts", r"call 1 of 'sequential\.test_on_batch' has other parts", "the same arguments", "arguments"),
    Fault("two threads train", "two `fit`s", ("fit_in_two_threads",),
          r"Rank \d failed: GraphError: '(one|two)\.fit' was called in a thread while another thread is in "
          r"'(one|two)\.fit'", within_s=20),
    Fault("the launcher of another MPI", "its environment variables", ("meet_other_mpi",),
          r"started 2 processes \(OMPI_COMM_WORLD_SIZE=2\), but MPI sees 1", ranks=0,
          environment=(("OMPI_COMM_WORLD_SIZE", "2"),)),
    Fault("MPI is missing", "a transport with another library's name", ("miss_mpi",),
          r"MPI was not found: .*pip install mpich"),
    Fault("/dev/shm is full", "a stand-in for `statvfs`", ("have_no_shared_memory",),
          r"/dev/shm has 2\.7 of 64\.0 MiB left, but MPI needs 24 MiB there for the ranks of this host \(2\); remove"),
    *(Fault(f"an option that cannot be: `{option}`", "it is given", ("ask_for", option), says)
      for option, says in (
          ("servers=[5]", r"servers=\[5\], expected distinct ranks from 0 to 1"),
          ("dedicated_servers=1", "dedicated_servers=1 in a job of 2 ranks, expected at most 0: two or more have to"),
          ("timeout_s=0", "timeout_s=0, expected a positive number of seconds"),
          ("engine='nccl'", "engine='nccl', expected one of horovod, mpi"))),
)
