"""cuBLAS through PyTorch or CuPy, whichever is installed; gpu_check.py measures it beside our kernels."""


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
        """Returns a function of i that computes the case on set i; None if the library has no such product."""
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
    """Returns a Torch, a CuPy or None; prints why a library cannot be used."""
    for kind in Torch, CuPy:
        try:
            return kind()
        except Exception as error:  # whatever is wrong with it, our kernels can still be measured
            print(f"no {kind.__name__}: {describe(error)}", flush=True)
    return None


def describe(error):
    """Returns an exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
