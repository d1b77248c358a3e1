"""SkyRL's and OpenRLHF's models at their call sites, as skyrl 0.4.0 and OpenRLHF 0.11.2 have them."""

import importlib
import logging
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treefx
from tests.models import double
from tests.oracle import FLOAT64, Outcome, assert_close
from treefx.integrations import openrlhf, skyrl
from treefx.integrations.startup import sitecustomize
from treefx.runtime.converted.convert import is_converted

PROMPT = [5, 6, 7, 8, 9, 10]
ROWS = [[*PROMPT, 30 + answer, *range(40, 42 + answer)] for answer in range(4)]


class HFModelWrapper(nn.Module):
    """SkyRL: rows, or one row of the tokens under the mask, and logits divided in place."""

    def __init__(self, pretrain_or_model: str, sequence_parallel_size: int = 1, packs: bool = False) -> None:
        super().__init__()
        self.model: Any = double(pretrain_or_model, num_hidden_layers=1)
        self.model.config.use_cache = False
        self.sequence_parallel_size, self.packs = sequence_parallel_size, packs

    def forward(self, sequences: Tensor, attention_mask: Tensor, temperature: float = 0.9) -> Tensor:
        positions = (attention_mask.cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
        kept = attention_mask.bool()
        rows = sequences, attention_mask, positions
        given = (sequences[kept][None], None, positions[kept][None]) if self.packs else rows
        rolled = torch.roll(given[0], shifts=-1, dims=1)
        output = self.model(given[0], attention_mask=given[1], position_ids=given[2])
        logits = output["logits"]
        logits.div_(temperature)
        logprobs = torch.log_softmax(logits, -1).gather(-1, rolled[..., None])[..., 0]
        if not self.packs:
            return logprobs * attention_mask
        return logprobs.new_zeros(sequences.shape).masked_scatter(kept, logprobs[0])


class Actor(HFModelWrapper):
    """OpenRLHF: the same, with a ring of ranks that hold slices."""

    def forward(  # type: ignore[override]
        self, sequences: Tensor, attention_mask: Tensor, ring_attn_group: Any = None
    ) -> Tensor:
        return super().forward(sequences, attention_mask)


def batch() -> tuple[Tensor, Tensor]:
    """Padded on the left, where prompts are, and on the right."""
    longest = max(map(len, ROWS))
    ids = torch.tensor([[0, *row, *[0] * (longest - len(row))] for row in ROWS])
    mask = torch.tensor([[0, *[1] * len(row), *[0] * (longest - len(row))] for row in ROWS])
    return ids, mask


def step(model: Any) -> Outcome:
    ids, mask = batch()
    weights = torch.linspace(-1, 1, ids.numel(), dtype=torch.float64).view(ids.shape)
    inner = mask.clone()
    inner[:, :-1] &= mask[:, 1:]  # the last token of a sequence predicts the first one of the next
    inner[:, -1] = 0
    model.zero_grad(set_to_none=True)
    loss = (model(ids, mask) * weights * inner).sum()
    loss.backward()
    return Outcome(loss.detach(), {name: x.grad for name, x in model.named_parameters()})


HOOKS = {HFModelWrapper: skyrl.convert_wrappers, Actor: openrlhf.convert_actors}


def hooked(kind: Any) -> Any:
    made = type(kind.__name__, (kind,), {"__init__": kind.__init__, "forward": kind.forward})
    HOOKS[kind](made)
    HOOKS[kind](made)
    return made


@pytest.mark.parametrize(("kind", "packs"), [(HFModelWrapper, True), (Actor, False)], ids=["packed", "padded"])
def test_log_probabilities_are_what_they_were(kind: Any, packs: bool) -> None:
    expected = step(kind("llama", packs=packs))
    model = hooked(kind)("llama", packs=packs)
    assert_close(step(model), expected, FLOAT64)
    stats = treefx.inspect(model.model).stats
    assert stats["ran"] == "packed" and stats["tokens"] < stats["raw_tokens"]


def test_slices_of_rows_keep_the_model(caplog: pytest.LogCaptureFixture) -> None:
    assert not is_converted(hooked(HFModelWrapper)("llama", sequence_parallel_size=2))
    assert "sequence_parallel_size=2" in caplog.text
    model = hooked(Actor)("llama")
    assert is_converted(model)
    want = Actor("llama")(*batch())
    assert torch.equal(model(*batch(), ring_attn_group=object()), want)
    assert not is_converted(model) and "ring of 1" in caplog.text


def test_what_cannot_be_converted_stays(caplog: pytest.LogCaptureFixture) -> None:
    class MegatronWorker:
        def make_megatron_module(self, wrap_with_ddp: bool = True) -> list[nn.Module]:
            return [nn.Linear(2, 2)]

    skyrl.convert_megatron_workers(MegatronWorker)
    skyrl.convert_megatron_workers(MegatronWorker)
    with caplog.at_level(logging.WARNING):
        (module,) = MegatronWorker().make_megatron_module(wrap_with_ddp=False)
    assert isinstance(module, nn.Linear) and "GPTModel" in caplog.text


def test_the_hooks_heed_the_sharing_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """``treefx run --min-sharing`` reaches conversions; ``--inner`` compiles nothing of them."""

    class Engines(ModuleType):
        Actor = type("Actor", (Actor,), {"__init__": Actor.__init__, "forward": Actor.forward})

    monkeypatch.setitem(sitecustomize._WANTED, "options", {"min_sharing": 9.0, "inner": "eager"})
    sitecustomize._HOOKS["openrlhf.models.actor"](Engines("openrlhf"))
    model = Engines.Actor("llama", packs=False)
    model(*batch())
    assert treefx.inspect(model.model).stats["min_sharing"] == 9.0
    assert treefx.inspect(model.model).stats["ran"] != "packed"


def test_the_hooks_find_their_classes() -> None:
    class Engines(ModuleType):
        HFModelWrapper = type("HFModelWrapper", (HFModelWrapper,), {"__init__": HFModelWrapper.__init__})
        Actor = type("Actor", (Actor,), {"__init__": Actor.__init__, "forward": Actor.forward})
        MegatronWorker = type("MegatronWorker", (), {"make_megatron_module": lambda self: []})

    names = [name for name in sitecustomize._HOOKS if name.startswith(("skyrl.", "openrlhf."))]
    for name in names:
        sitecustomize._HOOKS[name](Engines(name))
    assert len(names) == 3 and importlib.import_module("treefx.integrations.skyrl") is skyrl
    assert hasattr(Engines.HFModelWrapper.__init__, "__wrapped__") and hasattr(Engines.Actor.forward, "__wrapped__")
    assert hasattr(Engines.MegatronWorker.make_megatron_module, "__wrapped__")
