"""Graphs of exchange ops that all ranks of a job run in this process."""

from concurrent import futures

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from tf_poseidon.ops import library


def run(kernels, of_rank, steps):
    """Returns what each rank computes, by step; `of_rank` builds its outputs, with `kernels` by rank."""
    def run_rank(rank):
        with tf.Graph().as_default() as graph, tf.device("CPU:0"):
            outputs = of_rank(library.load()[0], rank)
        for node in graph.get_operations():
            if node.type.startswith("Poseidon"):
                node._set_attr("_poseidon_rank", attr_value_pb2.AttrValue(i=rank))
                if kernels[rank]:
                    node._set_attr("_kernel", attr_value_pb2.AttrValue(s=kernels[rank].encode()))
        config = tf.compat.v1.ConfigProto()
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        with tf.compat.v1.Session(graph=graph, config=config) as session:
            return [session.run(outputs) for _ in range(steps)]

    with futures.ThreadPoolExecutor(len(kernels)) as pool:
        return list(pool.map(run_rank, range(len(kernels))))
