"""Define the records of a report: frozen, plain data, converted to JSON field by field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "SCHEMA",
    "AttentionAccount",
    "Coverage",
    "GraphNode",
    "Loss",
    "Mask",
    "ModuleAccount",
    "OperatorAccount",
    "PassRun",
    "Restoration",
    "Verdict",
]

SCHEMA = "treefx.report/1"
"""Name and version of the form of a report; a change that old readers cannot read gets another number."""


@dataclass(frozen=True)
class Coverage:
    """The FLOPs of the captured graph's forward, on padded shapes, by how often they run.

    Attributes:
        token: Once per distinct token, attention among them.
        batch: Once for the batch: functions of parameters and constants.
        row: Once per row.
    """

    token: int = 0
    batch: int = 0
    row: int = 0

    @property
    def share(self) -> float:
        """The share that does not run per row; 1 where there is nothing to count."""
        total = self.token + self.batch + self.row
        return 1.0 - self.row / total if total else 1.0


@dataclass(frozen=True)
class Loss:
    """One reason for which something runs on rows.

    Attributes:
        code: Of ``treefx.reason_codes``.
        title: The code in words.
        reason: The analysis' reason, for this model.
        way_out: The change to make; "" where nothing is lost.
        operator: The operator that it is about, or "" for the whole call.
        line: The user's line, ``file:line: code``.
        flops: Of the captured graph, that run on rows for it.
        times: How many operators say so.
    """

    code: str
    title: str
    reason: str
    way_out: str
    operator: str = ""
    line: str | None = None
    flops: int = 0
    times: int = 1


@dataclass(frozen=True)
class Verdict:
    """Hold the outcome in one sentence, and advice on the largest loss.

    Attributes:
        sentence: For people.
        advice: For people; "" where nothing is to be done.
        ran: "packed", "ordinary" or "nothing".
        raw_tokens: Of the last call.
        tokens: That ran.
        coverage: By FLOPs.
        flops_before: Of one forward of the captured graph, on the padded batch.
        flops_after: Of one forward of the rewritten graph.
        losses: By FLOPs, the largest first.
    """

    sentence: str
    advice: str
    ran: str
    raw_tokens: int
    tokens: int
    coverage: Coverage = field(default_factory=Coverage)
    flops_before: int = 0
    flops_after: int = 0
    losses: tuple[Loss, ...] = ()


@dataclass(frozen=True)
class OperatorAccount:
    """One operator of the captured graph, traced to ATen. Every operator has one account.

    Attributes:
        name: Of its node in the captured graph.
        op: Such as ``addmm``.
        ran: "token" (once per distinct token), "batch" (once for the batch), "row" (once per row), or "none" where
            nothing reads its result.
        code: The reason for which it runs per row; "" for others.
        reason: The same in words.
        law: Name of its packed form, if any; such as ``Attention``.
        module: Path of its module, as in ``named_modules``; "" for the model itself.
        line: The user's line, ``file:line: code``.
        captured: The nodes of Dynamo's graph that it comes from.
        shape: Dtype and shape on rows, such as ``f32[4, 12, 64]``.
        flops_before: On rows, as ``torch.utils.flop_counter`` counts.
        flops_after: Of the nodes that it became.
        bytes_before: Of its results on rows; views have none.
        bytes_after: Of the results of the nodes that it became.
        images: Nodes that it became, by graph: "rewritten", "forward", "backward".
        since: The operator where its rows began: itself, or its source of rows.
        kernels: Kernels of inductor that compute its images, where
            ``torch._inductor.config.trace.provenance_tracking_level`` was set when it compiled.
        seconds_before: On rows, one operator at a time as in eager mode; 0 where nothing was timed.
        seconds_after: Of the nodes that it became.
    """

    name: str
    op: str
    ran: str
    code: str = ""
    reason: str = ""
    law: str = ""
    module: str = ""
    line: str | None = None
    captured: tuple[str, ...] = ()
    shape: str = ""
    flops_before: int = 0
    flops_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    images: dict[str, tuple[str, ...]] = field(default_factory=dict)
    since: str = ""
    kernels: tuple[str, ...] = ()
    seconds_before: float = 0.0
    seconds_after: float = 0.0


@dataclass(frozen=True)
class ModuleAccount:
    """All operators of a module and of the modules in it.

    Attributes:
        path: As in ``named_modules``; "" is the model.
        kind: The class.
        depth: How many modules it stands in.
        operators: How many there are.
        token: How many run once per distinct token.
        batch: How many run once for the batch.
        row: How many run per row.
        folded: Paths of the modules of the same list with an equal account, this one among them.
        seconds_before: On rows, one operator at a time; 0 where nothing was timed.
        seconds_after: Of what runs now, what treefx put in for the module included.
    """

    path: str
    kind: str
    depth: int
    operators: int
    token: int
    batch: int
    row: int
    flops_before: int
    flops_after: int
    bytes_before: int
    bytes_after: int
    codes: tuple[str, ...] = ()
    folded: tuple[str, ...] = ()
    seconds_before: float = 0.0
    seconds_after: float = 0.0


@dataclass(frozen=True)
class PassRun:
    """One pass.

    Attributes:
        number: Its place.
        seconds: Over all its runs.
        nodes_before: Nodes of its graph in its last run; 0 where that is not known.
        changes: Operators with changed counts, as ``mm: 12 -> 10``.
        diff: Nodes before and after, as lines of a unified diff; names of nodes are left out.
    """

    number: int
    name: str
    seconds: float
    nodes_before: int = 0
    nodes_after: int = 0
    operators_before: int = 0
    operators_after: int = 0
    changes: tuple[str, ...] = ()
    diff: tuple[str, ...] = ()


@dataclass(frozen=True)
class AttentionAccount:
    """One attention on the tree.

    Attributes:
        name: Of the node in the rewritten graph.
        score: Logit of the softmax, as a formula.
        visible: Which keys a query sees.
        mathml: Both as MathML.
        shapes: Of query, key and value; N is the number of distinct tokens.
        kernel: The form that runs on the device of the call.
        source: Number of its source in ``Report.sources``; -1 without one.
        pairs: Pairs of query and key that are visible in the last forest; 0 where there is none.
        pairs_on_rows: The same of the rows.
        mask: Number of its picture in ``Report.masks``; -1 without a forest.
        tiles: Tiles of 128 queries and 128 keys in which the last forest shows a pair; 0 where there is none. A window
            leaves out more.
        tiles_of_all: All such tiles of the distinct tokens.
    """

    name: str
    score: str
    visible: str
    mathml: str = ""
    module: str = ""
    line: str | None = None
    shapes: str = ""
    kernel: str = ""
    source: int = -1
    pairs: int = 0
    pairs_on_rows: int = 0
    mask: int = -1
    tiles: int = 0
    tiles_of_all: int = 0


@dataclass(frozen=True)
class Mask:
    """Which keys the queries of the last forest see, as a small picture.

    Attributes:
        tokens: Of the forest.
        shades: A text per row of cells (queries, in packed order), a digit per cell (keys): 0 where none of its pairs
            is visible, 9 where all are.
        note: Parts that the picture omits.
    """

    tokens: int
    shades: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class Restoration:
    """A node of the backward that sums the gradients of all rows through a token.

    Attributes:
        name: Of the node.
        op: ``treefx.restore`` or ``treefx.restore_pick``.
        of: The node of the rewritten graph that it differentiates.
        multiplicities: Of the last forest: how many tokens have how many rows, as pairs.
    """

    name: str
    op: str
    of: str = ""
    module: str = ""
    line: str | None = None
    shape: str = ""
    multiplicities: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class GraphNode:
    """A node of a graph, for drawing.

    Attributes:
        sources: Nodes of the stage before that it was made from.
        mark: "restore", "attention" or "expand", for nodes that treefx put in.
    """

    name: str
    op: str
    inputs: tuple[str, ...] = ()
    type: str = ""
    module: str = ""
    line: str | None = None
    sources: tuple[str, ...] = ()
    mark: str = ""
    code: str = ""


Plain = dict[str, Any]
"""A JSON object."""
