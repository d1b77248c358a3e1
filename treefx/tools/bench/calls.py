"""Count treefx's Python in a steady training step: calls, files and switches.

Counted, not timed: the figures are the same on every machine. What was compiled before counts for nothing, so a figure
is what every later step pays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import treefx
from treefx.errors import InputError
from treefx.tools.bench.job.models import make_config, make_model
from treefx.tools.bench.job.synthetic import shared_prefix_batch
from treefx.tools.bench.plan import token_cost

__all__ = ["ENTRIES", "Walk", "run", "walked"]

_Given = TypeVar("_Given")

_WARM_UP, _ROWS, _PREFIX, _SUFFIX, _VOCABULARY = 4, 4, 24, 8, 64
_LIMIT = 36
"""Tokens of a part."""
_NOT_OURS = ("treefx.tools.", "treefx.cli.")


@dataclass
class Walk:
    """What ran of treefx's own Python.

    Attributes:
        calls: functions called.
        modules: how often each module was called into.
        switches: how often a call went into another module than the one before.
    """

    calls: int = 0
    modules: dict[str, int] = field(default_factory=dict)
    switches: int = 0
    _last: str = ""

    def note(self, module: str) -> None:
        """Count a call."""
        self.calls += 1
        self.modules[module] = self.modules.get(module, 0) + 1
        self.switches += module != self._last
        self._last = module

    def within(self, package: str) -> int:
        """Calls into a package."""
        return sum(count for name, count in self.modules.items() if f"{name}.".startswith(f"{package}."))


@contextmanager
def walked() -> Iterator[Walk]:
    """Count what runs inside, in this thread."""
    walk = Walk()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            module = frame.f_globals.get("__name__") or ""
            if module.startswith("treefx.") and not module.startswith(_NOT_OURS):
                walk.note(module)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield walk
    finally:
        sys.setprofile(before)


def run(model: str = "llama", layers: int = 2) -> Iterator[dict[str, Any]]:
    """Walk through a step of each entry, on the CPU with ``aot_eager``.

    Args:
        model: An architecture of transformers.
        layers: Its number of blocks.

    Yields:
        One record per entry: ``calls``, ``files`` and ``switches`` of the forward, ``passes`` of these calls that are
        of ``treefx.passes`` and ``labels`` that ask what was proved of values, ``backward_calls`` and
        ``backward_files``. The two halves of a plan come as one.
    """
    for name, make in ENTRIES.items():
        forward, backward = make(_model(model, layers))
        yield {
            "entry": name,
            "calls": forward.calls,
            "files": len(forward.modules),
            "switches": forward.switches,
            "passes": forward.within("treefx.passes"),
            "labels": forward.within("treefx.passes.labels"),
            "backward_calls": None if backward is None else backward.calls,
            "backward_files": None if backward is None else len(backward.modules),
        }


def _model(name: str, layers: int) -> Any:
    torch.manual_seed(0)
    return make_model(make_config(name, vocab_size=_VOCABULARY, layers=layers))


def _rows(seed: int) -> dict[str, Tensor]:
    batch = shared_prefix_batch(_ROWS, _PREFIX + seed % 3, _SUFFIX, _VOCABULARY, seed=seed)
    return batch.model_inputs()


def _walk(model: Any, given: Callable[[int], _Given], forward: Callable[[_Given], Tensor]) -> tuple[Walk, Walk]:
    """The forward and the backward of a step; what it is given was made before."""
    *before, last = [given(seed) for seed in range(_WARM_UP + 1)]
    for batch in before:
        torch.autograd.backward(forward(batch))
    with walked() as there:
        loss = forward(last)
    if treefx.inspect(model).stats["ran"] != "packed":
        raise InputError(f"the step should run packed, but did not: {treefx.inspect(model).stats['fallback']}")
    with walked() as back:
        torch.autograd.backward(loss)
    return there, back


def _walk_rows(model: nn.Module) -> tuple[Walk, Walk]:
    model.compile(backend="treefx", options={"inner": "aot_eager"})
    return _walk(model, _rows, lambda batch: model(**batch).loss)


def _walk_forest(model: nn.Module) -> tuple[Walk, Walk]:
    compiled = torch.compile(model, backend="treefx", options={"inner": "aot_eager"})

    def loss_of(rows: dict[str, Tensor]) -> Tensor:
        forest = treefx.Forest.from_sequences(rows["input_ids"].tolist())
        with treefx.use(forest):
            logits = compiled(**forest.model_inputs()).logits
            return treefx.losses.sft(treefx.edge_logprobs(logits, forest), forest)

    return _walk(compiled, _rows, loss_of)


def _walk_converted(model: nn.Module) -> tuple[Walk, Walk]:
    treefx.convert(model)
    return _walk(model, _rows, lambda batch: model(**batch).loss)


def _walk_converted_head(model: nn.Module) -> tuple[Walk, Walk]:
    treefx.convert(model, pack_lm_head=True)
    return _walk(model, _rows, lambda batch: model(**batch).loss)


def _walk_plan(model: nn.Module) -> tuple[Walk, None]:
    """Forward and backward of a plan of seven parts: the trunk, and six branches one by one."""
    compiled = torch.compile(model, backend="treefx", options={"inner": "aot_eager"})

    def step(seed: int) -> Walk:
        found = treefx.plan(_branches(seed), token_cost(), _LIMIT)
        assert len(found.parts) == 7, f"the plan has {len(found.parts)} parts"
        with walked() as walk:
            treefx.backward(compiled, found, lambda logp, part: treefx.losses.sft(logp, part))
        return walk

    walks = [step(seed) for seed in range(_WARM_UP + 1)]
    return walks[-1], None


def _branches(seed: int) -> treefx.Forest:
    generator = torch.Generator().manual_seed(seed)
    trunk = torch.randint(_VOCABULARY, (_PREFIX,), generator=generator)
    rows = torch.randint(_VOCABULARY, (6, _PREFIX), generator=generator)
    rows[:, 0] = torch.arange(6)
    return treefx.Forest.from_sequences([torch.cat([trunk, row]).tolist() for row in rows])


ENTRIES: dict[str, Callable[[nn.Module], tuple[Walk, Walk | None]]] = {
    "rows": _walk_rows,
    "forest": _walk_forest,
    "converted": _walk_converted,
    "converted, head packed": _walk_converted_head,
    "a plan of 7 parts": _walk_plan,
}
"""By what a call is given."""
