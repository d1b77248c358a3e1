"""Calls that Dynamo no longer compiles never reach treefx; the inspector says that there are such."""

import torch

import treefx
from tests.batches import distinct_tokens
from tests.inspection.test_inspector import batch_of, step, tiny
from tests.oracle import compile_with, loss_of


def test_calls_that_dynamo_no_longer_compiles_are_told() -> None:
    """They never reach treefx: the figures stay those of the last call that did."""
    model, last = tiny(layers=1), batch_of(length=17)
    compiled = compile_with(model, inner="eager")
    with torch._dynamo.config.patch(recompile_limit=2):
        for batch in (batch_of(), last):
            step(compiled, batch)
        assert treefx.inspect(compiled).stats["uncompiled"] is None
        with torch.no_grad():
            loss_of(batch_of())(compiled)
        inspection = treefx.inspect(compiled)
    assert inspection.stats["tokens"] == distinct_tokens(last)
    assert "2 kinds" in inspection.stats["uncompiled"]
    assert "recompile_limit" in inspection.summary()
