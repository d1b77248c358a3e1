"""Bad input of the backend's user: a TreefxError that says what was expected and what came."""

from typing import Any

import pytest
import torch

import treefx
from tests.batches import shared_batch
from tests.models import TinyLM
from tests.oracle import compile_with, loss_of, refused
from tests.spellings import SPELLINGS


def tiny() -> TinyLM:
    return TinyLM(SPELLINGS["sdpa_is_causal"], layers=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_shering": 1.2}, ("min_shering", "min_sharing")),
        ({"inner": "inductr"}, ("inner", "inductr", "aot_eager")),
        ({"inner": 3}, ("inner",)),
        ({"on_unsupported": "explode"}, ("on_unsupported", "explode", "expand")),
        ({"min_sharing": "high"}, ("min_sharing", "high")),
        ({"min_sharing": 0.5}, ("min_sharing", "0.5")),
        ({"min_sharing": float("nan")}, ("min_sharing", "nan")),
    ],
    ids=["unknown", "inner", "inner_type", "on_unsupported", "min_sharing_type", "below_one", "not_a_number"],
)
def test_options(options: dict[str, Any], words: tuple[str, ...]) -> None:
    batch = shared_batch(rows=3, length=8, shared=4, vocab=61, padding=None)
    with refused(*words):
        loss_of(batch)(compile_with(tiny(), **options))


def test_inspect_of_something_not_compiled() -> None:
    with refused("compile"):
        treefx.inspect(tiny())


def test_inspect_of_another_backend() -> None:
    with refused("treefx"):
        treefx.inspect(torch.compile(tiny(), backend="eager"))


def test_inspect_before_any_call() -> None:
    with refused("call"):
        _ = treefx.inspect(compile_with(tiny())).stats


@pytest.mark.parametrize("value", [None, [[5, 6], [5, 7]], torch.tensor([[5, 6]])], ids=type)
def test_use_of_something_else(value: Any) -> None:
    with refused("Forest", type(value).__name__), treefx.use(value):
        pass


def test_logits_of_another_forest() -> None:
    forest = treefx.Forest.from_sequences([[5, 6, 7], [5, 6, 8]])
    with refused("4", "3"):
        treefx.edge_logprobs(torch.zeros(1, 3, 61), forest)


def test_logprobs_of_another_forest() -> None:
    forest = treefx.Forest.from_sequences([[5, 6, 7], [5, 6, 8]])
    with refused("3", "5"):
        treefx.losses.sft(torch.zeros(5), forest)


def test_reduction() -> None:
    forest = treefx.Forest.from_sequences([[5, 6, 7], [5, 6, 8]])
    with refused("average", "token_mean"):
        treefx.losses.sft(torch.zeros(3), forest, reduction="average")  # type: ignore[arg-type]


def test_error_of_the_model_stays_its_own() -> None:
    """A token outside of the vocabulary is the caller's mistake; treefx does not hide the model's error."""
    compiled = compile_with(tiny())
    with pytest.raises(Exception, match="index|range|bound"):
        compiled(input_ids=torch.full((2, 6), 61))
