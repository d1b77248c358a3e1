"""Codes of reasons: every reason has one, none is given twice, and the texts of the analysis are all known."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from treefx.passes.labels.label_tokens import MEETS_ROWS, MEETS_VARIABLE
from treefx.passes.pipeline import GIVES_SCORES
from treefx.reason_codes import TABLE, code_of_cause, code_of_operator, code_of_text, find
from treefx.runtime.reason import Cause, Reason

PASSES = Path(__file__).resolve().parents[2] / "passes"
FUNCTIONS = {"custom_function_reason", "counts_tokens", "_of_rows", "_not_causal"}
"""Functions that return reasons."""


def test_every_cause_has_one_code_of_its_own() -> None:
    codes = [code_of_cause(item.name) for item in Cause]
    assert len(codes) == len(set(codes)) == len(Cause)
    assert all(Reason(item, "").code == code for item, code in zip(Cause, codes, strict=True))


def test_no_code_is_used_twice_and_their_order_holds() -> None:
    codes = [item.code for item in TABLE]
    assert codes == sorted(set(codes)) and all(re.fullmatch(r"TFX\d{3}", code) for code in codes)
    causes = [item.cause for item in TABLE if item.cause]
    assert sorted(causes) == sorted(item.name for item in Cause)
    for item in TABLE:
        assert find(item.code) is item and item.title and item.why
        assert item.way_out or item.code >= "TFX150"
        assert not item.why.endswith(".") and not item.way_out.endswith(".")


def _text_of(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(x.value) if isinstance(x, ast.Constant) else "[7]" for x in node.values)
    return None


def _texts() -> Iterator[tuple[str, str]]:
    """Every reason that is written out in the passes."""
    for path in sorted(PASSES.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "NoLaw" and node.args:
                text = _text_of(node.args[0])
                if text is not None:
                    yield f"{path.name}:{node.lineno}", text
            if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS:
                values = [item.value for item in ast.walk(node) if isinstance(item, ast.Return) and item.value]
                yield from ((f"{path.name}:{v.lineno}", text) for v in values if (text := _text_of(v)) is not None)


def test_every_text_of_the_analysis_has_exactly_one_code() -> None:
    texts = [*_texts(), ("", MEETS_ROWS), ("", MEETS_VARIABLE), ("", GIVES_SCORES)]
    assert len(texts) > 70
    for place, text in texts:
        codes = {item.code for item in TABLE for pattern in item.texts if re.match(pattern, text)}
        assert len(codes) == 1, (place, text, codes)
        assert codes == {code_of_text(text)}


@pytest.mark.parametrize(
    ("op", "reason", "code"),
    [
        ("aten.cumsum.default", "mixes positions along the token axis", "TFX104"),
        ("aten.native_batch_norm.default", "has no token-wise law", "TFX109"),
        ("aten.fft_fft.default", "has no token-wise law", "TFX101"),
        ("any", "a text that nothing knows", "TFX101"),
    ],
)
def test_codes_of_operators(op: str, reason: str, code: str) -> None:
    assert code_of_operator(op, reason) == code
