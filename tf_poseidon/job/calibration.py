"""Measures what the policy "auto" compares: latency, bandwidth, the speed of rebuilding gradients, and their spread.

Tests: tests/unit/test_calibration.py.
"""

from collections.abc import Callable
from collections.abc import Sequence
import concurrent.futures
import dataclasses
import functools
import logging
import math
import statistics
import time
from typing import Any

import numpy as np
import tensorflow as tf

from tf_poseidon import environment
from tf_poseidon import ops
from tf_poseidon import options as options_lib
from tf_poseidon import planning
from tf_poseidon.job import runtime
from tf_poseidon.job.communicator import Communicator

_log = logging.getLogger("tf_poseidon")

_ROUND_TRIPS = 30
# Tensors grow until their sum takes this long: then latency is negligible, even on a slow network.
_LONG_ENOUGH_S = 0.05
_FIRST_BYTES, _LAST_BYTES = 1 << 20, 64 << 20
# As large as the factors of a wide layer: 2 K M N = 0.27e9 operations, or 4.3e9 to keep a GPU busy. A GPU is
# given several at a time; otherwise the launch overhead would be measured.
_K, _SIZE, _SIZE_ON_GPU = 128, 1024, 4096
_AT_A_TIME_ON_GPU = 20
_COMPUTE_S = 0.1
# Bytes for each server of a tensor that is summed between GPUs: so many take the links, and not a message.
_LEAST_LINKED_BYTES = 64 << 10
_EVENTS = 1 << 14  # far more than a sum has
# Sums during which products are timed, and what these may take at most, if sums do not disturb them.
_SUMS_AT_ONCE = 10
_UNDISTURBED = 1.1

# The exchanges of the measurement, which are not part of training.
_ACROSS = "calibration/across"
SITES = frozenset({"calibration", "calibration/begin", "calibration/is_enough", "calibration/is_gpu", "calibration/sum",
                   "calibration/gpus", "calibration/open", _ACROSS, "calibration/end"})

_measured = None


def calibrate(**options: Any) -> planning.Cluster:
    """Measures the speeds of this job, once per process; all ranks must call it.

    It takes less than three seconds on networks of at least 0.1 Gbit/s. Ranks measure at the same time,
    so those that share a machine share its speed. All ranks get rank 0's numbers.

    Args:
        **options: If no strategy was created yet, the strategy's options about joining the job: engine, servers,
            ranks_per_node, kv_pair_bytes, timeout_s, startup_timeout_s, heartbeat_timeout_s and dedicated_servers.
            Give the strategy the same ones.

    Returns:
        A `Cluster`. Its bandwidth is that of sums over the parameter server: it includes the time for the
        additions. Its uncertainty is how much repeated measurements differed. Where rank 0 computes on a GPU, it has
        accelerators if sums do not slow that down, and links between the GPUs of a node if sums take them.

    Raises:
        PoseidonError: If the job cannot be joined, or ends.
    """
    global _measured
    if _measured is None:
        communicator = None if options else runtime.communicator()
        if communicator is None:
            names = [field.name for field in dataclasses.fields(options_lib.JobOptions)]
            communicator = runtime.start(options_lib.JobOptions(**environment.defaults(names) | options))
        if communicator is None:
            _measured = planning.Cluster(workers=1, gflops=_rounded(measure_gflops()))
        else:
            engine = runtime.engine()
            _measured = measure(communicator, engine.sum_in_place, runtime.cluster(),
                                None if engine.writer.has_to_agree else seconds_across)
    return _measured


def measure(communicator: Communicator, sum_in_place: Callable[[Communicator, str, np.ndarray], None],
            cluster: planning.Cluster,
            time_across: Callable[[Communicator, int], float] | None = None) -> planning.Cluster:
    """Returns the measured `Cluster` of a job.

    Args:
        communicator: This rank's communicator.
        sum_in_place: Same as in `engines.Engine`.
        cluster: The cluster, with any speeds.
        time_across: `seconds_across`, where gradients are summed by our own ops, else None.
    """
    begin = time.perf_counter()
    time_sums = functools.partial(_time_sums, communicator, sum_in_place)
    latency = _latency(time_sums)
    bandwidth = _bandwidth(communicator, time_sums, cluster, latency)
    communicator.sum("calibration/begin", np.zeros(1, np.float32))  # all ranks compute together
    time_product = _product_timer()
    times = _product_times(time_product)
    # All ranks exchange, or none.
    is_gpu, = communicator.broadcast("calibration/is_gpu", np.array([ops.multiplying_device().device_type == "GPU"]))
    accelerators = is_gpu and is_undisturbed(
        times, functools.partial(time_sums, bandwidth.num_bytes, _SUMS_AT_ONCE), time_product)
    if is_gpu and time_across is not None:
        cluster = with_links(cluster, communicator, bandwidth.num_bytes, time_across)
    own_measures = np.array([latency * 1e6, bandwidth.bits_per_second / 1e9, _gflops(times),
                             math.hypot(bandwidth.spread, _spread(times)), accelerators])
    latency_us, bandwidth_gbps, gflops, uncertainty, accelerators = communicator.broadcast("calibration", own_measures)
    cluster = dataclasses.replace(
        cluster, bandwidth_gbps=_rounded(bandwidth_gbps), latency_us=_rounded(latency_us), gflops=_rounded(gflops),
        uncertainty=_rounded(uncertainty), accelerators=bool(accelerators))
    _log.log(logging.INFO if communicator.rank == 0 else logging.DEBUG,
             "Measured in %.1f s: %s.", time.perf_counter() - begin, cluster)
    return cluster


def measure_gflops() -> float:
    """Returns how fast this process multiplies factors, in 10^9 operations per second."""
    return _gflops(_product_times(_product_timer()))


def with_links(cluster: planning.Cluster, communicator: Communicator, num_bytes: int,
               time_across: Callable[[Communicator, int], float]) -> planning.Cluster:
    """Returns a cluster with the links between GPUs that rank 0 finds; all ranks of the job must call it.

    Args:
        cluster: The cluster without them.
        communicator: This rank's communicator.
        num_bytes: Size of a tensor to sum; more where that is too little for the number of servers.
        time_across: Same as `seconds_across`.
    """
    if communicator.most_on_a_node == 1:
        return cluster
    num_bytes = max(num_bytes, cluster.servers * _LEAST_LINKED_BYTES)
    seconds, = communicator.broadcast("calibration/gpus", np.array([time_across(communicator, num_bytes)]))
    if not seconds:
        return cluster
    linked = dataclasses.replace(cluster, gpus_per_node=communicator.most_on_a_node, gpu_link_gbps=1.0)
    at_one_gbps = linked.gpu_link_seconds(planning.linked_dense_bytes(num_bytes, linked) / 2)
    return dataclasses.replace(linked, gpu_link_gbps=_rounded(at_one_gbps / seconds))


def seconds_across(communicator: Communicator, num_bytes: int) -> float:
    """Returns how long a sum keeps this rank busy with copies and additions between GPUs, in seconds; 0 if with none.

    All ranks must call it.

    Args:
        communicator: This rank's communicator, over which the ops exchange.
        num_bytes: Size of the tensor in the memory of the device that multiplies.
    """
    with tf.device(f"{ops.multiplying_device().device_type}:0"):
        whole = tf.zeros(num_bytes // 4)

    def exchange(site: str, value: tf.Tensor) -> None:
        ops.all_reduce(value, site)[:1].numpy()  # waits for a GPU, but copies a single number
        communicator.sum("calibration/end", np.zeros(1, np.float32))  # others have what they take from here

    exchange("calibration/open", whole[:1])  # ranks open each other's memory
    exchange(_ACROSS, whole)  # or what comes before this rank begins would have no name
    events = communicator.events_of(_ACROSS, functools.partial(exchange, _ACROSS, whole), _EVENTS)
    return 1e-9 * sum(end - begin for row, _, begin, end, *_ in events if row == "across")


def is_undisturbed(alone: Sequence[float], exchange: Callable[[], object],
                   time_product: Callable[[], float]) -> bool:
    """Returns whether products take no longer while this rank exchanges something.

    Args:
        alone: Seconds of products without exchanges.
        exchange: Exchanges something for longer than a few products take; called in another thread.
        time_product: Computes a product and returns its seconds.
    """
    meanwhile = []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        exchanging = pool.submit(exchange)
        while not exchanging.done():
            seconds = time_product()
            if not exchanging.done():
                meanwhile.append(seconds)
        exchanging.result()
    return len(meanwhile) >= 3 and statistics.median(meanwhile) < _UNDISTURBED * statistics.median(alone)


def _product_times(time_product: Callable[[], float]) -> list[float]:
    """Returns the seconds of several products."""
    times: list[float] = []
    end = time.perf_counter() + _COMPUTE_S
    while time.perf_counter() < end or len(times) < 3:
        times.append(time_product())
    return times


def _product_timer() -> Callable[[], float]:
    """Returns a function that multiplies factors and returns how long that takes."""
    rng = np.random.default_rng(0)
    kind = ops.multiplying_device().device_type
    size, count = _products()
    with tf.device(f"{kind}:0"):
        u, v = (tf.constant(rng.normal(size=(_K, size)), tf.float32) for _ in "uv")

    def time_product() -> float:
        begin = time.perf_counter()
        with tf.device(f"{kind}:0"):
            _multiply(u, v, count)
        return time.perf_counter() - begin

    time_product()  # the first is cold
    return time_product


def _products() -> tuple[int, int]:
    """Returns (size of a product that is timed, how many are timed at once)."""
    return (_SIZE_ON_GPU, _AT_A_TIME_ON_GPU) if ops.multiplying_device().device_type == "GPU" else (_SIZE, 1)


def _gflops(times: Sequence[float]) -> float:
    """Returns 10^9 operations per second, by the times of products."""
    size, count = _products()
    return 2e-9 * count * _K * size**2 / statistics.median(times)


def _spread(times: Sequence[float]) -> float:
    """Returns half of the distance of the quartiles as a share of the median."""
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / 2 / median


def _multiply(u: tf.Tensor, v: tf.Tensor, count: int) -> None:
    for _ in range(count):
        product = ops.outer_product(u, v)
    product[0, 0].numpy()  # waits for a GPU, but copies a single number


def _latency(time_sums: Callable[[int, int], list[float]]) -> float:
    """Returns the seconds of one message: a sum takes two, to the server and back."""
    times = time_sums(4, _ROUND_TRIPS)
    return statistics.median(times[_ROUND_TRIPS // 3:]) / 2


@dataclasses.dataclass(frozen=True)
class _Bandwidth:
    """A measured bandwidth.

    Attributes:
        bits_per_second: What a node sends while it receives as much.
        spread: How much the measurements differed, see `_spread`.
        num_bytes: Size of a tensor whose sum takes long enough to be measured.
    """

    bits_per_second: float
    spread: float
    num_bytes: int


def _bandwidth(communicator: Communicator, time_sums: Callable[[int, int], list[float]], cluster: planning.Cluster,
               latency: float) -> _Bandwidth:
    num_bytes = _FIRST_BYTES
    while True:
        times = time_sums(num_bytes, 4)[1:]  # the first is cold
        seconds = statistics.median(times)
        # Rank 0 decides; otherwise ranks could sum tensors of different sizes.
        is_enough = seconds >= _LONG_ENOUGH_S or num_bytes >= _LAST_BYTES
        if communicator.broadcast("calibration/is_enough", np.array([is_enough]))[0]:
            sent = planning.dense_bytes(num_bytes, cluster) / 2
            return _Bandwidth(8 * sent / max(seconds - 2 * latency, 1e-6), _spread(times), num_bytes)
        num_bytes *= 4


def _time_sums(communicator: Communicator, sum_in_place: Callable[[Communicator, str, np.ndarray], None],
               num_bytes: int, repeats: int) -> list[float]:
    """Returns the seconds of several sums, in place: fresh memory would cost as much as the network."""
    value, times = np.zeros(num_bytes // 4, np.float32), []
    for _ in range(repeats):
        begin = time.perf_counter()
        sum_in_place(communicator, "calibration/sum", value)
        times.append(time.perf_counter() - begin)
    return times


def _rounded(value: float) -> float:
    """Returns a value rounded to three digits: more are noise."""
    return float(f"{value:.3g}")
