"""From an object file to an image: bytes that run wherever they are put.

Kernels are compiled as position-independent ELF on every system (the calling convention is still the system's), so linking one is laying
its sections one behind the other and writing distances between them. Calls of the C library go through stubs whose addresses whoever loads
the image fills in, as well as those in tables of addresses. What a kernel must not have: data that is written.

ELF: the System V ABI. Relocations: its supplements for x86-64 (B the base, S a symbol, A the addend, P the place: S + A - P) and for
Arm's 64-bit architecture (Page(S + A) - Page(P) in adrp, the low twelve bits of S + A in what follows it).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

PAGE = 4096
"""An image begins at a multiple of it: adrp counts in such pages."""
X86_64, AARCH64 = 62, 183
SYMBOLS, RELOCATIONS, NO_BITS = 2, 4, 8
WRITE, ALLOCATE = 1, 2
UNWIND = ".eh_frame"
"""Section for those who walk through stack frames; no kernel throws."""
TABLES = ".data.rel.ro"
"""Section of constants that hold addresses: written by whoever loads it, and never again."""

# x86-64
ADDRESS, PC32, PLT32, PC64 = 1, 2, 4, 24
# aarch64: an address, distances, adrp, add and loads or stores of 1 << n bytes with the low twelve bits, branches
ABS64, PREL64, PREL32, ADR_PAGE, ADD_LOW, JUMP, CALL = 257, 260, 261, 275, 277, 282, 283
ACCESS_LOW = {278: 0, 284: 1, 285: 2, 286: 3, 299: 4}

CALLS = ((X86_64, PLT32), (AARCH64, JUMP), (AARCH64, CALL))
STUBS = {
    X86_64: bytes.fromhex("ff2502000000") + bytes(2),
    AARCH64: bytes.fromhex("50000058") + bytes.fromhex("00021fd6"),
}
"""Jumps to the address in the eight bytes behind: `jmp *2(%rip)` and two bytes of nothing; `ldr x16, 8` and `br x16`."""


class LinkError(Exception):
    """`str(error)` says what the object file has that an image cannot have."""


@dataclass(frozen=True)
class _Section:
    name: str
    type: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int

    @property
    def placed(self) -> bool:
        """Whether it is part of the image."""
        return bool(self.flags & ALLOCATE) and self.name != UNWIND


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _sections(data: bytes) -> list[_Section]:
    table, size, count, names = struct.unpack_from("<40xQ10xHHH", data)
    rows = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    return [
        _Section(_text(data, rows[names][4] + row[0]), row[1], row[2], row[4], row[5], row[6], row[7], max(row[8], 1)) for row in rows
    ]


@dataclass(frozen=True)
class Image:
    """Machine code of one kernel, to be put at a multiple of PAGE."""

    code: bytes
    entry: int
    """Where the kernel begins."""
    pointers: list[int]
    """Where eight bytes say how far behind the beginning something lies, to which the image's address is to be added."""
    needs: dict[str, int]
    """Functions of the system's C library that it calls (processors without an instruction for it: fmaf, rintf), and where the eight bytes
    of each one's address are to be written."""


def image(data: bytes, entry: str) -> Image:
    """Links an ELF file of one kernel, x86-64 or aarch64, little-endian; `entry`: the kernel's name in it. Raises LinkError."""
    sections = _sections(data)
    machine = struct.unpack_from("<H", data, 18)[0]
    whole, start = bytearray(), dict[int, int]()
    for i, section in enumerate(sections):
        if section.placed:
            if section.flags & WRITE and section.size and section.name != TABLES:
                raise LinkError(f"has data that is written ({section.name})")
            whole += bytes(-len(whole) % section.alignment)
            start[i] = len(whole)
            whole += bytes(section.size) if section.type == NO_BITS else data[section.offset : section.offset + section.size]
    symbols, found = list[tuple[str, int, int]](), -1
    for section in (s for s in sections if s.type == SYMBOLS):
        for at in range(section.offset, section.offset + section.size, 24):
            name, _, _, place, value, _ = struct.unpack_from("<IBBHQQ", data, at)
            symbols.append((_text(data, sections[section.link].offset + name), place, value))
            if symbols[-1][0] == entry and place in start:
                found = start[place] + value
    if found < 0:
        raise LinkError(f"holds no function {entry}")
    needs: dict[str, int] = {}
    pointers: list[int] = []
    for section in (s for s in sections if s.type == RELOCATIONS and s.info in start):
        for at in range(section.offset, section.offset + section.size, 24):
            offset, info, addend = struct.unpack_from("<QQq", data, at)
            name, place, value = symbols[info >> 32]
            kind = info & 0xFFFFFFFF
            if place in start:
                target = start[place] + value
            elif (machine, kind) in CALLS and name:
                if name not in needs:
                    whole += bytes(-len(whole) % 16) + STUBS[machine] + bytes(8)
                    needs[name] = len(whole) - 8
                target = needs[name] - len(STUBS[machine])
            else:
                raise LinkError(f"needs {name or 'a section'} from outside")
            at_image = start[section.info] + offset
            if (machine, kind) in ((X86_64, ADDRESS), (AARCH64, ABS64)):
                struct.pack_into("<q", whole, at_image, target + addend)
                pointers.append(at_image)
            else:
                _relocate(whole, machine, kind, at_image, target + addend)
    return Image(bytes(whole), found, pointers, needs)


def _relocate(whole: bytearray, machine: int, kind: int, at: int, target: int) -> None:
    """Writes what a relocation asks for at `at`. Raises LinkError for one that would depend on where the image lies."""
    distance = target - at
    if (machine, kind) in ((X86_64, PC32), (X86_64, PLT32), (AARCH64, PREL32)):
        struct.pack_into("<i", whole, at, distance)
    elif (machine, kind) in ((X86_64, PC64), (AARCH64, PREL64)):
        struct.pack_into("<q", whole, at, distance)
    elif machine == AARCH64:
        word = struct.unpack_from("<I", whole, at)[0]
        if kind == ADR_PAGE:
            pages = target // PAGE - at // PAGE
            word |= (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5
        elif kind == ADD_LOW:
            word |= target % PAGE << 10
        elif kind in ACCESS_LOW:
            word |= target % PAGE >> ACCESS_LOW[kind] << 10
        elif kind in (JUMP, CALL):
            word |= distance >> 2 & 0x3FFFFFF
        else:
            raise LinkError(f"has a relocation of type {kind}")
        struct.pack_into("<I", whole, at, word)
    else:
        raise LinkError(f"has a relocation of type {kind}, machine {machine}")
