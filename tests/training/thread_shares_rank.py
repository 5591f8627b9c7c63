"""Writes how this rank shares processors: in a folder, after a strategy that is created in one of several ways."""

import dataclasses
import json
import os
import pathlib
import sys

import tensorflow as tf

import tf_poseidon as poseidon

folder, how = sys.argv[1:]
if how == "computes first":
    tf.constant(1) + 1
plan = dataclasses.replace(poseidon.Plan("ps", poseidon.Cluster(2)), threads=7) if how == "plan" else None
strategy = poseidon.PoseidonStrategy(plan=plan)
chosen = os.environ.get("TF_NUM_INTRAOP_THREADS") or 0
threads = tf.config.threading.get_intra_op_parallelism_threads() or int(chosen)
pathlib.Path(folder, f"{strategy.rank}.json").write_text(json.dumps({
    "threads": threads, "allowed": sorted(os.sched_getaffinity(0))}))
