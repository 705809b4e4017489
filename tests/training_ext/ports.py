"""Ports for process groups of tests."""

import random
import socket


def free_ports(count: int = 1) -> int:
    """The first of `count` consecutive free ports, below those that the system gives to outgoing connections, which
    would take them between this look and their use."""
    for _ in range(1000):
        first = random.SystemRandom().randrange(15000, 32000)
        if all(map(_is_free, range(first, first + count))):
            return first
    raise RuntimeError(f"no {count} free ports in a row")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
