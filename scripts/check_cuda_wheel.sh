#!/usr/bin/env bash
# Builds the op library with its GPU kernels, against the TensorFlow wheel for GPUs, and runs with it the tests of
# placement, and the self-test on 2 ranks. Needs nvcc, but no GPU; takes two to three minutes.
#
#   scripts/check_cuda_wheel.sh [PYTHON]     PYTHON: python3 by default; makes its own environment in build/cuda
set -euo pipefail
cd "$(dirname "$0")/.."

supported() { "$python" -c "from runpy import run_path; print(run_path('tf_poseidon/supported.py')$1)"; }
folder=$PWD/build/cuda
python=$folder/venv/bin/python

test -x "$python" || "${1:-python3}" -m venv "$folder/venv"
"$python" -m pip install --quiet "tensorflow==$(supported "['TENSORFLOW_SERIES'][-1]").*" "mpich>=5" "setuptools>=77" \
  "$(supported "['KERAS']")" pytest rich
TF_POSEIDON_CUDA=1 "$python" setup.py --quiet build --build-base "$folder" --build-lib "$folder/lib"
"$python" setup.py --quiet egg_info --egg-base "$folder/lib"  # the version

# Not from the root: there Python would import this source tree, whose library is for CPUs.
cd tests
export PYTHONPATH=$folder/lib TF_CPP_MIN_LOG_LEVEL=3
"$python" -m pytest --quiet --rootdir . graphs/test_placement.py
"$python" -m tf_poseidon.cli selftest
