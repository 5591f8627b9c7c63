"""Builds the CUDA kernels, holds them to their bounds on the GPU of this machine, and measures them.

    python scripts/gpu_check.py --json out.json

Needs nvcc, a GPU and NumPy, but neither TensorFlow nor tf_poseidon; that is why the options are argparse's and the table
is plain text. With PyTorch or CuPy, cuBLAS is measured beside the kernels; with compute-sanitizer, accesses and races
of some cases are checked. Takes less than 5 minutes.

The roofline of a case is the larger of two times: its bytes at the speed of copying memory, and its operations at the
speed of cuBLAS on large square factors of the type. Both are measured here.
"""

import argparse
import collections
import ctypes
import json
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

import numpy as np

import gpu_outer_product as outer_product
from gpu_outer_product import Case

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCE = ROOT / "kernels" / "cuda" / "outer_product.cu.cc"
NVCC_FLAGS = ["-x", "cu", "-std=c++17", "-O3", "-gencode", "arch=compute_80,code=sm_80",
              "-gencode", "arch=compute_90,code=[sm_90,compute_90]", "-Werror", "all-warnings",
              "-Xcompiler", "-Wall,-Wextra,-Werror,-fPIC", "-Xptxas", "-v"]


def build(output, *options):
    """Compiles the kernels and returns what nvcc has said."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise SystemExit("gpu_check: no nvcc in PATH; install the CUDA toolkit.")
    done = subprocess.run([nvcc, *NVCC_FLAGS, *map(str, options), str(SOURCE), "-o", str(output)],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"gpu_check: nvcc failed:\n{done.stdout}")
    return done.stdout


Usage = collections.namedtuple("Usage", "kernel gpu registers spilled_bytes")


def resources(report):
    """Returns the Usage of every kernel in nvcc's report."""
    return [Usage(kernel, gpu, int(registers), int(stores) + int(loads))
            for kernel, gpu, stores, loads, registers in re.findall(
                r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
                r".*?Used (\d+) registers", report, re.DOTALL)]
