"""Runs one-process graphs, partitioned, on many ranks in this process, over the loopback transport."""

import os

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.core.framework import graph_pb2

from tf_poseidon import grappler
from tf_poseidon.graph_passes.partition import partitioner as partition_lib
from tf_poseidon.graph_passes.partition.preparation import inline
from tf_poseidon.job import communicator
from tf_poseidon.ops import library
from tf_poseidon.options import JobOptions

# Numbers of ranks; on three, batches have uneven parts and empty ones. All with --full.
RANKS = (1, 2, 3, 5) if "POSEIDON_ALL_CELLS" in os.environ else (3,)
_TIMEOUT_S = 10.0  # ranks that wait for each other, as those of graphs that are partitioned wrongly may


def forget_jobs():
    """Lets later graphs run in new jobs, after an error: ranks may still wait for each other in the old ones."""
    _jobs.clear()


def rows(*tensors, dimensions=None):
    """Marks tensors as inputs with rows, and returns the tensors that the graph must read."""
    return library.load()[0].poseidon_rows(
        values=tensors, part=[], dimensions=dimensions or [0] * len(tensors),
        names=[f"input{i}" for i in range(len(tensors))])


_jobs = {}  # by number of ranks


def job(size):
    """Returns the ranks of a job in this process: a new job if the one before has ended, as after an error."""
    if size not in _jobs or _jobs[size][0].failure is not None:
        _jobs[size] = communicator.join_loopback(size, JobOptions(timeout_s=_TIMEOUT_S))
    return _jobs[size]


class Partitioned:
    """A graph, and its partitioned graph.

    Attributes:
        partitioned: The `partitioner.PartitionedGraph`.
        report: Its report.
    """

    def __init__(self, build, optimize=True, runs_whole=False, rows=None):
        """Builds and partitions a graph.

        Args:
            build: A function that builds it and returns its fetches; feeds are by the names of placeholders.
            optimize: Whether TensorFlow optimizes graphs before it runs them.
            runs_whole, rows: Same as in `partitioner.partition`.
        """
        self._graph = tf.Graph()
        with self._graph.as_default():
            tf.compat.v1.set_random_seed(7)
            self._fetches = tf.nest.flatten(build())
            self._fetches = [t.name if hasattr(t, "name") else t for t in map(tf.convert_to_tensor, self._fetches)]
        self._config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4)
        self._config.graph_options.rewrite_options.disable_meta_optimizer = not optimize
        keep = [*self._fetches, *self._initializers()]
        flat = inline.inline(self._graph.as_graph_def(), keep)
        self.partitioned = partition_lib.partition(flat, self._fetches, grappler.add_shapes, rows=rows,
                                                   runs_whole=runs_whole)
        self.report = self.partitioned.report

    def alone(self, all_feeds):
        """Returns the results of one process for each of some feeds."""
        with tf.compat.v1.Session(graph=self._graph, config=self._config) as session:
            return [self._run(session, self._graph, [""], self._fetches, feeds) for feeds in all_feeds]

    def on_ranks(self, all_feeds, size):
        """Returns, for each of some feeds, the results of each rank of the partitioned graph."""
        grappler.order_sums()  # as in every process of a job
        communicator.use_ranks_for_ops(job(size))
        prefixes = [f"rank{rank}/" for rank in range(size)]
        with tf.Graph().as_default() as graph:
            for rank, prefix in enumerate(prefixes):
                tf.import_graph_def(_of_rank(self.partitioned.graph_def, rank), name=prefix[:-1])
            fetches = [[f"{prefix}{name}" if ":" in name else f"{prefix}{name}:0"
                        for name in self.partitioned.fetches] for prefix in prefixes]
            with tf.compat.v1.Session(graph=graph, config=self._config) as session:
                return [self._run(session, graph, prefixes, fetches, feeds) for feeds in all_feeds]

    def _run(self, session, graph, prefixes, fetches, feeds):
        """Runs with variables as they are initialized, under the names that follow each prefix."""
        session.run([graph.get_operation_by_name(prefix + name)
                     for prefix in prefixes for name in self._initializers()])
        return session.run(fetches, {f"{prefix}{name}:0": value for name, value in feeds.items()
                                     for prefix in prefixes})

    def _initializers(self):
        return [op.name for op in self._graph.get_operations()
                if op.type == "AssignVariableOp" and op.name.endswith("/Assign")]


def on_ranks(partitioned, size):
    """Returns (a graph that has a partitioned graph for each rank, for each of its fetches the names on all ranks).

    The names of rank 2 are below "rank2/".
    """
    communicator.use_ranks_for_ops(job(size))
    with tf.Graph().as_default() as joined:
        for rank in range(size):
            tf.import_graph_def(_of_rank(partitioned.graph_def, rank), name=f"rank{rank}")
    return joined, [[f"rank{rank}/{name}" + ("" if ":" in name else ":0") for rank in range(size)]
                    for name in partitioned.fetches]


def _of_rank(graph_def, rank):
    result = graph_pb2.GraphDef()
    result.CopyFrom(graph_def)
    for node in result.node:
        if node.op.startswith("Poseidon"):
            node.attr["_poseidon_rank"].CopyFrom(attr_value_pb2.AttrValue(i=rank))
        elif node.op == "VarHandleOp":
            node.attr["shared_name"].s = f"rank{rank}/{node.name}".encode()
        elif node.op == "Enter":
            node.attr["frame_name"].s = f"rank{rank}/".encode() + node.attr["frame_name"].s
    return result


def check(build, feeds, ranks=RANKS, tolerance=1e-12, optimize=True, runs_whole=False, rows=None):
    """Compares the results of ranks with those of one process, for one or several sets of feeds.

    Returns:
        The `Partitioned` graph.
    """
    made = Partitioned(build, optimize, runs_whole, rows)
    all_feeds = feeds if isinstance(feeds, list) else [feeds]
    all_expected = made.alone(all_feeds)
    for size in ranks:
        for results, expected in zip(made.on_ranks(all_feeds, size), all_expected):
            for rank, values in enumerate(results):
                for got, want, first, name in zip(values, expected, results[0], made.partitioned.fetches):
                    compare(got, want, tolerance, f"{name} on rank {rank} of {size}")
                    assert np.asarray(got).tobytes() == np.asarray(first).tobytes(), (
                        f"{name}: bits of rank {rank} of {size}")
    return made


def compare(got, want, tolerance, what):
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, one process has {want.shape}"
    if want.dtype == tf.bfloat16.as_numpy_dtype:  # which is no kind of float to NumPy
        got, want = got.astype(np.float32), want.astype(np.float32)
    if want.dtype.kind in "fc":
        scale = max(np.abs(want[np.isfinite(want)]).max(initial=0.0), 1.0)
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * scale, err_msg=what)
    else:
        np.testing.assert_array_equal(got, want, err_msg=what)
