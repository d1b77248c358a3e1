"""List forests and heads for GPU timings, and forms of FlexAttention."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treefx.tools.bench.attention.trees import Tree, agent_nodes, repeated_nodes, thought_nodes, uneven_nodes

__all__ = ["FLASH", "FLEX_VARIANTS", "SETTINGS", "Setting"]

FLEX_VARIANTS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "default": ((128, 128), {}),
    "TMA": ((128, 128), {"USE_TMA": True}),
    "64 x 64": ((64, 64), dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), 64)),
}
"""Queries and keys of the mask's blocks, and ``kernel_options``: the fastest of these counts, per direction."""
FLASH = "FLASH"
"""FlexAttention on the kernels of flash-attn-4, where that is installed: a separate baseline."""


@dataclass(frozen=True)
class Setting:
    """One forest and the shape of the heads."""

    tree: Tree
    head_dim: int = 128
    heads: int = 32
    kv_heads: int = 8
    variants: Sequence[str] = ("default",)
    """Of FlexAttention, and ``FLASH``; each is compiled on its own."""

    @property
    def name(self) -> str:
        """The case as a table shows it."""
        return f"{self.tree.name}, D={self.head_dim}, {self.heads}:{self.kv_heads}"


def _prefix(prefix: int, leaves: int, length: int) -> Tree:
    return Tree(f"prefix {prefix} + {leaves} x {length}", repeated_nodes(1, prefix, leaves, length))


def _groups(kind: str, count: int, prefix: int, leaves: int, length: int) -> Tree:
    return Tree(f"{kind} {count} x ({prefix} + {leaves} x {length})", repeated_nodes(count, prefix, leaves, length))


def _shared_prompt(prompt: int) -> Setting:
    """Describe a shape of DualKV (arXiv 2605.15422): 28 responses behind a prompt."""
    nodes = repeated_nodes(1, prompt, 28, 2048)
    return Setting(Tree(f"DualKV, prompt {prompt} + 28 x 2048", nodes), variants=("default", FLASH))


_EVERY = (*FLEX_VARIANTS, FLASH)
_SHORT, _MIDDLE, _LONG = _prefix(2048, 8, 256), _prefix(8192, 16, 512), _prefix(32768, 16, 2048)
_GROUPS = _groups("groups", 8, 1024, 8, 2048)
_UNEVEN = Tree(f"{_GROUPS.name}, half as long to half as long again", uneven_nodes(_GROUPS.nodes))
_AGENT = Tree("agent, 150 nodes of 50 to 200", agent_nodes(150, (50, 200)))
_THOUGHT = Tree("tree of thought, 341 nodes", thought_nodes())
SETTINGS = (
    Setting(_SHORT, variants=_EVERY),
    Setting(_LONG, variants=_EVERY),
    Setting(_AGENT, variants=_EVERY),
    Setting(_GROUPS, variants=_EVERY),
    Setting(_THOUGHT, variants=_EVERY),
    Setting(_groups("GRPO", 1, 512, 16, 224), variants=_EVERY),
    Setting(_groups("DPO", 4, 512, 2, 256), variants=_EVERY),
    Setting(_MIDDLE, variants=_EVERY),
    *map(_shared_prompt, (4096, 16384, 32768)),
    Setting(_MIDDLE, head_dim=64),
    Setting(_MIDDLE, head_dim=256, heads=16, kv_heads=4),
    Setting(_MIDDLE, kv_heads=32),
    Setting(_MIDDLE, heads=40),
    Setting(_MIDDLE, heads=28, kv_heads=4),
    Setting(_prefix(98304, 16, 2048), variants=_EVERY),
    Setting(_UNEVEN, variants=_EVERY),
    Setting(_groups("GRPO", 2, 512, 16, 1024), variants=_EVERY),
    Setting(_groups("DPO", 32, 512, 2, 256), variants=_EVERY),
    Setting(Tree("agent, 150 nodes", agent_nodes(150)), variants=_EVERY),
    Setting(Tree("agent, 640 nodes", agent_nodes(640)), variants=_EVERY),
    Setting(Tree("tree of thought, 1365 nodes", thought_nodes(depth=5)), variants=_EVERY),
    Setting(_AGENT, head_dim=64),
    Setting(_AGENT, head_dim=256, heads=16, kv_heads=4),
    Setting(_MIDDLE, kv_heads=4),
)
"""The most telling first, forests of 4 k to 128 k tokens: what does not fit the time is left out, by name."""
