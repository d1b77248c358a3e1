"""LM head and log-probabilities behind ``treefx.convert``: once per distinct token, exact against rows in float64."""

import copy
import gc
import io
import math
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from trl.trainer.utils import (
    add_fused_lm_head,
    entropy_from_logits,
    selective_log_softmax,
    selective_log_softmax_and_entropy,
)

import treefx
from tests.batches import distinct_with_padding, shared_batch
from tests.models import double
from tests.oracle import FLOAT64, assert_close, outcome

BATCH = shared_batch(rows=4, length=12, shared=6)
IDS, BARE = BATCH.input_ids, BATCH.without("labels").inputs()
NEXT = IDS[:, 1:]
DISTINCT = distinct_with_padding(IDS, BATCH.attention_mask)

Step = Callable[[Any], Tensor]


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    model = double("llama", num_hidden_layers=1)
    twin = copy.deepcopy(model)
    return treefx.convert(model, lazy_outputs=True), twin


def check(pair: tuple[Any, Any], step: Step) -> dict[str, Any]:
    """The step on both models; what was counted on the converted one."""
    model, twin = pair
    assert_close(outcome(model, lambda: step(model)), outcome(twin, lambda: step(twin)), FLOAT64)
    stats = dict(treefx.inspect(model).stats)
    assert stats["ran"] == "packed"
    return stats


@contextmanager
def case(name: str) -> Iterator[None]:
    """Names the case in what fails in it: cases share a proof of the model, which takes longer than their steps."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        raise AssertionError(f"{name}: {error}") from error


def positions(model: Any, step: Step) -> dict[str, int]:
    """By operator, how many positions a step computes along the vocabulary."""
    found: dict[str, int] = {}
    with torch.profiler.profile(record_shapes=True) as profile:
        step(model)
    for event in profile.events() or ():
        place = {"aten::mm": 1, "aten::_log_softmax": 0, "aten::_softmax": 0, "aten::logsumexp": 0}.get(event.name)
        outer = event.cpu_parent is None or event.cpu_parent.name != event.name
        if outer and place is not None and event.input_shapes[place][-1] == model.config.vocab_size:
            found[event.name] = found.get(event.name, 0) + math.prod(event.input_shapes[0][:-1])
    return found


def logits(run: Any, **more: Any) -> Tensor:
    found: Tensor = run(**BARE, **more).logits
    return found


def hidden(run: Any) -> Tensor:
    found: Tensor = run.model(**BARE).last_hidden_state
    return found


def scored(x: Tensor) -> Tensor:
    """A loss that weighs each row by itself, so that rows of a token do not get one gradient."""
    return -(x[:, :-1].log_softmax(-1).gather(-1, NEXT[..., None]).sin() * torch.arange(1, 12)[:, None]).mean()


# What stays packed --------------------------------------------------------------------------------------------------


def transformers_loss(run: Any, **more: Any) -> Tensor:
    loss: Tensor = run(**BATCH.inputs(), **more).loss
    return loss


def plain_loop(run: Any) -> Tensor:
    shifted = logits(run)[..., :-1, :].contiguous()
    return F.cross_entropy(shifted.view(-1, shifted.size(-1)), NEXT.reshape(-1), reduction="none").sin().sum()


def trl_selected(run: Any) -> Tensor:
    return selective_log_softmax(logits(run)[:, :-1] / 0.7, NEXT).sin().sum()


def trl_entropy(run: Any) -> Tensor:
    found = selective_log_softmax_and_entropy(logits(run)[:, :-1], NEXT, temperature=0.7)
    return torch.stack([x.sin().sum() for x in found]).sum()


def verl(run: Any) -> Tensor:
    flat = logits(run).flatten(0, 1).unsqueeze(0).squeeze(0)
    flat.div_(0.7)
    logp = torch.log_softmax(flat, dim=-1)[torch.arange(IDS.numel()), IDS.flatten().roll(-1)]
    entropy = torch.logsumexp(flat, dim=-1) - (F.softmax(flat, dim=-1) * flat).sum(-1)
    return logp.sin().sum() + entropy.cos().sum()


def rows_one_by_one(run: Any) -> Tensor:
    """As TRL does it in bfloat16."""
    rows = zip(logits(run)[:, :-1], NEXT, strict=True)
    return torch.stack([F.log_softmax(x, dim=-1).gather(-1, y[:, None]) for x, y in rows]).sin().sum()


def divergence(run: Any) -> Tensor:
    p = logits(run).log_softmax(-1)
    with torch.no_grad():
        q = (logits(run) * 1.1).log_softmax(-1)
    return (q.exp() * (q - p)).sum(-1).sin().sum()


STEPS: dict[str, tuple[Step, int]] = {
    "transformers": (transformers_loss, 1),
    "transformers, items in the batch": (lambda run: transformers_loss(run, num_items_in_batch=torch.tensor(7)), 1),
    "plain loop": (plain_loop, 1),
    "masked positions": (lambda run: F.cross_entropy(logits(run)[:, :-1][NEXT > 20], NEXT[NEXT > 20]), 1),
    "trl": (trl_selected, 1),
    "trl with entropy": (trl_entropy, 2),
    "trl's entropy in chunks": (lambda run: entropy_from_logits(logits(run), chunk_size=7).sin().sum(), 1),
    "verl": (verl, 1),
    "rows one by one": (rows_one_by_one, 1),
    "divergence": (divergence, 2),
    "argmax": (lambda run: scored(logits(run)) * (logits(run).argmax(-1) == IDS).sum(), 1),
    "top two": (lambda run: logits(run).topk(2).values.sin().sum(), 1),
    "checkpoint": (lambda run: checkpoint(scored, logits(run), use_reentrant=False), 1),
    "a head by hand": (lambda run: scored((hidden(run) * 2.0) @ run.lm_head.weight.T / 0.7), 1),
}
"""Steps, and how many log-softmaxes each computes."""


def test_head_and_log_probabilities_run_on_distinct_tokens(pair: tuple[Any, Any]) -> None:
    for name, (step, calls) in STEPS.items():
        with case(name):
            assert check(pair, step)["head_tokens"] == DISTINCT < IDS.numel()
            counted = positions(pair[0], step)
            assert counted.pop("aten::mm") in (DISTINCT, 2 * DISTINCT)  # some run the model twice
            assert all(found <= calls * DISTINCT for found in counted.values()), counted
            assert max(positions(pair[1], step).values()) >= 4 * 11  # on rows, this counts rows


def test_only_the_tokens_that_are_kept_meet_the_head(pair: tuple[Any, Any]) -> None:
    step = lambda run: selective_log_softmax(logits(run, logits_to_keep=4)[:, :-1], IDS[:, -3:]).sin().sum()  # noqa: E731
    kept = {tuple(row[: i + 1]) for row in IDS.tolist() for i in range(8, 12)}
    assert check(pair, step)["head_tokens"] == len(kept)


@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_caps_and_windows(name: str) -> None:
    # By name: transformers 5.17 chooses SDPA for gemma2 too, which leaves the cap out.
    model = double(name, num_hidden_layers=1, sliding_window=4, attn_implementation="eager")
    twin = copy.deepcopy(model)
    found = check((treefx.convert(model, lazy_outputs=True), twin), trl_selected)
    assert found["head_tokens"] == distinct_with_padding(IDS, BATCH.attention_mask, 4)


def test_dropped_padding_is_one_token_and_its_logits_are_those_of_zeros() -> None:
    model = double("llama", num_hidden_layers=1)
    model.lm_head.bias = torch.nn.Parameter(torch.randn(model.config.vocab_size).double())
    twin = copy.deepcopy(model)
    treefx.convert(model, padding="drop", lazy_outputs=True)
    stats = check((model, twin), transformers_loss)
    assert stats["head_tokens"] == stats["tokens"] + 1
    assert BATCH.attention_mask is not None
    found = logits(model)[BATCH.attention_mask == 0]
    torch.testing.assert_close(found.exp(), model.lm_head.bias.exp().expand(found.shape), rtol=1e-12, atol=0)


def test_parts_of_a_vocabulary_and_adapters_of_the_head() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    model, twin = (get_peft_model(double("llama", num_hidden_layers=1), config).double() for _ in range(2))
    twin.load_state_dict(model.state_dict())
    step = lambda run: logits(run)[..., 5:100].logsumexp(-1).sin().sum() + plain_loop(run)  # noqa: E731
    assert check((treefx.convert(model, lazy_outputs=True), twin), step)["head_tokens"] == DISTINCT


def test_rows_at_once() -> None:
    model = double("llama", num_hidden_layers=1)
    twin = copy.deepcopy(model)
    assert check((treefx.convert(model), twin), transformers_loss)["head_tokens"] is None
    assert type(logits(model)) is Tensor


# Values read on rows -----------------------------------------------------------------------------------------------


def changed(x: Tensor, how: str) -> Tensor:
    """A change in place of a part of logits."""
    if how == "divided":
        x[:, 2:].div_(0.7)
    elif how == "operator":
        x /= 0.7
    elif how == "no gradient":
        with torch.no_grad():
            x.mul_(2.0)
    elif how == "detached":
        x.detach().mul_(2.0)
    elif how == "filled":
        x.masked_fill_(IDS[..., None] == IDS[0, 1], 0.5)
    elif how == "set":
        x[:, 3] = 0.0
    else:
        x.transpose(1, 2).mul_(2.0)
    return x


def test_changes_in_place(pair: tuple[Any, Any]) -> None:
    for how in ("divided", "operator", "no gradient", "detached", "filled", "set", "through a view of features"):
        with case(how):
            check(pair, lambda run: scored(changed(logits(run), how)) + logits(run).exp().mean())  # noqa: B023


def through_a_slice(run: Any) -> Tensor:
    """The slice is changed, and so is what it is a slice of."""
    whole = logits(run)
    tail, before = whole[:, 3:], whole.detach()
    tail /= 0.5
    return scored(whole) + tail.logsumexp(-1).sin().sum() + before.sum()


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -3 * grad


class Copied(Reversed):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()


def hooked(run: Any) -> Tensor:
    x = logits(run)
    x.register_hook(lambda grad: grad * torch.arange(48).view(4, 12, 1))
    return scored(x)


def retained(run: Any) -> Tensor:
    x = logits(run)
    x.retain_grad()
    loss = scored(x)
    (grad,) = torch.autograd.grad(loss, [x], retain_graph=True)
    return loss + grad.pow(2).sum()


def from_a_leaf(run: Any) -> Tensor:
    h = hidden(run)
    leaf = h.detach().requires_grad_()
    (grad,) = torch.autograd.grad(scored(run.lm_head(leaf)), leaf)
    return (h * grad).sum()


def stored(run: Any) -> Tensor:
    x, file = logits(run), io.BytesIO()
    torch.save(x.detach(), file)
    file.seek(0)
    copies = [copy.deepcopy(x.detach()), pickle.loads(pickle.dumps(x.detach())), torch.load(file)]
    return scored(x) + sum(scored(y) for y in copies) + float(x.detach().numpy().sum()) + x.tolist()[1][2][3]


def fused(run: Any) -> Tensor:
    """TRL's head without logits, which is a function of autograd."""
    both = copy.copy(run)  # the same modules; TRL changes the model
    add_fused_lm_head(both, temperature=0.7, outputs=("log_probs", "entropy"))
    found = both(**BATCH.inputs(), fused_lm_head=True)
    return found.log_probs.sin().sum() + found.entropy.cos().sum()


def into(run: Any) -> Tensor:
    """Results in a tensor of the caller, which has the size of rows."""
    h, weight = hidden(run), run.lm_head.weight
    with torch.no_grad():
        flat = h.reshape(-1, h.shape[-1])
        out = torch.empty(len(flat), len(weight), dtype=h.dtype)
        torch.mm(flat, weight.T, out=out)
        torch.logsumexp(logits(run), -1, out=out[:, 0].view(4, 12))
    return scored(run.lm_head(h)) + out.sin().sum()


ON_ROWS: dict[str, Step] = {
    "whole logits": lambda run: logits(run).pow(2).cumsum(1).sum(),
    "label smoothing": lambda run: F.cross_entropy(logits(run).flatten(0, 1), IDS.flatten(), label_smoothing=0.1),
    "classes in front": lambda run: F.cross_entropy(logits(run).transpose(1, 2), IDS),
    "temperature of each row": lambda run: scored(logits(run) / torch.tensor([0.5, 0.7, 1.0, 2.0])[:, None, None]),
    "part of a vocabulary by index": lambda run: logits(run)[..., [5, 3, 3]].sin().sum(),
    "slice": through_a_slice,
    "reversed before the head": lambda run: scored(run.lm_head(Reversed.apply(hidden(run)))),
    "reversed": lambda run: scored(Reversed.apply(logits(run))),
    "copied": lambda run: scored(Copied.apply(logits(run))),
    "hook": hooked,
    "retained": retained,
    "leaf": from_a_leaf,
    "stored": stored,
    "head in a checkpoint": lambda run: scored(checkpoint(run.lm_head, hidden(run), use_reentrant=False)),
    "head in a reentrant checkpoint": lambda run: scored(checkpoint(run.lm_head, hidden(run), use_reentrant=True)),
    "trl's fused head": fused,
    "result given": into,
    "read in between": lambda run: scored(logits(run)) * float(logits(run).detach().sum()),
}


def test_other_readers_get_rows(pair: tuple[Any, Any]) -> None:
    for name, step in ON_ROWS.items():
        with case(name):
            check(pair, step)


def test_compiled_losses(pair: tuple[Any, Any]) -> None:
    torch._dynamo.reset()
    loss = torch.compile(scored, backend="aot_eager")
    check(pair, lambda run: loss(logits(run)))
    head = torch.compile(lambda x, weight: scored(x @ weight.T), backend="aot_eager")
    check(pair, lambda run: head(hidden(run), run.lm_head.weight))


def test_compiled_heads() -> None:
    torch._dynamo.reset()
    model = double("llama", num_hidden_layers=1)
    twin = copy.deepcopy(model)
    treefx.convert(model, lazy_outputs=True)
    model.lm_head.compile(backend="aot_eager")
    for _ in range(2):
        check((model, twin), transformers_loss)


def test_without_gradients(pair: tuple[Any, Any]) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got, expected = (plain_loop(run) for run in pair)
            x, y = (logits(run).div_(2.0) for run in pair)
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
            torch.testing.assert_close(x + 0.0, y, rtol=1e-12, atol=1e-14)


def test_it_is_a_tensor(pair: tuple[Any, Any]) -> None:
    x, y = (logits(run) for run in pair)
    assert isinstance(x, Tensor)
    assert x.shape == y.shape and x.dtype is y.dtype and x.requires_grad and x.grad_fn is not None and not x.is_leaf
    assert repr(x.detach())[:30] == repr(y.detach())[:30]
    with pytest.raises(RuntimeError, match="requires grad"):
        x.numpy()
    with pytest.raises(RuntimeError):  # an index outside is the function's own error
        x.gather(-1, torch.full((4, 12, 1), 1000))


def test_logits_are_gone_with_their_last_user(pair: tuple[Any, Any]) -> None:
    """Without waiting for the garbage collector, which does not know how large a cycle is."""
    steps: dict[str, Step] = {
        "rows one by one": lambda x: selective_log_softmax(x[:, :-1], NEXT).sum() + entropy_from_logits(x, 7).sum(),
        "whole": lambda x: x.exp().sum(),
        "classes in front": lambda x: x.transpose(1, 2).exp().sum(),
        "divided": lambda x: scored(changed(x, "divided")),
    }
    gc.collect()
    gc.disable()
    try:
        for name, step in steps.items():
            x: Any = logits(pair[0])
            packed = weakref.ref(x.packed)
            loss = step(x)
            loss.backward()
            del x, loss
            assert packed() is None, name
    finally:
        gc.enable()
