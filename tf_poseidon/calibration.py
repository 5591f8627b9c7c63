"""Measures what the policy "auto" compares: latency, bandwidth, and the speed of rebuilding gradients."""

from collections.abc import Callable
import dataclasses
import functools
import logging
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

# The exchanges of the measurement, which are not part of training.
SITES = frozenset({"calibration", "calibration/begin", "calibration/is_enough", "calibration/sum"})

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
        additions.

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
    bits_per_second = _bandwidth(communicator, time_sums, cluster, latency)
    communicator.sum("calibration/begin", np.zeros(1, np.float32))  # all ranks compute together
    mine = np.array([latency * 1e6, bits_per_second / 1e9, measure_gflops()])
    latency_us, bandwidth_gbps, gflops = map(_rounded, communicator.broadcast("calibration", mine))
    cluster = dataclasses.replace(cluster, bandwidth_gbps=bandwidth_gbps, latency_us=latency_us, gflops=gflops)
    _log.log(logging.INFO if communicator.rank == 0 else logging.DEBUG,
             "Measured in %.1f s: %s.", time.perf_counter() - begin, cluster)
    return cluster


def measure_gflops() -> float:
    """Returns how fast this process multiplies factors, in 10^9 operations per second."""
    rng = np.random.default_rng(0)
    kind = ops.multiplying_device().device_type
    size, count = (_SIZE_ON_GPU, _AT_A_TIME_ON_GPU) if kind == "GPU" else (_SIZE, 1)
    with tf.device(f"{kind}:0"):
        u, v = (tf.constant(rng.normal(size=(_K, size)), tf.float32) for _ in "uv")
        _multiply(u, v, count)
        times, end = [], time.perf_counter() + _COMPUTE_S
        while time.perf_counter() < end or len(times) < 3:
            begin = time.perf_counter()
            _multiply(u, v, count)
            times.append(time.perf_counter() - begin)
    return 2e-9 * count * _K * size**2 / statistics.median(times)


def _multiply(u: tf.Tensor, v: tf.Tensor, count: int) -> None:
    for _ in range(count):
        product = ops.outer_product(u, v)
    product[0, 0].numpy()  # waits for a GPU, but copies a single number


def _latency(time_sums: Callable[[int, int], list[float]]) -> float:
    """Returns the seconds of one message: a sum takes two, to the server and back."""
    times = time_sums(4, _ROUND_TRIPS)
    return statistics.median(times[_ROUND_TRIPS // 3:]) / 2


def _bandwidth(communicator: Communicator, time_sums: Callable[[int, int], list[float]], cluster: planning.Cluster,
               latency: float) -> float:
    """Returns the bits per second that a node sends while it receives as many."""
    num_bytes = _FIRST_BYTES
    while True:
        seconds = statistics.median(time_sums(num_bytes, 4)[1:])  # the first is cold
        # Rank 0 decides; otherwise ranks could sum tensors of different sizes.
        is_enough = seconds >= _LONG_ENOUGH_S or num_bytes >= _LAST_BYTES
        if communicator.broadcast("calibration/is_enough", np.array([is_enough]))[0]:
            sent = planning.dense_bytes(num_bytes, cluster) / 2
            return 8 * sent / max(seconds - 2 * latency, 1e-6)
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
