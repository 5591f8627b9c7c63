"""A link between two network namespaces that delays packets, also where the kernel has no netem.

    sudo python delayed_link.py NAMESPACE INTERFACE OTHER_NAMESPACE OTHER_INTERFACE MICROSECONDS

Makes both interfaces, as TAP devices, prints "ready", and then carries each packet from one to the other, until its
standard input is closed. Imports nothing of this project: it is run by itself, with few modules.

Tests: tests/scripts/test_emulated_cluster.py.
"""

import collections
import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time

_CLONE_NEWNET = 0x40000000
# Of linux/if_tun.h. Packets come as TCP hands them over, up to 64 KiB, with a header that says how to split them.
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_LARGEST = 1 << 17


def _enter(namespace: str) -> None:
    with open(namespace) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def _tap(namespace: str, name: str) -> int:
    """Makes an interface in a namespace; returns the descriptor of what the kernel sends there."""
    _enter(f"/run/netns/{namespace}")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(tap, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return tap


def carry(taps: tuple[int, int], delay_s: float, until: int) -> None:
    """Carries packets between two TAP devices until the descriptor `until` has something to read, or is closed."""
    # When it arrives, where, and the packet; in this order, since the delay is constant.
    under_way: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready, _, _ = select.select([*taps, until], [], [], wait)
        if until in ready:
            return
        now = time.monotonic()
        for tap, other in (taps, taps[::-1]):
            with contextlib.suppress(BlockingIOError):
                while tap in ready:
                    under_way.append((now + delay_s, other, os.read(tap, _LARGEST)))
        while under_way and under_way[0][0] <= now:
            _, tap, packet = under_way.popleft()
            with contextlib.suppress(OSError):  # an interface that is down takes nothing
                os.write(tap, packet)


def main(namespace: str, name: str, other_namespace: str, other_name: str, microseconds: str) -> None:
    own = f"/proc/self/fd/{os.open('/proc/self/ns/net', os.O_RDONLY)}"
    taps = _tap(namespace, name), _tap(other_namespace, other_name)
    _enter(own)  # what is left in a namespace at the end of a job is ended
    print("ready", flush=True)
    carry(taps, 1e-6 * float(microseconds), sys.stdin.fileno())


if __name__ == "__main__":
    main(*sys.argv[1:])
