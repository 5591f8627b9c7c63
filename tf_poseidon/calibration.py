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

from tf_poseidon import ops
from tf_poseidon import options as options_lib
from tf_poseidon import planning
from tf_poseidon import runtime
from tf_poseidon.communicator import Communicator

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
# Sums during which products are timed, and what these may take at most, if sums do not disturb them.
_SUMS_AT_ONCE = 10
_UNDISTURBED = 1.1

# The exchanges of the measurement, which are not part of training.
SITES = frozenset({"calibration", "calibration/begin", "calibration/is_enough", "calibration/is_gpu",
                   "calibration/sum"})

_measured = None


def calibrate(**options: Any) -> planning.Cluster:
    """Measures the speeds of this job, once per process; all ranks must call it.

    It takes less than three seconds on networks of at least 0.1 Gbit/s. Ranks measure at the same time,
    so those that share a machine share its speed. All ranks get rank 0's numbers.

    Args:
        **options: If no strategy was created yet, the strategy's options about joining the job: engine, servers,
            ranks_per_node, kv_pair_bytes, timeout_s, startup_timeout_s and heartbeat_timeout_s. Give the strategy the
            same ones.

    Returns:
        A `Cluster`. Its bandwidth is that of sums over the parameter server: it includes the time for the
        additions. Its uncertainty is how much repeated measurements differed. Where rank 0 computes on a GPU, it has
        accelerators if sums do not slow that down.

    Raises:
        PoseidonError: If the job cannot be joined, or ends.
    """
    global _measured
    if _measured is None:
        communicator = None if options else runtime.communicator()
        if communicator is None:
            communicator = runtime.start(options_lib.JobOptions(**options))
        _measured = (planning.Cluster(workers=1, gflops=_rounded(measure_gflops()))
                     if communicator is None else
                     measure(communicator, runtime.engine().sum_in_place, len(runtime.servers()),
                             runtime.ranks_that_combine()))
    return _measured


def measure(communicator: Communicator, sum_in_place: Callable[[Communicator, str, np.ndarray], None],
            num_servers: int = 0, ranks_per_node: int = 1) -> planning.Cluster:
    """Returns the measured `Cluster` of a job.

    Args:
        communicator: This rank's communicator.
        sum_in_place: Same as in `engines.Engine`.
        num_servers: How many ranks are servers, 0 for all.
        ranks_per_node: How many ranks of a node combine their contributions.
    """
    begin = time.perf_counter()
    cluster = planning.Cluster(communicator.size, num_servers, ranks_per_node=ranks_per_node)
    time_sums = functools.partial(_time_sums, communicator, sum_in_place)
    latency = _latency(time_sums)
    bandwidth = _bandwidth(communicator, time_sums, cluster, latency)
    communicator.sum("calibration/begin", np.zeros(1, np.float32))  # all ranks compute together
    time_product = _product_timer()
    times = _product_times(time_product)
    is_gpu = np.array([ops.multiplying_device().device_type == "GPU"])
    # All ranks exchange, or none.
    accelerators = communicator.broadcast("calibration/is_gpu", is_gpu)[0] and is_undisturbed(
        times, functools.partial(time_sums, bandwidth.num_bytes, _SUMS_AT_ONCE), time_product)
    mine = np.array([latency * 1e6, bandwidth.bits_per_second / 1e9, _gflops(times),
                     math.hypot(bandwidth.spread, _spread(times)), accelerators])
    latency_us, bandwidth_gbps, gflops, uncertainty, accelerators = communicator.broadcast("calibration", mine)
    cluster = dataclasses.replace(
        cluster, bandwidth_gbps=_rounded(bandwidth_gbps), latency_us=_rounded(latency_us), gflops=_rounded(gflops),
        uncertainty=_rounded(uncertainty), accelerators=bool(accelerators))
    _log.log(logging.INFO if communicator.rank == 0 else logging.DEBUG,
             "Measured in %.1f s: %s.", time.perf_counter() - begin, cluster)
    return cluster


def measure_gflops() -> float:
    """Returns how fast this process multiplies factors, in 10^9 operations per second."""
    return _gflops(_product_times(_product_timer()))


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
    times, end = [], time.perf_counter() + _COMPUTE_S
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
