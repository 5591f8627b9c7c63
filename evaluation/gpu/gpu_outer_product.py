"""What is expected of kernels/cuda/outer_product.h: cases, inputs, results and error bounds.

tests/gpu/test_cuda_kernels.py checks an emulated GPU against it, and gpu_check.py a real one. It imports only NumPy, so
that it runs where TensorFlow is not installed.
"""

import ctypes
import dataclasses
import itertools

import numpy as np

# By type: its number in the interface, the NumPy type that stores it, and the bits of its significand,
# including the leading one.
TYPES = {"float32": (0, np.float32, 24), "bfloat16": (1, np.uint16, 8), "half": (2, np.float16, 11),
         "tf32": (3, np.float32, 11)}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. `out` is a type, or "weights" for an update, whose learning rate is alpha.

    Pointers miss alignment to 256 bytes by `offset` elements, the velocity's by a quarter of that.
    If `momentum` is None, there is no velocity.
    """
    factors: str
    out: str
    k: int
    m: int
    n: int
    alpha: float = 1.0
    beta: float = 0.0
    momentum: float | None = None
    nesterov: bool = False
    offset: int = 0

    def __str__(self):
        fields = dataclasses.fields(self)
        rest = [f"{f.name}={value}" for f in fields[5:]
                if (value := getattr(self, f.name)) != f.default]
        return " ".join([f"{self.factors}->{self.out} {self.k}x{self.m}x{self.n}", *rest])


ALL_TYPES = (("float32", "float32"), ("tf32", "float32"), ("bfloat16", "float32"), ("half", "float32"),
             ("bfloat16", "bfloat16"), ("half", "half"))
# (K, M, N): empty, one of each, odd numbers; just below, at and above a tile and its parts; tiles in more
# than one band.
SHAPES = ((0, 5, 7), (3, 0, 7), (3, 5, 0), (1, 1, 1), (1, 128, 256), (2, 127, 257), (5, 33, 40),
          (15, 129, 255), (16, 64, 64), (17, 40, 272), (31, 8, 513), (32, 136, 264), (33, 65, 63),
          (64, 1, 300), (65, 260, 1), (130, 24, 48), (48, 1200, 20), (200, 16, 8))


def cases():
    """Returns the table: every type with every shape, then the other options."""
    shapes = [Case(factors, out, *shape) for factors, out in ALL_TYPES for shape in SHAPES]
    scaled = [Case(factors, out, 9, 70, 80 + odd, alpha, beta, offset=offset)
              for (factors, out), odd in itertools.product(ALL_TYPES, (0, 1))
              for alpha, beta, offset in ((-0.5, 1.0, 0), (2.0, -0.25, 1), (0.0, 0.5, 0), (0.0, 0.0, 3),
                                          (1.0, 0.0, 2))]
    updates = [Case(factors, "weights", k, m, n, 0.25, momentum=momentum, nesterov=nesterov, offset=offset)
               for factors in TYPES
               for k, m, n, offset in ((1, 130, 260, 0), (40, 70, 77, 0), (3, 128, 256, 1),
                                       (2, 128, 256, 4), (0, 9, 8, 0))
               for momentum, nesterov in ((None, False), (0.5, False), (0.5, True), (0.0, False))]
    return [*shapes, *scaled, *updates]


def random_case(rng, largest_k, largest):
    """Returns a case; its sizes are often multiples of a power of two, for all ways to copy."""
    def size(limit):
        unit = 2 ** rng.integers(0, 5)
        return int(rng.integers(0, limit // unit + 1) * unit)

    factors = rng.choice(list(TYPES))
    out = rng.choice(sorted({"float32", "weights", factors} - {"tf32"}))
    momentum = rng.choice([None, 0.5]) if out == "weights" else None
    return Case(str(factors), str(out), size(largest_k), size(largest), size(largest),
                alpha=float(rng.choice([0.0, 0.5, 1.0, -2.0])),
                beta=0.0 if out == "weights" else float(rng.choice([0.0, 1.0])),
                momentum=momentum, nesterov=bool(momentum and rng.integers(2)),
                offset=int(rng.choice([0, 0, 1, 2, 4])))


def encode(values, dtype):
    """Returns float values rounded to a type of the interface, in the NumPy type that stores it."""
    if dtype != "bfloat16":
        return np.asarray(values, TYPES[dtype][1])
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def decode(stored, dtype):
    """Returns what `encode` has stored as float64."""
    if dtype == "bfloat16":
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float64)


def make_inputs(case, rng, whole):
    """Returns stored U and V, and the results before the call: NaN if they should not be read.

    The numbers are small integers, so that all sums are exact, or normally distributed.
    """
    def draw(rows, columns, dtype):
        shape = rows, columns
        return encode(rng.integers(-3, 4, shape) if whole else rng.standard_normal(shape), dtype)

    size = case.m, case.n
    if case.out == "weights":
        old = [draw(*size, "float32") for _ in range(1 if case.momentum is None else 2)]
    else:
        old = [draw(*size, case.out) if case.beta else encode(np.full(size, np.nan), case.out)]
    return draw(case.k, case.m, case.factors), draw(case.k, case.n, case.factors), old


def expect(case, u, v, old):
    """Returns the exact results in float64, and how far each element may be off.

    Args:
        case: the call.
        u, v: stored factors [K, M] and [K, N], or only the needed columns.
        old: the stored results before the call: `out` [M, N], or the weights and, with momentum, the velocity.

    The bounds follow from rounding. The relative error is at most 2^-23 of the sum of the absolute products
    for each addition in a sum of K products (twice float32's unit roundoff, since tensor cores need not
    round to nearest), 2^-11 for each factor in TF32, 2^-24 for each operation on the sum, and the unit
    roundoff of the stored type for the result.
    """
    u, v = decode(u, case.factors), decode(v, case.factors)
    scale = case.alpha
    product, absolute = scale * (u.T @ v), abs(scale) * (abs(u).T @ abs(v))
    off = (case.k + 8) * 2.0 ** -23 * absolute
    if case.factors == "tf32":
        off += 2.0 ** -9.9 * absolute

    if case.out != "weights":
        before = case.beta * decode(old[0], case.out) if case.beta else 0.0
        exact = product + before
        off = off + 2.0 ** -22 * (absolute + abs(before))
        return [(exact, off + 2.0 ** -TYPES[case.out][2] * (abs(exact) + off) + 1e-7)]

    weights, momentum = decode(old[0], "float32"), case.momentum or 0.0
    velocity = decode(old[1], "float32") if len(old) > 1 else 0.0
    step = momentum * velocity - product
    off = off + 2.0 ** -22 * (absolute + abs(momentum * velocity))
    change = momentum * step - product if case.nesterov else step
    off_change = (1 + momentum) * off
    exact = weights + change
    results = [(exact, off_change + 2.0 ** -22 * (abs(weights) + abs(change) + off_change) + 1e-30)]
    return results + [(step, off + 1e-30)] if len(old) > 1 else results


def check(library, case, rng):
    """Runs a case twice, with numbers whose sums are exact and with others.

    Returns:
        The largest error, as a share of its bound.

    Raises:
        AssertionError: a result is wrong, or memory outside it was written.
    """
    return max(_check(library, case, rng, whole=True), _check(library, case, rng, whole=False))


def _check(library, case, rng, whole):
    u, v, old = make_inputs(case, rng, whole)
    factors = [Buffer(library.memory, stored, case.offset) for stored in (u, v)]
    results = [Buffer(library.memory, stored, offset)
               for stored, offset in zip(old, (case.offset, case.offset // 4))]
    library.call(case, *(buffer.address for buffer in (*factors, *results)))
    for name, buffer, stored in zip("UV", factors, (u, v)):
        assert np.array_equal(buffer.read(), stored), f"{case}: {name} was written"
    return max(compare(case, buffer.read(), exact, bound, whole)
               for buffer, (exact, bound) in zip(results, expect(case, u, v, old)))


def exact_cases():
    """Returns calls with chosen factors, and the exact results that they must give: (case, u, v, result)."""
    return [*(_nan_and_infinity(factors) for factors in TYPES), _nearest_tf32()]


def _nan_and_infinity(factors):
    """Infinities and NaN must survive, also NaN with all fraction bits set, as GPUs make it.

    Rounding to TF32 by an addition to the bits would turn such a NaN into 0.
    """
    v = encode(np.ones((1, 4)), factors)
    u = encode([[0, 0, np.inf, -np.inf]], factors)
    bits = u.itemsize * 8
    u.view(f"uint{bits}")[0, :2] = 2 ** (bits - 1) - 1, 2 ** bits - 1
    result = np.repeat(np.array([[np.nan], [np.nan], [np.inf], [-np.inf]], np.float32), 4, axis=1)
    return Case(factors, "float32", 1, 4, 4), u, v, result


def _nearest_tf32():
    """Factors that are not TF32 numbers, and not halfway between two TF32 numbers.

    Rounded to nearest, they have 11 bits, so that the products are exact in float32. The first of
    each factor is 1: multiplied by it, the rounding of each number of the other factor shows in the result.
    """
    rng = np.random.default_rng(0)
    factors, rounded = [], []
    for size in (150, 300):
        fraction = 1024 + rng.integers(0, 1024, size)
        rest = rng.choice([0.0, 2 ** -13, 0.25, 0.5 - 2 ** -13, 0.5 + 2 ** -13, 0.75, 1 - 2 ** -13], size)
        scale = rng.choice([-1.0, 1.0], size) * 2.0 ** rng.integers(-30, 10, size)
        fraction[0], rest[0], scale[0] = 1024, 0, 2.0 ** -10
        fraction[1], rest[1] = 2047, 1 - 2 ** -13  # rounded to the next power of two
        factors.append(encode([(fraction + rest) * scale], "tf32"))
        rounded.append((fraction + (rest > 0.5)) * scale)
    u, v = factors
    return Case("tf32", "float32", 1, 150, 300), u, v, np.outer(*rounded).astype(np.float32)


def check_exact(library, case, u, v, result):
    """Runs one of exact_cases().

    Raises:
        AssertionError: the result differs.
    """
    out = np.full(result.shape, np.nan, result.dtype)
    buffers = [Buffer(library.memory, stored) for stored in (u, v, out)]
    library.call(case, *(buffer.address for buffer in buffers))
    np.testing.assert_array_equal(buffers[2].read(), result, err_msg=str(case))


def compare(case, found, exact, bound, whole=False):
    """Returns the largest error of stored results as a share of its bound; if `whole`, it must be 0.

    Raises:
        AssertionError: a result is wrong; says in which rows and columns.
    """
    dtype = "float32" if case.out == "weights" else case.out
    found = decode(found, dtype)
    if whole:
        exact, bound = decode(encode(exact, dtype), dtype), np.zeros_like(exact)
    error = abs(found - exact)
    rows, columns = np.nonzero(~(error <= bound))  # NaN is wrong
    assert not rows.size, (f"{case}: {rows.size} elements exceed the error bound, in rows "
                           f"{rows.min()}-{rows.max()} and columns {columns.min()}-{columns.max()}")
    return 0.0 if whole else float((error / bound).max(initial=0.0))


class Buffer:
    """An array in the library's memory, between guard zones of NaN.

    With a GUARD of 0 the array ends at the end of its allocation, for tools that watch allocations.
    """
    GUARD = 1 << 12  # bytes

    def __init__(self, memory, stored, offset=0):
        self._memory, self._like = memory, stored
        self._before = self.GUARD + offset * stored.itemsize
        self._all = np.full(self._before + stored.nbytes + self.GUARD, 0xff, np.uint8)
        self._all[self._before:self._before + stored.nbytes] = stored.reshape(-1).view(np.uint8)
        self._base = self._memory.allocate(self._all.nbytes)
        self._memory.write(self._base, self._all)
        self.address = self._base.address + self._before

    def read(self):
        """Returns the array.

        Raises:
            AssertionError: a guard zone was written.
        """
        found = self._memory.read(self._base, self._all.nbytes)
        end = self._before + self._like.nbytes
        assert (found[:self._before] == 0xff).all(), "written before the first element"
        assert (found[end:] == 0xff).all(), "written after the last element"
        return found[self._before:end].view(self._like.dtype).reshape(self._like.shape)


class HostMemory:
    """Memory of this process, for the emulated GPU."""

    class Block:
        def __init__(self, nbytes):
            self.array = np.empty(nbytes + 256, np.uint8)
            self.address = -(-self.array.ctypes.data // 256) * 256

    def allocate(self, nbytes):
        return self.Block(nbytes)

    def write(self, block, array):
        ctypes.memmove(block.address, array.ctypes.data, array.nbytes)

    def read(self, block, nbytes):
        found = np.empty(nbytes, np.uint8)
        ctypes.memmove(found.ctypes.data, block.address, nbytes)
        return found


class Factors(ctypes.Structure):
    """PoseidonFactors."""
    _fields_ = [("type", ctypes.c_int), ("u", ctypes.c_void_p), ("v", ctypes.c_void_p),
                ("k", ctypes.c_int64), ("m", ctypes.c_int64), ("n", ctypes.c_int64)]


class Refused(Exception):
    """The library returned an error."""


class Library:
    """kernels/cuda/outer_product.h, and the memory that its pointers point to."""

    def __init__(self, path, memory):
        self.memory = memory
        self.c = ctypes.CDLL(str(path))
        pointer, number = ctypes.c_void_p, ctypes.c_float
        self.c.poseidon_outer_product.argtypes = [
            pointer, ctypes.POINTER(Factors), number, number, pointer, ctypes.c_int]
        self.c.poseidon_outer_product_update.argtypes = [
            pointer, ctypes.POINTER(Factors), number, number, ctypes.c_bool, pointer, pointer]
        self.c.poseidon_cuda_error.restype = ctypes.c_char_p

    def call(self, case, u, v, result, velocity=None, stream=None):
        """Runs a case on addresses.

        Raises:
            Refused: with the library's description of the error.
        """
        factors = Factors(TYPES[case.factors][0], u, v, case.k, case.m, case.n)
        if case.out == "weights":
            error = self.c.poseidon_outer_product_update(
                stream, factors, case.alpha, case.momentum or 0.0, case.nesterov, velocity, result)
        else:
            error = self.c.poseidon_outer_product(
                stream, factors, case.alpha, case.beta, result, TYPES[case.out][0])
        if error:
            raise Refused(f"{case}: {self.c.poseidon_cuda_error(error).decode()}")
