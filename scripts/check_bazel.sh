#!/usr/bin/env bash
# Builds all targets of BUILD, as root without a network, and runs the self-test on 2 ranks with the built libraries.
#
#   scripts/check_bazel.sh [PYTHON]     PYTHON: .venv/bin/python by default; it has TensorFlow, mpich and setuptools
#
# Needs Debian's bazel-bootstrap; takes five minutes on 2 cores at first. All that it writes is in build/bazel, but for
# what is compiled, which is kept in ${XDG_CACHE_HOME:-~/.cache}/tf_poseidon/bazel.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$PWD/build/bazel
python=${1:-.venv/bin/python}
command -v "$python" >/dev/null || {
  echo "check_bazel: there is no $python; run make setup, or give a Python." >&2
  exit 1
}
PYTHON=$(realpath --no-symlinks "$(command -v "$python")")
export PYTHON
offline=()
if [ "$(id -u)" = 0 ]; then offline=(unshare --net); else echo "check_bazel: only root can cut off the network"; fi

# --batch: without a server that would outlive this script.
"${offline[@]}" bazel --batch --output_user_root="$folder" build --symlink_prefix="$folder/" --noshow_progress \
  --disk_cache="${XDG_CACHE_HOME:-$HOME/.cache}/tf_poseidon/bazel" //...

# The package as pyproject.toml installs it, with these libraries only.
package=$folder/package/tf_poseidon
rm -rf "$folder/package"
mkdir "$folder/package"
cp -r tf_poseidon "$package"
find "$package" -name '*.so' -delete
cp "$folder"/bin/tf_poseidon/ops/*.so "$package/ops"
cp "$folder"/bin/tf_poseidon/job/engines/*.so "$package/job/engines"

cd "$folder/package"  # from where Python imports it, whatever is installed
export TF_CPP_MIN_LOG_LEVEL=3
"$PYTHON" - "$OLDPWD" <<'END'
"""Checks that the built library is the one that is loaded, and that it has all ops of the source."""
import pathlib, re, sys
from tf_poseidon.ops import library
ops, functions = library.load()
print("check_bazel:", functions._name)
if not pathlib.Path(functions._name).is_relative_to(pathlib.Path.cwd()):
    sys.exit("check_bazel: that is not the library that Bazel has built.")
sources = [path for path in pathlib.Path(sys.argv[1], "kernels").glob("*.cc") if not path.name.startswith("emulated_")]
names = {name for path in sources for name in re.findall(r'REGISTER_OP\("(\w+)"', path.read_text())}
if missing := sorted(name for name in names if not hasattr(ops, name)):
    sys.exit(f"check_bazel: it lacks {', '.join(missing)}.")
END
"$PYTHON" -m tf_poseidon selftest
