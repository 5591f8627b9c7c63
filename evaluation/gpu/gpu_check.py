"""Builds the CUDA kernels, tests them against their error bounds on this machine's GPU, and measures them.

    python scripts/gpu_check.py --json out.json

Needs nvcc, a GPU and NumPy, but neither TensorFlow nor tf_poseidon; that is why it uses argparse and
prints plain tables. With PyTorch or CuPy, cuBLAS is measured beside the kernels; with
compute-sanitizer, some cases are checked for invalid accesses and races. It should take less than 5
minutes.

The roofline of a case is the larger of two times: its bytes at the speed of copying memory, and its
operations at the speed of cuBLAS on large square factors of the type. Both speeds are measured here.
"""

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import re
import runpy
import shutil
import signal
import subprocess
import tempfile

import numpy as np

from evaluation import modules
from evaluation.gpu import gpu_outer_product as outer_product
from evaluation.gpu.gpu_cublas import describe
from evaluation.gpu.gpu_cublas import find_cublas
from evaluation.gpu.gpu_device import Clock
from evaluation.gpu.gpu_device import DeviceMemory
from evaluation.gpu.gpu_device import Driver
from evaluation.gpu.gpu_outer_product import Case

SOURCE = modules.ROOT / "kernels" / "cuda" / "outer_product.cu.cc"
NVCC_FLAGS = [*runpy.run_path(str(SOURCE.with_name("nvcc_flags.py")))["FLAGS"], "--threads", "0",
              "-Werror", "all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror", "-Xptxas", "-v"]


def find_nvcc():
    """Returns the path of nvcc, in CUDA_HOME if that is set, or None."""
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=home and os.path.join(home, "bin"))


def build(output, *options):
    """Compiles the kernels and returns the output of nvcc."""
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


# Too slow for the emulation.
LARGER = [Case(factors, out, *shape) for factors, out in outer_product.ALL_TYPES
          for shape in ((64, 2048, 2048), (257, 1030, 2051), (4096, 300, 520), (1, 5000, 3000))] + [
    Case(factors, "weights", k, 2000, n, 0.25, momentum=momentum, nesterov=momentum is not None)
    for factors in outer_product.TYPES for k, n in ((64, 2048), (33, 1999)) for momentum in (None, 0.5)]

# Results of more than 2^31 elements.
LARGEST = [Case("float32", "float32", 33, 70_001, 33_333),
           Case("bfloat16", "bfloat16", 33, 70_016, 33_344)]


def check_all(library, seed):
    """Checks the table, the larger cases and random ones on the GPU; returns the largest error of each kind."""
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


# The cases for compute-sanitizer, which slows kernels down: each program, with and without vectors.
SANITIZED = [Case(factors, out, 40, 130, n, beta=beta)
             for factors, out in outer_product.ALL_TYPES for n, beta in ((264, 0.0), (257, 1.0))] + [
    Case(factors, "weights", 40, 130, n, momentum=momentum)
    for factors in outer_product.TYPES for n, momentum in ((264, None), (257, 0.5))]


SANITIZER_SECONDS = 60  # for each of its tools


def sanitize(path):
    """Returns for each tool of compute-sanitizer "passed", why it did not run, or its complaint."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return {"compute-sanitizer": "not installed"}
    outcome = {}
    for tool in "memcheck", "racecheck":
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9",
                   *modules.command("gpu.gpu_check"), "--sanitized", str(path)]
        # In its own session, so that all the processes it starts can be ended: none may remain on the GPU.
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
    """Returns the minimum number of bytes that a case reads and writes."""
    factors = case.k * (case.m + case.n) * np.dtype(outer_product.TYPES[case.factors][1]).itemsize
    if case.out == "weights":
        return factors + case.m * case.n * 4 * 2 * (1 if case.momentum is None else 2)
    itemsize = np.dtype(outer_product.TYPES[case.out][1]).itemsize
    return factors + case.m * case.n * itemsize * (2 if case.beta else 1)


def measure_rates(clock, cublas):
    """Returns bytes/s of a copy, and operations/s and errors of cuBLAS on large square factors, by type."""
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
    # Enough sets of arrays that each has left the L2 cache when its turn comes again.
    sets = min(20, 1 + 3 * library.memory.driver.l2_bytes // min_bytes(case))
    data = [device_arrays(library.memory, case) for _ in range(sets)]
    seconds, quartiles = clock.measure(
        lambda i: library.call(case, *(block.address for block in data[i % sets])))  # noqa: F821
    del data
    row = {**dataclasses.asdict(case), "seconds": seconds, "quartiles": quartiles,
           "bytes_per_s": min_bytes(case) / seconds}
    operations = 2 * case.k * case.m * case.n
    row["operations_per_s"] = operations / seconds
    # Where no rate was measured, the bytes alone count: the fraction is too low if operations take longer.
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


# Titles and widths of the columns of measured cases; fixed, since each row is printed before the next is known.
COLUMNS = (("factors", 8), ("out", 8), ("K", 4), ("M x N", 11), ("momentum", 8), ("us", 8), ("GB/s", 5),
           ("TFLOP/s", 7), ("of roofline", 11), ("PyTorch/CuPy us", 15), ("speedup", 7))


def print_cells(cells):
    """Prints a line of the measured cases; further cells follow without padding."""
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
    parser.add_argument("--seed", type=int, help="of the random inputs; by default a different one in every run")
    parser.add_argument("--sanitized", type=pathlib.Path, help=argparse.SUPPRESS)  # see sanitize()
    options = parser.parse_args(arguments)
    if options.sanitized:
        outer_product.Buffer.GUARD = 0  # so that an access just outside an array is detected
        library = outer_product.Library(options.sanitized, DeviceMemory(Driver()))
        for case in SANITIZED:
            outer_product.check(library, case, np.random.default_rng(0))
        return

    driver = Driver()
    seed = options.seed if options.seed is not None else np.random.SeedSequence().entropy % 2 ** 32
    print(f"{driver.name}, {driver.multiprocessors} multiprocessors; seed {seed}", flush=True)
    results = {"gpu": driver.name, "seed": seed}

    def save(**more):
        """Writes the results so far, so that a later failure does not lose them."""
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
        # Last: it may use all of its time limit, and would share the GPU with the measurements.
        sanitized = sanitize(path)
    for tool, outcome in sanitized.items():
        print(f"{tool}: {outcome}")
    save(sanitizer=sanitized)
    if any(outcome not in ("passed", "not installed") for outcome in sanitized.values()):
        raise SystemExit("gpu_check: compute-sanitizer has not passed, see above.")


def measure_all(library, driver, save):
    """Measures all of TIMED; prints and saves every row as soon as it is measured."""
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
