"""Catalogue callers' actions around a model: invalid inputs, hooks, faults.

A text reads the names that the texts of ``calls`` read. Where a call may raise, both runs record that it raised.
"""

from __future__ import annotations

from treefx.tools.fuzz.families.calls import CALLS
from treefx.tools.fuzz.families.converted import CONVERTED
from treefx.tools.fuzz.families.parts import Part

__all__ = ["FAULTS", "HOOKED", "INPLACE", "INVALID", "NONFINITE", "SITUATIONS", "WEIGHTED", "is_forest"]

_TRY = (
    "opt.zero_grad()\ntry:\n    torch.manual_seed({k})\n    out = f(**b)\n    loss = criterion(out, b)\n"
    "    loss.backward()\n    collect(seen, '{k}', loss, m, b)\n"
    "except Exception: seen['{k} raised'] = torch.ones(())\n"
)


def _invalid(change: str) -> Part:
    """A call with one of its inputs changed."""
    return Part(
        "b = {n: x.detach().clone().requires_grad_(x.requires_grad) for n, x in batches[{b}].items()}\n"
        + change
        + "\n"
        + _TRY
    )


INVALID = {
    "label -1": _invalid("b['labels'][-1, -1] = -1"),
    "label -1 in the middle": _invalid("b['labels'][0, b['labels'].shape[1] // 2] = -1"),
    "label -99": _invalid("b['labels'][0, -1] = -99"),
    "label beyond the vocabulary": _invalid("b['labels'][-1, -1] = V"),
    "id beyond the vocabulary": _invalid("b['ids'][0, -1] = V"),
    "id below zero": _invalid("b['ids'][-1, 0] = -1"),
    "id beyond the vocabulary in padding": _invalid("b['ids'] = b['ids'].masked_fill(b['am'] == 0, V)"),
    "labels of another width": _invalid("b['labels'] = b['labels'][:, :-1]"),
    "mask of another width": _invalid("b['am'] = F.pad(b['am'], (0, 1), value=1)"),
    "ids of floats": _invalid("b['ids'] = b['ids'].double()"),
    "labels of floats": _invalid("b['labels'] = b['labels'].double()"),
    "narrow ids": _invalid("b['ids'] = b['ids'].to(torch.int32)"),
}
"""Eager raises for most of them; where it does not, the numbers must agree."""

_PUT = """
def slices(h, s): h[:, :2] = s[:, None, : h.shape[-1]].expand(-1, 2, -1)[:, : h[:, :2].shape[1]]; return h.sin()
def by_mask(h, s): h[h.detach() > 0.5] = 0.25; return h * s[:, None]
def added(h, s): h.add_(s[:, None]); return h * h
def a_view(h, s): h.transpose(1, 2).mul_(s[:, :, None].cos()); return h.sum(1)
def filled(h, s): h.masked_fill_((h > 0).detach(), 0.5); return h * s[:, None]
def both(h, s): h.mul_(2.0); s.add_(1.0); return h * s[:, None]
def rows_put(h, s): h.index_copy_(0, torch.arange(len(h)), h.detach() * 2); return h * s[:, None]
def a_part(h, s): h[..., 0].copy_(s[:, :1]); return h
"""


def _put(name: str) -> Part:
    run = (
        f"change = compile({name})\n"
        "for turn, (rows, columns) in enumerate(((3, 4), (5, 6), (2, 7))):\n"
        "    g = torch.Generator().manual_seed(turn)\n"
        "    base = torch.randn(rows, columns, D, generator=g, dtype=torch.float64).requires_grad_()\n"
        "    side = torch.randn(rows, D, generator=g, dtype=torch.float64).requires_grad_()\n"
        "    h = base * 1.5\n    out = change(h, side * 1.0)\n"
        "    loss = out.square().sum() + h.sum()\n    loss.backward()\n"
        "    seen[f'{k}{turn} loss'] = loss.detach()\n"
        "    seen[f'{k}{turn} gradient of base'], seen[f'{k}{turn} gradient of side'] = base.grad, side.grad\n"
        "for n in [n for n, x in seen.items() if x is None]: del seen[n]\n"
    )
    return Part(run, top=_PUT)


INPLACE = {
    f"hidden states changed: {name}": _put(name)
    for name in ("slices", "by_mask", "added", "a_view", "filled", "both", "rows_put", "a_part")
}
"""Functions of hidden states that change them, compiled by themselves, as behind a cut of Dynamo."""


def _nonfinite(value: str, place: str) -> Part:
    return Part(
        f"b = batches[{{b}}]\nbad, kept = b['ids'].flatten()[{place}], m.embed.weight.detach().clone()\n"
        f"with torch.no_grad():\n    m.embed.weight[bad] = float('{value}')\n    out = f(**b)\n"
        "    for n, x in enumerate(out):\n        if x.dim() > 2: seen[f'{k} output {n}'] = x.detach().clone()\n"
        "    m.embed.weight.copy_(kept)\n"
    )


NONFINITE = {
    f"{value} {where}": _nonfinite(value, place)
    for value in ("nan", "inf")
    for where, place in (
        ("at the end of a row", "-1"),
        ("inside a row", "len(b['ids'][0]) // 2"),
        ("in a prefix", "1"),
    )
}
"""A token whose embedding is not finite: rows without it are not touched by it."""

_WEIGHTED = '''
def weighted(m, f, b):
    """A forest whose first tokens have no weight; one of them is forbidden by its logit."""
    rows = rows_of(b)
    weights = [[0.0, 0.0] + [1.0 + 0.5 * n for n in range(len(row) - 2)] for row in rows]
    weights = [given[: len(row)] for given, row in zip(weights, rows)]
    forbidden = {row[1] for row in rows} - {t for row, given in zip(rows, weights) for t, w in zip(row, given) if w}
    barred = torch.tensor(sorted(forbidden), dtype=torch.int64)
    bar = torch.zeros(V, dtype=torch.float64).index_fill(0, barred, -float("inf"))
    if f is m:
        loss = torch.zeros((), dtype=torch.float64)
        for row, given in zip(rows, weights):
            out = m(ids=torch.tensor(row)[None], am=None, labels=None, positions=torch.arange(len(row))[None])[0]
            logp = (out[0, :-1] + bar).log_softmax(-1)
            kept = torch.tensor(given[1:], dtype=torch.float64)
            picked = logp[torch.arange(len(row) - 1), torch.tensor(row[1:])]
            loss = loss - torch.where(kept != 0, picked, 0.0) @ kept
        return loss
    forest = treefx.Forest.from_sequences(rows, weights)
    with treefx.use(forest):
        given = forest.model_inputs()
        out = f(ids=given["input_ids"], am=None, labels=None, positions=given["position_ids"])
    return treefx.losses.sft(treefx.edge_logprobs(out[0] + bar, forest), forest)
'''

_BACKWARD = "loss.backward()\ncollect(seen, '{k}', loss, m, {})\n"

WEIGHTED = {
    "forest with weights of zero": Part(
        "b = batches[{b}]\nopt.zero_grad()\nloss = weighted(m, f, b)\n" + _BACKWARD, top=_WEIGHTED
    ),
    "forest without a compiler": Part(
        "b = batches[{b}]\nopt.zero_grad()\n"
        "loss = native(m, m if f is m else lambda **given: m(**given), rows_of(b))\n" + _BACKWARD
    ),
}
"""What forests say of their tokens, and a model that does not hear it, which treefx refuses."""

_ACTING = '''
def stepped_inside(m):
    """Each parameter is stepped and its gradient freed as soon as it is accumulated."""
    own = {p: torch.optim.SGD([p], lr=0.1) for p in m.parameters()}
    def act(p):
        own[p].step()
        own[p].zero_grad()
    return [p.register_post_accumulate_grad_hook(act) for p in m.parameters()]


def clamped(m):
    return [p.register_hook(lambda g: g.clamp(-0.05, 0.05)) for p in m.parameters()]


def counted(m):
    m.fired = torch.zeros(())
    def act(p): m.fired += 1
    return [p.register_post_accumulate_grad_hook(act) for p in m.parameters()]


def normalised(m):
    return [p.register_hook(lambda g: g / (1 + g.norm())) for p in m.parameters()]
'''


_MEAN = '''
def mean_over_edges(m, f, compile, rows):
    """The mean over distinct edges, each once; its gradients in place."""
    if f is not m: return planned(m, f, compile, rows, True, lambda logp, forest: -logp.mean())
    found = {}
    for row in rows:
        out = m(ids=torch.tensor(row)[None], am=None, labels=None, positions=torch.arange(len(row))[None])[0]
        logp = out[0].log_softmax(-1)
        for t in range(1, len(row)): found.setdefault(tuple(row[: t + 1]), logp[t - 1, row[t]])
    loss = -torch.stack(list(found.values())).mean()
    loss.backward()
    return loss
'''


def _hooked(name: str, cut: bool) -> Part:
    return Part(
        f"b = batches[{{b}}]\nopt.zero_grad()\nhandles = {name}(m)\nloss = planned(m, f, compile, rows_of(b), {cut})\n"
        "for handle in handles: handle.remove()\n"
        "collect(seen, '{k}', loss, m, {})\n"
        "seen.update({f'{k} weight {n}': p.detach().clone() for n, p in m.named_parameters()})\n"
        "if hasattr(m, 'fired'): seen['{k} fired'] = m.fired\n",
        top=_ACTING,
    )


HOOKED = {
    f"plan{' in parts' if cut else ''}, {name.replace('_', ' ')}": _hooked(name, cut)
    for name in ("stepped_inside", "clamped", "counted", "normalised")
    for cut in (True, False)
} | {
    "plan in parts, a mean over edges": Part(
        "b = batches[{b}]\nopt.zero_grad()\nloss = mean_over_edges(m, f, compile, rows_of(b))\n"
        "collect(seen, '{k}', loss, m, {})\n",
        top=_MEAN,
    )
}
"""What acts on gradients while a plan runs backward (once, on the whole gradient); a loss that is no sum of parts."""

_CAUGHT = "except (ArithmeticError, KeyboardInterrupt): seen['{k} raised'] = torch.ones(())\n"
_FAULT = "def fault(*_): raise KeyboardInterrupt\n"

FAULTS = {
    "a fault in the loss": Part(
        "b = batches[{b}]\ntry:\n    out = f(**b)\n    raise ArithmeticError\n" + _CAUGHT, top=_FAULT
    ),
    "a fault in backward": Part(
        "b = batches[{b}]\nopt.zero_grad()\ntry:\n    loss = criterion(f(**b), b)\n"
        "    loss.register_hook(fault)\n    loss.backward()\n" + _CAUGHT,
        top=_FAULT,
    ),
    "a fault at a weight": Part(
        "b = batches[{b}]\nopt.zero_grad()\nhandle = m.embed.weight.register_hook(fault)\n"
        "try: criterion(f(**b), b).backward()\n" + _CAUGHT + "handle.remove()\nopt.zero_grad()\n",
        top=_FAULT,
    ),
    "a fault in a plan": Part(
        "b, tries = batches[{b}], iter(range(9))\n"
        "def broken(logp, forest):\n    if next(tries): raise ArithmeticError\n"
        "    return treefx.losses.sft(logp, forest)\n"
        "opt.zero_grad()\ntry: planned(m, f, compile, rows_of(b), True, broken)\nexcept ArithmeticError: pass\n"
        "else: opt.zero_grad()\n"  # a plan of one part calls the loss once, and nothing fails
        "left = [p.grad.abs().sum() for p in m.parameters() if p.grad is not None and f is not m]\n"
        "seen['{k} left'] = sum(left, torch.zeros((), dtype=dtype)).detach()\nopt.zero_grad()\n",
    ),
    "a fault while a plan adds": Part(
        "b, own = batches[{b}], [p for p in m.parameters() if p.requires_grad]\n"
        "for p in own: p.grad = torch.ones_like(p)\n"
        "handle = own[-1].register_post_accumulate_grad_hook(fault)\n"
        "try: planned(m, f, compile, rows_of(b), True) if f is not m else None\nexcept KeyboardInterrupt: pass\n"
        "handle.remove()\n"
        "seen['{k} left'] = sum(((p.grad - 1).abs().sum() for p in own), torch.zeros((), dtype=dtype)).detach()\n"
        "opt.zero_grad()\n",
        top=_FAULT,
    ),
}
SITUATIONS = {**CALLS, **INVALID, **INPLACE, **NONFINITE, **WEIGHTED, **HOOKED, **CONVERTED, **FAULTS}
"""All calls by name."""


def is_forest(name: str) -> bool:
    """Whether the call runs a forest."""
    return name.startswith(("forest", "plan")) or name in ("a fault in a plan", "a fault while a plan adds")
