"""Code that reads values inside of a converted backbone: the call runs on rows, and the place is named."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import treefx
from tests.batches import Batch, shared_batch
from tests.models import double
from tests.oracle import FLOAT64, assert_close, outcome
from treefx.runtime.converted import readers

TRACKED: list[Tensor] = []


class Tracker:
    """An object of a trainer that adds up auxiliary losses."""

    total: Any = 0.0


TRACKER = Tracker()
PLACE = "layers.0.mlp.down_proj"


def batch() -> Batch:
    return shared_batch(rows=4, length=10, shared=6, padding=None)


def layer_of(model: Any) -> Any:
    return model.model.layers[0].mlp.down_proj


def step(model: Any, read: Callable[[Any], Any]) -> Tensor:
    """The loss, and a function of the values that were read in the call."""
    TRACKED.clear()
    TRACKER.total = 0.0
    layer_of(model).log.clear()
    loss: Tensor = model(**batch().inputs(), use_cache=False).loss
    return loss + 10 * read(layer_of(model))


def reading(forward: Callable[[Any, Tensor], Tensor]) -> Any:
    """A model whose first block has a layer with this forward, and its twin."""
    model = double("llama", num_hidden_layers=1)
    layer = layer_of(model)
    layer.__class__ = type("Reading", (nn.Linear,), {"forward": forward})
    layer.log, layer.named = [], {}
    for name in ("seen", "count"):
        layer.register_buffer(name, torch.zeros((), dtype=torch.float64))
    return model, copy.deepcopy(model)


def assert_on_rows(model: Any, twin: Any, run: Callable[[Any], Tensor], *reasons: str) -> None:
    """The step of both is equal; the converted model says why it ran on rows, in a warning and in its report."""
    with pytest.warns(UserWarning, match="every row of .* separately") as warned:
        got = outcome(model, lambda: run(model))
    assert_close(got, outcome(twin, lambda: run(twin)), FLOAT64)
    stats = treefx.inspect(model).stats
    assert (stats["ran"], len(warned)) == ("ordinary", 1)
    for reason in reasons:
        assert reason in stats["fallback"]
        assert reason in str(warned[0].message)
    outcome(model, lambda: run(model))  # warns no second time


# Kept by forward ----------------------------------------------------------------------------------------------------


def keeps_attribute(self: Any, x: Tensor) -> Tensor:
    self.kept = nn.functional.linear(x, self.weight)
    return self.kept


def fills_dictionary(self: Any, x: Tensor) -> Tensor:
    y = nn.functional.linear(x, self.weight)
    self.named["out"] = (y, 1)
    return y


def appends_to_global(self: Any, x: Tensor) -> Tensor:
    y = nn.functional.linear(x, self.weight)
    TRACKED.append(y)
    return y


def adds_to_tracker(self: Any, x: Tensor) -> Tensor:
    y = nn.functional.linear(x, self.weight)
    TRACKER.total = TRACKER.total + y.pow(2).mean()
    return y


def keeps_size(self: Any, x: Tensor) -> Tensor:
    self.size = x.shape[1]
    return nn.functional.linear(x, self.weight)


def squares(y: Tensor) -> Tensor:
    return y.pow(2).mean()


@pytest.mark.parametrize(
    ("forward", "read", "reason"),
    [
        (keeps_attribute, lambda layer: squares(layer.kept), f"{PLACE}.kept: a tensor that depends on tokens"),
        (fills_dictionary, lambda layer: squares(layer.named["out"][0]), f"{PLACE}.named['out']: a tensor"),
        (appends_to_global, lambda layer: squares(TRACKED[0]), "TRACKED: a tensor"),
        (adds_to_tracker, lambda layer: TRACKER.total, "aten.mean.default"),
        (keeps_size, lambda layer: torch.tensor(float(layer.size)), f"{PLACE}.size: a size of the batch"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_values_of_tokens_that_are_kept(forward: Any, read: Any, reason: str) -> None:
    model, twin = reading(forward)
    treefx.convert(model)
    assert_on_rows(model, twin, lambda run: step(run, read), reason)


def test_an_auxiliary_loss_added_in_the_backward() -> None:
    """DeepSeek's and Megatron's: an autograd.Function hands hidden states on, and gives its loss a gradient of one."""

    class AddAuxiliaryLoss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
            ctx.dtype = loss.dtype
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad, torch.ones((), dtype=ctx.dtype)

    def adds(self: Any, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.weight)
        added: Tensor = AddAuxiliaryLoss.apply(y, y.pow(2).mean())  # type: ignore[no-untyped-call]
        return added

    model, twin = reading(adds)
    treefx.convert(model)
    assert_on_rows(model, twin, lambda run: step(run, lambda layer: 0))


def test_gradient_hooks_inside_are_not_hidden_by_the_trace() -> None:
    def clamps(self: Any, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.weight)
        if y.requires_grad:
            y.register_hook(lambda grad: grad.clamp(-1e-4, 1e-4))
        return y

    model, twin = reading(clamps)
    treefx.convert(model)
    assert_on_rows(model, twin, lambda run: step(run, lambda layer: 0))


def counts(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.seen.add_((x > 0).to(x.dtype).sum())
    return nn.functional.linear(x, self.weight)


def counts_by_shape(self: Any, x: Tensor) -> Tensor:
    self.seen.add_(x.shape[0] * x.shape[1])
    return nn.functional.linear(x, self.weight)


@pytest.mark.parametrize(("forward", "reason"), [(counts, "aten.sum.default"), (counts_by_shape, f"{PLACE}.seen: ")])
def test_buffers_that_count_tokens(forward: Any, reason: str) -> None:
    model, twin = reading(forward)
    treefx.convert(model)
    assert_on_rows(model, twin, lambda run: step(run, lambda layer: 0), reason)
    outcome(twin, lambda: step(twin, lambda layer: 0))
    assert layer_of(model).seen == layer_of(twin).seen > 0


def test_values_of_weights_may_be_kept() -> None:
    """As torchao's fake quantization does: scales in attributes, a counter in a buffer."""

    def keeps_scale(self: Any, x: Tensor) -> Tensor:
        self.scale = self.weight.detach().abs().amax(1, keepdim=True)
        self.log[:] = [self.scale]
        self.count.add_(1)
        self.seen.copy_(self.weight.detach().abs().amax())
        return nn.functional.linear(x, self.weight)

    model, twin = reading(keeps_scale)
    treefx.convert(model, on_unsupported="error")
    run = lambda layer: layer.scale.sum()  # noqa: E731
    for _ in range(2):
        got = outcome(model, lambda: step(model, run))
        assert_close(got, outcome(twin, lambda: step(twin, run)), FLOAT64)
        assert treefx.inspect(model).stats["ran"] == "packed"
    ours, others = layer_of(model), layer_of(twin)
    assert torch.equal(ours.scale, others.scale) and torch.equal(ours.seen, others.seen)
    assert ours.count == others.count == 2


def hides(self: Any, x: Tensor) -> Tensor:
    y = nn.functional.linear(x, self.weight)
    if not torch.compiler.is_compiling():
        self.kept = y
    return y


def test_what_no_trace_shows_is_an_error_once() -> None:
    model, twin = reading(hides)
    treefx.convert(model)
    read = lambda layer: squares(layer.kept)  # noqa: E731
    with pytest.raises(treefx.UnsupportedError, match=rf"{PLACE}.kept got a tensor.*Discard this call"):
        step(model, read)
    assert_on_rows(model, twin, lambda run: step(run, read), f"{PLACE}.kept")


def scales_by_length(self: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, self.weight) * (1 + 0.01 * x.shape[1])


@pytest.mark.parametrize("is_one_row", [False, True])
def test_blocks_that_compute_with_a_size(is_one_row: bool) -> None:
    """As attention whose logits grow with the logarithm of the length: the packed row has another length."""
    model, twin = reading(scales_by_length)
    treefx.convert(model)
    rows = batch().rows()
    ids = torch.tensor(sum(rows, []))[None]
    one = {"input_ids": ids, "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None], "labels": ids}
    given = one if is_one_row else batch().inputs()
    assert_on_rows(model, twin, lambda run: run(**given, use_cache=False).loss, "computes with a size of the batch")


# Hooks --------------------------------------------------------------------------------------------------------------


def plain() -> tuple[Any, Any]:
    model = double("llama", num_hidden_layers=1)
    layer_of(model).log = []
    return treefx.convert(model), copy.deepcopy(treefx.unconvert(copy.deepcopy(model)))


def hook_forward(layer: Any) -> Any:
    return layer.register_forward_hook(lambda module, args, out: module.log.append(out))


def hook_inputs(layer: Any) -> Any:
    return layer.register_forward_pre_hook(lambda module, args: module.log.append(args[0]))


def hook_partly(layer: Any) -> Any:
    return layer.register_forward_hook(functools.partial(lambda log, module, args, out: log.append(out), layer.log))


def hook_everywhere(layer: Any) -> Any:
    def look(module: Any, args: Any, out: Any) -> None:
        if module is layer:
            layer.log.append(out)

    return register_module_forward_hook(look)


@pytest.mark.parametrize("register", [hook_inputs, hook_partly, hook_everywhere])
def test_hooks_registered_after_the_first_call_and_removed(register: Callable[[Any], Any]) -> None:
    model, twin = plain()
    read = lambda layer: sum(squares(x) for x in layer.log)  # noqa: E731
    assert_close(*(outcome(run, lambda run=run: step(run, read)) for run in (model, twin)), FLOAT64)
    assert treefx.inspect(model).stats["ran"] == "packed"
    handles = [register(layer_of(run)) for run in (model, twin)]
    try:
        assert_on_rows(model, twin, lambda run: step(run, read), "hook", "test_values_read.py")
    finally:
        for handle in handles:
            handle.remove()
    assert_close(*(outcome(run, lambda run=run: step(run, read)) for run in (model, twin)), FLOAT64)
    assert treefx.inspect(model).stats["ran"] == "packed"


def test_gradients_seen_by_backward_hooks() -> None:
    model, twin = plain()
    for run in (model, twin):
        layer_of(run).register_full_backward_hook(lambda module, given, out: module.log.append(out[0]))
    assert_on_rows(model, twin, lambda run: step(run, lambda layer: 0), f"{PLACE} (Linear) has the backward hook")
    assert [x.shape for x in layer_of(model).log] == [x.shape for x in layer_of(twin).log]


def test_hooks_around_the_backbone_see_rows() -> None:
    """On the module that takes the ids, before and after conversion, in front of its hooks and behind them."""
    seen: dict[str, list[Any]] = {"model": [], "twin": []}
    models = dict(zip(("model", "twin"), plain(), strict=True))

    def register(prepend: bool) -> None:
        for name, run in models.items():
            note = lambda module, args, kwargs, out=None, name=name: seen[name].append(  # noqa: E731
                (kwargs["input_ids"].shape, getattr(out, "last_hidden_state", torch.zeros(0)).detach())
            )
            run.model.register_forward_pre_hook(note, with_kwargs=True, prepend=prepend)
            run.model.register_forward_hook(note, with_kwargs=True, prepend=prepend)

    run_both = lambda: [step(run, lambda layer: 0) for run in models.values()]  # noqa: E731
    for prepend in (False, True):
        register(prepend)
        for _ in range(2):
            run_both()
    assert treefx.inspect(models["model"]).stats["ran"] == "packed"
    assert len(seen["model"]) == len(seen["twin"])
    for (ids, hidden), (others, expected) in zip(seen["model"], seen["twin"], strict=True):
        assert ids == others
        torch.testing.assert_close(hidden, expected, rtol=1e-10, atol=1e-12)


def test_without_the_checks_the_values_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a hook reads of distinct tokens gives another loss: the checks of hooks and attributes are needed."""
    monkeypatch.setattr("treefx.runtime.converted.planner.find_hook", lambda modules: None)
    monkeypatch.setattr(readers.Attributes, "changed", lambda self: ())
    model, twin = plain()
    for run in (model, twin):
        hook_forward(layer_of(run))
    read = lambda layer: sum(squares(x) for x in layer.log)  # noqa: E731
    got, wanted = (step(run, read) for run in (model, twin))
    assert abs(got - wanted) > 1e-8 * abs(wanted)


def test_libraries_that_move_weights_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT and transformers register a hook on the embedding for checkpoints; NEFTune's draws noise."""
    model, twin = plain()
    for run in (model, twin):
        run.enable_input_require_grads()
    outcome(model, lambda: step(model, lambda layer: 0))
    assert treefx.inspect(model).stats["ran"] == "packed"
    noise = type("Noise", (), {"__call__": lambda self, *given: None, "__module__": "transformers.trainer_utils"})()
    model.model.embed_tokens.register_forward_hook(noise)
    assert "Noise" in str(readers.find_hook(list(model.model.modules())))
