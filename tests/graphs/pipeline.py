"""Runs cases through the whole pipeline: the partitioner, TensorFlow's graph optimizer, and the passes that it calls.

Unlike those of `partition_table.py`, the graphs that ranks run are rewritten, and optimized by all that TensorFlow has.
Each rank is a thread with a session of its own, in this process.
"""

from concurrent import futures
from unittest import mock

import partition_table
import partitioning
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from tf_poseidon import grappler
from tf_poseidon import planning
from tf_poseidon.graph_passes import session
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.job import communicator

_RANK = "_poseidon_rank"


class _Passes(grappler.GraphPass):
    """The passes, for graphs whose nodes say which rank they are of."""

    def rewrite(self, graph_def):
        rewritten = super().rewrite(graph_def)
        if rewritten is not None:
            rank = next(node.attr[_RANK].i for node in graph_def.node if _RANK in node.attr)
            for node in rewritten.node:
                if node.op.startswith("Poseidon"):
                    node.attr[_RANK].CopyFrom(attr_value_pb2.AttrValue(i=rank))
                if node.op in ("PoseidonSend", "PoseidonRecv") and rank % 2 == 0:  # beside ranks without one
                    node.attr["_kernel"].s = b"emulated_gpu"
        return rewritten


class Batch(partition_table.Batch):
    """One graph of many cases, see the base class.

    Attributes:
        plans: The plans that ranks have followed, by number of ranks.
    """

    def __init__(self, cases, usual_rows=13, policy="sfb"):
        """Builds the graph.

        Args:
            cases: The cases.
            usual_rows: The rows of a batch for which exchanges are planned.
            policy: The policy of the plan.
        """
        super().__init__(cases)
        self.plans = {}
        self._usual_rows = usual_rows
        self._policy = policy
        self._optimized = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=2)

    def on_ranks(self, graph_def, fetches, sizes, all_rows=partition_table.ROWS):
        for size in sizes:
            communicator.use_ranks_for_ops(partitioning.job(size))
            passes = _Passes(session.RewriteSession(planning.Planner(planning.Cluster(size), self._policy)))
            with passes.registered(), futures.ThreadPoolExecutor(size) as pool:
                by_rank = list(pool.map(lambda rank: self._of_rank(graph_def, fetches, rank, size, all_rows),
                                        range(size)))
            self.plans[size] = passes.plan
            assert passes.plan is not None and not passes.plan.refusal, passes.plan
            yield size, {rows: [results[rows] for results in by_rank] for rows in all_rows}

    def _of_rank(self, graph_def, fetches, rank, size, all_rows):
        """Returns the results of a rank: by number of rows, by case, values."""
        writer = graph_lib.Writer("agree", "/device:CPU:0")
        writer.add("", "PoseidonAgree", [], sites="", rows=-(-self._usual_rows // size), global_rows=self._usual_rows,
                   strict=False)
        graph_def = graph_lib.with_nodes(graph_def, [*graph_def.node, *writer.nodes])
        with tf.Graph().as_default() as graph:
            tf.import_graph_def(partitioning._of_rank(graph_def, rank), name="")
        with tf.compat.v1.Session(graph=graph, config=self._optimized) as ranks_session:
            return {rows: ranks_session.run(
                ({i: [name if ":" in name else f"{name}:0" for name in names]
                  for i, names in self._fetched(fetches, rows).items()}, "agree"),
                {f"{name}:0": value for name, value in self.feeds(rows).items()})[0] for rows in all_rows}


    def changed_by_tensorflow(self, expected):
        """Returns the numbers of the cases whose results TensorFlow's optimizer changes in one process.

        For example, where it takes the maximum of x before a function that grows with x, it takes the first output of
        the node that computes x.
        """
        with tf.Graph().as_default() as graph:
            tf.import_graph_def(_without_markers(self.flat), name="")
        with mock.patch.object(self, "_config", self._optimized), mock.patch.object(self, "graph", graph):
            optimized = self.alone(tuple(expected))
        lines = self.wrong_values(expected, {rows: [results] for rows, results in optimized.items()}, 1)
        return {i for i, case in enumerate(self.cases) if any(line.startswith(f"{case.ops}:") for line in lines)}


def _without_markers(graph_def):
    result, given = graph_lib.with_nodes(graph_def, graph_def.node), {}
    for node in graph_def.node:
        if node.op == "PoseidonRows":
            given.update({f"{node.name}:{i}" if i else node.name: tensor for i, tensor in enumerate(node.input)})
            result.node.remove(node)
    for node in result.node:
        node.input[:] = [given.get(tensor, tensor) for tensor in node.input]
    return result


def check(cases, sizes, all_rows, **options):
    """Returns a line for each error in the cases, except TensorFlow's own; `options` are those of `Batch`."""
    batch = Batch(cases, **options)
    _, graph_def, fetches = batch.partition()
    expected = batch.alone(all_rows)
    try:
        if changed := batch.changed_by_tensorflow(expected):
            return check([case for i, case in enumerate(cases) if i not in changed], sizes, all_rows, **options)
    except (tf.errors.OpError, ValueError):
        return _check_each(cases, sizes, all_rows, **options) if len(cases) > 1 else []
    try:
        return [line for size, results in batch.on_ranks(graph_def, fetches, sizes, all_rows)
                for line in batch.wrong_values(expected, results, size)]
    except (tf.errors.OpError, ValueError) as error:
        partitioning.forget_jobs()
        if len(cases) == 1:
            return [f"{cases[0].ops}: {type(error).__name__} {str(error)[:600]}"]
        return _check_each(cases, sizes, all_rows, **options)


def _check_each(cases, sizes, all_rows, **options):
    return [line for case in cases for line in check([case], sizes, all_rows, **options)]
