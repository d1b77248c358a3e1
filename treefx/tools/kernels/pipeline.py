"""How far the loops of a kernel load ahead: read in its TTGIR."""

import re

__all__ = ["copies_ahead"]

_PRODUCT = re.compile(r"\b(ttng\.warp_group_dot|ttng\.tc_gen5_mma|tt\.dot)\b(?!_)")
_WAIT = re.compile(r"\bttg\.async_wait\b.*\bnum = (\d+)")


def copies_ahead(ttgir: str) -> tuple[int, ...]:
    """Return, per loop with products, the pending copies when it begins to use a tile.

    At 0 a loop waits for all it has asked for: nothing is loaded while it multiplies.

    Args:
        ttgir: the kernel's TTGIR, as ``compiled.asm["ttgir"]``; its loads are asynchronous copies by all warps.
    """
    found: list[int] = []
    loops: list[list[str]] = []
    blocks: list[bool] = []
    for line in ttgir.splitlines():
        text = line.split(" loc(")[0].strip()
        if text.startswith("}") and blocks and blocks.pop():
            found += _ahead(loops.pop())
        elif loops:
            loops[-1].append(text)
        if text.endswith("{"):
            blocks.append("scf.for" in text)
            loops += [[]] if blocks[-1] else []
    return tuple(found)


def _ahead(loop: list[str]) -> list[int]:
    if not any(_PRODUCT.search(text) for text in loop):
        return []
    return [min((int(wait[1]) for text in loop if (wait := _WAIT.search(text))), default=0)]
