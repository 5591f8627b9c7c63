"""Which processors and threads ranks take: of hosts whose /sys and /proc are folders."""

import math

import pytest

from tf_poseidon.job.host import processors
from tf_poseidon.job.host.processors import ProcessorShare as Share
from tf_poseidon.job.host.processors import Sharer

TWO_NODES = {  # four cores with two threads each; the nodes have every second core
    **{f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list": f"{number % 4},{number % 4 + 4}"
       for number in range(8)},
    "sys/devices/system/node/node0/cpulist": "0,2,4,6", "sys/devices/system/node/node1/cpulist": "1,3,5,7"}


@pytest.mark.parametrize("files, allowed, cores, quota", [
    ({}, [0, 1, 5], [(0,), (1,), (5,)], math.inf),
    (TWO_NODES, range(8), [(0, 4), (2, 6), (1, 5), (3, 7)], math.inf),
    (TWO_NODES, [1, 2, 6, 7], [(2, 6), (1,), (7,)], math.inf),
    ({"sys/devices/system/node/node0/cpulist": "0-1,3", "sys/devices/system/node/node1/cpulist": "2"}, range(4),
     [(0,), (1,), (3,), (2,)], math.inf),
    ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max":
      "250000 100000"}, [0], [(0,)], 2.5),
    ({"proc/self/cgroup": "0::/not/seen/here", "sys/fs/cgroup/cpu.max": "50000 100000"}, [0], [(0,)], 0.5),
    ({"proc/self/cgroup": "3:cpuset:/\n2:cpu,cpuacct:/a\n0::/", "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us":
      "300000", "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000",
      "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1"}, [0], [(0,)], 3.0)],
    ids=["no_topology", "hyperthreads", "some_of_them", "nodes", "quota", "container", "first_version"])
def test_what_a_process_may_compute_on(files, allowed, cores, quota, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    found = processors.found(allowed, tmp_path)
    assert (list(found.cores), found.quota) == (cores, quota)
    assert sorted(found.numbers) == sorted(allowed)


def on_host(ranks, cores, host=0, allowed=0, quota=math.inf):
    return [Sharer(host, allowed, cores, quota)] * ranks


@pytest.mark.parametrize("ranks, shares", [
    (on_host(1, 8), [None]),
    (on_host(2, 8), [Share(4, (0, 3)), Share(4, (4, 7))]),
    (on_host(3, 8), [Share(2, (0, 1)), Share(2, (2, 4)), Share(2, (5, 7))]),
    (on_host(4, 2), [Share(1, (0, 0)), Share(1, (0, 0)), Share(1, (1, 1)), Share(1, (1, 1))]),
    (on_host(2, 8, 0) + on_host(1, 8, 1), [Share(4, (0, 3)), Share(4, (4, 7)), None]),
    ([rank for pair in zip(on_host(2, 4, 0), on_host(2, 4, 1)) for rank in pair],
     [Share(2, (0, 1)), Share(2, (0, 1)), Share(2, (2, 3)), Share(2, (2, 3))]),
    (on_host(1, 4, allowed=1) + on_host(1, 4, allowed=2), [None, None]),
    (on_host(1, 4, allowed=1) + on_host(1, 3, allowed=2), [None, None]),
    (on_host(2, 4, allowed=1) + on_host(1, 4, allowed=2), [Share(2, (0, 1)), Share(2, (2, 3)), None]),
    (on_host(2, 8, quota=5.0), [Share(2), Share(2)]), (on_host(4, 8, quota=2.0), [Share(1)] * 4),
    (on_host(1, 8, quota=2.5), [Share(2)]), (on_host(1, 8, quota=0.5), [Share(1)]),
    (on_host(1, 4, allowed=1, quota=4.0) + on_host(1, 4, allowed=2, quota=4.0), [Share(2), Share(2)]),
    (on_host(2, 4, quota=8.0), [Share(2, (0, 1)), Share(2, (2, 3))])],
    ids=["alone", "halves", "uneven", "more_than_cores", "hosts", "hosts_in_turn", "bound_by_launcher",
         "bound_to_some_in_common", "some_bound",
         "quota", "small_quota", "quota_alone", "less_than_one", "quota_of_bound", "larger_quota"])
def test_what_ranks_take(ranks, shares):
    assert processors.shares(ranks, may_bind=True) == shares
    threads = [None if share is None else Share(share.threads) for share in shares]
    assert processors.shares(ranks, may_bind=False) == threads
