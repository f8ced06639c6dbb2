"""Conversations' K/V on disk, so that a long chat goes on after a restart without being read again.

A file for each block, named by a hash of everything its K/V depend on: the model's digest, the KV type, and all tokens up to the block's
end, as a chain (hash of the hash before and the block's own tokens). Conversations that begin alike share files; what is there is not
written again. A file carries its tokens and a checksum of all of it: one that is damaged, cut short or another's is noticed, logged,
removed and treated as missing. The folder is bounded: the files used least lately go first, of one conversation the end before the
beginning.

Files are written by a thread of their own, which the engine hands copies to; what would wait too long there is not saved. They hold what
was said, so nobody but their owner may read them. Knows bytes and tokens; knows neither requests nor what lies in a block.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)

MAGIC = b"LRKV0001"
SUFFIX = ".kv"
_CHECKSUM = 32
_WAITING_BYTES = 256 << 20
"""Of copies that wait to be written, at most."""
_LOOK_AGAIN_S = 60.0
"""How old a listing of the folder may be, which other runners write to as well."""


def root_key(digest: str, kv_type: str, block_bytes: int, n_ctx: int) -> bytes:
    """What the K/V of all sequences of a model depend on: the start of their chains."""
    return hashlib.sha256(f"{MAGIC.decode()} {digest} {kv_type} {block_bytes} {n_ctx}".encode()).digest()


class Chain:
    """The names of a token sequence's blocks, each made when it is asked for."""

    def __init__(self, root: bytes, block_tokens: int) -> None:
        self._keys = [root]
        self._tokens: list[int] = []
        self._size = block_tokens

    def key(self, tokens: Sequence[int], index: int) -> bytes:
        """Of block `index` (0 is the first) of `tokens`, which must begin as at the last call, but may have changed behind a shift."""
        known = (len(self._keys) - 1) * self._size
        if self._tokens[:known] != list(tokens[:known]):
            del self._keys[1:], self._tokens[:]
        while len(self._keys) <= index + 1:
            at = (len(self._keys) - 1) * self._size
            own = tokens[at : at + self._size]
            self._keys.append(hashlib.sha256(self._keys[-1] + struct.pack(f"<{self._size}I", *own)).digest())
            self._tokens += own
        return self._keys[index + 1]


class SessionStore:
    """A folder of blocks. `most_bytes`: what it may hold. `close` waits for what is still to be written."""

    def __init__(self, folder: Path, root: bytes, block_tokens: int, most_bytes: int) -> None:
        self.n_saved = self.n_restored = self.n_damaged = self.n_skipped = 0
        self._folder = folder
        self._root = root
        self._block_tokens = block_tokens
        self._most_bytes = most_bytes
        self._waiting: queue.SimpleQueue[tuple[bytes, tuple[int, ...], bytes] | None] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._present: set[bytes] = set()
        """Blocks that are in the folder or on their way; others may have removed some."""
        self._writer: threading.Thread | None = None
        self._told = False
        self._listed_at = -_LOOK_AGAIN_S
        self._bytes = 0

    def chain(self) -> Chain:
        return Chain(self._root, self._block_tokens)

    def has(self, key: bytes) -> bool:
        return key in self._present or self._path(key).exists()

    def save(self, key: bytes, tokens: Sequence[int], content: bytes) -> bool:
        """Has a block written, soon. False when too much is waiting: then it is not."""
        with self._lock:
            if self._waiting_bytes + len(content) > max(_WAITING_BYTES, len(content)):
                self.n_skipped += 1
                return False
            self._waiting_bytes += len(content)
        self._present.add(key)
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, name="sessions", daemon=True)
            self._writer.start()
        self._waiting.put((key, tuple(tokens), content))
        return True

    def load(self, key: bytes, tokens: Sequence[int], n_bytes: int) -> bytes | None:
        """A block's K/V, or None: it is not there, or damaged. Marks it as used now."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            self._present.discard(key)
            return None
        except OSError as error:
            log.warning("a saved block of a session cannot be read: %s", error.strerror)
            return None
        head = MAGIC + key + struct.pack(f"<{self._block_tokens}I", *tokens)
        content = data[len(head) : -_CHECKSUM]
        if data[: len(head)] != head or len(content) != n_bytes or hashlib.sha256(data[:-_CHECKSUM]).digest() != data[-_CHECKSUM:]:
            log.warning("a saved block of a session is damaged and is removed: %s", path.name)
            self.n_damaged += 1
            self._present.discard(key)
            path.unlink(missing_ok=True)
            return None
        self.n_restored += 1
        return content

    def touch(self, keys: Sequence[bytes]) -> None:
        """These blocks of one conversation, in order, were used now; its end goes first when room is needed."""
        now = time.time()
        for i, key in enumerate(keys):
            with contextlib.suppress(OSError):
                os.utime(self._path(key), (now, now - i * 1e-3))

    def close(self, seconds: float = 10.0) -> None:
        """Waits, for no longer than that, until what was to be saved is."""
        if self._writer is not None:
            self._waiting.put(None)
            self._writer.join(seconds)

    def _path(self, key: bytes) -> Path:
        return self._folder / (key.hex() + SUFFIX)

    def _write_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                self._write(*item)
            except OSError as error:
                self._present.discard(item[0])
                self.n_skipped += 1
                # A full or read-only disk is told once, not with every block.
                log.log(logging.DEBUG if self._told else logging.WARNING, "sessions are not saved: %s", error.strerror or error)
                self._told = True
            finally:
                with self._lock:
                    self._waiting_bytes -= len(item[2])

    def _write(self, key: bytes, tokens: tuple[int, ...], content: bytes) -> None:
        path = self._path(key)
        if path.exists():
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = MAGIC + key + struct.pack(f"<{self._block_tokens}I", *tokens) + content
        partial = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
                file.write(hashlib.sha256(data).digest())
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        self.n_saved += 1
        self._bytes += len(data) + _CHECKSUM
        self._make_room()

    def _make_room(self) -> None:
        """Removes what was used least lately until the folder is within its bound; a little more, so as not to do it at each block."""
        if self._bytes <= self._most_bytes and time.monotonic() - self._listed_at < _LOOK_AGAIN_S:
            return
        found = []
        for entry in os.scandir(self._folder):
            with contextlib.suppress(OSError):
                status = entry.stat()
                if entry.name.endswith((SUFFIX, ".part")):
                    found.append((status.st_mtime, status.st_size, entry.path))
        self._bytes = sum(size for _, size, _ in found)
        self._listed_at = time.monotonic()
        if self._bytes <= self._most_bytes:
            return
        for _, size, path in sorted(found):
            if self._bytes <= self._most_bytes * 0.9:
                break
            with contextlib.suppress(OSError):
                Path(path).unlink()
                self._bytes -= size
                self._present.discard(bytes.fromhex(Path(path).name.partition(".")[0]))
