"""What the GPUs' driver says, through its own library, which is wherever there are GPUs.

Tests: tests/unit/test_gpus.py.
"""

from collections.abc import Callable
import ctypes
import functools
import subprocess
import sys
from typing import Any

_HANDLE_BYTES, _UUID_BYTES = 64, 16
_PINNED_BYTES = 48 << 20  # what a rank takes by default
_ANSWER_S = 60.0  # longest time for another process to answer


class Handle(ctypes.Structure):
    """By which another process opens memory of a GPU."""

    _fields_ = [("bytes", ctypes.c_ubyte * _HANDLE_BYTES)]


class Driver:
    """The driver of this machine's GPUs, of which it counts those that CUDA_VISIBLE_DEVICES leaves to this process.

    Args:
        library: That of its C interface.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def version(self) -> tuple[int, int]:
        """Returns the newest CUDA that it supports, major and minor."""
        version = self._number("cuDriverGetVersion")
        return version // 1000, version % 1000 // 10

    def count(self) -> int:
        """Returns the number of GPUs."""
        self._call("cuInit", 0)
        return self._number("cuDeviceGetCount")

    def uuid(self, number: int) -> bytes:
        """Returns what identifies a GPU, or a part of one that MIG has cut, on whatever machine."""
        uuid = ctypes.create_string_buffer(_UUID_BYTES)
        self._call("cuDeviceGetUuid_v2", uuid, self._device(number))
        return uuid.raw

    def memory_bytes(self, number: int) -> int:
        """Returns the memory of a GPU."""
        total = ctypes.c_size_t()
        self._call("cuDeviceTotalMem_v2", ctypes.byref(total), self._device(number))
        return total.value

    def reaches(self, number: int, other: int) -> bool:
        """Whether a GPU reads and writes the memory of another one itself."""
        return bool(self._number("cuDeviceCanAccessPeer", self._device(number), self._device(other)))

    def pin(self) -> None:
        """Pins as much memory of the host as a rank does by default, and frees it.

        Raises:
            OSError: If that is not allowed.
        """
        self._use()
        data = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(data), ctypes.c_size_t(_PINNED_BYTES), 0)
        self._call("cuMemFreeHost", data)

    def share(self, open_elsewhere: Callable[[bytes], str] | None = None) -> str:
        """Lets another process open memory of the first GPU, as ranks do; returns why it cannot, or nothing.

        Args:
            open_elsewhere: Opens a handle in another process, and returns what that says; None for a new process.
        """
        self._use()
        data, handle = ctypes.c_uint64(), Handle()
        self._call("cuMemAlloc_v2", ctypes.byref(data), ctypes.c_size_t(1 << 20))
        try:
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), data)
            return (open_elsewhere or _opened_elsewhere)(bytes(handle.bytes))
        except OSError as error:
            return str(error)
        finally:
            self._call("cuMemFree_v2", data)

    def open(self, handle: bytes) -> None:
        """Opens memory that another process shares, and closes it.

        Raises:
            OSError: If that is not allowed.
        """
        self._use()
        data = ctypes.c_uint64()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(data), Handle.from_buffer_copy(handle), 1)
        self._call("cuIpcCloseMemHandle", data)

    def _device(self, number: int) -> ctypes.c_int:
        self._call("cuInit", 0)
        return ctypes.c_int(self._number("cuDeviceGet", number))

    def _use(self) -> None:
        """Makes the first GPU that of the calls that follow."""
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(0))
        self._call("cuCtxSetCurrent", context)

    def _number(self, name: str, *arguments: Any) -> int:
        """Returns the number that a function writes where its first argument says."""
        result = ctypes.c_int()
        self._call(name, ctypes.byref(result), *arguments)
        return result.value

    def _call(self, name: str, *arguments: Any) -> None:
        if error := getattr(self._library, name)(*arguments):
            raise OSError(f"{name} of the GPUs' driver fails with error {error}")


def _opened_elsewhere(handle: bytes) -> str:
    done = subprocess.run([sys.executable, __file__, handle.hex()], capture_output=True, text=True, timeout=_ANSWER_S)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


@functools.cache
def find() -> Driver | None:
    """Returns the driver, None where there is none."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return None


if __name__ == "__main__":  # the other process of `Driver.share`
    if (driver := find()) is None:
        sys.exit("there is no driver")
    driver.open(bytes.fromhex(sys.argv[1]))
