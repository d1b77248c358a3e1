"""Keys and values of prefixes, every distinct prefix token once.

A token's place is a *slot*; a trie leads from the slot of the token before it, and the token id, to its own. Slots are
never moved, so a prefix is the list of its slots.
"""

from collections.abc import Iterable, Sequence

from torch import Tensor

__all__ = ["PrefixCache", "common_length"]

_ROOT = -1
_FIRST_CAPACITY = 256


class PrefixCache:
    """Hold slots of tokens, their keys and values per layer, and logits at ends of prefixes.

    Attributes:
        logits: by slot of a prefix's last token, [V]; the next token is drawn from them.
    """

    def __init__(self) -> None:
        self.logits: dict[int, Tensor] = {}
        self._child: dict[tuple[int, int], int] = {}
        self._pools: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        """Number of slots."""
        return len(self._child)

    @property
    def layers(self) -> list[int]:
        """Layers that keep keys and values."""
        return sorted(self._pools)

    def find(self, tokens: Iterable[int]) -> list[int]:
        """Slots of the longest prefix of `tokens` that is held."""
        path, at = [], _ROOT
        for token in tokens:
            found = self._child.get((at, token))
            if found is None:
                break
            path.append(found)
            at = found
        return path

    def extend(self, path: Sequence[int], tokens: Iterable[int]) -> list[int]:
        """Slots of `tokens` after `path`; those that are new are to be written next."""
        slots, at = [], path[-1] if path else _ROOT
        for token in tokens:
            at = self._child.setdefault((at, token), len(self._child))
            slots.append(at)
        return slots

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys [n, H, D] and values [n, H, Dv] of a layer at slots [n]."""
        grown = tuple(
            _grow(pool, new, len(self))
            for pool, new in zip(self._pools.get(layer, (None, None)), (keys, values), strict=True)
        )
        for pool, new in zip(grown, (keys, values), strict=True):
            pool[slots.to(pool.device)] = new
        self._pools[layer] = (grown[0], grown[1])

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, H, L, D] and values [B, H, L, Dv] of a layer at slots [B, L]."""
        keys, values = self._pools[layer]
        slots = slots.to(keys.device)  # a model may lie on several
        return keys[slots].transpose(1, 2), values[slots].transpose(1, 2)

    def missing_pieces(self, prefixes: Iterable[Sequence[int]]) -> list[tuple[list[int], list[int]]]:
        """Return the next pieces to compute so that all prefixes end up in the cache.

        The logits at their ends are included.

        Returns:
            Pairs of a path that is held and the tokens after it, up to where prefixes end or part; no two pieces have
            a token in common. Empty when nothing is missing.
        """
        pieces: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for prefix in prefixes:
            path = self.find(prefix)
            if len(path) == len(prefix):
                if path[-1] in self.logits:
                    continue
                path = path[:-1]  # held as part of a longer prefix, without logits
            rest = list(prefix[len(path) :])
            at = (path[-1] if path else _ROOT, rest[0])
            others = pieces.get(at, (path, rest))[1]
            pieces[at] = (path, rest[: common_length(rest, others)])
        return list(pieces.values())


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    length = min(len(first), len(second))
    return next((i for i in range(length) if first[i] != second[i]), length)


def _grow(pool: Tensor | None, new: Tensor, needed: int) -> Tensor:
    """A pool with room for `needed` slots: twice as large where it has to grow."""
    if pool is None:
        return new.new_zeros((max(_FIRST_CAPACITY, needed), *new.shape[1:]))
    if needed <= len(pool):
        return pool
    grown = pool.new_zeros((max(2 * len(pool), needed), *pool.shape[1:]))
    grown[: len(pool)] = pool
    return grown
