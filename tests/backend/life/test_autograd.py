"""What callers do with autograd around a compiled model: graphs kept, parts of gradients, hooks, checkpoints."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import treefx
from tests.backend.small import Small
from tests.backend.support import compile_with
from tests.batches import shared_batch
from tests.models import TinyLM
from tests.oracle import FLOAT64, stats_of
from tests.spellings import PADDED
from treefx.runtime.ways.ordinary import Ordinary
from treefx.torch_patches import kept_graphs

BATCH = shared_batch(rows=4, length=14, shared=6, vocab=61)


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return Small(PADDED["additive_padding"]).double()


def collected(model: nn.Module) -> list[Tensor]:
    """The gradients that the parameters hold, which are taken away."""
    found = [p.new_zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def worst(got: list[Tensor], wanted: list[Tensor]) -> float:
    """Largest difference over the largest gradient."""
    largest = max(float(x.abs().max()) for x in wanted)
    return max(float((x - y).abs().max()) for x, y in zip(got, wanted, strict=True)) / largest


Act = Callable[[nn.Module, Any], list[Tensor]]


def keep_twice(model: nn.Module, run: Any) -> list[Tensor]:
    loss = run(**BATCH.inputs()).loss
    loss.backward(retain_graph=True)
    first = collected(model)
    loss.backward(retain_graph=True)
    second = collected(model)
    loss.backward()
    return [*first, *second, *collected(model)]


def same(act: Act, inner: str, model: nn.Module) -> None:
    """``act(model, function)`` gives the same tensors eagerly and compiled, in a first and a second call."""
    twin = copy.deepcopy(model)
    wanted, run = act(model, model), compile_with(twin, inner=inner)
    for _ in range(2):
        assert worst(act(twin, run), wanted) < FLOAT64


def test_a_backward_that_overwrites_what_it_kept_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled backwards do write into what the forward saved: without copies the second one is wrong."""
    model = TinyLM(PADDED["additive_padding"], layers=1, width=16).double()
    twin = copy.deepcopy(model)
    wanted, run = keep_twice(model, model), compile_with(twin, inner="inductor")
    for _ in range(2):
        assert worst(keep_twice(twin, run), wanted) < FLOAT64
    monkeypatch.setattr(kept_graphs, "_copied", lambda x: x)
    with pytest.raises(AssertionError):
        assert worst(keep_twice(twin, run), wanted) < FLOAT64


def caller_loss(out: Any) -> Tensor:
    return (out.logits.square().mean(-1) * BATCH.attention_mask).sum()


def two_losses_on_one_graph(model: nn.Module, run: Any) -> list[Tensor]:
    """The model's own loss and one of the caller's on its logits, one after the other."""
    out = run(**BATCH.inputs())
    out.loss.backward(retain_graph=True)
    first = collected(model)
    caller_loss(out).backward()
    return [*first, *collected(model)]


def gradients_of_some_parameters(model: nn.Module, run: Any) -> list[Tensor]:
    loss = run(**BATCH.inputs()).loss
    wanted = [model.head.weight, model.embed.weight, torch.zeros(3, requires_grad=True)]
    some = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
    assert some[2] is None and model.head.weight.grad is None
    other = torch.autograd.grad(loss, [model.mixes[0].weight])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    return [*some[:2], *other]


def hooks_on_parameters(model: nn.Module, run: Any) -> list[Tensor]:
    """Gradient hooks change what arrives, and hooks after accumulation see all of it once."""
    seen: list[Tensor] = []
    handles = [
        model.embed.weight.register_hook(lambda g: 2 * g),
        model.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())),
    ]
    run(**BATCH.inputs()).loss.backward()
    for handle in handles:
        handle.remove()
    assert len(seen) == 1
    return [*seen, *collected(model)]


def gradients_that_are_there_already(model: nn.Module, run: Any) -> list[Tensor]:
    run(**BATCH.inputs()).loss.backward()
    model.zero_grad(set_to_none=False)
    for _ in range(2):
        run(**BATCH.inputs()).loss.backward()
    return collected(model)


def checkpointed(reentrant: bool) -> Act:
    """A checkpoint around the whole model."""

    def act(model: nn.Module, run: Any) -> list[Tensor]:
        def forward(scale: Tensor) -> tuple[Tensor, Tensor]:
            out = run(**BATCH.inputs())
            return out.loss * scale, out.logits * scale

        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        loss, logits = checkpoint(forward, scale, use_reentrant=reentrant)
        (loss + (logits.square().mean(-1) * BATCH.attention_mask).sum()).backward()
        return [*collected(model), scale.grad]

    return act


def saved_tensors_elsewhere(model: nn.Module, run: Any) -> list[Tensor]:
    with torch.autograd.graph.save_on_cpu():
        out = run(**BATCH.inputs())
        loss = out.loss + caller_loss(out)
    loss.backward()
    return collected(model)


def anomaly_detection(model: nn.Module, run: Any) -> list[Tensor]:
    with torch.autograd.set_detect_anomaly(True):
        out = run(**BATCH.inputs())
        (out.loss + caller_loss(out)).backward()
    return collected(model)


def functional_call(model: nn.Module, run: Any) -> list[Tensor]:
    prefix = "_orig_mod." if hasattr(run, "_orig_mod") else ""
    others = {prefix + name: (p * 1.1).detach().requires_grad_() for name, p in model.named_parameters()}
    out = torch.func.functional_call(run, others, (), BATCH.inputs())
    return list(torch.autograd.grad(out.loss, list(others.values())))


def evaluation_with_gradients(model: nn.Module, run: Any) -> list[Tensor]:
    model.eval()
    with torch.no_grad():
        before = run(**BATCH.inputs()).loss
        with torch.enable_grad():
            loss = run(**BATCH.inputs()).loss
    model.train()
    return [before, *torch.autograd.grad(loss, list(model.parameters()))]


OF_THE_LOSS = [gradients_that_are_there_already, gradients_of_some_parameters, keep_twice, hooks_on_parameters]
OF_THE_LOGITS = [
    checkpointed(reentrant=True), two_losses_on_one_graph, saved_tensors_elsewhere, anomaly_detection,
    checkpointed(reentrant=False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("acts", "inner"),
    [
        (OF_THE_LOSS, "aot_eager"),
        (OF_THE_LOGITS, "aot_eager"),
        ([functional_call, evaluation_with_gradients], "eager"),
    ],
)
def test_what_callers_do_with_gradients(acts: list[Act], inner: str) -> None:
    """Each act twice, all on one compiled model, as in one process."""
    reference, twin = tiny(), tiny()
    run = compile_with(twin, inner=inner)
    for act in acts:
        wanted = act(reference, reference)
        for call in range(2):
            assert worst(act(twin, run), wanted) < FLOAT64, (act, call)


def test_second_derivatives_are_refused() -> None:
    model = tiny()
    loss = compile_with(model, inner="aot_eager")(**BATCH.inputs()).loss
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    with pytest.raises(Exception, match="double backward|second derivative|does not require grad"):
        sum(g.square().sum() for g in gradients).backward()


class Broken(nn.Module):
    """Layers, and a head behind a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny()

    def forward(self, **inputs: Tensor) -> Tensor:
        hidden = self.inner(**inputs).hidden
        torch._dynamo.graph_break()
        return self.inner.head(hidden)


LINEAR: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor]]] = {
    "logits": (tiny, lambda run: run(**BATCH.inputs()).logits.sum()),
    "hidden states": (tiny, lambda run: run(**BATCH.inputs()).hidden[..., 0].sum()),
    "a graph behind another": (Broken, lambda run: run(**BATCH.inputs()).sum()),
}
"""Models, and sums of what they return: the gradient of each entry requires no gradient."""


def check_penalty(value: Callable[[], Tensor], parameters: list[nn.Parameter], named: bool) -> None:
    """Gradients with ``create_graph`` are the plain ones, and a penalty on them is no constant."""
    first = value()
    gradients = torch.autograd.grad(first, parameters, create_graph=True, allow_unused=True)
    plain = torch.autograd.grad(value(), parameters, allow_unused=True)
    for x, y in zip(plain, gradients, strict=True):
        assert (x is None) is (y is None) and (x is None or y is None or torch.equal(x, y))
    loss = first + sum(g.square().sum() for g in gradients if g is not None)
    with pytest.raises(Exception, match="double backward|a second one was taken"):
        if named:
            torch.autograd.grad(loss, parameters, allow_unused=True)
        else:
            loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", LINEAR)
def test_penalties_on_gradients_are_refused(name: str, named: bool) -> None:
    make, value = LINEAR[name]
    model = make()
    run = compile_with(model, inner="aot_eager")
    check_penalty(lambda: value(run), list(model.parameters()), named)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("function", [treefx.edge_logprobs, treefx.edge_entropy])
def test_penalties_on_gradients_of_edges_are_refused(function: Any, named: bool) -> None:
    model, forest = nn.Embedding(61, 61).double(), treefx.Forest.from_sequences(BATCH.input_ids)
    check_penalty(lambda: function(model(forest.model_inputs()["input_ids"]), forest).sum(), [model.weight], named)


class Gate(torch.autograd.Function):
    """Its backward is a function of saved values, which have another derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (1 - x.tanh() ** 2)


class Gated(nn.Module):
    """A gate behind a token's embedding; with ``packs``, an attention before it."""

    def __init__(self, packs: bool) -> None:
        super().__init__()
        self.embed, self.head, self.packs = nn.Embedding(61, 8), nn.Linear(8, 61), packs

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.packs:
            unseen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            x = (x @ x.mT).masked_fill(unseen, -torch.inf).softmax(-1) @ x
        return F.cross_entropy(self.head(Gate.apply(x))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def second_derivatives(model: nn.Module, run: Any) -> list[Tensor]:
    loss = run(BATCH.input_ids)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sum(g.square().sum() for g in gradients).backward()
    return [loss.detach(), *collected(model)]


@pytest.mark.parametrize("packs", [False, True])
def test_second_derivatives_through_a_function_of_the_user(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo takes what the function saved for a constant: silently wrong where the graph runs unchanged."""
    torch.manual_seed(0)
    model = Gated(packs).double()
    same(lambda own, run: [run(BATCH.input_ids)], "eager", model)
    with pytest.raises(treefx.UnsupportedError, match="second derivative"):
        same(second_derivatives, "eager", model)
    if not packs:
        torch._dynamo.reset()
        monkeypatch.setattr(Ordinary, "_guarded", lambda self, run: run)
        with pytest.raises(AssertionError):
            same(second_derivatives, "eager", model)


class Salient(nn.Module):
    """Frozen embeddings that are made to require grad, and kept to read their gradient where ``kept``."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.inner, self.kept = tiny(), kept
        self.inner.embed.requires_grad_(False)
        self.inner.embed.register_forward_hook(self.hook)

    def hook(self, module: nn.Module, args: Any, x: Tensor) -> Tensor:
        x.requires_grad_()
        if self.kept:
            self.seen = x
        return x

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.inner(**inputs).loss


@pytest.mark.parametrize("kept", [True, False])
def test_gradients_of_embeddings_that_are_kept(kept: bool) -> None:
    """Kept, they have a gradient afterwards; not kept, nothing stands in the way of one whole graph."""
    model, reference = Salient(kept), Salient(kept)
    compiled = compile_with(model, inner="eager")
    compiled(**BATCH.inputs()).backward()
    reference(**BATCH.inputs()).backward()
    if kept:
        assert worst([model.seen.grad], [reference.seen.grad]) < FLOAT64
    assert worst(collected(model), collected(reference)) < FLOAT64
    assert (stats_of(compiled)["fallback"] is None) is not kept
