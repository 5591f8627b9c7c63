"""What the GPUs' driver says, through its own library, which is wherever there are GPUs.

Tests: tests/unit/test_gpus.py.
"""

import ctypes
import functools
from typing import Any

_UUID_BYTES = 16


class Driver:
    """The driver of this machine's GPUs, of which it counts those that CUDA_VISIBLE_DEVICES leaves to this process.

    Args:
        library: That of its C interface.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def version(self) -> tuple[int, int]:
        """Returns the newest CUDA that it supports, major and minor."""
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        return version.value // 1000, version.value % 1000 // 10

    def uuid(self, number: int) -> bytes:
        """Returns what identifies a GPU, or a part of one that MIG has cut, on whatever machine."""
        device, uuid = ctypes.c_int(), ctypes.create_string_buffer(_UUID_BYTES)
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), number)
        self._call("cuDeviceGetUuid_v2", uuid, device)
        return uuid.raw

    def _call(self, name: str, *arguments: Any) -> None:
        if error := getattr(self._library, name)(*arguments):
            raise OSError(f"{name} of the GPUs' driver fails with error {error}")


@functools.cache
def find() -> Driver | None:
    """Returns the driver, None where there is none."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return None
