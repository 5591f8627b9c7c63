"""Runs evaluation/gpu/gpu_check.py, from any directory; --help says how."""

import pathlib
import runpy
import sys

del sys.path[0]  # this folder
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))  # at the end: an installed tf_poseidon is used
runpy.run_module("evaluation.gpu.gpu_check", run_name="__main__", alter_sys=True)
