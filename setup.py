"""Builds the op library and the MPI transport with g++ against the installed wheels.

The op library gets GPU kernels where there is nvcc, and a TensorFlow that runs on GPUs. TF_POSEIDON_CUDA=0 builds none
all the same; 1 insists on them, also beside a TensorFlow for CPUs: its headers are the same. With
TF_POSEIDON_TENSORFLOW there is an op library for each of several TensorFlows: that is how scripts/build_wheel.sh makes
one wheel for all.
"""

import concurrent.futures
import importlib.metadata
import os
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import typing

import setuptools
from setuptools.command import bdist_wheel
from setuptools.command import build_ext

ROOT = pathlib.Path(__file__).resolve().parent
SUPPORTED = runpy.run_path(str(ROOT / "tf_poseidon" / "supported.py"))
NEWEST = SUPPORTED["TENSORFLOW_SERIES"][-1]

# Warnings are ours alone: -isystem keeps TensorFlow's own headers quiet.
COMPILE_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra",
                 "-pthread"]
# A library loaded from inside Python may leave symbols to be found at load time, but only those
# of the libraries that it names.
LINK_FLAGS = ["-shared", "-Wl,--no-undefined", "-Wl,--as-needed", "-pthread", "-ldl"]

NVCC_FLAGS = [*runpy.run_path(str(ROOT / "kernels" / "cuda" / "nvcc_flags.py"))["FLAGS"],
              "-Xcompiler=-fvisibility=hidden,-Wall"]
# Static, so that the library loads where there is no CUDA.
CUDA_LIBRARIES = ["-lcudart_static", "-lrt", "-ldl", "-lpthread"]


def relative(paths):
    """Returns sorted paths relative to the project, as setuptools wants them."""
    return sorted(str(path.relative_to(ROOT)) for path in paths)


COMMUNICATOR = "kernels/communicator"
COMMUNICATOR_FLAGS = [f"-I{COMMUNICATOR}"]  # it knows no TensorFlow
OP_FLAGS = ["-Ikernels", *COMMUNICATOR_FLAGS, "-DEIGEN_MAX_ALIGN_BYTES=64", "-D_GLIBCXX_USE_CXX11_ABI=1"]
MPI_SOURCES = [f"{COMMUNICATOR}/mpi_transport.cc"]
COMMUNICATOR_SOURCES = [path for path in relative(ROOT.glob(f"{COMMUNICATOR}/*.cc")) if path not in MPI_SOURCES]
GPU_SOURCES = relative([*ROOT.glob("kernels/**/*.cu.cc"), *ROOT.glob("kernels/*_gpu.cc")])
# Of tests and benchmarks, so in the tree alone.
EMULATION_SOURCES = relative(ROOT.glob("kernels/emulated_*.cc"))
OP_SOURCES = COMMUNICATOR_SOURCES + [
    path for path in relative([*ROOT.glob("kernels/*.cc"), *ROOT.glob("tf_poseidon/graph_passes/*.cc")])
    if path not in GPU_SOURCES + EMULATION_SOURCES
]


class TensorFlow(typing.NamedTuple):
    """A TensorFlow to build against.

    Attributes:
        name: Of its distribution.
        series: Its version, without the patch level, as those in supported.py.
        package: Its folder.
    """

    name: str
    series: str
    package: pathlib.Path


def tensorflow_in(path):
    """Returns the TensorFlow in a list of folders like sys.path, None if there is none; importing it takes seconds."""
    for name in ("tensorflow-cpu", "tensorflow"):
        for found in importlib.metadata.distributions(name=name, path=path):
            series = ".".join(found.version.split(".")[:2])
            if series not in SUPPORTED["TENSORFLOW_SERIES"]:
                sys.exit(f"tf_poseidon: {name} is {found.version}, but tf_poseidon supports "
                         f"{', '.join(SUPPORTED['TENSORFLOW_SERIES'])}; install {name}=={NEWEST}.*.")
            return TensorFlow(name, series, pathlib.Path(found.locate_file("tensorflow")))
    return None


def tensorflows():
    """Returns those to build against: in the folders that TF_POSEIDON_TENSORFLOW lists, or that of this Python."""
    folders = os.environ.get("TF_POSEIDON_TENSORFLOW")
    if not folders:
        return [each for each in [tensorflow_in(sys.path)] if each]
    found = {folder: tensorflow_in([folder]) for folder in folders.split(os.pathsep)}
    if missing := [folder for folder, each in found.items() if each is None]:
        sys.exit(f"tf_poseidon: TF_POSEIDON_TENSORFLOW lists {missing[0]}, expected a folder into which a wheel of "
                 "TensorFlow is installed or unpacked.")
    return list(found.values())


def find_nvcc(tensorflow):
    """Returns the path of nvcc if GPU kernels are to be built for a TensorFlow, else None."""
    wish = os.environ.get("TF_POSEIDON_CUDA", "")
    if wish not in ("", "0", "1"):
        sys.exit(f"tf_poseidon: TF_POSEIDON_CUDA={wish}, expected 0, 1, or nothing to build GPU kernels where "
                 "that is possible.")
    if wish == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=home and os.path.join(home, "bin"))
    info = runpy.run_path(str(tensorflow.package / "python" / "platform" / "build_info.py"))["build_info"]
    if not (info["is_cuda_build"] or wish == "1"):
        return None
    if nvcc is None and wish == "1":
        sys.exit(f"tf_poseidon: TF_POSEIDON_CUDA=1, but there is no nvcc in "
                 f"{os.path.join(home, 'bin') if home else 'PATH'}; set CUDA_HOME to the folder of a CUDA toolkit, or "
                 "leave TF_POSEIDON_CUDA away to build for CPUs.")
    return nvcc


def cuda_link_flags(nvcc):
    """Returns what nvcc would tell the linker of its toolkit's libraries."""
    shown = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], check=True, text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout
    return [*re.findall(r'"(-L[^"]+)"', shown), *CUDA_LIBRARIES]


class BuildLibraries(build_ext.build_ext):
    """Compiles one object per source, in parallel, and links each library."""

    def get_ext_filename(self, fullname):
        return fullname.replace(".", os.sep) + ".so"  # a plain library: no Python ABI in its name

    def get_export_symbols(self, ext):
        return ext.export_symbols

    def run(self):
        if not TENSORFLOWS:
            sys.exit("tf_poseidon: no TensorFlow to build against; run pip install "
                     f"'tensorflow-cpu=={NEWEST}.*' first.")
        if "MPICXX" in os.environ:
            check_own_mpi(os.environ["MPICXX"])
        if self.editable_mode:  # pip's folder is gone afterwards, and `build_ext --inplace` would compile all again
            self.build_temp = os.path.join("build", f"temp.{self.plat_name}-{sys.implementation.cache_tag}")
        self.is_in_tree = bool(self.inplace or self.editable_mode)  # setuptools forgets it while it builds
        super().run()
        # What earlier builds for other TensorFlows have left would be installed, too, beside newer Python code.
        built = {pathlib.Path(self.get_ext_fullpath(ext.name)) for ext in self.extensions}
        for folder in {path.parent for path in built} | {pathlib.Path(self.build_lib, "tf_poseidon", "ops")}:
            for path in folder.glob("libposeidon_ops*.so"):
                if path.name not in {each.name for each in built}:
                    path.unlink()

    def build_extension(self, ext):
        tensorflow = next((each for each in TENSORFLOWS if ext.name.endswith(SUPPORTED["library"](each.series))), None)
        compiler, compile_flags, link_flags, nvcc = (
            self.tensorflow_toolchain(tensorflow) if tensorflow else self.mpi_toolchain())
        command = [*compiler, *COMPILE_FLAGS, *compile_flags]
        sources = dict.fromkeys([*ext.sources, *(GPU_SOURCES if nvcc else ()), *(
            EMULATION_SOURCES if tensorflow and self.is_in_tree else ())], command)
        sources |= {source: [nvcc, *NVCC_FLAGS] for source in sources if source.endswith(".cu.cc")}
        folders = dict.fromkeys(sources, os.path.join(self.build_temp, ext.name.rpartition(".")[2]))
        # What knows no TensorFlow is compiled once for all.
        for source in COMMUNICATOR_SOURCES:
            if source in sources:
                sources[source] = [*compiler, *COMPILE_FLAGS, *COMMUNICATOR_FLAGS]
        folders |= {source: self.build_temp for source in sources
                    if source in COMMUNICATOR_SOURCES or source.endswith(".cu.cc")}
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(self.compile, sources.values(), sources, folders.values()))
        library = pathlib.Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        self.run_if_stale([*compiler, *objects, *LINK_FLAGS, *link_flags, "-o", str(library)],
                          library, objects)

    def tensorflow_toolchain(self, tensorflow):
        """Returns compiler, compile flags and link flags of an op library, and nvcc if it gets GPU kernels."""
        nvcc = find_nvcc(tensorflow)
        return (shlex.split(os.environ.get("CXX", "g++")),
                [*OP_FLAGS, "-isystem", f"{tensorflow.package}/include"],
                [f"-L{tensorflow.package}", "-l:libtensorflow_framework.so.2",
                 *(cuda_link_flags(nvcc) if nvcc else ())], nvcc)

    def mpi_toolchain(self):
        """Returns compiler, compile flags and link flags of the MPI transport, and None."""
        if "MPICXX" in os.environ:  # a cluster's own MPI: its wrapper knows everything
            return shlex.split(os.environ["MPICXX"]), [*COMMUNICATOR_FLAGS, "-DPOSEIDON_OWN_MPI"], [], None
        header, library = mpich_wheel("mpi.h"), mpich_wheel("libmpi.so.12")
        if header is None or library is None:
            sys.exit("tf_poseidon: no MPI to build against; run pip install mpich, or set MPICXX "
                     "to the compiler of your cluster's MPI.")
        # Not the wheel's mpicxx: it would write the path of this (perhaps temporary) environment
        # into the library. tf_poseidon/job/engines/mpi.py finds libmpi when it runs.
        return (shlex.split(os.environ.get("CXX", "g++")),
                [*COMMUNICATOR_FLAGS, "-isystem", os.path.dirname(header)], [library], None)

    def compile(self, command, source, folder):
        """Compiles one source unless its object is newer than all it includes; returns the object, in a folder."""
        object_file = pathlib.Path(folder, source).with_suffix(".o")
        object_file.parent.mkdir(parents=True, exist_ok=True)
        dependencies = object_file.with_suffix(".d")
        inputs = [source]
        if dependencies.exists():
            inputs += shlex.split(dependencies.read_text().partition(":")[2].replace("\\\n", " "))
        self.run_if_stale([*command, "-MMD", "-MF", str(dependencies), "-c", source, "-o",
                           str(object_file)], object_file, inputs)
        return str(object_file)

    def run_if_stale(self, command, output, inputs):
        """Runs `command` unless `output` was made by the same command from older inputs."""
        stamp = pathlib.Path(self.build_temp, str(output).replace(os.sep, "_") + ".command")
        text = shlex.join(command)
        if not self.force and output.exists() and stamp.exists() and stamp.read_text() == text:
            made = output.stat().st_mtime
            if all(os.path.exists(path) and os.path.getmtime(path) <= made for path in inputs):
                return
        print(text, flush=True)
        subprocess.run(command, check=True)
        stamp.write_text(text)


def check_own_mpi(mpicxx):
    """Refuses the compiler of the mpich wheel, which is the first one in the PATH of its environment."""
    found = shutil.which(shlex.split(mpicxx)[0])
    if found and os.path.realpath(found) == mpich_wheel("mpicxx"):
        sys.exit(f"tf_poseidon: MPICXX={mpicxx} is {found}, which belongs to the mpich wheel; give the path of the "
                 "cluster's, such as MPICXX=/usr/bin/mpicxx, or omit MPICXX to use the wheel.")


def mpich_wheel(name):
    """Returns the path of a file of the mpich wheel, or None."""
    try:
        files = importlib.metadata.files("mpich") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    return next((str(f.locate().resolve()) for f in files if f.name == name), None)


class Wheel(bdist_wheel.bdist_wheel):
    """A wheel of any Python 3: the libraries do not know Python."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":  # bazel/installed.py only asks what is installed, and for the flags
    TENSORFLOWS = tensorflows()
    # Built against the TensorFlow of this Python, it needs that; a wheel for several leaves the choice to its users.
    NEEDED = ([] if os.environ.get("TF_POSEIDON_TENSORFLOW") else
              [f"{each.name}=={each.series}.*" for each in TENSORFLOWS] or [f"tensorflow-cpu=={NEWEST}.*"])
    setuptools.setup(
        install_requires=["absl-py", "cloudpickle", "numpy", "packaging", "rich", SUPPORTED["KERAS"],
                          *(() if "MPICXX" in os.environ else ["mpich>=5"]), *NEEDED],
        ext_modules=[
            *(setuptools.Extension(f"tf_poseidon.ops.{SUPPORTED['library'](each.series)}", OP_SOURCES)
              for each in TENSORFLOWS),
            setuptools.Extension("tf_poseidon.job.engines.libposeidon_mpi", MPI_SOURCES),
        ],
        cmdclass={"build_ext": BuildLibraries, "bdist_wheel": Wheel},
    )
