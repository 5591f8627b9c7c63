#!/usr/bin/env bash
# Packs all that training on GPUs needs, for a machine that has a GPU, its driver and Python, but no network: this package
# with kernels for GPUs, TensorFlow, and what they import, in parts that can be carried one by one. unpack.sh, among them,
# joins them there.
#
#   scripts/pack_gpu.sh [PYTHON] [DIRECTORY]     PYTHON: of the version that is there, python3 by default;
#                                                DIRECTORY: for the parts, build/pack/parts
#
# PART_BYTES=57671680: the size of a part. Needs nvcc, g++ and xz. Takes about eight minutes on 2 cores.
#
# NVIDIA's libraries are not packed, but for the small CUDA runtime: unpack.sh finds those of that machine.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(command -v "${1:-python3}")
folder=$PWD/build/pack
environment=$folder/environment
series=$("$python" -c "from runpy import run_path
print(run_path('tf_poseidon/supported.py')['TENSORFLOW_SERIES'][-1])")
mkdir -p "${2:-$folder/parts}"
parts=$(cd "${2:-$folder/parts}" && pwd)

WHEEL_SERIES=$series scripts/build_wheel.sh python3 "$folder/wheel"
rm -rf "$environment" "$parts"/*
"$python" -m venv "$environment"
"$environment/bin/python" -m pip install --quiet --no-compile "$folder"/wheel/*.whl "tensorflow==$series.*" \
  'nvidia-cuda-runtime-cu12<13'

# Without what is for compilers, and for looking at profiles, which TensorFlow imports and a step does not call.
profiler=$(echo "$environment"/lib/python*/site-packages/tensorflow/python/profiler/internal/_pywrap_profiler_plugin.so)
rm "$profiler"
touch "${profiler%.so}.py"
${CXX:-g++} -shared -x c++ /dev/null -o "$environment/lib/libempty.so"  # see unpack.sh
(cd "$environment" && tar --create --exclude='__pycache__' --exclude='*/site-packages/pip*' \
  --exclude='*/site-packages/clang*' --exclude='*/tensorflow/include' \
  --exclude='*/numpy/*/tests' lib bin/mpiexec* bin/hydra_*) |
  xz --threads=0 -6 | split --bytes="${PART_BYTES:-57671680}" --numeric-suffixes - "$parts/part."
cp scripts/unpack.sh "$parts"
ls -l "$parts"
