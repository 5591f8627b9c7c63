"""What the processes that a rank forks must not keep of it: connections whose end tells others that the rank has ended.

Imports nothing of this project, so any module may use it.

Tests: tests/unit/test_forks.py.
"""

from collections.abc import Iterable
import contextlib
import os


def keep_from_children(descriptors: Iterable[int]) -> None:
    """Closes connections in all children of this process, those that it forks and those that run another program.

    Args:
        descriptors: Their file descriptors. This process may close them, and have other files by the same numbers.
    """
    inodes = {descriptor: os.fstat(descriptor).st_ino for descriptor in descriptors}

    def close() -> None:
        for descriptor, inode in inodes.items():
            with contextlib.suppress(OSError):  # closed before
                if os.fstat(descriptor).st_ino == inode:
                    os.close(descriptor)

    for descriptor in inodes:
        os.set_inheritable(descriptor, False)
    os.register_at_fork(after_in_child=close)
