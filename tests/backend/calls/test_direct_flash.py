"""Models that call functions of flash attention themselves: shared where these compute what the operator means.

The functions are stubs with the signatures of FlashAttention 2 (``tests.backend.flash``), and PyTorch's own
``varlen_attn`` with an implementation for the CPU.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.library import register_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from tests.backend import flash
from tests.backend.packed import AGENTS, Packed, pack, trie_size
from tests.backend.small import stripped
from tests.backend.support import assert_packed, compare, compile_with
from tests.batches import padded
from tests.models import TinyLM
from tests.oracle import FLOAT64, Step, assert_close, outcome, relative_errors, stats_of
from treefx.passes.trace.flash import autograd_recorded
from treefx.runtime.whole import direct_flash

Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""q [B, H, T, D], k and v [B, Hkv, T, D], ends of sequences or None -> [B, H, T, D]."""


class Calls(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None) -> Tensor:
        return self.attend(q, k, v, ends)


class DirectLM(TinyLM):
    """Blocks that are given the ends of sequences in place of a mask."""

    def __init__(self, attend: Attend, kv_heads: int = 4, layers: int = 1) -> None:
        super().__init__(functools.partial(Calls, attend), layers=layers, width=16, kv_heads=kv_heads)

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None, ends: Tensor | None = None
    ) -> Tensor:
        assert self.place is not None
        x = self.embed(input_ids)
        x = x + self.place(torch.arange(input_ids.shape[1]) if position_ids is None else position_ids)
        for block in self.blocks:
            x = block(x, ends)
        return cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def dense(function: Any, **more: Any) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, ends: Any) -> Tensor:
        out: Tensor = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **more)
        return out.transpose(1, 2)

    return attend


def sequences(function: Any, longest: int = 10, **more: Any) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, ends: Any) -> Tensor:
        tokens = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        return (
            function(*tokens, ends, ends, longest, longest, **more).view(q.shape[0], -1, *q.shape[1::2]).transpose(1, 2)
        )  # type: ignore[no-any-return]

    return attend


def packed_step(packed: Packed) -> Step:
    lengths = torch.tensor([len(item) for item in packed.segments])
    ends = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    given = {"input_ids": packed.input_ids, "labels": packed.labels, "position_ids": packed.position_ids}
    return lambda model: model(**given, ends=ends)


def padded_step() -> tuple[Step, int]:
    """Without a mask pads are tokens; the number of distinct prefixes, with them."""
    batch = padded(AGENTS, "right")
    ids = [tuple(row) for row in batch.input_ids.tolist()]
    distinct = {row[: end + 1] for row in ids for end in range(len(row))}
    return lambda model: model(batch.input_ids, batch.labels), len(distinct)


@pytest.fixture(autouse=True, scope="module")
def on_cpu() -> Iterator[None]:
    """PyTorch's operator and its backward, by the stub."""

    def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: Any, window: Any) -> Tensor:
        return flash.flash_attn_varlen_func(
            q, k, v, ends, ends, 10**9, 10**9, softmax_scale=scale, window_size=tuple(window)
        )

    def forward(q: Any, k: Any, v: Any, ends: Any, ends_k: Any, max_q: Any, max_k: Any, *others: Any) -> Any:
        _, scale, window = others[:3]
        out = attend(q, k, v, ends, scale, window)
        return out, torch.zeros(q.shape[1], q.shape[0]), torch.zeros(2, dtype=torch.uint64)

    def backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, ends: Any, *others: Any) -> Any:
        *_, scale, window = others
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            return torch.autograd.grad(attend(*leaves, ends, scale, window), leaves, grad)

    register_kernel("torch_attn::_varlen_attn", "cpu", forward)
    register_kernel("torch_attn::_varlen_attn_backward", "cpu", below_autograd(backward))
    yield


def below_autograd(function: Any) -> Any:
    @functools.wraps(function)
    def run(*args: Any) -> Any:
        with autograd_recorded():
            return function(*args)

    return run


VARLEN = functools.partial(sequences, varlen_attn)
FLASH = functools.partial(sequences, flash.flash_attn_varlen_func)
DENSE = functools.partial(dense, flash.flash_attn_func)

SHARED_KEYS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""PyTorch 2.11 has no such argument, and takes fewer key heads than query heads as they are."""
PACKED_FORMS: dict[str, tuple[Attend, int]] = {
    "torch": (VARLEN(window_size=(-1, 0)), 4),
    "torch, window, scale, groups": (VARLEN(window_size=(2, 0), scale=0.3, **SHARED_KEYS), 2),
    "flash": (FLASH(causal=True), 4),
    "flash, window, softcap, groups": (FLASH(causal=True, window_size=(3, -1), softcap=0.7, deterministic=True), 2),
}


@pytest.mark.parametrize("name", PACKED_FORMS)
def test_packed_rows(name: str) -> None:
    attend, kv_heads = PACKED_FORMS[name]
    packed = pack(AGENTS)
    checked = compare(DirectLM(attend, kv_heads).double(), packed_step(packed))
    assert_packed(checked, trie_size(packed))
    assert not checked.stats["expansions"]


def test_packed_rows_compiled() -> None:
    packed = pack(AGENTS)
    model = stripped(DirectLM(VARLEN(window_size=(-1, 0)))).double()
    checked = compare(model, packed_step(packed), inner="inductor")
    assert_packed(checked, trie_size(packed))


DENSE_FORMS = {
    "scale": DENSE(causal=True, softmax_scale=0.2), "window": DENSE(causal=True, window_size=(4, 4)),
    "softcap": DENSE(causal=True, softcap=0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", DENSE_FORMS)
def test_rows(name: str) -> None:
    step, tokens = padded_step()
    checked = compare(DirectLM(DENSE_FORMS[name]).double(), step)
    assert_packed(checked, tokens)


def test_lengths_that_change_compile_twice() -> None:
    model = DirectLM(FLASH(causal=True)).double()
    compiled = compile_with(model)
    for count in (6, 4, 5, 2):
        step = packed_step(pack(AGENTS[:count]))
        got = outcome(model, functools.partial(step, compiled))
        assert_close(got, outcome(model, functools.partial(step, model)), FLOAT64)
    assert stats_of(compiled)["compiles"] <= 2


class Checkpointed(DirectLM):
    """Its blocks are checkpoints, which get the ends and a number per token: two vectors, one of which marks ends."""

    def forward(self, ids: Tensor, labels: Tensor, share: Tensor, ends: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(weighted, block, x, share, ends, use_reentrant=False)
        return cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def weighted(block: nn.Module, x: Tensor, share: Tensor, ends: Tensor) -> Tensor:
    y: Tensor = block(x, ends)
    return y * share[None, :, None]


def checkpointed_step(count: int) -> Step:
    packed = pack(AGENTS[:count])
    ends = nn.functional.pad(torch.tensor([len(item) for item in packed.segments]).cumsum(0), (1, 0)).to(torch.int32)
    share = 1.0 / (1.0 + packed.position_ids[0].double())
    return lambda model: model(packed.input_ids, packed.labels, share, ends)


@pytest.mark.parametrize("min_sharing", [1.0, 100.0])
def test_checkpoints_of_lengths_that_change_compile_twice(min_sharing: float) -> None:
    """Packed, and as the model has it: a checkpoint hands out what its backward has saved a single time."""
    model = Checkpointed(FLASH(causal=True), layers=2).double()
    compiled = compile_with(model, min_sharing=min_sharing)
    for count in (6, 4, 5):
        step = checkpointed_step(count)
        got = outcome(model, functools.partial(step, compiled))
        assert_close(got, outcome(model, functools.partial(step, model)), FLOAT64)
        assert stats_of(compiled)["ran"] == ("packed" if min_sharing == 1.0 else "ordinary")
    assert stats_of(compiled)["compiles"] <= 2


# Unchanged calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more", [{"causal": False}, {"causal": True, "alibi_slopes": torch.ones(4)}, {"window_size": (3, 3)}]
)
def test_other_calls_are_traced_as_they_are(more: dict[str, Any], nothing_taken: None) -> None:
    step, _ = padded_step()
    compare(DirectLM(DENSE(**more)).double(), step)


class Prefixed(nn.Module):
    """Attention that sees learned keys in front: the last query stands at the last key."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Parameter(torch.randn(2, 4, 3, 4) / 2)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ends: Any) -> Tensor:
        front = self.front[:, None].expand(-1, q.shape[0], -1, -1, -1)
        k, v = (torch.cat([given, x], 2) for given, x in zip(front, (k, v), strict=True))
        return dense(aligned, causal=True)(q, k, v, ends)


def aligned(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1)
) -> Tensor:
    """As FlashAttention has it where there are more keys than queries."""
    more = k.shape[1] - q.shape[1]
    padded = nn.functional.pad(q, (0, 0, 0, 0, more, 0))
    return flash._attend(padded, k, v, softmax_scale, causal, window_size, 0.0, None)[:, more:]


aligned.__name__ = "flash_attn_func"


def test_keys_of_other_tokens_are_left_as_they_are(nothing_taken: None) -> None:
    step, _ = padded_step()
    model = DirectLM(lambda *_: torch.empty(0))
    for block in model.blocks:
        block.attention = Prefixed()
    compare(model.double(), step)


def test_a_call_that_the_function_does_not_take_is_its_own_error() -> None:
    step, _ = padded_step()
    model = DirectLM(DENSE(causal=True, slopes=1.0)).double()
    with pytest.raises(Exception, match="slopes"):
        step(compile_with(model))


@pytest.fixture
def nothing_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*_: Any) -> str:
        raise AssertionError("the operator takes the place of the function")

    monkeypatch.setattr(direct_flash, "_kernel", taken)


def test_a_function_of_that_name_that_computes_something_else(nothing_taken: None) -> None:
    """Its name and arguments are those of flash attention; it turns its values round."""

    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1)
    ) -> Tensor:
        return flash._attend(q, k, -v, softmax_scale, causal, window_size, 0.0, None)

    step, _ = padded_step()
    model = DirectLM(dense(flash_attn_func, causal=True)).double()
    compare(model, step)


@pytest.mark.parametrize("mistake", ["window", "scale"])
def test_mistakes_in_the_meaning_are_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong reading of arguments computes something else, which the small example shows."""
    original = direct_flash._meaning

    def wrong(form: Any, constants: Any) -> Any:
        found = original(form, constants)
        if found is None:
            return None
        causal, scale, window, softcap = found
        return (causal, 0.1, window, softcap) if mistake == "scale" else (causal, scale, (window or 3) - 1, softcap)

    monkeypatch.setattr(direct_flash, "_meaning", wrong)
    monkeypatch.setattr(direct_flash, "_computes", lambda *args: True)
    model = DirectLM(DENSE(causal=True, window_size=(3, 0))).double()
    step, _ = padded_step()
    compiled = compile_with(model)
    got, want = (outcome(model, functools.partial(step, called)) for called in (compiled, model))
    assert max(relative_errors(got, want).values()) > 1e-6
