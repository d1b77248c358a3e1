"""Vision-language models of transformers in four kinds of batches: the loss, all gradients, and the tokens that ran.

Here run four of the models, of which Dynamo cuts three, in two kinds each, and single cases of others; all kinds run on
a smaller model in ``test_images``.
``python -m tests.backend.models.test_vlms`` runs all fourteen.
"""

import itertools
import sys
import warnings

import pytest
import torch

from tests.backend.models.vision import CASES
from tests.backend.models.vlms import VLMS, batch_of, count_distinct, positions_of
from tests.backend.support import Pair, in_case
from tests.batches import Side
from tests.oracle import stats_of

RUN = {
    "gemma4": ("text alone", "two images, one shared"), "paligemma": ("text alone", "two images, one shared"),
    "llava_onevision": ("an image per row", "two images, one shared"), "kimi_k25": ("text alone", "an image per row"),
}  # fmt: skip
SIDES: dict[str, Side] = dict(zip(CASES, itertools.cycle(("left", "right"))))
"""Where the rows of each case are padded."""


def check(pair: Pair, name: str, case: str, side: Side) -> tuple[int, int, int, float]:
    """Compare one batch with eager mode; the kept tokens, the distinct ones, those that ran, and the largest error."""
    vlm, names = VLMS[name], CASES[case][1]
    batch, inputs = batch_of(vlm, case, side)
    expected = count_distinct(vlm, batch, names, positions_of(pair.eager, inputs), inputs.get("token_type_ids"))
    checked = pair.check(lambda model: model(**inputs).loss)
    stats = checked.stats
    assert not stats["expansions"] and stats["raw_tokens"] == int(inputs["attention_mask"].sum())
    return stats["raw_tokens"], expected, stats["tokens"], max(checked.errors.values())


@pytest.mark.parametrize("name", RUN)
def test_cases(name: str) -> None:
    """Text alone, an image per row, and two images of which one is shared."""
    pair = Pair(VLMS[name].make())
    for case in RUN[name]:
        side = SIDES[case]
        with in_case(f"{case}, {side}"):
            kept, expected, ran, _ = check(pair, name, case, side)
            assert ran == expected <= kept
            stats = stats_of(pair.compiled)
            assert stats["fallback"] is None and not stats["warned"]
            names = CASES[case][1]
            assert not names or (stats["images"], stats["images_run"]) == (len(names), len({*names}))


ONE_CASE = [
    ("qwen3_5", "an image per row", "left"),
    ("idefics3", "two images, one shared", "left"),
    ("mistral3", "one image per group", "left"),
]


@pytest.mark.parametrize(("name", "case", "side"), ONE_CASE)
def test_one_case(name: str, case: str, side: Side) -> None:
    """Models with one case that the others do not have.

    Zero padding in front of Qwen3.5's recurrences does not run. Idefics3's tower lists the images of rows. A graph in
    Mistral3's tower cannot be traced, which loses no tokens.
    """
    pair = Pair(VLMS[name].make())
    _, expected, ran, _ = check(pair, name, case, side)
    names, stats = CASES[case][1], stats_of(pair.compiled)
    assert ran == expected and stats["fallback"] is None and not stats["warned"]
    assert (stats["images"], stats["images_run"]) == (len(names), len({*names}))


def main(names: list[str]) -> None:
    """Print a table of models, cases and sides of padding."""
    print("model            side   case                     kept distinct  ran  error")
    for name, side in itertools.product(names or VLMS, ("right", "left")):
        torch.compiler.reset()
        pair = Pair(VLMS[name].make())
        for case in CASES:
            kept, expected, ran, error = check(pair, name, case, side)
            why = "" if ran == expected else "UNEQUAL"
            print(f"{name:16} {side:6} {case:24} {kept:4} {expected:8} {ran:4}  {error:.0e}  {why}", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
