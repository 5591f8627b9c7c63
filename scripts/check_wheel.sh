#!/usr/bin/env bash
# Installs a wheel as its user does, into a new environment and without a compiler in PATH, and trains on 2 ranks there.
#
#   scripts/check_wheel.sh WHEEL [PYTHON]     makes its environment in build/check_wheel; takes about a minute
set -euo pipefail
wheel=$(realpath "$1")
folder=$(cd "$(dirname "$0")/.." && pwd)/build/check_wheel

rm -rf "$folder"
"${2:-python3}" -m venv "$folder"
cd "$folder"  # not the source tree, from where Python would import it
PATH=$folder/bin
pip install --quiet "$wheel[cpu]"
export TF_CPP_MIN_LOG_LEVEL=3
tf-poseidon doctor
tf-poseidon selftest
