"""Memory that machine code runs in: written once, then executable and never written again."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence

from localrun.kernels_cpu.link import PAGE, Image


def _address(function: str) -> int:
    """Of a function of the C library. Raises OSError."""
    library = ctypes.CDLL("ucrtbase" if sys.platform == "win32" else None)
    try:
        return ctypes.cast(getattr(library, function), ctypes.c_void_p).value or 0
    except AttributeError:
        raise OSError(f"this system's C library has no {function}") from None


class CodeMemory:
    """Images of machine code, kept until this object goes. addresses: where each kernel begins."""

    def __init__(self, images: Sequence[Image]) -> None:
        """images: at least one. Raises OSError where the system gives no executable memory, or lacks a function that an image needs."""
        self.addresses: list[int] = []
        size = sum(-(-len(image.code) // PAGE) * PAGE for image in images)
        self._start = at = self._allocate(size)
        for image in images:
            ctypes.memmove(at, image.code, len(image.code))
            for offset in image.pointers:
                inside = int.from_bytes(image.code[offset : offset + 8], "little")
                ctypes.memmove(at + offset, (at + inside).to_bytes(8, "little"), 8)
            for name, offset in image.needs.items():
                ctypes.memmove(at + offset, _address(name).to_bytes(8, "little"), 8)
            self.addresses.append(at + image.entry)
            at += -(-len(image.code) // PAGE) * PAGE
        self._seal(size)

    if sys.platform == "win32":

        def _allocate(self, size: int) -> int:
            commit_and_reserve, read_write = 0x3000, 0x04
            kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
            kernel32.VirtualAlloc.restype = ctypes.c_void_p
            kernel32.VirtualAlloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_ulong, ctypes.c_ulong]
            start = kernel32.VirtualAlloc(None, size, commit_and_reserve, read_write)
            if not start:
                raise ctypes.WinError(ctypes.get_last_error())
            return int(start)

        def _seal(self, size: int) -> None:
            execute_read = 0x20
            kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
            kernel32.VirtualProtect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_ulong, ctypes.c_void_p]
            if not kernel32.VirtualProtect(self._start, size, execute_read, ctypes.byref(ctypes.c_ulong())):
                raise ctypes.WinError(ctypes.get_last_error())
            kernel32.FlushInstructionCache(ctypes.c_void_p(-1), ctypes.c_void_p(self._start), ctypes.c_size_t(size))

        def __del__(self) -> None:
            release = 0x8000
            ctypes.WinDLL("kernel32").VirtualFree(ctypes.c_void_p(self._start), ctypes.c_size_t(0), release)

    else:

        def _allocate(self, size: int) -> int:
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

        def _seal(self, size: int) -> None:
            """Linux makes the instruction cache see what was written when pages become executable; macOS wants to be told."""
            libc = ctypes.CDLL(None, use_errno=True)
            start, length = ctypes.c_void_p(self._start), ctypes.c_size_t(size)
            if libc.mprotect(start, length, mmap.PROT_READ | mmap.PROT_EXEC):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            if sys.platform == "darwin":
                libc.sys_icache_invalidate(start, length)
