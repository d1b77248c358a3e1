"""List tile sizes, warps and stages that compiled without spills, by kernel and type."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from treefx.errors import UnsupportedError
from treefx.kernels.score import Expr, Score

__all__ = [
    "GFX942",
    "SHARED_MEMORY",
    "GLUON_ONE_PASS_KEYS",
    "ONE_PASS_KEYS",
    "Config",
    "Problem",
    "candidates",
    "chunk_widths",
    "default_config",
    "one_pass_fits",
    "operations_of",
    "product_precision",
    "usable_shared_memory",
]


@dataclass(frozen=True)
class Config:
    """How one kernel is launched.

    Attributes:
        block_m: rows of a query tile; every token has one per query head of a group.
        block_n: keys of a tile.
        warps: warps of a program.
        stages: depth of the software pipeline.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Problem:
    """Hold the inputs of the choice of a configuration.

    Attributes:
        kernel: ``"forward"``, ``"backward_keys"``, ``"backward_queries"`` or ``"backward_once"``.
        path: ``"plain"`` or ``"gluon"``.
        dtype: of q, k and v.
        head_dim: width of queries and keys.
        value_dim: width of values.
        group: query heads per key head.
        heavy: whether the score needs further registers (a slope that varies, terms per pair).
        loads_pairs: whether the score loads an element per pair.
        node_length: mean length of the forest's nodes, rounded down to a power of two.
        shared_limit: bytes of shared memory that a program may use.
        operations: operations of the score without its numbers: ``mul`` for a scaled product alone.
    """

    kernel: str
    path: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    group: int
    heavy: bool = False
    loads_pairs: bool = False
    node_length: int = 256
    shared_limit: int = 232_448
    operations: str = ""


def usable_shared_memory(arch: int) -> int:
    """Return the bytes of shared memory to plan with on compute capability ``arch / 10``, or ``GFX942``."""
    if 100 <= arch < 120:
        # Products take their operands from there too.
        return SHARED_MEMORY[100] - 34_000
    return SHARED_MEMORY.get(arch, SHARED_MEMORY[86])


GFX942 = 942
"""Stands for AMD's gfx942 (CDNA 3) where NVIDIA's architectures are compute capabilities times 10."""
SHARED_MEMORY = {
    **{80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376},
    GFX942: 65_536,
}
"""Bytes that a program may use, by architecture; Triton's compiler does not check them."""


@lru_cache(maxsize=256)
def operations_of(score: Score) -> str:
    """Return the names of a score's operations, of the logit and then of the condition."""
    parts = [sorted(_names(part)) for part in (score.value, score.visible) if part is not None]
    return "|".join(",".join(names) for names in parts)


def _names(expr: Expr) -> set[str]:
    inner = [item for item in expr[1:] if isinstance(item, tuple)]
    return set().union({expr[0]} if inner or expr[0] == "load" else (), *(_names(item) for item in inner))


def chunk_widths(dtype: torch.dtype) -> tuple[int, int]:
    """Return the narrowest and the widest piece of a head in one product.

    Float32 keeps three parts of each piece in registers, and spills where one is as narrow as 16.
    """
    return (32, 64) if dtype == torch.float32 else (16, 256)


def product_precision(dtype: torch.dtype, shared_limit: int) -> str:
    """Return how Triton multiplies: AMD's matrix instructions take float32 unchanged, NVIDIA's three parts of it."""
    if _is_amd(shared_limit):
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"


def default_config(problem: Problem) -> Config:
    """Return the first choice, used until tuning has found a better one."""
    return candidates(problem)[0]


def one_pass_fits(problem: Problem) -> bool:
    """Return whether the kernel that sums dq together with dk and dv has room for both.

    A score with a varying slope, or terms of pairs, spills 70 to 250 bytes of registers in it; wider heads more (on
    an A100 96 features spill 672), or they take more columns of a Blackwell's tensor memory than it has (80 features
    544 of 512). And a tile of fewer keys than a head has features adds more bytes to dq than a second pass would load.
    In Gluon each group of warps multiplies 64 features of the keys, no fewer than a swizzled line of shared memory has.
    AMD's registers have no room for it either, and hold a tile in another order than sums have.
    """
    if _is_amd(problem.shared_limit):
        return False
    on_hopper = problem.shared_limit == SHARED_MEMORY[90]
    widest = _ONE_PASS_HEAD if on_hopper else _ONE_PASS_HEAD_BY_WARP if _by_warp(problem) else _ONE_PASS_HEAD_BLACKWELL
    if problem.heavy or max(problem.head_dim, problem.value_dim) > widest:
        return False
    if problem.path == "gluon" and (not on_hopper or problem.head_dim != _GLUON_ONE_PASS_HEAD):
        return False
    return candidates(problem)[0].block_n >= problem.head_dim


@lru_cache(maxsize=1024)
def candidates(problem: Problem) -> tuple[Config, ...]:
    """Return the configurations worth trying that fit the device, the best guess first.

    Raises:
        UnsupportedError: the heads are too wide for any tile.
    """
    width = max(problem.head_dim, problem.value_dim)
    plain = _BY_WARP if _by_warp(problem) else _SIXTEEN_BITS
    plain = _FLOAT32 if problem.dtype == torch.float32 else plain
    if _is_amd(problem.shared_limit):
        plain = _AMD_FLOAT32 if problem.dtype == torch.float32 else _AMD
    found = (_GLUON if problem.path == "gluon" else plain)[problem.kernel]
    bound = next((bound for bound in found if width <= bound), max(found))
    choices = found[bound]
    if problem.heavy and problem.kernel in _BY_KEY:
        largest = _HEAVY_TILE if width <= _WIDE_HEAD else _HEAVY_WIDE_TILE
        choices = tuple(config for config in choices if config.block_m * config.block_n <= largest)
    if problem.loads_pairs and problem.kernel == "forward":
        choices = tuple(config for config in choices if config.block_n <= _LOADING_KEYS)
    choices = (*_tile_of_nodes(problem), *_first_elsewhere(problem), *choices)
    others = () if problem.path == "gluon" else _SMALL
    fitting = [config for config in (*choices, *others) if _fits(problem, config)]
    if not fitting:
        raise UnsupportedError(
            f"a generated kernel must find room for its tiles, got heads of {problem.head_dim} and "
            f"{problem.value_dim} features and {problem.shared_limit} bytes: use impl='flex'"
        )
    return tuple(dict.fromkeys(fitting))[: len(choices)]


def _tile_of_nodes(problem: Problem) -> tuple[Config, ...]:
    """Return Hopper's first choice for a product alone in Gluon, by the length of nodes.

    Of twice as many keys a tile takes a fifth fewer instructions per logit (9.5 instead of 12.3 in full tiles of the
    plain form); conditions and slopes spill in it, short nodes fill little of it (a tree of thought takes Gluon's
    forward 0.26 ms in it on an H100, and 0.21 ms in half of it).
    """
    width, bare = max(problem.head_dim, problem.value_dim), not problem.heavy and "|" not in problem.operations
    hopper = problem.shared_limit == SHARED_MEMORY[90] and problem.dtype != torch.float32
    gluon, long = problem.path == "gluon", problem.node_length >= _LONG_NODE
    kernels = ("forward", "backward_queries") if gluon else ("forward",)
    if problem.kernel not in kernels or not (hopper and bare and width <= 128) or problem.loads_pairs:
        return ()
    if gluon:
        return (Config(128, 128, 4, 3 if width <= 64 else 2) if long else Config(128, 64, 4, 3),)
    return (Config(128, 128, 8, 3),) if long else ()


def _first_elsewhere(problem: Problem) -> tuple[Config, ...]:
    """Return a first choice where a table's own spills.

    Other than on Hopper, sums are either all in registers, or in a separate memory.
    """
    if problem.path == "gluon" or problem.dtype == torch.float32 or _is_amd(problem.shared_limit):
        return ()
    both = problem.head_dim + problem.value_dim
    if not _by_warp(problem):
        return (Config(32, 64, 8, 3),) if problem.kernel in _BY_KEY and 320 < both <= 384 else ()
    if not problem.loads_pairs or problem.kernel == "backward_once":
        return ()
    if problem.kernel == "backward_queries":
        return (Config(64, 64, 8, 3),)
    rows, keys = (32, 64) if problem.kernel == "backward_keys" else (64, 64)
    return (Config(rows, keys if both <= 256 else 32, 8, 3),)


def _is_amd(shared_limit: int) -> bool:
    """Return whether a device is AMD's: no other has so little shared memory."""
    return shared_limit == SHARED_MEMORY[GFX942]


def _by_warp(problem: Problem) -> bool:
    """Return whether a device multiplies by warp, with sums in registers.

    That is before Hopper, and on desktop GPUs.
    """
    return problem.shared_limit < usable_shared_memory(100)


def _shared_bytes(problem: Problem, config: Config) -> int:
    """Estimate a program's bytes of shared memory: its tile and the pipeline of the others."""
    if _is_amd(problem.shared_limit):
        return _local_bytes(problem, config)
    both = problem.head_dim + problem.value_dim
    by_warp = _by_warp(problem) and problem.dtype != torch.float32
    # Warps copy operands to registers; warp groups still read a tile while the next ones are loaded.
    tiles = max(1, config.stages - 1) if by_warp else config.stages
    if problem.kernel in _BY_KEY:
        elements = config.block_n * both + tiles * config.block_m * both
    elif problem.kernel == "forward":
        elements = config.block_m * problem.head_dim + tiles * config.block_n * both
    else:
        elements = config.block_m * both + tiles * config.block_n * both
    size = 4 if problem.dtype == torch.float32 else 2
    # Weights are exchanged if they have fewer rows than eight warps multiply, or meet loads of pairs.
    rows = config.block_n if problem.kernel in _BY_KEY else config.block_m
    changes = by_warp and (rows < _ROWS_OF_WARPS or problem.loads_pairs)
    changed = config.block_m * config.block_n if changes else 0
    sums = 4 * config.block_m * problem.head_dim if problem.kernel == "backward_once" else 0  # laid for wide additions
    return (elements + changed) * size + sums + _RESERVED


def _local_bytes(problem: Problem, config: Config) -> int:
    """Return what AMD's programs take at most: their own tile before the loops, or one of the others in them.

    The next one waits in registers. Weights are exchanged where a warp has fewer than 32 rows.
    """
    by_key = problem.kernel in _BY_KEY
    rows, columns = (config.block_n, config.block_m) if by_key else (config.block_m, config.block_n)
    both = problem.head_dim + problem.value_dim
    widest = 1 << (max(problem.head_dim, problem.value_dim).bit_length() - 1)  # of the pieces of a head
    size, most = (4, chunk_widths(torch.float32)[1]) if problem.dtype == torch.float32 else (2, widest)
    exchanged = rows * columns if rows < _ROWS_OF_AMD * config.warps else 0
    return max(rows * min(widest, most) * size, (columns * both + exchanged) * size + _ROWS_OF_POOL)


ONE_PASS_KEYS = 330
"""Keys a row of queries must meet before one pass over the tiles costs less than two.

Two passes make seven products of a tile, one makes five; but it zeroes sums of dq in float32 and reads them again, 8
bytes per feature more. Where products run at 430 TFLOP/s and memory at 2.6 TB/s: 8 / 2.6e12 = keys * 4 / 430e12."""
GLUON_ONE_PASS_KEYS = 460
"""The same for kernels in Gluon, whose products run at 600 TFLOP/s."""
_ONE_PASS_HEAD, _ONE_PASS_HEAD_BY_WARP, _ONE_PASS_HEAD_BLACKWELL = 128, 80, 64
_GLUON_ONE_PASS_HEAD = 128
_RESERVED = 3_000
"""For reductions, masks and barriers."""
_ROWS_OF_WARPS = 128
_ROWS_OF_AMD = 32
"""Rows that one warp multiplies."""
_ROWS_OF_POOL = 512
"""Bytes for the rows of keys from outside."""
_LOADING_KEYS = 32
"""Keys of a tile of the forward that does not spill when every pair loads."""
_LONG_NODE = 256
"""Tokens."""
_BY_KEY = ("backward_keys", "backward_once")
_WIDE_HEAD = 192
_HEAVY_TILE, _HEAVY_WIDE_TILE = 32 * 128, 16 * 64
"""Largest tile of dk and dv that does not spill when the score needs further registers."""


def _fits(problem: Problem, config: Config) -> bool:
    return _shared_bytes(problem, config) <= problem.shared_limit


_Table = dict[str, dict[int, tuple[Config, ...]]]

# Tables: the widest head a row is good for, then its configurations.
# Three stages: with two, a loop loads nothing ahead, and the assembler serialises the products of Hopper (C7515).
_SIXTEEN_BITS: _Table = {
    "forward": {
        128: (Config(128, 64, 8, 3), Config(64, 64, 4, 3), Config(128, 32, 8, 3), Config(64, 32, 4, 3)),
        192: (Config(128, 64, 8, 3), Config(64, 32, 4, 3)),
        256: (Config(128, 32, 8, 3), Config(64, 32, 4, 3)),
    },
    "backward_keys": {
        128: (Config(64, 128, 8, 3), Config(32, 128, 8, 3), Config(64, 64, 4, 3)),
        192: (Config(32, 128, 8, 3), Config(64, 64, 8, 3), Config(32, 64, 8, 3)),
        256: (Config(32, 64, 8, 3), Config(16, 64, 8, 3)),
    },
    "backward_once": {128: (Config(64, 128, 8, 3), Config(64, 64, 8, 3))},
    "backward_queries": {
        128: (Config(128, 64, 8, 3), Config(64, 64, 4, 3), Config(128, 32, 8, 3)),
        192: (Config(128, 32, 8, 3), Config(64, 32, 8, 3)),
        256: (Config(128, 32, 8, 3), Config(64, 32, 8, 3)),
    },
}
_BY_WARP: _Table = {
    "forward": {
        128: (Config(128, 64, 8, 3), Config(128, 32, 8, 3), Config(64, 64, 4, 3), Config(64, 32, 4, 3)),
        192: (Config(128, 32, 8, 3), Config(64, 32, 4, 3)),
        256: (Config(64, 32, 4, 3), Config(64, 32, 4, 2)),
    },
    "backward_keys": {
        80: (Config(64, 128, 8, 3), Config(32, 128, 8, 3), Config(64, 64, 4, 3)),
        96: (Config(32, 64, 4, 3), Config(32, 128, 8, 3)),
        128: (Config(64, 64, 8, 3), Config(32, 64, 4, 3), Config(32, 128, 8, 3)),
        192: (Config(64, 32, 4, 3), Config(32, 32, 4, 3), Config(32, 32, 8, 3)),
        256: (Config(32, 32, 4, 3), Config(32, 32, 4, 2)),
    },
    "backward_once": {128: (Config(64, 128, 8, 3), Config(64, 64, 8, 3))},
    "backward_queries": {
        128: (Config(128, 64, 8, 3), Config(128, 32, 8, 3), Config(64, 32, 4, 3)),
        192: (Config(128, 32, 8, 3), Config(32, 32, 4, 3), Config(64, 32, 4, 2)),
        256: (Config(64, 32, 4, 3), Config(32, 32, 4, 2)),
    },
}
"""Where products are made warp by warp: A100, Ada and desktop GPUs."""
_GLUON: _Table = {
    "forward": {
        64: (Config(128, 128, 4, 3), Config(128, 64, 4, 3)),
        128: (Config(128, 128, 4, 2), Config(128, 64, 4, 3)),
        192: (Config(128, 64, 4, 2),),
    },
    "backward_keys": {
        128: (Config(64, 128, 4, 3), Config(32, 128, 4, 3)),
        192: (Config(32, 128, 4, 3),),
    },
    "backward_once": {128: (Config(64, 128, 4, 3),)},
    "backward_queries": {
        128: (Config(128, 64, 4, 3),),
        192: (Config(128, 64, 4, 2),),
    },
}
"""Four warps: the kernel adds a second group of them and one that loads."""
_FLOAT32: _Table = {
    "forward": {
        64: (Config(64, 32, 4, 3), Config(32, 32, 4, 3)),
        128: (Config(32, 32, 4, 3), Config(32, 16, 4, 3)),
        256: (Config(32, 32, 8, 3), Config(16, 32, 8, 3)),
    },
    "backward_keys": {
        64: (Config(32, 32, 8, 3), Config(32, 64, 8, 3)),
        128: (Config(32, 16, 8, 3), Config(16, 16, 4, 3)),
        256: (Config(16, 16, 8, 3),),
    },
    "backward_once": {64: (Config(32, 32, 8, 3), Config(32, 64, 8, 3)), 128: (Config(32, 16, 8, 3),)},
    "backward_queries": {
        64: (Config(32, 32, 8, 3), Config(64, 32, 4, 3)),
        96: (Config(16, 32, 4, 3), Config(16, 16, 4, 3)),
        128: (Config(32, 32, 8, 3), Config(16, 32, 8, 3)),
        256: (Config(16, 16, 8, 3),),
    },
}
_AMD: _Table = {
    "forward": {
        128: (Config(128, 64, 4, 2), Config(128, 32, 4, 2), Config(64, 32, 4, 2)),
        192: (Config(128, 32, 4, 2), Config(64, 32, 4, 2)),
        256: (Config(128, 32, 4, 2), Config(64, 32, 4, 2)),
    },
    "backward_keys": {
        64: (Config(32, 128, 4, 2), Config(16, 128, 4, 2)),
        128: (Config(32, 128, 4, 1), Config(16, 64, 4, 2), Config(16, 128, 4, 1)),
        192: (Config(16, 64, 4, 2), Config(16, 64, 4, 1)),
        256: (Config(16, 64, 4, 1), Config(16, 32, 4, 1)),
    },
    "backward_queries": {
        128: (Config(128, 32, 4, 2), Config(128, 64, 4, 1), Config(128, 32, 4, 1)),
        192: (Config(128, 16, 4, 2), Config(128, 32, 4, 1)),
        256: (Config(128, 16, 4, 1), Config(64, 16, 4, 1)),
    },
}
"""gfx942: 64 lanes a warp, 32 rows of a tile each. Of two stages a loop holds the next tile in registers."""
_AMD_FLOAT32: _Table = {
    "forward": {
        128: (Config(128, 32, 4, 2), Config(128, 16, 4, 2)),
        256: (Config(128, 16, 4, 2), Config(64, 16, 4, 2)),
    },
    "backward_keys": {
        64: (Config(16, 128, 4, 2), Config(16, 64, 4, 2)),
        128: (Config(16, 64, 4, 2), Config(16, 128, 4, 1)),
        256: (Config(16, 64, 4, 1), Config(16, 32, 4, 1)),
    },
    "backward_queries": {
        128: (Config(128, 16, 4, 2), Config(128, 32, 4, 1)),
        256: (Config(64, 16, 4, 2), Config(64, 16, 4, 1)),
    },
}
_SMALL = (Config(64, 32, 4, 2), Config(32, 32, 4, 2), Config(16, 32, 4, 2), Config(16, 16, 4, 2), Config(16, 16, 4, 1))
"""Configurations for older devices and wider heads, at some loss."""
