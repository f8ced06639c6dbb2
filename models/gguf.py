"""Reads GGUF files: the header is checked and parsed once, tensor data stays in the mapped file.

    "GGUF" | version u32 | tensor count u64 | key count u64
    key count    x  name string | value type u32 | value          string = length u64 | bytes;  array = item type u32 | n u64 | items
    tensor count x  name string | n_dims u32 | dims u64... | ggml type u32 | offset u64
    padding to general.alignment (32 unless said)
    tensor data, each tensor beginning at its offset, padded to the alignment

Everything is little-endian. Layout: the GGUF specification of the ggml project; version 3 differs from 2 only in allowing big-endian files.
Nothing read from the file is believed: no count, length or offset is used before it has been compared with what is left of the file.
This module knows bytes, not meanings: what a key is for, which tensors a family needs and what tokens mean is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from localrun.kernels_cpu.formats import FORMATS
from localrun.models.errors import ModelFileError
from localrun.models.gguf_values import Array, Metadata

DEFAULT_ALIGNMENT = 32

MAX_HEADER = 128 << 20
"""Bytes of keys and tensor infos that are read at most. A vocabulary of 262,144 tokens takes about 10 MB."""
MAX_ARRAY = 1 << 22
"""Items of one array: fifteen times the largest vocabulary there is."""
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_KEY_BYTES = 65_535
MAX_NAME_BYTES = 64
MAX_DIMS = 4

# By GGUF value type id: its name and the struct code of one value.
_SCALARS: dict[int, tuple[str, str]] = {
    0: ("uint8", "B"),
    1: ("int8", "b"),
    2: ("uint16", "H"),
    3: ("int16", "h"),
    4: ("uint32", "I"),
    5: ("int32", "i"),
    6: ("float32", "f"),
    7: ("bool", "B"),
    10: ("uint64", "Q"),
    11: ("int64", "q"),
    12: ("float64", "d"),
}
_STRING = 8
_ARRAY = 9

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_PART_NAME = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)


def printable(text: str, limit: int = 80) -> str:
    """`text` from a file, fit for one line of an error message: control characters escaped, and cut after `limit` characters."""
    cut = text if len(text) <= limit else text[:limit] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode("ascii") for c in cut)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies and what it is.

    shape: in ggml's order, ne0 (the values of one row, consecutive in memory) first; a matrix that maps n values to m has shape (n, m).
    type: ggml type id, a key of kernels_cpu.formats.FORMATS. offset: bytes from the start of file number `file` (0 unless split).
    """

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    nbytes: int
    file: int


class _Part:
    """One file of a model: mapped, its header read from front to back with a cursor."""

    def __init__(self, path: Path, number: int, size: int | None = None) -> None:
        """size: of the whole file, when `path` holds only the beginning of it."""
        self.path = path
        self.number = number
        self.version = 0
        self.metadata = Metadata()
        self.value_types: dict[str, str] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._pos = 0
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else None
        except OSError as e:
            raise ModelFileError(path, "", f"cannot be opened: {e.strerror or e}") from e
        except ValueError as e:
            raise ModelFileError(path, "", f"cannot be mapped into memory: {e}") from e
        self._end = min(self.size, MAX_HEADER)
        if size is not None:
            self.size = size
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.map is not None:
            # A view of the data still held by someone keeps the mapping alive; it goes with the last view.
            with contextlib.suppress(BufferError):
                self.map.close()

    def fail(self, field: str, problem: str) -> ModelFileError:
        return ModelFileError(self.path, printable(field), problem)

    # ---- the cursor ----

    @property
    def _left(self) -> int:
        return self._end - self._pos

    def _truncated(self, field: str) -> ModelFileError:
        if self._end < self.size:
            return self.fail(field, f"the header runs past {MAX_HEADER >> 20} MiB, more than any model needs; the file is damaged")
        return self.fail(field, f"the file ends inside it, at byte {self.size}; it is incomplete or damaged, download it again")

    def _number(self, form: struct.Struct, field: str) -> int:
        if self._left < form.size:
            raise self._truncated(field)
        value: int = form.unpack_from(self._buffer, self._pos)[0]
        self._pos += form.size
        return value

    def _bytes(self, field: str, limit: int | None = None) -> bytes:
        length = self._number(_U64, field)
        if limit is not None and length > limit:
            raise self.fail(field, f"is {length} bytes long, at most {limit} are allowed")
        if length > self._left:
            raise self.fail(field, f"claims to be {length} bytes long, but {self._left} are left")
        start = self._pos
        self._pos += length
        return self._buffer[start : self._pos]

    def _name(self, field: str, limit: int) -> str:
        raw = self._bytes(field, limit)
        if not raw:
            raise self.fail(field, "is empty")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(field, f"is not UTF-8: {raw[:40]!r}") from None

    # ---- the header ----

    def _read(self) -> None:
        if self.map is None:
            raise self.fail("", "is empty (0 bytes); download it again")
        self._buffer = self.map
        magic = self.map[:4]
        if magic != b"GGUF":
            raise self.fail("magic", f"is {magic!r}, not b'GGUF'; this is no GGUF file")
        self._pos = 4
        self._check_version()
        n_tensors = self._number(_U64, "tensor count")
        n_keys = self._number(_U64, "key count")
        # The smallest tensor info and the smallest key-value pair that exist take this many bytes.
        self._check_count("tensor count", n_tensors, 8 + 1 + 4 + 4 + 8, MAX_TENSORS)
        self._check_count("key count", n_keys, 8 + 1 + 4 + 1, MAX_KEYS)
        for i in range(n_keys):
            self._read_key(i, n_keys)
        alignment = self._alignment()
        infos = [self._read_tensor_info(i, n_tensors) for i in range(n_tensors)]
        self._place_tensors(infos, alignment)
        del self._buffer  # `map` alone decides how long the file stays mapped

    def _check_version(self) -> None:
        version = self._number(_U32, "version")
        if version & 0xFFFF == 0 and version:
            raise self.fail("version", "the file is big-endian; only little-endian GGUF files are supported, convert it")
        if version not in (2, 3):
            raise self.fail("version", f"{version} is not supported, only 2 and 3 are; convert the model again with a current tool")
        self.version = version

    def _check_count(self, field: str, count: int, smallest: int, limit: int) -> None:
        if count * smallest > self.size - self._pos:
            raise self.fail(field, f"{count} cannot fit into a file of {self.size} bytes; the file is damaged")
        if count > limit:
            raise self.fail(field, f"{count} is more than the {limit} that are supported")

    def _read_key(self, i: int, n_keys: int) -> None:
        key = self._name(f"key {i + 1} of {n_keys}", MAX_KEY_BYTES)
        if key in self.metadata:
            raise self.fail(key, "the key appears twice")
        kind = self._number(_U32, key)
        if kind == _STRING:
            # A damaged description is no reason to refuse a model: what is not UTF-8 becomes U+FFFD.
            self.metadata.put(key, self._bytes(key).decode("utf-8", "replace"))
            self.value_types[key] = "string"
        elif kind == _ARRAY:
            self._read_array(key)
        elif kind in _SCALARS:
            name, code = _SCALARS[kind]
            value: int | float = self._number(struct.Struct("<" + code), key)
            if kind == 7:
                if value not in (0, 1):
                    raise self.fail(key, f"is a bool with the value {value}; only 0 and 1 are allowed")
                value = bool(value)
            self.metadata.put(key, value)
            self.value_types[key] = name
        else:
            raise self.fail(key, f"has the unknown value type {kind}")

    def _read_array(self, key: str) -> None:
        kind = self._number(_U32, key)
        n = self._number(_U64, key)
        if kind == _ARRAY:
            raise self.fail(key, "is an array of arrays, which is not supported")
        if kind != _STRING and kind not in _SCALARS:
            raise self.fail(key, f"is an array of the unknown value type {kind}")
        name, code = ("string", "") if kind == _STRING else _SCALARS[kind]
        smallest = 8 if kind == _STRING else struct.calcsize("<" + code)
        if n * smallest > self._left:
            raise self.fail(key, f"claims {n} items, which cannot fit into the {self._left} bytes that are left; the file is damaged")
        if n > MAX_ARRAY:
            raise self.fail(key, f"has {n} items, more than the {MAX_ARRAY} that are supported")
        start = self._pos
        self._pos = self._end_of_strings(key, n) if kind == _STRING else start + n * smallest
        array = Array(n, code, self._buffer[start : self._pos])
        if kind == 7:
            items = array.items()
            if any(item > 1 for item in items):
                raise self.fail(key, "is an array of bools with a value other than 0 and 1")
            self.metadata.put(key, [item == 1 for item in items])
        else:
            self.metadata.put(key, array)
        self.value_types[key] = f"array[{name}]"

    def _end_of_strings(self, key: str, n: int) -> int:
        """Where n strings end that begin here. The hot loop of the reader (a vocabulary is 100,000s of strings): plain local variables, one
        check a string.
        """
        buffer, end, pos = self._buffer, self._end, self._pos
        length_at = _U64.unpack_from
        i = 0
        try:
            for i in range(n):
                length = length_at(buffer, pos)[0]
                pos += 8 + length
                if pos > end:
                    raise self.fail(f"{key}[{i}]", f"claims to be {length} bytes long, but {end - pos + length} are left")
        except struct.error:
            raise self._truncated(f"{key}[{i}]") from None
        return pos

    def _alignment(self) -> int:
        key = "general.alignment"
        if key not in self.metadata:
            return DEFAULT_ALIGNMENT
        if self.value_types[key] != "uint32":
            raise self.fail(key, f"is of type {self.value_types[key]}, not uint32")
        alignment: int = self.metadata[key]
        if alignment < 8 or alignment & (alignment - 1):
            raise self.fail(key, f"is {alignment}; it must be a power of two, 8 or more")
        return alignment

    def _read_tensor_info(self, i: int, n_tensors: int) -> TensorInfo:
        """One tensor's entry, its offset still counted from the start of the data section."""
        name = self._name(f"name of tensor {i + 1} of {n_tensors}", MAX_NAME_BYTES)
        field = f"tensor {name}"
        n_dims = self._number(_U32, field)
        if n_dims > MAX_DIMS:
            raise self.fail(field, f"has {n_dims} dimensions, at most {MAX_DIMS} are allowed")
        shape = tuple(self._number(_U64, field) for _ in range(n_dims))
        kind = self._number(_U32, field)
        offset = self._number(_U64, field)
        form = FORMATS.get(kind)
        if form is None:
            raise self.fail(field, f"has the unknown tensor type {kind}")
        if 0 in shape:
            raise self.fail(field, f"has the shape {list(shape)}, which holds no values")
        row = shape[0] if shape else 1
        if row % form.block:
            raise self.fail(field, f"has rows of {row} values, no whole number of {form.name} blocks of {form.block}")
        nbytes = form.row_bytes(row) * math.prod(shape[1:])
        if nbytes > self.size:
            raise self.fail(field, f"needs {nbytes} bytes for its shape {list(shape)}, but the file has {self.size}; it is incomplete")
        return TensorInfo(name, shape, kind, offset, nbytes, self.number)

    def _place_tensors(self, infos: list[TensorInfo], alignment: int) -> None:
        """Checks that the tensors' data follow one another without gap or overlap inside the file, counts offsets from its start."""
        start = -(-self._pos // alignment) * alignment
        if infos and start > self.size:
            raise self.fail("tensor data", f"would begin at byte {start} (alignment {alignment}), but the file has {self.size}")
        expected = 0
        for info in infos:
            field = f"tensor {info.name}"
            if info.name in self.tensors:
                raise self.fail(field, "the tensor appears twice")
            if info.offset % alignment:
                raise self.fail(field, f"has the offset {info.offset}, no multiple of the alignment {alignment}")
            if info.offset != expected:
                what = "overlaps the tensor before it" if info.offset < expected else "leaves a gap after the tensor before it"
                raise self.fail(field, f"has the offset {info.offset} instead of {expected}: it {what}")
            if start + info.offset + info.nbytes > self.size:
                end = start + info.offset + info.nbytes
                raise self.fail(field, f"its data ends at byte {end}, but the file has {self.size}; it is incomplete, download it again")
            expected = -(-(expected + info.nbytes) // alignment) * alignment
            self.tensors[info.name] = TensorInfo(info.name, info.shape, info.type, start + info.offset, info.nbytes, self.number)


class GGUFFile:
    """An open model file, or several that are the parts of one model. A context manager; `open_gguf` makes one.

    version: 2 or 3. metadata: value by key in the file's order (int, float, bool, str, or a list of one of them); strings inside arrays
    keep bytes that are no UTF-8 as lone surrogates (decode errors "surrogateescape"). value_types: by key "uint32", "float32", "string",
    "array[int32]" and so on. tensors: by name, in the file's order.
    """

    def __init__(self, path: Path, parts: list[_Part]) -> None:
        self.path = path
        self._parts = parts
        first = parts[0]
        self.version: int = first.version
        self.metadata = first.metadata
        self.value_types: dict[str, str] = first.value_types
        self.tensors: dict[str, TensorInfo] = {}
        for part in parts:
            for name, info in part.tensors.items():
                if name in self.tensors:
                    raise part.fail(f"tensor {name}", f"appears in {parts[self.tensors[name].file].path.name} too")
                self.tensors[name] = info

    @property
    def architecture(self) -> str:
        """`general.architecture`. Raises ModelFileError when the file does not say it."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            problem = "is missing" if value is None else f"is {printable(repr(value))}"
            raise ModelFileError(self.path, "general.architecture", f"{problem}; the file does not say what kind of model it is")
        return value

    @property
    def file_size(self) -> int:
        """Bytes of the file, or of all its parts."""
        return sum(part.size for part in self._parts)

    def data(self, name: str) -> memoryview:
        """The tensor's bytes as they lie in the file: a read-only view of the mapping, nothing is copied.

        Raises KeyError for a name that is not in `tensors`, ValueError after close().
        """
        info = self.tensors[name]
        mapping = self._parts[info.file].map
        if mapping is None:
            raise ValueError("the file is closed")
        return memoryview(mapping)[info.offset : info.offset + info.nbytes]

    def drop_pages(self, name: str, first_byte: int = 0, end_byte: int | None = None) -> None:
        """Tells the system that the tensor's pages (or those of some of its bytes) will not be read again soon and need not stay in
        memory. A hint: never fails.
        """
        info = self.tensors[name]
        mapping = self._parts[info.file].map
        if mapping is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        # Only whole pages that no neighbour shares.
        first = -(-(info.offset + first_byte) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (info.offset + (info.nbytes if end_byte is None else end_byte)) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            with contextlib.suppress(OSError, ValueError):
                mapping.madvise(mmap.MADV_DONTNEED, first, end - first)

    def close(self) -> None:
        """Gives the mapping back, as soon as no view from `data` is in use any more. Idempotent."""
        for part in self._parts:
            part.close()
            part.map = None

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def open_gguf(path: str | Path, *, parts: Sequence[str | Path] | None = None, sizes: Sequence[int] | None = None) -> GGUFFile:
    """Opens and checks a GGUF file; a model split into `NAME-00001-of-0000N.gguf` is opened by its first part and comes as one.

    parts: where the second and later parts lie when they are not beside the first under the usual names (a store of blobs).
    sizes: the files hold only the beginning of files of these many bytes, one for each part: the header can be read, no tensor's data.
    Raises ModelFileError: the file cannot be opened, is damaged, incomplete, of another version or byte order, or a part is missing.
    """
    path = Path(path)
    opened = [_Part(path, 0, sizes[0] if sizes else None)]
    try:
        for number, part_path in enumerate(_other_parts(opened[0], parts), start=1):
            opened.append(_Part(part_path, number, sizes[number] if sizes else None))
            _check_part(opened[0], opened[number], number)
        _check_split_total(opened)
        return GGUFFile(path, opened)
    except BaseException:
        for part in opened:
            part.close()
        raise


def _split_number(part: _Part, key: str) -> int:
    value = part.metadata.get(key, 0)
    if type(value) is not int or value < 0:
        raise part.fail(key, f"is {printable(repr(value))}, not a count")
    return value


def _other_parts(first: _Part, given: Sequence[str | Path] | None) -> list[Path]:
    count = _split_number(first, "split.count")
    if count <= 1:
        if given:
            raise first.fail("split.count", "the file is whole, yet further parts were given")
        return []
    number = _split_number(first, "split.no")
    if number != 0:
        raise first.fail("split.no", f"this is part {number + 1} of {count}; open the first part instead")
    if given is not None:
        if len(given) != count - 1:
            raise first.fail("split.count", f"the model has {count} parts, {len(given) + 1} were given")
        return [Path(p) for p in given]
    name = _PART_NAME.match(first.path.name)
    if name is None or int(name["number"]) != 1 or int(name["count"]) != count:
        problem = f"is {count}, so the file must be named NAME-00001-of-{count:05}.gguf with the other parts beside it"
        raise first.fail("split.count", problem)
    paths = [first.path.with_name(f"{name['stem']}-{i:05}-of-{count:05}.gguf") for i in range(2, count + 1)]
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise first.fail("split.count", f"is {count}, but {missing[0]}{more} is missing beside it")
    return paths


def _check_part(first: _Part, part: _Part, number: int) -> None:
    count = _split_number(first, "split.count")
    if _split_number(part, "split.count") != count:
        raise part.fail("split.count", f"is {_split_number(part, 'split.count')}, but {first.path.name} says {count}")
    if _split_number(part, "split.no") != number:
        raise part.fail("split.no", f"is {_split_number(part, 'split.no')} where {number} was expected; the parts are mixed up")


def _check_split_total(parts: list[_Part]) -> None:
    if len(parts) > 1 and "split.tensors.count" in parts[0].metadata:
        total = sum(len(part.tensors) for part in parts)
        said = _split_number(parts[0], "split.tensors.count")
        if total != said:
            raise parts[0].fail("split.tensors.count", f"is {said}, but the parts hold {total} tensors")
