"""The CUDA kernels without a GPU: compiled for all supported GPUs, and run on an emulated one.

The emulation (emulated_gpu.cc) runs the index arithmetic of kernels/cuda/block.h, not the
instructions of a GPU; those are for evaluation/gpu/gpu_check.py, with the same cases.
"""

import collections
import copy
import ctypes
import dataclasses
import json
import mmap
import os
import pathlib
import runpy
import subprocess
import time

import numpy as np
import pytest

from evaluation.gpu import gpu_check
from evaluation.gpu import gpu_cublas
from evaluation.gpu import gpu_outer_product as outer_product
from evaluation.gpu.gpu_outer_product import Case

ROOT = pathlib.Path(__file__).resolve().parents[2]
ALL_TILES = 2 ** 62


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Returns the library on an emulated GPU."""
    path = tmp_path_factory.mktemp("gpu") / "emulated.so"
    subprocess.run([os.environ.get("CXX", "g++"), "-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra",
                    "-Werror", "-Wno-unknown-pragmas", ROOT / "tests" / "gpu" / "emulated_gpu.cc", "-o", path],
                   check=True)
    library = outer_product.Library(path, outer_product.HostMemory())
    library.c.poseidon_emulate.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_uint64]
    library.c.poseidon_emulate_hopper.argtypes = [ctypes.c_bool]
    return library


@pytest.fixture(params=["Ampere", "Hopper"])
def emulated(library, request):
    """Returns the library on an emulated GPU of each kind that has programs of its own."""
    library.c.poseidon_emulate_hopper(request.param == "Hopper")
    return library


@pytest.mark.parametrize("seed, case", list(enumerate(outer_product.cases())), ids=str)
def test_outer_products_of_all_cases_are_right(emulated, seed, case):
    emulated.c.poseidon_emulate(0, ALL_TILES, 1 + seed % 3, seed)
    outer_product.check(emulated, case, np.random.default_rng(seed))


def test_random_cases(emulated):
    rng = np.random.default_rng(0)
    for seed in range(80):
        emulated.c.poseidon_emulate(0, ALL_TILES, rng.integers(1, 5), seed)
        outer_product.check(emulated, outer_product.random_case(rng, 150, 600), rng)


@pytest.mark.parametrize("m, n", [(1, 1), (1024, 256), (1025, 257), (2600, 1100), (128 * 9, 5)])
def test_tiles_cover_the_result_once(emulated, m, n):
    tiles = -(-m // 128) * -(-n // 128)
    corners = {tile_at(emulated, number, m, n) for number in range(tiles)}
    assert corners == {(row, column) for row in range(0, m, 128) for column in range(0, n, 128)}


@pytest.mark.parametrize("m, n", [(2 ** 31 + 300, 2 ** 33 + 1), (2 ** 40 + 1, 1000), (1000, 2 ** 50)])
def test_numbers_of_tiles_have_64_bits(emulated, m, n):
    rows, columns = -(-m // 128), -(-n // 128)
    for number in np.linspace(0, rows * columns - 1, 1000).astype(int).tolist():
        row, column = tile_at(emulated, number, m, n)
        band = row // 1024
        height = min(8, rows - 8 * band)
        assert number == 8 * band * columns + column // 128 * height + row // 128 - 8 * band


def tile_at(emulated, number, m, n):
    """Returns row and column of the first element of a tile."""
    corner = (ctypes.c_int64 * 2)()
    emulated.c.poseidon_emulated_tile(*map(ctypes.c_int64, (number, m, n)), corner)
    return tuple(corner)


def sparse(shape, dtype):
    """Returns an array of zeros that uses memory only where it is written."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE),
                         dtype).reshape(shape)


MAP_NORESERVE = 0x4000  # Linux; Python 3.10 does not name it


@pytest.mark.parametrize("factors, out", [("float32", "float32"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("k, m, n", [(2, 70_016, 33_344), (3, 70_001, 33_333), (3, 2 ** 31 + 5, 8),
                                     (2, 5, 2 ** 31 + 24), (2 ** 16 + 1, 7, 40_000)])
def test_more_than_2_31_elements(emulated, factors, out, k, m, n):
    """The last tile, after more than 2^31 elements of the result or of the factors."""
    case = Case(factors, out, k, m, n)
    tiles = -(-m // 128) * -(-n // 128)
    rng = np.random.default_rng(0)
    u, v = (sparse((k, size), outer_product.TYPES[factors][1]) for size in (m, n))
    result = sparse((m, n), outer_product.TYPES[out][1])
    ends = tuple(np.s_[-min(size, 600):] for size in (m, n))
    rows = sorted({0, k // 2, k - 1})  # where the factors are not 0
    for factor, end in zip((u, v), ends):
        factor[rows, end] = outer_product.encode(rng.integers(-3, 4, factor[rows, end].shape), factors)
    result[ends] = outer_product.encode(np.full(result[ends].shape, np.nan), out)

    emulated.c.poseidon_emulate(tiles - 1, 1, 1, 0)
    emulated.call(case, u.ctypes.data, v.ctypes.data, result.ctypes.data)

    (exact, bound), = outer_product.expect(case, u[rows, ends[0]], v[rows, ends[1]], [None])
    first = tuple((size - 1) // tile * tile - size for size, tile in ((m, 128), (n, 128)))
    written = np.s_[first[0]:, first[1]:]
    outer_product.compare(case, result[written], exact[written], bound[written], whole=True)
    beside = outer_product.decode(result[ends], out)
    beside[written] = np.nan
    assert np.isnan(beside).all()


def test_bits_depend_neither_on_order_nor_blocks(emulated):
    case = Case("bfloat16", "float32", 50, 300, 270)
    u, v, (out,) = outer_product.make_inputs(case, np.random.default_rng(0), whole=False)
    results = set()
    for seed in range(4):
        emulated.c.poseidon_emulate(0, ALL_TILES, 1 + seed, seed)
        emulated.call(case, u.ctypes.data, v.ctypes.data, out.ctypes.data)
        results.add(out.tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("change", [
    dict(k=-1), dict(m=-1), dict(n=-1), dict(out="tf32"), dict(out="half"),
    dict(factors="float32", out="bfloat16"), dict(factors="tf32", out="tf32"), dict(u=None), dict(v=None),
    dict(result=None), dict(out="weights", momentum=0.5)], ids=str)
def test_arguments_that_the_kernel_cannot_take_are_refused(emulated, change):
    emulated.c.poseidon_emulate(0, ALL_TILES, 1, 0)
    case = Case("bfloat16", "bfloat16", 2, 3, 4)
    pointers = dict.fromkeys(("u", "v", "result"), np.zeros(12, np.float32).ctypes.data)
    case = dataclasses.replace(case, **{k: v for k, v in change.items() if k not in pointers})
    pointers |= {k: v for k, v in change.items() if k in pointers}
    with pytest.raises(outer_product.Refused, match="do not go together"):
        emulated.call(case, **pointers)


@pytest.mark.parametrize("case", [Case("half", "half", 3, 0, 5), Case("half", "half", 3, 5, 0),
                                  Case("tf32", "weights", 3, 0, 0)], ids=str)
def test_nothing_to_do_needs_no_memory(emulated, case):
    emulated.call(case, None, None, None)


@pytest.mark.parametrize("k, alpha", [(0, 1.0), (7, 0.0)])
def test_without_products_factors_are_not_read(emulated, k, alpha):
    emulated.c.poseidon_emulate(0, ALL_TILES, 1, 0)
    nan, out = np.full((7, 2), np.nan, np.float16), np.full((2, 2), 3, np.float32)
    emulated.call(Case("half", "float32", k, 2, 2, alpha, beta=0.5), nan.ctypes.data, nan.ctypes.data,
                  out.ctypes.data)
    assert (out == 1.5).all()


@pytest.mark.parametrize("case, u, v, result", outer_product.exact_cases(),
                         ids=[str(case) for case, *_ in outer_product.exact_cases()])
def test_outer_products_of_special_numbers_are_exact(emulated, case, u, v, result):
    emulated.c.poseidon_emulate(0, ALL_TILES, 1, 0)
    outer_product.check_exact(emulated, case, u, v, result)


class Wrong:
    """A library that computes with NumPy, and then does `damage` to the result."""

    def __init__(self, damage):
        self.memory, self._damage = outer_product.HostMemory(), damage

    def call(self, case, u, v, out):
        def array(address, rows, columns):
            return np.ctypeslib.as_array((ctypes.c_float * (rows * columns)).from_address(address))

        product = (array(u, case.k, case.m).reshape(case.k, -1).T.astype(float)
                   @ array(v, case.k, case.n).reshape(case.k, -1))
        result = array(out, case.m, case.n)
        result[:] = product.reshape(-1)
        self._damage(result, out)


@pytest.mark.parametrize("damage, message", [
    (lambda result, address: None, None),
    (lambda result, address: result.__setitem__(7, np.nan), "1 elements .* rows 1-1 and columns 2-2"),
    (lambda result, address: np.multiply(result, 1 + 1e-4, out=result), "exceed the error bound"),
    (lambda result, address: ctypes.memset(address - 4, 0, 4), "before the first"),
    (lambda result, address: ctypes.memset(address + result.nbytes, 0, 1), "after the last"),
], ids=["none", "an element", "rounding", "before", "after"])
def test_a_wrong_result_is_found(damage, message):
    def check():
        outer_product.check(Wrong(damage), Case("float32", "float32", 9, 4, 5), np.random.default_rng(0))

    if message is None:
        check()
    else:
        with pytest.raises(AssertionError, match=message):
            check()


class HostDriver:
    """gpu_device.Driver for memory of the host, and events that are a millisecond apart."""
    name, multiprocessors, l2_bytes = "emulated", 1, 1

    def __init__(self):
        self._arrays = {}

    def call(self, name, *arguments):
        getattr(self, name)(*(getattr(argument, "value", argument) for argument in arguments))

    def cuMemAlloc_v2(self, address, nbytes):
        array = np.empty(nbytes + 256, np.uint8)
        address._obj.value = -(-array.ctypes.data // 256) * 256
        self._arrays[address._obj.value] = array

    def cuMemFree_v2(self, address):
        del self._arrays[address]

    def cuMemcpyDtoDAsync_v2(self, to, source, nbytes, stream):
        ctypes.memmove(to, source, nbytes)

    def cuMemsetD8_v2(self, address, value, nbytes):
        ctypes.memset(address, value, nbytes)

    def cuEventElapsedTime(self, milliseconds, begin, end):
        milliseconds._obj.value = 1.0

    cuMemcpyHtoD_v2 = cuMemcpyDtoH_v2 = lambda self, to, source, nbytes: ctypes.memmove(to, source, nbytes)
    cuEventCreate = cuEventRecord = cuEventSynchronize = lambda self, *arguments: None


def broken():
    raise OSError("no cuBLAS today")


class TooLarge:
    """gpu_cublas.CuPy where memory is short."""

    def product(self, case, sets):
        raise MemoryError("too large")

    update = product


def test_gpu_check(emulated, monkeypatch, tmp_path, capsys):
    """The script works on the emulated GPU, and its calculations are right for equal times."""
    emulated.c.poseidon_emulate(0, ALL_TILES, 1, 0)
    few = [Case("bfloat16", "float32", 20, 40, 60), Case("tf32", "weights", 3, 50, 20, momentum=0.5)]
    monkeypatch.setattr(gpu_check, "Driver", HostDriver)
    monkeypatch.setattr(gpu_check, "build", lambda *_: None)
    monkeypatch.setattr(gpu_check.outer_product, "Library",
                        lambda path, memory: _with_memory(emulated, memory))
    monkeypatch.setattr(gpu_check.outer_product, "cases", lambda: few)
    monkeypatch.setattr(gpu_check.outer_product, "random_case", lambda *_: few[0])
    monkeypatch.setattr(gpu_check, "LARGER", [])
    monkeypatch.setattr(gpu_check, "LARGEST", [Case("half", "half", 2, 300, 280)])
    monkeypatch.setattr(gpu_check, "TIMED", few)
    monkeypatch.setattr(gpu_check, "sanitize", lambda _: {"compute-sanitizer": "not installed"})
    monkeypatch.setattr(gpu_cublas, "Torch", broken)
    monkeypatch.setattr(gpu_cublas, "CuPy", TooLarge)
    monkeypatch.setattr(gpu_check.Clock, "BLOCKING_BYTES", 1000)

    gpu_check.main(["--json", str(tmp_path / "out.json"), "--seed", "1"])

    results = json.loads((tmp_path / "out.json").read_text())
    assert set(results["largest_error_of_bound"]) == {"bfloat16->float32", "tf32->weights"}
    assert all(0 < worst <= 1 for worst in results["largest_error_of_bound"].values())
    assert results["copy_bytes_per_s"] == pytest.approx(2 * 1000 / (1e-3 / 2))
    nbytes = 20 * (40 + 60) * 2 + 40 * 60 * 4, 3 * (50 + 20) * 4 + 50 * 20 * 4 * 2 * 2
    for row, size in zip(results["cases"], nbytes):
        assert row["seconds"] == pytest.approx(1e-3 / 20)
        roofline = size / results["copy_bytes_per_s"]
        assert row["fraction_of_roofline"] == pytest.approx(roofline / row["seconds"])
    out = capsys.readouterr().out
    assert "bfloat16   float32    20      40 x 60" in out
    assert "no cuBLAS today" in out
    assert [row["other_error"] for row in results["cases"]] == ["MemoryError: too large"] * 2
    assert set(results["cublas_errors"]) == set(outer_product.TYPES)
    assert results["sanitizer"] == {"compute-sanitizer": "not installed"}


def test_the_gpu_is_busy_while_calls_are_queued(monkeypatch):
    """Copies take a millisecond here, and queueing 20 calls 10: so 20 copies are needed, or some more."""
    driver, copies = HostDriver(), []
    monkeypatch.setattr(gpu_check.Clock, "BLOCKING_BYTES", 1000)
    driver.cuMemcpyDtoDAsync_v2 = lambda *arguments: copies.append(arguments)
    clock = gpu_check.Clock(driver)
    clock.measure(lambda i: time.sleep(5e-4))
    assert len(copies) - 1 >= clock.REPEATS * 20


def test_sanitizer_leaves_no_process(monkeypatch, tmp_path):
    """A tool that hangs is ended with all processes that it has started."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! >> {tmp_path}/started\nwait\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(gpu_check, "SANITIZER_SECONDS", 1)
    assert gpu_check.sanitize("library") == dict.fromkeys(("memcheck", "racecheck"), "took longer than 1 s")
    pids = (tmp_path / "started").read_text().split()
    assert len(pids) == 2
    for _ in range(1000):
        if not any(map(_runs, pids)):
            return
        time.sleep(0.01)
    raise AssertionError("a process is left")


def _runs(pid):
    """Returns whether a process exists and is not a zombie."""
    try:
        return pathlib.Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_sanitized_arrays_end_with_their_allocations(emulated, monkeypatch):
    emulated.c.poseidon_emulate(0, ALL_TILES, 1, 0)
    memory, sizes = outer_product.HostMemory(), []
    monkeypatch.setattr(memory, "allocate", lambda nbytes: sizes.append(nbytes) or memory.Block(nbytes))
    monkeypatch.setattr(gpu_check, "Driver", HostDriver)
    monkeypatch.setattr(gpu_check.outer_product, "Library", lambda *_: _with_memory(emulated, memory))
    monkeypatch.setattr(gpu_check, "SANITIZED", [Case("half", "half", 3, 5, 7, offset=2)])
    monkeypatch.setattr(outer_product.Buffer, "GUARD", outer_product.Buffer.GUARD)  # to be reset
    gpu_check.main(["--sanitized", "library"])
    assert sizes == [2 * (2 + size) for size in (15, 21, 35)] * 2


def _with_memory(library, memory):
    with_memory = copy.copy(library)
    with_memory.memory = memory
    return with_memory


# Products of 6 pairs of types, with what was there and without, and updates by factors of 4, with velocity and without.
# Those of 16-bit factors also for Hopper; other GPUs have stubs of these.
PROGRAMS = 6 * 2 + 4 * 2 + 4 * 2 + 2 * 2


@pytest.mark.skipif(gpu_check.find_nvcc() is None and not os.environ.get("CI"), reason="nvcc is not installed")
def test_compiles_without_local_memory(tmp_path):
    """For all supported GPUs, without TensorFlow's headers. Sums are registers: none spilled, and none indexed."""
    report = gpu_check.build(tmp_path / "object.o", "-c", "-MMD", "-MF", tmp_path / "dependencies")
    usage = gpu_check.resources(report)
    gpus = runpy.run_path(str(ROOT / "kernels" / "cuda" / "nvcc_flags.py"))["GPUS"]
    assert collections.Counter(row.gpu for row in usage) == {f"sm_{gpu}": PROGRAMS for gpu in gpus}
    assert [row for row in usage if row.stack_bytes or row.spilled_bytes] == []
    assert "tensorflow" not in (tmp_path / "dependencies").read_text()
