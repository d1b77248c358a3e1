"""Make the launches of one attention: kernels, arguments and lists of tiles."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from treefx.kernels.common import Inputs
from treefx.kernels.gpu.replays import VALUES, of_forest
from treefx.kernels.gpu.triton_tree.arguments import (
    ColumnValues,
    KeySource,
    RowValues,
    buffer_arguments,
    forest_numbers,
    padded_length,
    strides,
)
from treefx.kernels.gpu.triton_tree.codegen import Request, kernel_module, row_vectors, row_width
from treefx.kernels.gpu.triton_tree.configs import (
    Config,
    Problem,
    chunk_widths,
    default_config,
    operations_of,
    product_precision,
)
from treefx.kernels.gpu.triton_tree.expressions import HoistedValue, ScoreCode, kinds_of, score_code
from treefx.kernels.gpu.triton_tree.small_launches import (
    ROW_VECTORS,
    Launch,
    join_values,
    launch_prologue,
    launch_repair,
    launch_sums,
    launch_values,
)
from treefx.kernels.gpu.triton_tree.support import processors, programs_per_head
from treefx.kernels.score import Score, loads
from treefx.kernels.tiles.tree_blocks import Keys, TileLists, TreeBlocks, find_blocks, remembered

__all__ = ["Attention", "KeySource", "Launch"]


@dataclass(frozen=True)
class Attention:
    """Hold the data that all launches of one attention share.

    Attributes:
        inputs: the tensors; the boundary is a separate key source.
        score: the score.
        path: ``"plain"`` or ``"gluon"``.
        once: whether the kernel of dk and dv also adds up dq, in no fixed order.
        choose: the configuration of each problem.
        node_length: mean length of the forest's nodes, rounded down to a power of two.
        shared_limit: bytes of shared memory that a program may use.
        request: inputs of the kernels' source.
        code: the score in Triton.
        group: query heads per key head.
    """

    inputs: Inputs
    score: Score
    path: str = "plain"
    once: bool = False
    choose: Callable[[Problem], Config] = default_config
    node_length: int = 256
    shared_limit: int = 232_448
    request: Request = field(init=False)
    code: ScoreCode = field(init=False)
    group: int = field(init=False)

    def __post_init__(self) -> None:
        q, v = self.inputs.q, self.inputs.v
        buffers = kinds_of(self.inputs.buffers)
        chunks = chunk_widths(q.dtype)
        request = Request(self.score.to_json(), buffers, q.shape[-1], v.shape[-1], chunks, self.path)
        object.__setattr__(self, "request", request)
        object.__setattr__(self, "code", score_code(request.score, buffers))
        object.__setattr__(self, "group", q.shape[1] // self.inputs.k.shape[1])

    @cached_property
    def module(self) -> ModuleType:
        """The kernels: written when they are first asked for."""
        return kernel_module(self.request)

    def sources(self) -> list[KeySource]:
        """Return the boundary's keys, if there is a boundary, then the own keys."""
        own = self.own_keys()
        return [own] if self.inputs.boundary is None else [self.boundary_keys(), own]

    def own_keys(self) -> KeySource:
        """Return the keys of the queries' own tokens."""
        boundary = self.inputs.boundary
        outside = 0 if boundary is None else boundary.k.shape[2]
        keys = Keys(self.inputs.subtree_end, None, base=outside, query_base=outside)
        return KeySource(self.inputs.k, self.inputs.v, keys)

    def boundary_keys(self) -> KeySource:
        """Return the keys from outside, which come first in the score's indices."""
        boundary = self.inputs.boundary
        assert boundary is not None
        keys = Keys(boundary.hi, boundary.lo, base=0, query_base=boundary.k.shape[2])
        return KeySource(boundary.k, boundary.v, keys)

    def problem(self, kernel: str) -> Problem:
        """Return the inputs of the choice of a kernel's configuration."""
        return Problem(
            kernel,
            self.path,
            self.inputs.q.dtype,
            self.request.head_dim,
            self.request.value_dim,
            self.group,
            self.code.slope is not None or bool(self.code.pair),
            self.code.loads_pairs,
            self.node_length,
            self.shared_limit,
            operations_of(self.score),
        )

    def config(self, kernel: str) -> Config:
        """Return the configuration of a kernel."""
        return self.choose(self.problem(kernel))

    def forward(
        self, source: KeySource, out: Tensor, lse: Tensor, previous: tuple[Tensor, Tensor] | None = None
    ) -> Launch:
        """Return the launch that writes ``out`` and ``lse``, continuing from a previous pair."""
        config = self.config("forward")
        blocks = self.blocks(source, config)
        arguments = {
            **self.shared(source, config, blocks, blocks.by_query),
            "Out": out,
            "Lse": lse,
            "PreviousOut": None if previous is None else previous[0],
            "PreviousLse": None if previous is None else previous[1],
            "Sinks": self.inputs.sinks,
            **strides("out", out),
            **strides("previous", out if previous is None else previous[0]),
        }
        return self._with_repair(self.launch("forward", len(blocks.by_query.order), arguments, config), {})

    @property
    def of_keys(self) -> str:
        """The kernel of dk and dv."""
        return "backward_once" if self.once else "backward_keys"

    def backward_keys(self, source: KeySource, gradients: dict[str, Any], dk: Tensor, dv: Tensor) -> Launch:
        """Return the launch that writes the gradients of a source's keys and values.

        Args:
            source: the keys.
            gradients: result of :meth:`prologue`.
            dk: where the gradient of the keys goes.
            dv: where that of the values goes.
        """
        config = self.config(self.of_keys)
        blocks = self.blocks(source, config)
        work = blocks.key_programs
        # Never empty: whether there are parts must not make another kernel.
        slots = max(1, work.slots)
        parts = [
            torch.empty(slots, self.heads, config.block_n, tensor.shape[-1], dtype=torch.float32, device=dk.device)
            for tensor in ((dk, dv) if len(work.split) else (dk[..., :1], dv[..., :1]))
        ]
        arguments = {
            **self.shared(source, config, blocks, blocks.by_key),
            **gradients,
            "GradK": dk,
            "GradV": dv,
            "PartsK": parts[0],
            "PartsV": parts[1],
            "order": work.order,
            "start": work.start,
            "middle": work.middle,
            "stop": work.stop,
            "slot": work.slot,
            **strides("dk", dk),
            **strides("dv", dv),
        }
        launch = self._with_repair(self.launch(self.of_keys, len(work.order), arguments, config), {})
        if not len(work.split):
            return launch
        return replace(launch, after=(*launch.after, launch_sums(work, config, parts, (dk, dv))))

    def backward_queries(
        self, source: KeySource, gradients: dict[str, Any], dq: Tensor, previous: Tensor | None = None
    ) -> Launch:
        """Return the launch that writes the gradient of the queries, added to a previous one."""
        config = self.config("backward_queries")
        arguments = self._of_queries(source, config, dq, previous) | gradients
        launch = self.launch("backward_queries", len(arguments["order"]), arguments, config)
        return self._with_repair(launch, {**gradients.get("in_place", {}), "Spoiled": dq, **strides("spoiled", dq)})

    def repair_sums(
        self, source: KeySource, rows: dict[str, Any], spoiled: Tensor, dq: Tensor, previous: Tensor | None = None
    ) -> Launch:
        """Return the launch that recomputes tiles of one-pass dq with one source of keys.

        Args:
            source: the keys.
            rows: result of :meth:`prologue` for the kernel of dq.
            spoiled: dq of all sources, which says where that is needed.
            dq: where the result goes.
            previous: that of the sources before.
        """
        config = self.config(self.of_keys)
        arguments = self._of_queries(source, config, dq, previous) | rows
        return self._repair("backward_queries", {**arguments, "Spoiled": spoiled, **strides("spoiled", dq)}, config)

    def _of_queries(self, source: KeySource, config: Config, dq: Tensor, previous: Tensor | None) -> dict[str, Any]:
        blocks = self.blocks(source, config)
        return {
            **self.shared(source, config, blocks, blocks.by_query),
            "GradQ": dq,
            "PreviousGradQ": previous,
            **strides("dq", dq),
            **strides("previous", dq if previous is None else previous),
        }

    def _with_repair(self, launch: Launch, further: Mapping[str, Any]) -> Launch:
        """Return a launch; in Gluon, a repair follows with the same and ``further`` arguments."""
        if self.path == "plain":  # these kernels do so themselves
            return launch
        name = launch.kernel.__name__
        repaired = "backward_keys" if name == self.of_keys else name  # of the sums of dq: repair_sums
        return replace(launch, after=(self._repair(repaired, {**launch.arguments, **further}, launch.config),))

    def _repair(self, name: str, arguments: Mapping[str, Any], config: Config) -> Launch:
        kernel = getattr(kernel_module(replace(self.request, path="repair")), f"repair_{name}")
        buffers = buffer_arguments(self.inputs.buffers, self.code.used)
        return launch_repair(kernel, {**arguments, **buffers}, config, self.heads)

    def is_seen(self, source: KeySource) -> bool:
        """Return whether any query sees a key of a source; boundary padding is not seen."""
        if source.keys.low is None or not len(source):
            return len(source) > 0
        return len(self.blocks(source, self.config("forward")).by_query.tiles) > 0

    @property
    def heads(self) -> int:
        """Key heads, of all elements of the batch: the programs per list of tiles."""
        return self.inputs.q.shape[0] * self.inputs.k.shape[1]

    def keys_met(self, kernel: str) -> float:
        """Return the mean number of keys that a row of queries meets, without synchronizing."""
        config = self.config(kernel)
        tiles = sum(len(self.blocks(one, config).by_key.tiles) for one in self.sources() if self.is_seen(one))
        return tiles * config.block_m * config.block_n / (self.inputs.q.shape[2] * self.group)

    def blocks(self, source: KeySource, config: Config) -> TreeBlocks:
        """Return the tile lists of a source for tiles of this configuration."""
        return find_blocks(
            source.keys,
            self.inputs.q.shape[2],
            config.block_m,
            config.block_n,
            self.score.visible,
            self.inputs.buffers,
            self.group,
        )

    def launch(self, name: str, lists: int, arguments: dict[str, Any], config: Config) -> Launch:
        """Return a launch with one program per list of tiles and key head, or fewer."""
        kernel = getattr(self.module, name)
        taken = {parameter: arguments[parameter] for parameter in kernel.arg_names}
        if "lists" in taken:
            lists = programs_per_head(lists, len(taken["tiles"]), self.heads, processors(self.inputs.q.device))
        return Launch(kernel, (lists, self.heads), taken, config)

    def shared(self, source: KeySource, config: Config, blocks: TreeBlocks, lists: TileLists) -> dict[str, Any]:
        """Return the arguments that the three big kernels have in common."""
        q = self.inputs.q
        return {
            "Q": q,
            "K": source.k,
            "V": source.v,
            "Low": blocks.low,
            "Size": blocks.size,
            "pool_row": source.rows,
            "order": lists.order,
            "lists": len(lists.order),
            "start": lists.start,
            "middle": lists.middle,
            "tiles": lists.tiles,
            **self.read_by_score(source),
            **strides("q", q),
            **strides("k", source.k),
            **strides("v", source.v),
            "queries": q.shape[2],
            "keys": len(source),
            "query_base": source.keys.query_base,
            "key_base": source.keys.base,
            "kv_heads": source.k.shape[1],
            "GROUP": self.group,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "STAGES": config.stages,
            "PRECISION": product_precision(q.dtype, self.shared_limit),
        }

    def prologue(
        self, grad_out: Tensor, out: Tensor, lse: Tensor, values: Sequence[Launch] = ()
    ) -> tuple[Launch, dict[str, Any], dict[str, Any]]:
        """Return the launch before the backward, and its results per row for keys and queries.

        All but the plain kernel of dq, which loads its rows once, read them in the order of the tiles; what repairs dq
        reads them ``in_place``. In one pass the sums of dq are zeroed. ``values`` are made there too.
        """
        q = self.inputs.q
        width = row_width(self.request.head_dim, self.request.chunk_widths) if self.once else None
        read = row_vectors(self.path)
        launch = launch_prologue(q, grad_out, out, lse, self.inputs.k.shape[1], width, read)
        made = launch.arguments
        rows, grads = (q, grad_out) if made["PackedQ"] is None else (made["PackedQ"], made["PackedGrad"])
        packed = {name: made[name] for name in (*ROW_VECTORS, "packed_rows", "SumsQ")}
        packed |= {"Q": rows, "GradOut": grads, **strides("q", rows), **strides("grad", grads)}
        in_place = {"Q": q, "GradOut": grad_out, "Lse": lse, "Delta": made["Delta"]}
        in_place |= {**strides("q", q), **strides("grad", grad_out)}
        launch = join_values(self._value_kernels, launch, values) if values else launch
        return launch, packed, in_place if self.path == "plain" or self.once else {**packed, "in_place": in_place}

    def with_values(self, sources: Sequence[KeySource]) -> tuple[list[KeySource], list[Launch]]:
        """Return key sources with the score's values for Gluon, and the launches making them.

        These are parts of the score that read one query or one key alone, in the order of the tiles. Functions of the
        forest are cached; all others may change from layer to layer.

        Args:
            sources: key sources, own keys last; unseen sources get no values.
        """
        if self.path == "plain" or not (self.code.row_values or self.code.column_values):
            return list(sources), []
        batch, _, queries, _ = self.inputs.q.shape
        rows = self._values(RowValues, self.code.row_values, (self.heads, queries * self.group))
        found, launches = [], []
        for source in sources:
            if not self.is_seen(source):
                found.append(source)
                continue
            columns = self._values(ColumnValues, self.code.column_values, (batch, len(source)), source.keys.base)
            made = {name: made for name, (_, made) in columns.items()}
            made |= {name: made if source is sources[-1] else None for name, (_, made) in rows.items()}
            if any(tensor is not None for tensor in made.values()):
                launches.append(launch_values(self._value_kernels, self._read_by_values(source, made), self.heads))
            values = {f"Row_{name}": value for name, (value, _) in rows.items()}
            values |= {f"Column_{name}": value for name, (value, _) in columns.items()}
            found.append(replace(source, values=values))
        return found, launches

    @property
    def _value_kernels(self) -> ModuleType:
        return kernel_module(replace(self.request, path="values"))

    def _values(
        self,
        side: type[RowValues | ColumnValues],
        values: Sequence[HoistedValue],
        size: tuple[int, int],
        first: int = 0,
    ) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Return values of one side by name, and those that a launch has to make per layer."""
        q, known = self.inputs.q, {*forest_numbers(self.inputs, self.score)}
        found: dict[str, tuple[Tensor, Tensor | None]] = {}
        for value in values:
            make = side(value.expr, q.shape, self.inputs.outside, q.device, self.group, first, size[1])
            dtype = torch.float32 if value.kind == "float" else torch.int32
            if {*loads(value.expr)} <= known:
                found[value.name] = self.of_forest(make), None
            else:
                made = q.new_empty((size[0], padded_length(size[1])), dtype=dtype)
                found[value.name] = made, made
        return found

    def _read_by_values(self, source: KeySource, made: Mapping[str, Tensor | None]) -> dict[str, Any]:
        """Return arguments of the kernels of values; ``None`` stands for existing values."""
        return {
            **{f"{VALUES}{name}": tensor for name, tensor in made.items()},
            **buffer_arguments(self.inputs.buffers, self.code.used),
            "packed_rows": padded_length(self.inputs.q.shape[2] * self.group),
            "packed_columns": padded_length(len(source)),
            "queries": self.inputs.q.shape[2],
            "keys": len(source),
            "query_base": source.keys.query_base,
            "key_base": source.keys.base,
            "kv_heads": source.k.shape[1],
            "GROUP": self.group,
        }

    def of_forest(self, make: RowValues | ColumnValues) -> Tensor:
        """Return the score's values that read the forest alone, made once for all layers."""
        buffers = self.inputs.buffers
        forest = (self.inputs.subtree_end, *(buffers[number] for number in loads(make.expr)))
        # By its text: 1 and 1.0 are equal, and make values of other types.
        return of_forest(remembered(("values", repr(make)), forest, lambda: make(*buffers)))

    def read_by_score(self, source: KeySource) -> dict[str, Any]:
        """Return buffers, or Gluon's values in their stead, and the distance of their rows."""
        if self.path == "plain":
            return buffer_arguments(self.inputs.buffers, self.code.used)
        rows = self.inputs.q.shape[2] * self.group
        return {**source.values, "packed_rows": padded_length(rows), "packed_keys": padded_length(len(source))}
