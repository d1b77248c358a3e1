"""Packed rows with all further arguments of trainers, without FlashAttention and with it.

The truth is the caller's own call in eager mode. The model's attention decides where sequences end: lengths
where it is given these, positions where it looks at them.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import cross_entropy, pad
from transformers import DataCollatorWithFlattening

from tests.backend.calls.test_direct_flash import VARLEN, DirectLM, on_cpu
from tests.backend.calls.test_packed_rows import assert_shared, one_layer
from tests.backend.calls.test_packed_traps import assert_unshared, given_mask
from tests.backend.flash import flash_stubs, with_flash
from tests.backend.life.test_packed_lengths import drawn, exact_step
from tests.backend.packed import AGENTS, DocumentLM, Packed, by_document, loss_inside, loss_outside, pack, trie_size
from tests.backend.support import compare, compile_with
from tests.models import double, zoo
from tests.oracle import FLOAT64, Step, assert_close, outcome, stats_of
from tests.trainers.feeds.test_steps import several_planes
from treefx.runtime import call_plan, shapes

__all__ = ["on_cpu"]  # a fixture


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with flash_stubs():
        yield


# The same in single precision -----------------------------------------------------------------------------------------

FORMS = {
    "labels inside": (pack(AGENTS), loss_inside), "pads that count up": (pack(AGENTS, pads=3), loss_outside),
    "several rows": (pack(AGENTS[:4], AGENTS[1:]), loss_inside),
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "name"), [("labels inside", "llama"), ("pads that count up", "gemma2"), ("several rows", "llama")]
)
def test_in_float32(form: str, name: str) -> None:
    packed, loss = FORMS[form]
    layers = 2 if name == "gemma2" else 1  # with a window, and without
    assert_shared(compare(zoo(name, num_hidden_layers=layers), loss(packed)), packed)


def test_a_given_mask_in_float32() -> None:
    packed = pack(AGENTS)
    stats = compare(
        zoo("llama", num_hidden_layers=1), loss_inside(packed, attention_mask=given_mask(packed).float())
    ).stats
    assert (stats["ran"], stats["tokens"]) == ("packed", trie_size(packed))


# Lengths of sequences of which the last counts the pads, while its positions restart (prime-rl) -------------------


class WithLengths(NamedTuple):
    """A packed row, and lengths that join its last sequence and the pads."""

    packed: Packed
    lengths: Tensor

    @property
    def ends(self) -> Tensor:
        return pad(self.lengths.cumsum(0), (1, 0)).int()

    @property
    def documents(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)[None]

    @property
    def tokens(self) -> int:
        """Distinct prefixes of what the lengths say, places in them read from the positions."""
        pairs = list(zip(self.packed.input_ids[0].tolist(), self.packed.position_ids[0].tolist()))
        ends = self.ends.tolist()
        return len({tuple(pairs[a : c + 1]) for a, b in zip(ends, ends[1:]) for c in range(a, b)})


def joined(count: int = len(AGENTS), pads: int = 3) -> WithLengths:
    """The second sequence is one with the third, too: it is seen, where pads are not read."""
    packed = pack(AGENTS[:count], pads=pads)
    first, second, third, *rest, last, behind = map(len, packed.segments)
    return WithLengths(packed, torch.tensor([first, second + third, *rest, last + behind]))


class LengthsLM(DirectLM):
    """Makes the ends of sequences of their lengths, as models of prime-rl do, for PyTorch's operator."""

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        ends = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return super().forward(ids, labels, positions, ends)


def by_ends(given: WithLengths) -> Step:
    packed = given.packed
    return lambda model: model(packed.input_ids, packed.labels, packed.position_ids, given.ends)


def by_lengths(given: WithLengths) -> Step:
    packed = given.packed
    return lambda model: model(packed.input_ids, packed.labels, packed.position_ids, given.lengths)


def by_documents(given: WithLengths) -> Step:
    """The numbers of documents that lengths tell, with the weights of a loss outside."""

    def step(model: nn.Module) -> Tensor:
        logits = model(given.packed.input_ids, given.documents, given.packed.position_ids)
        weight = torch.linspace(0.5, 2.0, logits[..., 0].numel(), dtype=logits.dtype).view(logits.shape[:2])
        return (logits.square().mean(-1) * weight).sum()

    return step


def attends() -> Any:
    return VARLEN(window_size=(-1, 0))


LENGTHS: dict[str, tuple[Any, Any]] = {
    "an operator by ends": (lambda: DirectLM(attends()), by_ends),
    "an operator by lengths": (lambda: LengthsLM(attends()), by_lengths),
    "a mask by documents": (lambda: DocumentLM(by_document), by_documents),
}


@pytest.mark.parametrize("how", LENGTHS)
def test_lengths_join_what_positions_part(how: str) -> None:
    """Lengths that change compile twice at most."""
    make, step = LENGTHS[how]
    model = make().double()
    compiled = compile_with(model)
    for count, pads in ((len(AGENTS), 3), (4, 2), (5, 5), (6, 1)):
        given = joined(count, pads)
        assert given.tokens > trie_size(given.packed)
        run = step(given)
        assert_close(outcome(model, lambda run=run: run(compiled)), outcome(model, lambda run=run: run(model)), FLOAT64)
        stats = stats_of(compiled)
        assert (stats["ran"], stats["tokens"], stats["fallback"]) == ("packed", given.tokens, None)
    assert stats["compiles"] <= 2


@pytest.mark.parametrize("how", LENGTHS)
def test_cut_by_positions_they_would_be_wrong(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, step = LENGTHS[how]
    given = joined()
    for module in (shapes, call_plan):
        monkeypatch.setattr(module, "find_starts", lambda *_: given.packed.position_ids == 0)
    with pytest.raises(AssertionError, match="differ by more than"):
        compare(make().double(), step(given))


# A dictionary of no masks with the ends (AReaL) ---------------------------------------------------------------------

NONE = dict.fromkeys(("full_attention", "sliding_attention"))


def ends_of(packed: Packed) -> dict[str, Any]:
    lengths = torch.tensor([len(item) for item in packed.segments])
    ends, longest = pad(lengths.cumsum(0), (1, 0)).int(), int(lengths.max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


@pytest.mark.parametrize("flash", [True, False])
def test_no_masks_by_name_leave_the_ends_to_flash_attention(flash: bool) -> None:
    """Without it the row is one causal sequence, and stays that."""
    packed = pack(AGENTS)
    model = double("gemma2", sliding_window=4)
    checked = compare(
        with_flash(model) if flash else model, loss_inside(packed, attention_mask=dict(NONE), **ends_of(packed))
    )
    if flash:
        assert_shared(checked, packed)
    else:
        assert_unshared(checked)


# transformers' collator of flattened rows, with all that it can add ---------------------------------------------------


def flattened(rows: list[list[int]]) -> tuple[Packed, dict[str, Any]]:
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collate([{"input_ids": row, "labels": row} for row in rows])
    more = {name: x for name, x in batch.items() if name not in ("input_ids", "position_ids", "labels")}
    assert set(more) == {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
    return Packed(batch["input_ids"], batch["position_ids"], batch["labels"], tuple(map(tuple, rows))), more


@pytest.mark.parametrize("flash", [True, False])
def test_flattened_rows_of_twelve_lengths(flash: bool) -> None:
    """Ends, the longest, and the number of each token's sequence: none of their numbers recompiles."""
    model = one_layer("mistral")
    model = with_flash(model) if flash else model
    compiled = compile_with(model)
    sizes = set()
    for seed in range(12):
        packed, more = flattened([*drawn(seed, 3 + seed), [5] * (1 + seed)])
        stats = exact_step(compiled, model, packed, lambda packed, more=more: loss_inside(packed, **more))
        assert (stats["ran"], stats["fallback"]) == ("packed", None) and not stats["expansions"]
        assert stats["tokens"] == trie_size(packed) and stats["compiles"] <= 2
        sizes.add(packed.input_ids.numel())
    assert len(sizes) == 12


# One dimension, and what goes with it into every block (torchtitan) ---------------------------------------------------


class Ends(NamedTuple):
    """torchtitan's metadata of variable lengths."""

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int


class TitanBlock(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attend = attends()

    def forward(self, x: Tensor, attention_masks: Ends, positions: Tensor) -> Tensor:
        """x [T, C], or [1, T, C]."""
        angle = positions[..., None, None] / torch.tensor([1.0, 10.0], dtype=x.dtype)
        q, k, v = (part.unflatten(-1, (4, -1)) for part in self.qkv(self.norm(x)).chunk(3, -1))
        q, k = (turned(part, angle) for part in (q, k))
        flat = (part.reshape(-1, *part.shape[-2:]) for part in (q, k, v))
        mixed = varlen_attn(*flat, *attention_masks, window_size=(-1, 0))
        return x + self.out(mixed.view(x.shape))


def turned(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Titan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(61, 16), nn.Linear(16, 61)
        self.layers = nn.ModuleList([TitanBlock(), TitanBlock()])

    def forward(self, tokens: Tensor, attention_masks: Ends, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, attention_masks, positions)
        return self.head(x)


def titan_step(packed: Packed, *, row: bool) -> Step:
    """Tokens and positions [T], or [1, T] where ``row``."""
    ends = Ends(*ends_of(packed).values())
    tokens, positions = (x if row else x[0] for x in (packed.input_ids, packed.position_ids))

    def step(model: nn.Module) -> Tensor:
        logits = model(tokens, ends, positions)
        return cross_entropy(logits.flatten(0, -2)[:-1], packed.input_ids[0, 1:])

    return step


@pytest.mark.parametrize("row", [True, False])
def test_tokens_of_one_dimension(row: bool) -> None:
    """Unchanged they run ordinarily, and the advice (to pass them as a row) is true."""
    packed = pack(AGENTS)
    checked = compare(Titan().double(), titan_step(packed, row=row))
    if row:
        assert_shared(checked, packed)
    else:
        assert checked.stats["ran"] == "ordinary" and "ids[None] is a row" in checked.stats["fallback"]


def test_blocks_compiled_one_by_one_run_as_they_are() -> None:
    """No ids enter them. Lengths that change compile a block twice at most."""
    model, twin = Titan().double(), Titan().double()
    twin.load_state_dict(model.state_dict())
    for layer in twin.layers:
        layer.compile(backend="treefx", fullgraph=True, options={"inner": "eager", "min_sharing": 1.0})
    for seed in range(4):
        step = titan_step(pack(drawn(seed, 3 + seed)), row=False)
        assert_close(
            outcome(twin, lambda step=step: step(twin)), outcome(model, lambda step=step: step(model)), FLOAT64
        )
    stats = stats_of(twin.layers[0])
    assert stats["ran"] == "ordinary" and stats["tokens"] == 0 and stats["compiles"] <= 2
    assert stats["fallback"]


# Positions of four planes (verl) --------------------------------------------------------------------------------------


def planes_of(packed: Packed, differ: bool) -> Tensor:
    """Text, time, height and width, int [4, 1, T]; the last of them of one sequence lies elsewhere."""
    planes = packed.position_ids.expand(4, -1, -1).clone()
    if differ:
        planes[3, 0, 2:4] += 5
    return planes


def planes_step(packed: Packed, planes: Tensor) -> Step:
    def step(model: nn.Module) -> Tensor:
        logits = model(packed.input_ids, planes)
        return cross_entropy(logits[0, :-1], packed.input_ids[0, 1:])

    return step


@pytest.mark.parametrize("differ", [False, True])
def test_four_planes(differ: bool) -> None:
    """Which of them tell tokens apart is not known: the call runs on rows, and the report says where."""
    packed = pack(AGENTS)
    stats = compare(several_planes(), planes_step(packed, planes_of(packed, differ))).stats
    assert stats["ran"] == "ordinary" and "not proved causal" in stats["fallback"]
