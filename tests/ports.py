"""A port for a server that must be told its port before it binds it."""

from __future__ import annotations

import itertools
import os
import socket

_FIRST, _COUNT = 12_000, 16_000
_numbers = itertools.count(os.getpid() * 41)


def free_port() -> int:
    """A free port of loopback, outside the range from which systems draw for whoever asks for any port, and for connections (on Linux from
    32768): until it is bound nobody else gets it by chance, as the next best one might, however many tests run beside this one."""
    for number in itertools.islice(_numbers, _COUNT):
        port = _FIRST + number % _COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
