"""What happens in machine code while products of warp groups are under way.

A product may take its left operand from registers, and reads them after the next instructions have begun. Assemblers
before CUDA 13.3 may give such registers to something else too early. So it is looked up here, line by line.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["beside_products", "overwritten_operands"]

_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?(?P<name>[A-Z][\w.]*)\s*(?P<rest>[^;]*);")
_PRODUCT, _COMMITTED, _WAIT, _EXPONENTIAL = "HGMMA", "gsb0", "WARPGROUP.DEPBAR", "MUFU.EX2"
_OPERAND = 4
"""Registers of the left operand of one instruction, of a 16-bit type."""
_WIDTHS = {"64": 2, "WIDE": 2, "128": 4}
"""Registers that an instruction writes, by a part of its name."""
_WITHOUT_RESULT = ("ST", "BAR", "RED", "WARP", "BRA", "SYNCS", "UTMA")


@dataclass
class _Step:
    """Hold an instruction, with registers read by pending products, last group last."""

    name: str
    arguments: list[str]
    read: list[set[int]] = field(default_factory=list)

    def written(self) -> set[int]:
        """Return the registers that it writes."""
        first = _register(self.arguments[0]) if self.arguments else None
        if first is None or self.name.startswith(_WITHOUT_RESULT):
            return set()
        width = max((_WIDTHS.get(part, 1) for part in self.name.split(".")), default=1)
        return set(range(first, first + width))


def overwritten_operands(sass: str) -> list[str]:
    """Return instructions that overwrite operands of pending products, in words.

    Args:
        sass: the machine code, as `instructions.disassembled` returns it, read from top to bottom.
    """
    found = []
    for step in _steps(sass):
        lost = step.written() & set().union(*step.read)
        if lost and not step.name.startswith(_PRODUCT):
            found.append(f"{step.name} writes R{min(lost)}, which a product under way reads")
    return found


def beside_products(sass: str) -> tuple[int, ...]:
    """Return, for every wait that ends all products, the exponentials before it.

    Those count that began while any of these products was under way: at 0 nothing is computed meanwhile.

    Args:
        sass: the machine code, as `instructions.disassembled` returns it.
    """
    counts, exponentials = [], 0
    for step in _steps(sass):
        if step.name.startswith(_EXPONENTIAL):
            exponentials += len(step.read) > 1
        elif step.name.startswith(_WAIT) and _left(step) == 0:
            counts.append(exponentials)
            exponentials = 0
    return tuple(counts)


def _steps(sass: str) -> Iterator[_Step]:
    """Yield the instructions; products are committed in groups, and waits leave the last."""
    groups: list[set[int]] = []
    current = set[int]()
    for line in sass.splitlines():
        parts = _INSTRUCTION.search(line)
        if parts is None:
            continue
        step = _Step(parts["name"], [text.strip() for text in parts["rest"].split(",")])
        step.read = [*groups, current]
        yield step
        if step.name.startswith(_PRODUCT):
            first = _register(step.arguments[1])
            current = current | (set() if first is None else set(range(first, first + _OPERAND)))
            if _COMMITTED in step.arguments:
                groups, current = [*groups, current], set()
        elif step.name.startswith(_WAIT):
            left = _left(step)
            groups = groups[len(groups) - left :] if left else []


def _left(step: _Step) -> int:
    """Return how many groups of products a wait leaves under way."""
    return int(step.arguments[-1], 16)


def _register(text: str) -> int | None:
    found = re.fullmatch(r"R(\d+)", text)
    return int(found[1]) if found else None
