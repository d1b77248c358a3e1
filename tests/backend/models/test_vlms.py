"""Vision-language models of transformers in four kinds of batches: the loss, all gradients, and the tokens that ran."""

import pytest

from tests.backend.models.vision import CASES, IMAGE, distinct, rows_of
from tests.backend.models.vlms import VLMS
from tests.backend.support import Pair, in_case
from tests.batches import IGNORED, padded


@pytest.mark.parametrize("name", VLMS)
def test_cases(name: str) -> None:
    """Text alone, one image per group, an image per row, and two images of which one is shared."""
    vlm = VLMS[name]
    pair = Pair(vlm.make())
    for case, (rows, names) in CASES.items():
        batch = padded(rows_of(rows, vlm.patches))
        assert batch.labels is not None
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "use_cache": False}
        inputs |= {"labels": batch.labels.masked_fill(batch.input_ids == IMAGE, IGNORED)}
        inputs |= vlm.inputs(names, batch.input_ids)
        prefix = 0 if vlm.predicted is None else batch.input_ids.shape[1] - vlm.predicted
        with in_case(case):
            stats = pair.check(lambda model: model(**inputs).loss).stats
            assert stats["fallback"] is None and not stats["expansions"] and not stats["warned"]
            assert stats["tokens"] == distinct(batch, names, vlm.patches, prefix) < stats["raw_tokens"]
            if names:
                assert (stats["images"], stats["images_run"]) == (len(names), len({*names}))
