"""The prefix tree: which token sequences have their K/V in the pool, so that a new one starts from its longest match.

A radix tree over tokens whose edges are one block long: block boundaries are multiples of the block size from the sequence's start, so
sequences can share a block exactly when they agree up to its end. Matching is by token all the same: where a sequence leaves the tree
inside a block, that block is matched for the tokens they share, and whoever wants to write on in it copies it first (cache.py). Only a
whole block has children; a shorter one, the end of something finished, is a leaf.

K/V that depend on more than the tokens (adapters) lie below a root of their own for each kind.

Least recently used leaves go first. Knows tokens and blocks; knows neither requests nor the model.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from localrun.engine.pool import BlockPool
from localrun.engine.sequence import Kind
from localrun.engine.states import StateSlots


class Node:
    """One block of tokens below `parent`; the root has none."""

    __slots__ = ("block", "by_first", "children", "parent", "states", "tokens", "used")

    def __init__(self, parent: Node | None, tokens: tuple[int, ...], block: int, used: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.block = block
        self.used = used
        self.children: dict[tuple[int, ...], Node] = {}
        self.by_first: dict[int, list[Node]] = {}
        """The children again, by first token: the candidates for a partial match."""
        self.states: dict[int, int] = {}
        """Slots of recurrent state after so many of the tokens."""


@dataclass(frozen=True)
class Match:
    """The longest known beginning of a token sequence."""

    n_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    """Their blocks, the last one perhaps shared only in part (n_tokens is then no multiple of the block size)."""
    slot: int = -1
    """Of a model with recurrent state: the snapshot after n_tokens; such a match ends where there is one."""
    n_known: int = 0
    """How many tokens the tree knows, snapshot or not."""


@dataclass(frozen=True)
class NearMiss:
    """Where a sequence left the tree although the tree went on."""

    position: int
    cached: tuple[int, ...]
    """The tokens that the tree has there, at most a block of them."""
    beyond: int
    """How many tokens the tree holds from there on, along one path."""


class PrefixTree:
    """`states`: of a model whose sequences need a snapshot to go on from, None of others."""

    def __init__(self, pool: BlockPool, states: StateSlots | None = None) -> None:
        self._pool = pool
        self._roots: dict[Kind, Node] = {}
        self._states = states
        self._tick = 0
        self._victims: list[tuple[int, int, Node]] = []
        self._by_block: dict[int, Node] = {}
        self._ties = itertools.count()
        self.n_evicted = 0

    def __len__(self) -> int:
        """Blocks in the tree."""
        return len(self._by_block)

    def match(self, tokens: Sequence[int], limit: int, kind: Kind = ()) -> Match:
        """The longest match of tokens[:limit], marked as used now. Takes no references: that is the caller's next act."""
        self._tick += 1
        size = self._pool.block_tokens
        node, at, blocks = self._root(kind), 0, list[int]()
        while at + size <= limit:
            child = node.children.get(tuple(tokens[at : at + size]))
            if child is None:
                break
            child.used = self._tick
            blocks.append(child.block)
            node, at = child, at + size
        best, shared = self._closest(node, tokens[at : min(at + size, limit)])
        if best is None:
            return Match(at, blocks)
        best.used = self._tick
        return Match(at + shared, [*blocks, best.block])

    def match_state(self, tokens: Sequence[int], limit: int, kind: Kind = ()) -> Match:
        """The longest beginning of tokens[:limit] that ends at a snapshot, marked as used now."""
        self._tick += 1
        size = self._pool.block_tokens
        node, at, path, found = self._root(kind), 0, list[int](), Match()
        while at < limit:
            wanted = tuple(tokens[at : min(at + size, limit)])
            child = node.children.get(wanted) if len(wanted) == size else None
            best, shared = (child, size) if child is not None else self._closest(node, wanted)
            if best is None:
                break
            best.used = self._tick
            for other in node.by_first[wanted[0]]:
                common = _common(other.tokens, wanted) if other.states else 0
                offset = max((offset for offset in other.states if offset <= common), default=0)
                if offset and at + offset > found.n_tokens:
                    other.used = self._tick
                    found = Match(at + offset, [*path, other.block], other.states[offset])
            path.append(best.block)
            at += shared
            if shared < size:
                break
            node = best
        return replace(found, n_known=at)

    def locate(self, tokens: Sequence[int], n_tokens: int, kind: Kind = ()) -> tuple[Node, int] | None:
        """The node that the first n_tokens end in, and how many of its tokens they reach; None when the tree does not know them all."""
        size = self._pool.block_tokens
        node, at = self._root(kind), 0
        while at + size <= n_tokens:
            child = node.children.get(tuple(tokens[at : at + size]))
            if child is None:
                return None
            node, at = child, at + size
        if at == n_tokens:
            return None if node.parent is None else (node, size)
        rest = tuple(tokens[at:n_tokens])
        begun = [child for child in node.by_first.get(rest[0], ()) if child.tokens[: len(rest)] == rest]
        # Several may begin so: one that has its snapshot there already needs no other.
        best = next((child for child in begun if len(rest) in child.states), begun[0] if begun else None)
        return None if best is None else (best, len(rest))

    def near_miss(self, tokens: Sequence[int], kind: Kind = ()) -> NearMiss | None:
        """Where `tokens` stops agreeing with what is cached, if the cache goes on from there."""
        size = self._pool.block_tokens
        node, at = self._root(kind), 0
        while (child := node.children.get(tuple(tokens[at : at + size]))) is not None:
            node, at = child, at + size
        best, shared = self._closest(node, tokens[at : at + size])
        if best is None and node.parent is not None:
            best = next(iter(node.children.values()), None)
        if best is None or shared == len(best.tokens) or at + shared >= len(tokens):
            return None
        return NearMiss(at + shared, best.tokens[shared:], _depth(best) - shared)

    def insert(
        self, cursor: Node | None, tokens: Sequence[int], table: list[int], start: int, end: int, *, tail: bool = False, kind: Kind = ()
    ) -> Node | None:
        """Leaves tokens[start:end] of a sequence in the tree; `table` are all its blocks, `start` is block-aligned.

        `cursor` is what the last call for this sequence returned (None: the root), and stays valid while the sequence holds its blocks.
        Only whole blocks are kept, unless `tail`, which also keeps the rest, as a leaf. Where an equal block is there already, the
        sequence's is swapped for it in `table` and given back: K/V of equal beginnings are equal to the bit, whoever computed them.
        """
        self._tick += 1
        size = self._pool.block_tokens
        node = self._root(kind) if cursor is None else cursor
        for at in range(start, end if tail else end - size + 1, size):
            key = tuple(tokens[at : min(at + size, end)])
            child = node.children.get(key)
            if child is None:
                child = self._add(node, key, table[at // size])
            elif child.block != table[at // size]:
                self._pool.retain(child.block)
                self._pool.release(table[at // size])
                table[at // size] = child.block
            if child is None:
                break
            child.used = self._tick
            node = child
        return None if node.parent is None else node

    def evict(self) -> bool:
        """Frees the least recently used leaf that nobody holds; False when there is none."""
        node = self._next_victim() or (self._collect_victims() and self._next_victim()) or None
        if node is None:
            return False
        parent = node.parent
        assert parent is not None
        self._remove(node)
        self.n_evicted += 1
        if self._evictable(parent):
            heapq.heappush(self._victims, (parent.used, next(self._ties), parent))
        return True

    def forget(self, block: int) -> None:
        """Takes a block out of the tree, whoever else holds it, and what is below it. It stays where somebody holds something of that."""
        node = self._by_block.get(block)
        if node is None:
            return
        below = [node]
        for one in below:
            below += one.children.values()
        if all(self._pool.references(one.block) == 1 for one in below[1:]):
            for one in reversed(below):
                self._remove(one)

    def clear(self) -> None:
        """Evicts all that nobody holds."""
        while self.evict():
            pass

    def blocks(self) -> Iterator[int]:
        """Every block of the tree."""
        return iter(self._by_block)

    def check(self) -> None:
        """Raises AssertionError where the tree contradicts itself."""
        count = 0
        for node in self.nodes():
            count += 1
            size = self._pool.block_tokens
            if not 1 <= len(node.tokens) <= size or (node.children and len(node.tokens) != size):
                raise AssertionError(f"a node of {len(node.tokens)} tokens with {len(node.children)} children")
            listed = sorted(id(n) for nodes in node.by_first.values() for n in nodes)
            if listed != sorted(id(n) for n in node.children.values()):
                raise AssertionError("a node's two indexes of its children differ")
            above = node.parent
            if above is not None and above.parent is not None and self._pool.references(above.block) < self._pool.references(node.block):
                raise AssertionError(f"block {node.block} has more holders than block {above.block} before it")
            if self._by_block.get(node.block) is not node:
                raise AssertionError(f"block {node.block} is not known as its node's")
        if count != len(self):
            raise AssertionError(f"{count} nodes, {len(self)} known")

    def _root(self, kind: Kind) -> Node:
        """Where everything of a kind begins; roots below which nothing is left go when another kind comes."""
        if kind not in self._roots:
            self._roots = {known: root for known, root in self._roots.items() if root.children}
            self._roots[kind] = Node(None, (), -1, 0)
        return self._roots[kind]

    def _add(self, parent: Node, key: tuple[int, ...], block: int) -> Node | None:
        """A new child; None when a longer leaf already says as much. A shorter leaf that it continues is dropped."""
        node = Node(parent, key, block, self._tick)
        for other in list(parent.by_first.get(key[0], ())):
            if len(other.tokens) > len(key) and other.tokens[: len(key)] == key:
                other.used = self._tick
                return None
            if len(other.tokens) < len(key) and key[: len(other.tokens)] == other.tokens:
                if self._states is not None:
                    self._states.move_all(other, node)
                self._remove(other)
        self._pool.enter_tree(block)
        self._by_block[block] = node
        parent.children[key] = node
        parent.by_first.setdefault(key[0], []).append(node)
        return node

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None and not node.children
        del parent.children[node.tokens]
        siblings = parent.by_first[node.tokens[0]]
        siblings.remove(node)
        if not siblings:
            del parent.by_first[node.tokens[0]]
        node.parent = None
        if self._states is not None:
            self._states.drop_all(node)
        del self._by_block[node.block]
        self._pool.leave_tree(node.block)

    def _evictable(self, node: Node) -> bool:
        return node.parent is not None and not node.children and self._pool.references(node.block) == 1

    def _next_victim(self) -> Node | None:
        while self._victims:
            used, _, node = heapq.heappop(self._victims)
            if node.used == used and self._evictable(node):
                return node
        return None

    def _collect_victims(self) -> bool:
        self._victims = [(node.used, next(self._ties), node) for node in self.nodes() if self._evictable(node)]
        heapq.heapify(self._victims)
        return bool(self._victims)

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _closest(self, node: Node, wanted: Sequence[int]) -> tuple[Node | None, int]:
        """The child of `node` that shares most tokens with `wanted`, and how many."""
        best, shared = None, 0
        for child in node.by_first.get(wanted[0], ()) if wanted else ():
            n = _common(child.tokens, wanted)
            if n > shared:
                best, shared = child, n
        return best, shared


def _depth(node: Node | None) -> int:
    """Tokens from this node to the end of the path that always takes the first child."""
    total = 0
    while node is not None:
        total += len(node.tokens)
        node = next(iter(node.children.values()), None)
    return total


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
