"""A network link that delays and loses packets: `python slow_link.py DEVICE NAMESPACE OTHER-DEVICE SECONDS LOSS`.

It carries packets between two TAP devices, of which the other is in another network namespace. The kernel's own
`tc netem` does the same, but many kernels are built without it.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x2, 0x1000
MAX_PACKET_BYTES = 2**16


def open_tap(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return descriptor


def enter_namespace(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(descriptor)


def main(device: str, namespace: str, other: str, seconds: float, loss: float) -> None:
    first = open_tap(device)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    enter_namespace(f"/run/netns/{namespace}")
    second = open_tap(other)
    enter_namespace(f"/proc/self/fd/{home}")  # or this process would count as one of the host's
    ends = {first: second, second: first}
    chance = random.Random(0)
    due: list[tuple[float, int, int, bytes]] = []
    number = 0
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        wait = None if not due else max(0.0, due[0][0] - time.monotonic())
        for end in select.select(list(ends), [], [], wait)[0]:
            packet = os.read(end, MAX_PACKET_BYTES)
            if chance.random() >= loss:
                number += 1
                heapq.heappush(due, (time.monotonic() + seconds, number, ends[end], packet))
        while due and due[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(due)
            os.write(end, packet)


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(float, sys.argv[4:]))
