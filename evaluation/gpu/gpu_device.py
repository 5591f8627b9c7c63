"""The GPU of this machine without a CUDA toolkit: its driver, its memory, and a clock for its work.

For gpu_check.py; imports NumPy alone.
"""

import ctypes
import math
import statistics
import time

import numpy as np


class Driver:
    """The needed part of CUDA's driver API, whose library exists on every machine with a GPU."""

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
        # The context that CUDA's runtime, PyTorch and CuPy use.
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
    """Memory of the GPU, with the interface of gpu_outer_product.HostMemory."""

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

        Copies keep the GPU busy while the calls are queued, so that it never waits for this process: for
        twice the time that queueing took in a trial.
        """
        run(0)  # loading at the first call does not count
        queueing, copying, _ = self._repeat(run, launches, copies=1)  # also warms up
        copies = max(1, math.ceil(2 * queueing / copying))
        times = [self._repeat(run, launches, copies)[2] / launches for _ in range(self.REPEATS)]
        low, median, high = statistics.quantiles(times, n=4)
        return median, (low, high)

    def _repeat(self, run, launches, copies):
        """Returns the seconds that this process took to queue the calls, and the GPU's for copies and for calls."""
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


class Copies:
    """Measures copies between memory of the GPU and pinned memory of the host, by a stream for each direction."""
    REPEATS = 9
    BYTES = 256 << 20

    def __init__(self, driver):
        self._driver = driver
        memory = DeviceMemory(driver)
        self._device = [memory.allocate(self.BYTES) for _ in range(2)]
        self._host = [ctypes.c_void_p() for _ in range(2)]
        self._streams = [ctypes.c_void_p() for _ in range(2)]
        for host, stream in zip(self._host, self._streams):
            driver.call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(self.BYTES), 0)
            driver.call("cuStreamCreate", ctypes.byref(stream), 1)  # not synchronized with the default stream

    def measure(self, piece, directions):
        """Returns the median of the bytes/s of each of some directions, which run together.

        Args:
            piece: Bytes of a copy.
            directions: Names of directions: "down" and "up", or "within" the GPU.
        """
        rates = []
        for _ in range(self.REPEATS):
            begin = time.perf_counter()
            for offset in range(0, self.BYTES, piece):
                for direction in directions:
                    self._copy(direction, offset, min(piece, self.BYTES - offset))
            for stream in self._streams:
                self._driver.call("cuStreamSynchronize", stream)
            rates.append(self.BYTES / (time.perf_counter() - begin))
        return statistics.median(rates)

    def _copy(self, direction, offset, nbytes):
        number = 0 if direction == "down" else 1
        device = ctypes.c_uint64(self._device[number].address + offset)
        host = ctypes.c_void_p(self._host[number].value + offset)
        size, stream = ctypes.c_size_t(nbytes), self._streams[number]
        if direction == "down":
            self._driver.call("cuMemcpyDtoHAsync_v2", host, device, size, stream)
        elif direction == "within":
            other = ctypes.c_uint64(self._device[0].address + offset)
            self._driver.call("cuMemcpyDtoDAsync_v2", device, other, size, stream)
        else:
            self._driver.call("cuMemcpyHtoDAsync_v2", device, host, size, stream)
