#!/usr/bin/env bash
# Installs a wheel as its users do, into new environments and without a compiler in PATH: beside TensorFlow for CPUs, where
# it trains on 2 ranks, and beside TensorFlow for GPUs, without NVIDIA's libraries, where it also places nodes on GPUs that
# are not there.
#
#   scripts/check_wheel.sh WHEEL [PYTHON]     makes its environments in build/check_wheel; takes about two minutes
set -euo pipefail
wheel=$(realpath "$1")
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$root/build/check_wheel
series=$("${2:-python3}" -c "from runpy import run_path
print(run_path('$root/tf_poseidon/supported.py')['TENSORFLOW_SERIES'][-1])")
export TF_CPP_MIN_LOG_LEVEL=3

rm -rf "$folder"
mkdir -p "$folder"
cd "$folder"  # not the source tree, from where Python would import it
for beside in tensorflow-cpu tensorflow; do
  echo "check_wheel: beside $beside"
  "${2:-python3}" -m venv "$beside"
  (
    PATH=$folder/$beside/bin
    pip install --quiet "$wheel" "$beside==$series.*"
    python -c "
import pathlib, sys
from tf_poseidon import ops
libraries = pathlib.Path(ops.__file__).parent.glob('*.so')
sys.exit('check_wheel: the wheel has the ops of emulated accelerators, which are for tests and benchmarks' if any(
    b'PoseidonEmulated' in library.read_bytes() for library in libraries) else 0)"
    tf-poseidon doctor
    tf-poseidon selftest
    if [ "$beside" = tensorflow ]; then
      pip install --quiet pytest
      cd "$root/tests"  # where the wheel is imported, not the source tree: conftest.py
      python -m pytest --quiet --rootdir . graphs/test_placement.py
    fi
  )
done
