"""Read a kernel's assembly for AMD: registers, spills, matrix instructions, instructions of loops."""

import re
from collections import Counter
from dataclasses import dataclass, field

import networkx as nx

__all__ = ["Metadata", "kernel_of", "metadata_of", "names_in_loops"]

_INSTRUCTION = re.compile(r"\s+(?P<name>(?:v|s|ds|global|buffer|flat|scratch)_\w+)(?P<rest>[^;]*)")
_LABEL = re.compile(r"(\.LBB\w+):")
_PRODUCT = re.compile(r"v_s?mfmac?_")
_ENTRY = ".entry"


@dataclass(frozen=True)
class Metadata:
    """What the assembler notes of a kernel.

    Attributes:
        registers: vector registers per lane, those of sums among them.
        spills: vector registers that lie in memory.
        scalar_spills: scalar registers that lie in lanes of vector registers.
        shared_bytes: fixed ones; those of Triton come with the launch.
    """

    registers: int
    spills: int
    scalar_spills: int
    shared_bytes: int


def metadata_of(text: str) -> Metadata:
    """Return the notes at the end of ``compiled.asm["amdgcn"]``."""
    names = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "group_segment_fixed_size")
    return Metadata(*(int(re.findall(rf"^\s+(?:- )?\.{name}:\s+(\d+)$", text, re.MULTILINE)[-1]) for name in names))


def kernel_of(text: str, name: str) -> str:
    """Return the code of a kernel without that of functions which it calls."""
    _, _, code = text.partition(f"; -- Begin function {name}\n")
    return code.partition("; -- End function")[0]


@dataclass
class _Block:
    """Instructions that run one after the other, and the blocks that may follow."""

    names: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    falls_through: bool = True


def names_in_loops(code: str) -> tuple[Counter[str], ...]:
    """Return how often each instruction stands in every innermost loop with products, in the order of the code.

    A loop has all blocks from which its start is reached again: compilers move some of them out of line. Fillers do
    not count.
    """
    blocks = _blocks(code)
    graph, order = _graph(blocks), [*blocks]
    dominators = nx.immediate_dominators(graph, _ENTRY)
    loops: dict[str, set[str]] = {}
    for block, start in graph.edges:
        if block in dominators and _dominates(dominators, start, block):
            reached = nx.ancestors(graph.subgraph(set(graph) - {start}), block) if block != start else set()
            loops.setdefault(start, {start}).update(reached | {block})
    inner = [loop for loop in loops.values() if not any(loop > other for other in loops.values())]
    counts = [
        Counter(name for block in loop for name in blocks[block].names)
        for loop in sorted(inner, key=lambda loop: min(map(order.index, loop)))
    ]
    return tuple(count for count in counts if any(map(_PRODUCT.match, count)))


def _blocks(code: str) -> dict[str, _Block]:
    """Cut code at labels and behind jumps."""
    blocks = {_ENTRY: _Block()}
    current = blocks[_ENTRY]
    for line in code.splitlines():
        if label := _LABEL.match(line):
            current = blocks[label[1]] = _Block()
        instruction = _INSTRUCTION.match(line)
        if instruction is None or instruction["name"] == "s_nop":
            continue
        name = instruction["name"]
        current.names.append(name)
        if name in ("s_endpgm", "s_branch", "s_setpc_b64"):
            current.falls_through = False
        if name.startswith(("s_branch", "s_cbranch")):
            current.targets += re.findall(r"\.LBB\w+", instruction["rest"])
            if name != "s_branch":  # what follows is a block, though it has no label
                fresh = blocks[f"{_ENTRY} {len(blocks)}"] = _Block()
                current = fresh
    return blocks


def _graph(blocks: dict[str, _Block]) -> "nx.DiGraph[str]":
    graph: nx.DiGraph[str] = nx.DiGraph()
    names = [*blocks]
    graph.add_nodes_from(names)
    for name, after in zip(names, [*names[1:], None], strict=True):
        follows = [after] if after is not None and blocks[name].falls_through else []
        graph.add_edges_from((name, target) for target in [*blocks[name].targets, *follows])
    return graph


def _dominates(dominators: dict[str, str], one: str, other: str) -> bool:
    """Return whether every way to a block leads over another one."""
    while other != one and dominators.get(other, other) != other:
        other = dominators[other]
    return other == one
