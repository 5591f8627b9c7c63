#!/usr/bin/env bash
# Joins the parts that pack_gpu.sh has made to an environment of Python, and gives it the CUDA libraries of this machine.
#
#   unpack.sh DIRECTORY TARGET [PYTHON]     DIRECTORY: of the parts; PYTHON: python3 by default
#
# Then `TARGET/bin/python` runs programs. TensorFlow looks for the libraries of CUDA 12 by name, and for their functions
# by name, too. So those of another version serve it, if they still have these functions: they are linked under the
# names that it looks for.
set -euo pipefail
parts=$1 target=$2 python=${3:-python3}

"$python" -m venv --without-pip "$target"
"$python" - "$target" "$parts"/part.* <<'END'
import glob
import io
import os
import pathlib
import site
import subprocess
import sys
import tarfile

target, *parts = sys.argv[1:]


class Joined(io.RawIOBase):
    """The bytes of the parts, one after the other."""

    def __init__(self, paths):
        self._files = [open(path, "rb") for path in sorted(paths)]

    def readable(self):
        return True

    def readinto(self, buffer):
        while self._files:
            if count := self._files[0].readinto(buffer):
                return count
            self._files.pop(0).close()
        return 0


with tarfile.open(fileobj=io.BufferedReader(Joined(parts), 1 << 20), mode="r|xz") as archive:
    archive.extractall(target, filter="tar")

# Where TensorFlow's names may be: installed by pip, the packed ones first, by the toolkit, or by the system.
folders = [folder for packages in [*glob.glob(f"{target}/lib/python*/site-packages"), *site.getsitepackages()]
           for folder in sorted(glob.glob(f"{packages}/nvidia/*/lib"))]
folders += [*sorted(glob.glob("/usr/local/cuda*/lib64")), "/usr/lib/x86_64-linux-gnu"]
# By name: the versions that serve, and whether a step calls it. If not, an empty one is enough.
WANTED = {
    "libcudart.so.12": ([12], True), "libcublas.so.12": ([12, 13], True), "libcublasLt.so.12": ([12, 13], True),
    "libcudnn.so.9": ([9], True), "libcufft.so.11": ([11, 12], False), "libcurand.so.10": ([10], False),
    "libcusolver.so.11": ([11, 12], False), "libcusparse.so.12": ([12], False)}
links = pathlib.Path(target, "cuda")
links.mkdir(exist_ok=True)
path = ":".join([str(links), *folders[:-1]])


def loads(library):
    program = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    return subprocess.run([sys.executable, "-c", program, library], env={**os.environ, "LD_LIBRARY_PATH": path},
                          stderr=subprocess.DEVNULL).returncode == 0


missing = []
for name, (versions, is_called) in WANTED.items():
    stem = name.rpartition(".")[0]
    found = next((each for version in versions for folder in folders
                  if (each := pathlib.Path(folder, f"{stem}.{version}")).exists() and loads(each)), None)
    if found is None:
        found = pathlib.Path(target, "lib", "libempty.so")
        missing += [name] if is_called else []
    (links / name).unlink(missing_ok=True)
    (links / name).symlink_to(found.resolve())
    print(f"unpack: {name} is {found}")
if missing:
    sys.exit(f"unpack: none of {', '.join(missing)} loads from {', '.join(folders)}; install them, such as by pip install "
             "nvidia-cublas-cu12 nvidia-cudnn-cu12, and run this again.")
# With the folders: what these libraries need in turn is there, under its own name.
pathlib.Path(target, "activate").write_text(f"export PATH={target}/bin:$PATH LD_LIBRARY_PATH={path}\n")
END
echo "unpack: run programs after '. $target/activate'"
