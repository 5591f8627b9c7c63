"""Runs evaluation/clusters/emulated_cluster.py, from any directory; --help says how."""

import pathlib
import runpy
import sys

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
runpy.run_module("evaluation.clusters.emulated_cluster", run_name="__main__", alter_sys=True)
