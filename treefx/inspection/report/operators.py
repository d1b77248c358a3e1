"""Account for each operator of the captured graph: how often it runs, why, at what cost.

=========  =============================================================================================
ran        holds for
=========  =============================================================================================
``token``  values that are packed, attention and its scores, shifted logits that a loss picks from, and operators
           replaced by a packed form: masks and scores of an attention, steps of a recurrence
``batch``  functions of parameters and constants
``row``    all else; each has a code, and a value that merely reads another one on rows has that one's
``none``   dead values
=========  =============================================================================================

A call that ran the ordinary graph ran everything per row: operators that would be packed then have the call's code.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from treefx.inspection.graph_diff import operator_name
from treefx.inspection.report.costs import node_flops, result_bytes
from treefx.inspection.report.lines import line_of, module_path
from treefx.inspection.report.material import Material
from treefx.inspection.report.records import OperatorAccount
from treefx.passes.causal.contract import Contracted
from treefx.passes.labels.facts import Fact, Kind, ReadsOthers, fact_of
from treefx.passes.labels.label_tokens import MEETS_ROWS, SHAPE_ONLY
from treefx.passes.labels.laws.losses import Pick
from treefx.passes.labels.laws.reindex import Reindexed
from treefx.passes.labels.liveness import live_nodes
from treefx.passes.packing.compile_inner import KERNELS
from treefx.reason_codes import LOSS_PICKS, ROWS_BY_INPUTS, code_of_operator, find

__all__ = ["NO_LOSS", "account_operators", "origins"]

NO_LOSS = {ROWS_BY_INPUTS, LOSS_PICKS}
"""Codes of operators on rows that would save nothing."""

_IN_PLACE = "changes a buffer of the model"
_CONTRACTED = "runs on rows, and is read once per distinct token again"


@dataclass(frozen=True)
class _Origin:
    """Explain why a value is computed per row: code, text, and the first such operator."""

    code: str
    reason: str
    node: str


def account_operators(material: Material) -> tuple[OperatorAccount, ...]:
    """Account for every call of the captured graph, in order, without ``getitem``."""
    accounts = _labelled(material) if material.is_labelled else _unlabelled(material)
    return tuple(accounts)


def origins(operators: tuple[OperatorAccount, ...]) -> dict[str, OperatorAccount]:
    """Map the name of each operator on rows to the operator where its rows began."""
    by_name = {item.name: item for item in operators}  # reasons of the whole call began at no operator
    return {item.name: by_name.get(item.since, item) for item in operators if item.ran == "row"}


def _calls(gm: fx.GraphModule) -> Iterator[fx.Node]:
    for node in gm.graph.nodes:
        if node.op.startswith("call_") and node.target is not operator.getitem:
            yield node


def _unlabelled(material: Material) -> Iterator[OperatorAccount]:
    """Account for a graph that was never analysed: all per row, or per token if converted."""
    is_row = not material.runs_converted
    for node in _calls(material.traced):
        flops = _flops_of_captured(node, material)
        yield OperatorAccount(
            name=node.name,
            op=operator_name(node),
            ran="row" if is_row else "token",
            code=(material.code or "TFX001") if is_row else "",
            reason=(material.reason or find("TFX001").why) if is_row else "",
            module=module_path(node),
            line=line_of(node),
            captured=(node.name,),
            shape=material.sizes.text(node.meta.get("val", node.meta.get("example_value"))),
            flops_before=flops,
            flops_after=flops if is_row else flops * material.stats["tokens"] // max(material.positions, 1),
        )


def _flops_of_captured(node: fx.Node, material: Material) -> int:
    """Count FLOPs of a node of Dynamo's graph: linear layers and products only.

    They have other names there.
    """
    values = [item.meta.get("example_value") for item in node.all_input_nodes]
    shapes = [material.sizes.shape(x) for x in values if isinstance(x, torch.Tensor)]
    result = node.meta.get("example_value")
    name = getattr(node.target, "__name__", str(node.target))
    if name not in ("linear", "matmul", "bmm", "mm") or not shapes or not isinstance(result, torch.Tensor):
        return 0
    count = 1
    for size in material.sizes.shape(result):
        count *= size
    return 2 * count * shapes[0][-1]


def _labelled(material: Material) -> Iterator[OperatorAccount]:
    live, absorbed = live_nodes(material.traced), set[fx.Node]()
    for node in reversed(material.traced.graph.nodes):
        if node not in live and any(_absorbs(user, live, absorbed) for user in node.users):
            absorbed.add(node)
    found: dict[fx.Node, _Origin] = {}
    after = _Costs(material)
    for node in material.traced.graph.nodes:
        if node.op != "call_function":
            continue
        fact = fact_of(node)
        origin = _origin(node, fact, found)
        if origin is not None:
            found[node] = origin
        if node.target is not operator.getitem:
            ran = "token" if node in absorbed else _ran(node, fact, node in live)
            yield _account(material, node, fact, origin if ran == "row" else None, ran, after)


def _absorbs(user: fx.Node, live: set[fx.Node], absorbed: set[fx.Node]) -> bool:
    """Return True if a packed form replaces an operator together with its unread operands."""
    if user.op != "call_function" or user.target in SHAPE_ONLY:
        return False
    return user in absorbed or (user in live and isinstance(fact_of(user).law, ReadsOthers))


# Long: one field a line.
def _account(
    material: Material, node: fx.Node, fact: Fact, origin: _Origin | None, ran: str, after: _Costs
) -> OperatorAccount:
    flops = node_flops(node, material.sizes, material.columns)
    images = material.images.get(node.name, {})
    account = OperatorAccount(
        name=node.name,
        op=operator_name(node),
        ran=ran,
        code=origin.code if origin is not None else "",
        reason=origin.reason if origin is not None else "",
        law=_law(fact),
        module=module_path(node),
        line=line_of(node),
        captured=tuple(item.name for item in node.meta.get("from_node") or ()),
        shape=material.sizes.text(node.meta.get("val")),
        flops_before=flops,
        flops_after=after.flops(images.get("rewritten", ())),
        bytes_before=result_bytes(node, material.sizes),
        bytes_after=after.bytes(images.get("rewritten", ())),
        images=images,
        since=origin.node if origin is not None else "",
        kernels=_kernels(material, images),
        seconds_before=material.seconds.get("captured", {}).get(node.name, 0.0),
        seconds_after=after.seconds(images.get("rewritten", ())),
    )
    return account if material.packed else _on_rows(account, material)


def _kernels(material: Material, images: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Find the kernels of forward and backward that compute any image, from inductor's record."""
    found: dict[str, None] = {}
    for stage in ("forward", "backward"):
        names = set(images.get(stage, ()))
        known = material.graphs[stage].meta.get(KERNELS, {}) if stage in material.graphs else {}
        found |= {kernel: None for kernel, nodes in known.items() if not names.isdisjoint(nodes)}
    return tuple(found)


def _on_rows(account: OperatorAccount, material: Material) -> OperatorAccount:
    """Convert an account to that of a call that ran the ordinary graph."""
    same = {"flops_after": account.flops_before, "bytes_after": account.bytes_before, "images": {}, "kernels": ()}
    if account.ran != "token":
        return replace(account, **same)  # type: ignore[arg-type]
    return replace(account, ran="row", code=material.code, reason=material.reason, **same)  # type: ignore[arg-type]


class _Costs:
    """Sum costs of nodes of the rewritten graph, by name."""

    def __init__(self, material: Material) -> None:
        gm = material.graphs.get("rewritten")
        self._nodes = {} if gm is None else {node.name: node for node in gm.graph.nodes}
        self._material = material

    def flops(self, names: tuple[str, ...]) -> int:
        """Sum the FLOPs of nodes."""
        return sum(node_flops(self._nodes[n], self._material.sizes, self._material.columns) for n in names)

    def bytes(self, names: tuple[str, ...]) -> int:
        """Sum the result bytes of nodes."""
        return sum(result_bytes(self._nodes[n], self._material.sizes) for n in names)

    def seconds(self, names: tuple[str, ...]) -> float:
        """Sum the seconds of nodes."""
        known = self._material.seconds.get("rewritten", {})
        return sum((known.get(name, 0.0) for name in names), 0.0)


def _ran(node: fx.Node, fact: Fact, is_live: bool) -> str:
    if not is_live and node.target is not torch.ops.aten.copy_.default:
        return "none"
    first = fact.parts[0] if fact.parts else fact
    if isinstance(fact.law, Contracted):
        return "row"
    if isinstance(fact.law, Reindexed):  # with a reason: what reads the shifted value runs on rows, from here on
        return "token" if fact.reason is None else "row"
    if first.kind in (Kind.PACKED, Kind.SCORE):
        return "token"
    return "batch" if first.kind is Kind.INVARIANT else "row"


def _law(fact: Fact) -> str:
    """Return the name of the packed form, or "" without one."""
    return "" if fact.law is None or isinstance(fact.law, str) else type(fact.law).__name__.lstrip("_")


def _origin(node: fx.Node, fact: Fact, found: dict[fx.Node, _Origin]) -> _Origin | None:
    """Find the reason why a value is computed per row; None if it is not."""
    if node.target is operator.getitem:
        return found.get(node.all_input_nodes[0])
    own = fact.reason if fact.reason not in (None, MEETS_ROWS) else fact.obstacle
    name = fact.blame or str(node.target)
    if own is not None and not (fact.reason is not None and fact.blame is not None and _meets(node, found)):
        return _Origin(code_of_operator(name, own), own, node.name)
    if node.target is torch.ops.aten.copy_.default:
        return _Origin(code_of_operator(name, _IN_PLACE), _IN_PLACE, node.name)
    if isinstance(fact.law, Contracted):
        return next((found[item] for item in node.all_input_nodes if item in found), None) or _Origin(
            "TFX104", _CONTRACTED, node.name
        )
    if isinstance(fact.law, Pick):
        return _Origin(LOSS_PICKS, find(LOSS_PICKS).title, node.name)
    if fact.kind is not Kind.ROW and fact.kind is not Kind.PREFIX or isinstance(fact.law, Reindexed):
        return None
    return _inherited(node, found) or _Origin(ROWS_BY_INPUTS, find(ROWS_BY_INPUTS).title, node.name)


def _meets(node: fx.Node, found: dict[fx.Node, _Origin]) -> bool:
    return any(item in found and found[item].code not in NO_LOSS for item in node.all_input_nodes)


def _inherited(node: fx.Node, found: dict[fx.Node, _Origin]) -> _Origin | None:
    """Return the origin of an operand; operands with features of the model come first."""
    near = [found[item] for item in node.all_input_nodes if item in found]
    return next((item for item in near if item.code not in NO_LOSS), near[0] if near else None)
