"""Drawing tokens by uniform numbers: frequencies, excluded tokens, and recorded log-probabilities."""

from typing import Any

import pytest
import torch

from treefx import InputError
from treefx.rl.samplers.draw import Drawing, draw, uniforms

LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.0, -3.0, 0.0], dtype=torch.float64)


def shares(count: int = 20000, **options: Any) -> list[float]:
    """How often each token is drawn."""
    numbers = torch.linspace(0, 1, count + 1, dtype=torch.float64)[:-1]
    tokens, _ = draw(LOGITS.expand(count, -1), numbers, Drawing(**options))
    return (torch.bincount(tokens, minlength=len(LOGITS)) / count).tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_tokens_come_as_often_as_is_probable(temperature: float) -> None:
    expected = torch.softmax(LOGITS / temperature, 0).tolist()
    assert shares(temperature=temperature) == pytest.approx(expected, abs=2e-4)


def test_top_k_and_top_p_leave_out_what_is_improbable() -> None:
    probabilities = torch.softmax(LOGITS, 0)
    first, second, third = (float(p) for p in probabilities.sort(descending=True)[0][:3])
    assert shares(top_k=2) == pytest.approx([first / (first + second), 0, 0, second / (first + second), 0, 0], abs=2e-4)
    # The fewest that reach p: two are just enough, then just not.
    for top_p, kept in ((first + second - 1e-6, 2), (first + second + 1e-6, 3), (1e-9, 1)):
        assert sum(share > 0 for share in shares(top_p=top_p)) == kept
    assert shares(top_p=1.0) == pytest.approx(probabilities.tolist(), abs=2e-4)
    assert sum(share > 0 for share in shares(top_k=1, top_p=0.99)) == 1


def test_logprobs_are_those_of_the_tempered_distribution_whatever_is_left_out() -> None:
    numbers = uniforms(range(50), 1)[:, 0]
    for drawing in (Drawing(temperature=0.7), Drawing(temperature=0.7, top_k=2), Drawing(temperature=0.7, top_p=0.5)):
        tokens, logprobs = draw(LOGITS.expand(50, -1), numbers, drawing)
        assert torch.allclose(logprobs, torch.log_softmax(LOGITS / 0.7, 0)[tokens], atol=1e-14)


def test_temperature_zero_takes_the_most_probable() -> None:
    tokens, logprobs = draw(LOGITS[None].float(), torch.tensor([0.999]), Drawing(temperature=0))
    assert tokens.tolist() == [0] and logprobs.dtype == torch.float32
    assert float(logprobs) == pytest.approx(float(torch.log_softmax(LOGITS, 0)[0]), abs=1e-6)


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(5, -1)
    numbers = torch.tensor([0.0, 0.25, 0.5, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits, numbers, Drawing())[0].tolist() == [1, 1, 3, 3, 3]


def test_a_seed_gives_its_own_numbers_in_any_batch() -> None:
    together = uniforms([3, 2**62, 5], 4)
    assert torch.equal(together[1:2], uniforms([2**62], 4)) and len(together.unique()) == 12


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 2}, "top_p"),
    ],
)
def test_unfit_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Drawing(**options)
