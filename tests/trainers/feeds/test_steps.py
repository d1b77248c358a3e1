"""Calls as trainers write them, call after call through one compiled model: as exact as eager, shared where they share.

Each test names the trainer whose code makes such calls. The loss stands outside of the model.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.backend.packed import AGENTS, pack, trie_size
from tests.models import double, lifted
from tests.oracle import FLOAT64, assert_close, compile_with, outcome, stats_of

VOCABULARY, TEMPERATURE = 61, 0.9
Call = Callable[..., Any]
Losses = Callable[[Call, nn.Module], list[Tensor]]


def tokens(seed: int, *shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def llama() -> nn.Module:
    return double("llama", num_hidden_layers=1, vocab_size=VOCABULARY)


def assert_same_steps(model: nn.Module, losses: Losses, **options: Any) -> dict[str, Any]:
    """Every loss, and the sum of all their gradients."""
    reference, twin = copy.deepcopy(model), copy.deepcopy(model)
    compiled = compile_with(twin, **options)
    expected, got = (losses(call, of) for call, of in ((reference, reference), (compiled, twin)))
    torch.testing.assert_close(torch.stack(got), torch.stack(expected), rtol=FLOAT64, atol=0.0)
    assert_close(
        outcome(twin, lambda: torch.stack(losses(compiled, twin)).sum()),
        outcome(reference, lambda: torch.stack(losses(reference, reference)).sum()),
        FLOAT64,
    )
    return stats_of(compiled)


# GRPO of TRL: prompts padded left, completions padded right, the last logits alone, four micro-batches a step --------


@dataclass
class Rollouts:
    """Eight rows of two prompts; ``counted`` is 0 in the completions of a row that was cut off."""

    ids: Tensor
    mask: Tensor
    counted: Tensor
    kept: int

    def rows(self, part: slice) -> "Rollouts":
        return Rollouts(self.ids[part], self.mask[part], self.counted[part], self.kept)


def rollouts(seed: int, kept: int, scattered: bool) -> Rollouts:
    lengths = [4, 4, 4, 4, 7, 7, 7, 7]
    prompts, completions = {n: tokens(n, n) for n in (4, 7)}, tokens(seed, 8, kept)
    ends = torch.randint(1, kept + 1, (8, 1), generator=torch.Generator().manual_seed(seed))
    counted = (torch.arange(kept) < ends).double()
    ids = torch.stack([torch.cat([torch.zeros(7 - n).long(), prompts[n], c]) for n, c in zip(lengths, completions)])
    real = torch.stack([torch.arange(7) >= 7 - n for n in lengths])
    mask = torch.cat([real, counted.bool()], 1).long()
    counted[2] = 0.0  # mask_truncated_completions
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed)) if scattered else torch.arange(8)
    return Rollouts((ids * mask)[order], mask[order], counted[order], kept)


def logprobs(call: Call, batch: Rollouts) -> Tensor:
    """``_get_per_token_logps``: the temperature in place, one logsumexp per row."""
    kept = batch.kept
    logits = call(
        input_ids=batch.ids, attention_mask=batch.mask, logits_to_keep=kept + 1, use_cache=False
    ).logits  # fmt: skip
    logits = logits[:, :-1, :][:, -kept:, :]
    logits.div_(TEMPERATURE)
    picked = logits.gather(-1, batch.ids[:, -kept:, None]).squeeze(-1)
    return picked - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


def grpo() -> Losses:
    """Rows in the order of their prompts in the second step, scattered in the others."""
    advantages = tokens(9, 8).double() / VOCABULARY - 0.5

    def losses(call: Call, model: nn.Module) -> list[Tensor]:
        found = []
        for seed, kept in enumerate((5, 8, 6)):
            batch = rollouts(seed, kept, scattered=seed != 1)
            with torch.no_grad():
                old = logprobs(call, batch)
            for first in range(0, 8, 2):
                part = slice(first, first + 2)
                ratio = torch.exp(logprobs(call, batch.rows(part)) - old[part])
                gain = torch.minimum(ratio * advantages[part, None], ratio.clamp(0.8, 1.2) * advantages[part, None])
                found.append(-(gain * batch.counted[part]).sum() / batch.counted.sum())
        return found

    return losses


def test_grpo() -> None:
    stats = assert_same_steps(llama(), grpo(), inner="eager")
    assert stats["fallback"] is None and stats["compiles"] <= 8


# DPO of TRL and of LLaMA-Factory: chosen rows, then rejected ones; the reference without gradients -------------------


def pairs(seed: int, columns: int) -> tuple[Tensor, Tensor]:
    prompts = tokens(seed, 4, 6)
    ids = torch.cat([prompts.repeat(2, 1), tokens(seed + 100, 8, columns - 6)], 1)
    mask = torch.ones_like(ids)
    mask[2, -3:] = 0
    return ids * mask, mask


def dpo() -> Losses:
    def losses(call: Call, model: Any) -> list[Tensor]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        found = []
        for seed, columns in enumerate((16, 24, 16)):
            ids, mask = pairs(seed, columns)

            def of_rows(ids: Tensor = ids, mask: Tensor = mask) -> Tensor:
                logits = call(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
                picked = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
                return (picked * mask[:, 1:] * (torch.arange(1, columns) >= 6)).sum(-1)

            with torch.no_grad():
                reference = of_rows() * 0.9
            margin = of_rows() - reference
            found.append(-F.logsigmoid(0.5 * (margin[:4] - margin[4:])).mean())
        return found

    return losses


def test_dpo() -> None:
    """Under checkpoints, whose tags AOTAutograd's partitioner reads."""
    stats = assert_same_steps(llama(), dpo(), inner="aot_eager")
    assert stats["ran"] == "packed" and stats["fallback"] is None


# Packed rows with what else a collator gives ------------------------------------------------------------------------


def test_packed_rows_with_the_lengths_for_flash_attention_and_numbers_of_sequences() -> None:
    """transformers' DataCollatorWithFlattening: 12 lengths, none of which recompiles."""
    model = llama()
    compiled = compile_with(model, inner="eager")
    for count in range(12):
        packed = pack([AGENTS[i % len(AGENTS)] for i in range(2 + count % 5)] + [[5] * (1 + count)])
        lengths = torch.tensor([0, *map(len, packed.segments)], dtype=torch.int32).cumsum(0).int()
        more = {
            "cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": int(lengths.diff().max()),
            "max_length_k": int(lengths.diff().max()),
        }  # fmt: skip

        def step(call: Call, packed: Any = packed, more: Any = more) -> Tensor:
            logits = call(input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False, **more).logits
            return F.cross_entropy(logits[0, :-1], packed.input_ids[0, 1:])

        expected = outcome(model, lambda step=step: step(model))
        assert_close(outcome(model, lambda step=step: step(compiled)), expected, FLOAT64)
        stats = stats_of(compiled)
        assert stats["fallback"] is None and stats["tokens"] == trie_size(packed) and stats["compiles"] <= 2


class OneDimensional(nn.Module):
    """torchtitan's: tokens [T] and positions [T] of several sequences, without a dimension of rows."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.place, self.head = (
            nn.Embedding(VOCABULARY, width),
            nn.Embedding(64, width),
            nn.Linear(width, 61),
        )
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(positions)
        sequence, index = (positions == 0).cumsum(0), torch.arange(len(ids))
        seen = (sequence[:, None] == sequence[None, :]) & (index[:, None] >= index[None, :])
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(0, 1)[None] for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)[0].transpose(0, 1).flatten(1)
        return self.head(x + y)


def test_rows_without_a_dimension_run_as_they_are() -> None:
    def losses(call: Call, model: nn.Module) -> list[Tensor]:
        found = []
        for lengths in ((4, 6, 3), (5, 5, 2), (7, 3, 1)):
            ids = torch.cat([torch.cat([torch.arange(3, 9), tokens(n, n)]) for n in lengths])
            positions = torch.cat([torch.arange(6 + n) for n in lengths])
            found.append(F.cross_entropy(call(ids, positions)[:-1], ids[1:]))
        return found

    stats = assert_same_steps(OneDimensional().double(), losses, inner="eager")
    assert stats["ran"] == "ordinary" and "ids[None] is a row" in stats["fallback"]


@pytest.mark.parametrize("packed", [False, True])
def test_positions_of_several_planes(packed: bool) -> None:
    """Qwen2.5-VL's: text, height and width [3, B, T]. Tokens are the same only where all planes are: in the second
    batch a row differs in one of them.
    """
    model = several_planes()

    def losses(call: Call, model: nn.Module) -> list[Tensor]:
        found = []
        for seed in range(2):
            ids = torch.cat([torch.arange(3, 9).expand(4, 6), tokens(seed, 4, 6)], 1)
            planes = torch.arange(12).expand(3, 4, 12).clone()
            if seed:
                planes[1, 2, 2:] += 3
            if packed:
                ids, planes = ids.reshape(1, -1), planes.reshape(3, 1, -1)
            logits = call(ids, planes)
            found.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
        return found

    assert_same_steps(model, losses, inner="eager")


def several_planes() -> nn.Module:
    """In float64 throughout: rotations in float32 of distinct tokens differ from those of rows at 1e-8."""
    from transformers import Qwen2_5_VLTextConfig
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

    text_model = lifted(modeling_qwen2_5_vl.__name__).Qwen2_5_VLTextModel

    class WithHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
            config = Qwen2_5_VLTextConfig(
                vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, rope_parameters=rope,
                bos_token_id=1, eos_token_id=2,
            )  # fmt: skip
            self.model, self.head = text_model(config), nn.Linear(32, VOCABULARY)

        def forward(self, ids: Tensor, planes: Tensor) -> Tensor:
            hidden = self.model(input_ids=ids, position_ids=planes, use_cache=False).last_hidden_state
            logits: Tensor = self.head(hidden)
            return logits

    torch.manual_seed(0)
    return WithHead().double()
