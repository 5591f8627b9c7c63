"""Builds the CUDA kernels, holds them to their bounds on the GPU of this machine, and measures them.

    python scripts/gpu_check.py --json out.json

Needs nvcc, a GPU and NumPy, but neither TensorFlow nor tf_poseidon; that is why the options are
argparse's and the table is plain text. With PyTorch or CuPy, cuBLAS is measured beside the kernels;
with compute-sanitizer, accesses and races of some cases are checked. Meant to take less than 5
minutes.

The roofline of a case is the larger of two times: its bytes at the speed of copying memory, and its
operations at the speed of cuBLAS on large square factors of the type. Both are measured here.
"""

import argparse
import collections
import ctypes
import dataclasses
import json
import math
import os
import pathlib
import re
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

import gpu_outer_product as outer_product
from gpu_outer_product import Case

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCE = ROOT / "kernels" / "cuda" / "outer_product.cu.cc"
NVCC_FLAGS = [*runpy.run_path(str(SOURCE.with_name("nvcc_flags.py")))["FLAGS"], "--threads", "0",
              "-Werror", "all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror", "-Xptxas", "-v"]


def find_nvcc():
    """Returns the path of nvcc, of CUDA_HOME if that is set, or None."""
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=home and os.path.join(home, "bin"))


def build(output, *options):
    """Compiles the kernels and returns what nvcc has said."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise SystemExit("gpu_check: no nvcc in PATH or in CUDA_HOME/bin, if CUDA_HOME is set; install the CUDA "
                         "toolkit.")
    done = subprocess.run([nvcc, *NVCC_FLAGS, *map(str, options), str(SOURCE), "-o", str(output)],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"gpu_check: nvcc failed:\n{done.stdout}")
    return done.stdout


Usage = collections.namedtuple("Usage", "kernel gpu registers stack_bytes spilled_bytes")


def resources(report):
    """Returns the Usage of every kernel in nvcc's report."""
    return [Usage(kernel, gpu, int(registers), int(stack), int(stores) + int(loads))
            for kernel, gpu, stack, stores, loads, registers in re.findall(
                r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes stack frame, "
                r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
                report, re.DOTALL)]


class Driver:
    """The part of CUDA's driver interface that is needed: its library is there wherever a GPU is."""

    def __init__(self):
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise SystemExit(
                "gpu_check: no libcuda.so.1; this machine has no driver for NVIDIA GPUs.") from None
        self.call("cuInit", 0)
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self._device = device.value
        context = ctypes.c_void_p()
        # The one that CUDA's runtime, PyTorch and CuPy use.
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, 256, device)
        self.name = name.value.decode()
        self.multiprocessors = self._attribute(16)
        self.l2_bytes = self._attribute(38)

    def _attribute(self, number):
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
        return value.value

    def call(self, name, *arguments):
        error = getattr(self._library, name)(*arguments)
        if error:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(error, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()}")


class DeviceMemory:
    """Memory of the GPU, as gpu_outer_product.HostMemory is of the host."""

    class Block:
        def __init__(self, driver, nbytes):
            self._driver, address = driver, ctypes.c_uint64()
            driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(nbytes, 1)))
            self.address = address.value

        def __del__(self):
            if hasattr(self, "address"):
                self._driver.call("cuMemFree_v2", ctypes.c_uint64(self.address))

    def __init__(self, driver):
        self.driver = driver

    def allocate(self, nbytes):
        return self.Block(self.driver, nbytes)

    def write(self, block, array):
        self.driver.call("cuMemcpyHtoD_v2", ctypes.c_uint64(block.address),
                         ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes))

    def read(self, block, nbytes, offset=0):
        found = np.empty(nbytes, np.uint8)
        self.driver.call("cuMemcpyDtoH_v2", ctypes.c_void_p(found.ctypes.data),
                         ctypes.c_uint64(block.address + offset), ctypes.c_size_t(nbytes))
        return found

    def fill(self, block, nbytes):
        """Fills a block with NaN."""
        self.driver.call("cuMemsetD8_v2", ctypes.c_uint64(block.address), ctypes.c_ubyte(0xff),
                         ctypes.c_size_t(nbytes))

    def put(self, array):
        """Returns a block that holds an array."""
        block = self.allocate(array.nbytes)
        self.write(block, np.ascontiguousarray(array))
        return block


class Clock:
    """Measures work on the default stream."""
    REPEATS = 9
    BLOCKING_BYTES = 2 << 30

    def __init__(self, driver):
        self._driver = driver
        self._blocks = [DeviceMemory(driver).allocate(self.BLOCKING_BYTES) for _ in range(2)]
        self._events = [ctypes.c_void_p() for _ in range(3)]
        for event in self._events:
            driver.call("cuEventCreate", ctypes.byref(event), 0)

    def copy(self):
        to, source = (ctypes.c_uint64(block.address) for block in self._blocks)
        self._driver.call("cuMemcpyDtoDAsync_v2", to, source, ctypes.c_size_t(self.BLOCKING_BYTES), None)

    def measure(self, run, launches=20):
        """Returns the median time of run(i) in seconds, and its quartiles.

        The GPU is kept busy with copies while the calls are put into its queue, so that it does not
        wait for this process: for twice the time that this took when it was tried.
        """
        run(0)  # what is loaded at the first call does not count
        queueing, copying, _ = self._repeat(run, launches, copies=1)  # also warms up
        copies = max(1, math.ceil(2 * queueing / copying))
        times = [self._repeat(run, launches, copies)[2] / launches for _ in range(self.REPEATS)]
        low, median, high = statistics.quantiles(times, n=4)
        return median, (low, high)

    def _repeat(self, run, launches, copies):
        """Returns the seconds of this process for queueing the calls, and of the GPU for copies and calls."""
        self._record(0)
        for _ in range(copies):
            self.copy()
        self._record(1)
        began = time.perf_counter()
        for i in range(launches):
            run(i)
        queueing = time.perf_counter() - began
        self._record(2)
        self._driver.call("cuEventSynchronize", self._events[2])
        return queueing, self._elapsed(0), self._elapsed(1)

    def _record(self, number):
        self._driver.call("cuEventRecord", self._events[number], None)

    def _elapsed(self, number):
        """Returns the seconds from one event to the next."""
        milliseconds = ctypes.c_float()
        self._driver.call("cuEventElapsedTime", ctypes.byref(milliseconds), *self._events[number:number + 2])
        return milliseconds.value / 1e3


class Torch:
    """cuBLAS, and updates, through PyTorch."""

    def __init__(self):
        import torch
        if not torch.cuda.is_available():
            raise ImportError("this PyTorch is for CPUs")
        self._torch = torch
        self._types = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16,
                       "half": torch.float16}

    def _draw(self, dtype, *shape):
        return self._torch.randn(*shape, device="cuda").to(self._types[dtype])

    def product(self, case, sets):
        """Returns a function of i that computes the case on set i; None if there is no such product."""
        if case.out not in ("weights", self._out(case)):
            return None
        self._torch.backends.cuda.matmul.allow_tf32 = case.factors == "tf32"
        data = [(self._draw(case.factors, case.k, case.m), self._draw(case.factors, case.k, case.n),
                 self._draw(self._out(case), case.m, case.n)) for _ in range(sets)]

        def run(i):
            u, v, out = data[i % sets]
            self._torch.matmul(u.t(), v, out=out)
            return out

        return run

    @staticmethod
    def _out(case):
        return "float32" if case.factors == "tf32" else case.factors

    def update(self, case, sets):
        """Returns a function of i that computes the gradient on set i, and then updates the weights."""
        product = self.product(case, sets)
        arrays = 1 if case.momentum is None else 2
        data = [[self._draw("float32", case.m, case.n) for _ in range(arrays)] for _ in range(sets)]

        def run(i):
            gradient = product(i)
            weights, *velocity = data[i % sets]
            if velocity:
                velocity[0].mul_(case.momentum).add_(gradient, alpha=-case.alpha)
                weights.add_(velocity[0])
            else:
                weights.add_(gradient, alpha=-case.alpha)

        return run


class CuPy:
    """cuBLAS through CuPy, which has neither bfloat16 nor a way to choose TF32 for one call."""

    def __init__(self):
        import cupy
        self._cupy = cupy

    def product(self, case, sets):
        dtype = {"float32": "float32", "half": "float16"}.get(case.factors)
        if dtype is None or case.out != case.factors:
            return None
        data = [tuple(self._cupy.random.standard_normal(shape, "float32").astype(dtype) for shape in
                      ((case.k, case.m), (case.k, case.n), (case.m, case.n))) for _ in range(sets)]

        def run(i):
            u, v, out = data[i % sets]
            self._cupy.matmul(u.T, v, out=out)

        return run

    def update(self, case, sets):
        return None


def find_cublas():
    """Returns a Torch, a CuPy or None; says why it is not one of the first."""
    for kind in Torch, CuPy:
        try:
            return kind()
        except Exception as error:  # whatever is wrong with it, our kernels can be measured
            print(f"no {kind.__name__}: {describe(error)}", flush=True)
    return None


def describe(error):
    """Returns an exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# More than the emulation has time for.
LARGER = [Case(factors, out, *shape) for factors, out in outer_product.ALL_TYPES
          for shape in ((64, 2048, 2048), (257, 1030, 2051), (4096, 300, 520), (1, 5000, 3000))] + [
    Case(factors, "weights", k, 2000, n, 0.25, momentum=momentum, nesterov=momentum is not None)
    for factors in outer_product.TYPES for k, n in ((64, 2048), (33, 1999)) for momentum in (None, 0.5)]

# Results of more than 2^31 elements.
LARGEST = [Case("float32", "float32", 33, 70_001, 33_333),
           Case("bfloat16", "bfloat16", 33, 70_016, 33_344)]


def check_all(library, seed):
    """Holds the GPU to the table, the larger cases and random ones; returns the worst error of each kind."""
    rng = np.random.default_rng(seed)
    random = [outer_product.random_case(rng, 400, 1000) for _ in range(60)]
    worst = collections.defaultdict(float)
    for case in [*outer_product.cases(), *LARGER, *random]:
        kind = f"{case.factors}->{case.out}"
        worst[kind] = max(worst[kind], outer_product.check(library, case, rng))
    for exact in outer_product.exact_cases():
        outer_product.check_exact(library, *exact)
    for case in LARGEST:
        check_rows(library, case, rng)
    return worst


def check_rows(library, case, rng):
    """Checks some rows of a product that is too large to be checked whole."""
    u, v = (outer_product.encode(rng.standard_normal((case.k, size)), case.factors)
            for size in (case.m, case.n))
    row_bytes = case.n * np.dtype(outer_product.TYPES[case.out][1]).itemsize
    factors, out = [library.memory.put(x) for x in (u, v)], library.memory.allocate(case.m * row_bytes)
    library.memory.fill(out, case.m * row_bytes)
    library.call(case, *(block.address for block in factors), out.address)
    rows = np.unique([0, case.m - 1, *rng.integers(0, case.m, 30)])
    (exact, bound), = outer_product.expect(case, u[:, rows], v, [None])
    found = [library.memory.read(out, row_bytes, int(row) * row_bytes) for row in rows]
    outer_product.compare(case, np.stack(found).view(outer_product.TYPES[case.out][1]), exact, bound)


# What compute-sanitizer looks at, which makes kernels slow: each program, with and without vectors.
SANITIZED = [Case(factors, out, 40, 130, n, beta=beta)
             for factors, out in outer_product.ALL_TYPES for n, beta in ((264, 0.0), (257, 1.0))] + [
    Case(factors, "weights", 40, 130, n, momentum=momentum)
    for factors in outer_product.TYPES for n, momentum in ((264, None), (257, 0.5))]


SANITIZER_SECONDS = 60  # for each of its tools


def sanitize(path):
    """Returns for each tool of compute-sanitizer "passed", why it did not run, or what is wrong."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return {"compute-sanitizer": "not installed"}
    outcome = {}
    for tool in "memcheck", "racecheck":
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9",
                   sys.executable, __file__, "--sanitized", str(path)]
        # In a session of its own, so that all the processes it starts can be ended: none may stay on the GPU.
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              start_new_session=True) as process:
            try:
                said, _ = process.communicate(timeout=SANITIZER_SECONDS)
                outcome[tool] = "passed" if process.returncode == 0 else said[-2000:]
            except subprocess.TimeoutExpired:
                outcome[tool] = f"took longer than {SANITIZER_SECONDS} s"
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
    return outcome


TIMED = [Case(factors, out, k, size, size)
         for factors, out in (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("half", "half"),
                              ("tf32", "float32"))
         for size in (2048, 4096, 8192) for k in (1, 16, 64, 128, 256, 1024)] + [
    Case("float32", "float32", k, 4096, 4096) for k in (1, 16, 64, 256)] + [
    Case(factors, "float32", 64, 4096, 4097) for factors in ("bfloat16", "tf32")] + [
    Case(factors, "weights", k, size, size, 1e-3, momentum=momentum)
    for factors in ("bfloat16", "tf32") for size in (2048, 4096, 8192) for k in (16, 64, 256)
    for momentum in (None, 0.9)]


def min_bytes(case):
    """Returns how many bytes a case reads and writes at least."""
    factors = case.k * (case.m + case.n) * np.dtype(outer_product.TYPES[case.factors][1]).itemsize
    if case.out == "weights":
        return factors + case.m * case.n * 4 * 2 * (1 if case.momentum is None else 2)
    itemsize = np.dtype(outer_product.TYPES[case.out][1]).itemsize
    return factors + case.m * case.n * itemsize * (2 if case.beta else 1)


def measure_rates(clock, cublas):
    """Returns bytes/s of a copy, for each type operations/s of cuBLAS on large square factors, and its errors."""
    seconds, _ = clock.measure(lambda i: clock.copy(), launches=2)
    rates, errors = {}, {}
    for factors in outer_product.TYPES if cublas else ():
        case = Case(factors, "float32" if factors == "tf32" else factors, 8192, 8192, 8192)
        try:
            run = cublas.product(case, 1)
            if run:
                rates[factors] = 2 * 8192 ** 3 / clock.measure(run, launches=2)[0]
        except Exception as error:
            errors[factors] = describe(error)
    return 2 * clock.BLOCKING_BYTES / seconds, rates, errors


def measure_case(library, clock, cublas, case, copy_rate, rates):
    """Returns a row of the results."""
    # So many sets of arrays that none is in the second-level cache when its turn comes again.
    sets = min(20, 1 + 3 * library.memory.driver.l2_bytes // min_bytes(case))
    data = [device_arrays(library.memory, case) for _ in range(sets)]
    seconds, quartiles = clock.measure(
        lambda i: library.call(case, *(block.address for block in data[i % sets])))
    del data
    row = {**dataclasses.asdict(case), "seconds": seconds, "quartiles": quartiles,
           "bytes_per_s": min_bytes(case) / seconds}
    operations = 2 * case.k * case.m * case.n
    row["operations_per_s"] = operations / seconds
    # Where no rate was measured, of the bytes alone: too low a fraction if operations take longer.
    roofline = max(min_bytes(case) / copy_rate, operations / rates.get(case.factors, float("inf")))
    row["fraction_of_roofline"] = roofline / seconds
    try:
        other = cublas and (cublas.update if case.out == "weights" else cublas.product)(case, sets)
        if other:
            row["other_seconds"], row["other_quartiles"] = clock.measure(other)
            row["speedup"] = row["other_seconds"] / seconds
    except Exception as error:
        row["other_error"] = describe(error)
    return row


def device_arrays(memory, case):
    """Returns blocks of random factors and zero results."""
    rng = np.random.default_rng(0)
    factors = [memory.put(outer_product.encode(rng.standard_normal((case.k, size)), case.factors))
               for size in (case.m, case.n)]
    dtype = "float32" if case.out == "weights" else case.out
    results = [memory.put(np.zeros((case.m, case.n), outer_product.TYPES[dtype][1]))
               for _ in range(1 if case.momentum is None else 2)]
    return [*factors, *results]


def print_table(rows):
    """Prints lists of cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths)))


# Titles and widths of the columns of measured cases: a row is printed before the next is known.
COLUMNS = (("factors", 8), ("out", 8), ("K", 4), ("M x N", 11), ("momentum", 8), ("us", 8), ("GB/s", 5),
           ("TFLOP/s", 7), ("of roofline", 11), ("PyTorch/CuPy us", 15), ("speedup", 7))


def print_cells(cells):
    """Prints a line of the measured cases; what is beyond the columns follows as it is."""
    widths = [width for _, width in COLUMNS] + [0] * (len(cells) - len(COLUMNS))
    print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths)), flush=True)


def report(row):
    """Prints a row of measure_case."""
    other = ["", ""]
    if "speedup" in row:
        other = [f"{1e6 * row['other_seconds']:.1f}", f"{row['speedup']:.2f}"]
    elif "other_error" in row:
        other = ["", "", row["other_error"]]
    print_cells([row["factors"], row["out"], str(row["k"]), f"{row['m']} x {row['n']}",
                 "" if row["momentum"] is None else str(row["momentum"]), f"{1e6 * row['seconds']:.1f}",
                 f"{row['bytes_per_s'] / 1e9:.0f}", f"{row['operations_per_s'] / 1e12:.1f}",
                 f"{row['fraction_of_roofline']:.2f}", *other])


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=pathlib.Path, help="file for the results")
    parser.add_argument("--seed", type=int, help="of the random inputs; by default, other ones in every run")
    parser.add_argument("--sanitized", type=pathlib.Path, help=argparse.SUPPRESS)  # see sanitize()
    options = parser.parse_args(arguments)
    if options.sanitized:
        outer_product.Buffer.GUARD = 0  # so that an access just beside an array is seen
        library = outer_product.Library(options.sanitized, DeviceMemory(Driver()))
        for case in SANITIZED:
            outer_product.check(library, case, np.random.default_rng(0))
        return

    driver = Driver()
    seed = options.seed if options.seed is not None else np.random.SeedSequence().entropy % 2 ** 32
    print(f"{driver.name}, {driver.multiprocessors} multiprocessors; seed {seed}", flush=True)
    results = {"gpu": driver.name, "seed": seed}

    def save(**more):
        """Writes what there is so far: whatever happens later, it stays."""
        results.update(more)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))

    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory, "outer_product.so")
        build(path, "-shared")
        library = outer_product.Library(path, DeviceMemory(driver))
        worst = check_all(library, seed)
        print_table([["case", "largest error / bound"], *([k, f"{v:.3f}"] for k, v in worst.items())])
        save(largest_error_of_bound=worst)
        measure_all(library, driver, save)
        # Last: it takes as long as it is let, and would share the GPU with the measurements.
        sanitized = sanitize(path)
    for tool, outcome in sanitized.items():
        print(f"{tool}: {outcome}")
    save(sanitizer=sanitized)
    if any(outcome not in ("passed", "not installed") for outcome in sanitized.values()):
        raise SystemExit("gpu_check: compute-sanitizer has not passed, see above.")


def measure_all(library, driver, save):
    """Measures all of TIMED; prints and saves every row as soon as it is there."""
    clock, cublas = Clock(driver), find_cublas()
    copy_rate, rates, errors = measure_rates(clock, cublas)
    print(f"copy: {copy_rate / 1e9:.0f} GB/s",
          *(f"cuBLAS {factors}: {rate / 1e12:.0f} TFLOP/s" for factors, rate in rates.items()),
          *(f"cuBLAS {factors}: {error}" for factors, error in errors.items()), sep="; ", flush=True)
    rows = []
    save(copy_bytes_per_s=copy_rate, cublas_operations_per_s=rates, cublas_errors=errors, cases=rows)
    print_cells([title for title, _ in COLUMNS])
    for case in TIMED:
        rows.append(measure_case(library, clock, cublas, case, copy_rate, rates))
        report(rows[-1])
        save()


if __name__ == "__main__":
    main()
