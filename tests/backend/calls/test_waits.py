"""Planning a call reads its inputs on the host: with one wait for a device, or none where a trainer moved the batch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.backend.models import test_blocks, test_images, test_vision_towers
from tests.backend.models.vision import TinyVLM, draw_images, qwen3_vl
from tests.backend.small import Small
from tests.backend.support import compile_with, in_case
from tests.batches import Batch, shared_batch
from tests.oracle import Step, loss_of, outcome, relative_errors, stats_of, zero_gradients
from tests.spellings import PADDED, SPELLINGS
from treefx.integrations.moved_batches import remember_moved
from treefx.kernels import memory
from treefx.runtime.analyses import Analyses
from treefx.runtime.ways import rows

aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.is_nonzero.default,
    aten._unique2.default, aten.unique_dim.default, aten.masked_select.default,
}  # fmt: skip


class StandIn(TorchDispatchMode):
    """Stand in for a device whose tensors, and results of them, lie on the CPU.

    Attributes:
        waits: The operators that wait for it, and how many tensors each copy to the host has taken.
        mixed: Operators of tensors here and there, which a device refuses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[Any] = []
        self.mixed: list[str] = []
        self._there: dict[int, Tensor] = {}

    def place(self, *values: Any) -> None:
        self._there |= {x.untyped_storage()._cdata: x for x in tree_leaves(values) if isinstance(x, Tensor)}

    def holds(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self._there

    def fetch(self, tensors: list[Tensor]) -> list[Tensor]:
        self.waits.append(len(tensors))
        return [torch.from_numpy(x.detach().numpy().copy()) for x in tensors]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        there = [x for x in given if self.holds(x)]
        if there and (
            func in WAITING or any(x.dtype is torch.bool for x in tree_leaves(args[1:2]) if func is aten.index.Tensor)
        ):
            self.waits.append(str(func))
        picks = func is aten.index.Tensor and self.holds(args[0])  # indices may lie on the host
        if there and not picks and any(x.dim() and not self.holds(x) for x in given):
            self.mixed.append(str(func))
        result = func(*args, **(kwargs or {}))
        if there:
            self.place(result)
        return result


@contextmanager
def planned_on(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let calls be planned as if their inputs, buffers and constants were on the device."""

    def within(function: Callable[..., Any]) -> Callable[..., Any]:
        def planned(*args: Any) -> Any:
            device.place(*args)
            for shape in (x for x in args if isinstance(x, rows.Shape)):
                gm = shape.analysis.gm
                device.place([getattr(gm, str(node.target)) for node in gm.graph.find_nodes(op="get_attr")])
            with device:
                return function(*args)

        return planned

    def together(operands: Any) -> Any:
        """Move operands to the device if one with dimensions is there, and a number of it to the host otherwise."""
        tensors = [x for x in tree_leaves(operands) if isinstance(x, Tensor)]
        if any(x.dim() and device.holds(x) for x in tensors):
            device.place(tensors)
            return operands
        return tree_map(lambda x: x.clone() if isinstance(x, Tensor) and device.holds(x) else x, operands)

    with monkeypatch.context() as patch:
        patch.setattr(memory, "is_on_device", device.holds)
        for module in ("padding", "places", "origins"):
            patch.setattr(f"treefx.runtime.{module}.together", together)
        for module in ("runtime.padding", "runtime.places", "inputs.values"):
            patch.setattr(f"treefx.{module}.is_on_device", device.holds)
        patch.setattr(memory, "_fetched", device.fetch)
        patch.setattr(rows, "plan_call", within(rows.plan_call))
        patch.setattr(Analyses, "_values", within(Analyses._values))
        yield
    memory._sent.clear()


def fresh(seed: int, padding: Any = "right") -> Batch:
    return shared_batch(rows=4, length=11, shared=5, vocab=61, padding=padding, seed=seed)


def planned(spelling: str, monkeypatch: pytest.MonkeyPatch, padding: Any) -> Iterator[StandIn]:
    """Train six fresh batches on one compilation, and compare the gradients with eager mode's.

    Yield the device after three batches, and another after three that a trainer has moved.
    """
    torch.manual_seed(0)
    model = Small({**SPELLINGS, **PADDED}[spelling]).double()
    compiled = compile_with(model, min_sharing=1.0)
    loss_of(fresh(0, padding))(compiled)
    for seeds in ((1, 2, 3), (4, 5, 6)):
        device = StandIn()
        for seed in seeds:
            batch = fresh(seed, padding)
            expected = outcome(model, lambda batch=batch: loss_of(batch)(model))
            with planned_on(device, monkeypatch):
                there = Batch(**{name: value.clone() for name, value in batch.inputs().items()}, **_absent(batch))
                device.place(there.inputs())
                if seed > 3:
                    remember_moved(batch.inputs(), there.inputs())
                got = outcome(model, lambda there=there: loss_of(there)(compiled))
            assert max(relative_errors(got, expected).values()) < 1e-10
            assert stats_of(compiled)["ran"] == "packed"
        yield device


OF_GROUP, PER_ROW = "one image per group", "an image per row"
STEPS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Step]]] = {
    "images": (lambda: TinyVLM().double(), lambda seed: of_images((OF_GROUP, PER_ROW)[seed % 2])),
    "a tower in front of a cut": (
        qwen3_vl,
        lambda seed: test_vision_towers.step_of(test_vision_towers.batch_of_images(), ("abab", "abac")[seed % 2]),
    ),
    "blocks": (lambda: test_blocks.Blocked("patches").double(), lambda seed: test_blocks.step_of(fresh(seed))),
}
MOST = {"large": 0, "small": 1 << 20}
"""Elements of a small tensor, so that all others are large or none is."""


def of_images(case: str) -> Step:
    batch, names = test_images.batch_of(case)
    return test_images.step_of(batch, draw_images(names))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("a tower in front of a cut", ("large", "small")),
        *((name, (size,)) for name in ("images", "blocks") for size in MOST),
    ],
)
def test_values_of_other_kinds_meet_in_one_place(
    name: str, sizes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pixels and vectors that stay on the device, next to ids on the host; small ones come to the host."""
    make, step = STEPS[name]
    model = make()
    compiled = compile_with(model, min_sharing=1.0)
    step(0)(compiled)
    for size in sizes:
        monkeypatch.setattr(memory, "_MOST_OTHERS", MOST[size])
        device = StandIn()
        with in_case(size):
            for seed in (1, 2, 3):
                expected = outcome(model, lambda seed=seed: step(seed)(model))
                with planned_on(device, monkeypatch):
                    got = outcome(model, lambda seed=seed: step(seed)(compiled))
                zeros = zero_gradients(model, step(seed))
                assert max(relative_errors(got, expected, zeros).values()) < 1e-10
                assert stats_of(compiled)["ran"] == "packed"
            assert device.waits and not device.mixed


def _absent(batch: Batch) -> dict[str, None]:
    return dict.fromkeys(batch.__dataclass_fields__.keys() - batch.inputs().keys())


@pytest.mark.parametrize(
    ("spelling", "padding"),
    [
        ("sdpa_is_causal", None),
        ("tril_buffer", None),
        ("sliding_softcap", None),
        *((name, side) for name in ("sdpa_padding", "additive_padding") for side in ("right", "left")),
        ("two_fills", "right"),
        ("chunked_from_the_first_token", "left"),
    ],
)
def test_planning_waits_once_or_not_at_all(spelling: str, padding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each new batch: all that is read of it comes in one copy, of nothing where a trainer has moved the batch."""
    fetched, moved = planned(spelling, monkeypatch, padding)
    assert len(fetched.waits) == 3 and all(isinstance(count, int) for count in fetched.waits), fetched.waits
    assert not fetched.mixed
    assert not moved.waits and not moved.mixed
