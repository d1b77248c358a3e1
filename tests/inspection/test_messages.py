"""Messages end in a code and a link, each code has an entry in the troubleshooting page, and the page is up to date."""

import ast
import pickle
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import treefx
from tests.inspection.situations import compiled, ids_of, train
from treefx.reason_codes import TABLE, TROUBLESHOOTING, code_of_text, find, marked, with_code
from treefx.refusal_codes import REFUSALS, code_of_module
from treefx.tools.troubleshooting import EXAMPLES, entry_of, page

ROOT = Path(__file__).resolve().parents[2]
ROWS = (*TABLE, *REFUSALS)
ENDS = re.compile(r"\[(TFX\d{3}), docs/troubleshooting\.md#tfx\d{3}\]")
OTHER_WARNINGS = {
    "treefx/data/files/reading.py", "treefx/data/template.py",  # of data that is left out
    "treefx/runtime/observed/observer.py",  # of counting that has stopped
    "kernels/dumps.py",  # of a folder that cannot be written
    "treefx/scale/agreement.py", "treefx/planning/execution/ranks.py",  # of ranks that do not answer
    "treefx/planning/execution/backward.py",  # quotes a refusal, which has its code
    "kernels/gpu/triton_tree/tuning.py",  # of a file that cannot be written
}  # fmt: skip
"""Of nothing that runs on rows, is refused, or takes a slower form."""


def test_the_page_is_up_to_date() -> None:
    """Make it with ``make docs``."""
    text = (ROOT / TROUBLESHOOTING).read_text(encoding="utf-8")
    assert text == page()
    anchors = re.findall(r'<a id="(\w+)"></a>', text)
    assert anchors == [row.code.lower() for row in ROWS] and len(anchors) == len(set(anchors))


def test_every_code_has_an_example_that_its_pattern_knows() -> None:
    assert list(EXAMPLES) == [row.code for row in ROWS]
    for row in ROWS:
        text = EXAMPLES[row.code]
        assert row.title and row.why and not ENDS.search(text)
        if row.texts:
            assert row.code in {code_of_text(text), code_of_text(text.partition(": ")[2])}, text


def test_an_entry_in_the_terminal() -> None:
    text = entry_of(" tfx104")
    assert text.startswith("TFX104: mixes positions along the tokens\n") and text.endswith(marked("TFX104"))
    assert find("TFX104").way_out in text
    with pytest.raises(treefx.InputError, match="a code should be one of TFX001, .*, got 'TFX999'"):
        entry_of("TFX999")


def _sources() -> Iterator[tuple[Path, ast.Module]]:
    for folder in ("treefx", "passes", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def _calls(tree: ast.AST, *names: str) -> list[ast.Call]:
    return [x for x in ast.walk(tree) if isinstance(x, ast.Call) and ast.unparse(x.func) in names]


def test_every_module_that_refuses_has_a_code() -> None:
    found = set()
    for path, tree in _sources():
        if _calls(tree, "UnsupportedError", "CoupledLossError"):
            inside = path.with_suffix("").parts
            name = ".".join(inside if inside[0] == "treefx" else ("treefx", *inside))
            assert code_of_module(name), name
            found.add(code_of_module(name))
    assert len(found) > 8 and found <= {row.code for row in ROWS}
    assert code_of_module("tests.inspection") == code_of_module("") == ""


def test_every_warning_of_a_loss_names_its_code() -> None:
    seen = 0
    for path, tree in _sources():
        if path.as_posix() in OTHER_WARNINGS:
            continue
        for function in [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)]:
            for call in _calls(function, "warnings.warn", "_log.warning"):
                seen += 1
                text = ast.unparse(function)
                assert re.search(r"with_code\(|marked\(|_OTHER\b", text), f"{path}:{call.lineno}"
    assert seen > 12


def test_refusals_end_in_their_code() -> None:
    forest = treefx.Forest.from_sequences([[1, 2], [1, 3]])
    with pytest.raises(treefx.UnsupportedError) as caught, treefx.use(forest):
        pass
    assert str(caught.value).endswith(marked("TFX201")) and not ENDS.search(caught.value.text)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.code, type(again)) == (str(caught.value), "TFX201", treefx.UnsupportedError)
    assert str(treefx.UnsupportedError("of a program of the user's")) == "of a program of the user's"
    assert str(treefx.UnsupportedError("a reason", "TFX104")) == f"a reason {marked('TFX104')}"
    assert with_code(f"named before {marked('TFX104')}", "TFX201").count("docs/") == 1


@pytest.mark.parametrize(("what", "code"), [("mean", "TFX104"), ("dropout", "TFX102")])
def test_warnings_summaries_and_refusals_of_operators(what: str, code: str) -> None:
    model = compiled(what, min_sharing=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, ids_of())
    texts = [str(item.message) for item in caught if issubclass(item.category, treefx.SharingWarning)]
    assert [ENDS.findall(text) for text in texts] == [[code]]
    report: Any = treefx.inspect(model)
    assert code in ENDS.findall(report.summary()) and f"See {TROUBLESHOOTING}#{code.lower()}." in report.why()
    with pytest.raises(Exception, match=re.escape(marked(code))) as refused:
        train(compiled(what, min_sharing=1.0, on_unsupported="error"), ids_of())
    assert str(refused.value).count(f"[{code}") == 1


@pytest.mark.parametrize(
    ("what", "options", "words"),
    [
        ("", {}, r"LM runs 18 distinct tokens instead of 36 \(sharing ratio 2\.00\), 100\.0 % of FLOPs once per"),
        ("mean", {}, r"LM runs 18 distinct tokens instead of 36 \(sharing ratio 2\.00\), [1-9]\d\.\d % of FLOPs"),
        ("", {"min_sharing": 9.0}, r"LM runs every row separately, .* min_sharing=9\.0 \[TFX016, docs/"),
        ("not causal", {}, r"LM runs every row separately, .* \[TFX120, docs/"),
    ],
)
def test_the_first_compilation_logs_one_line(what: str, options: Any, words: str, caplog: Any) -> None:
    model = compiled(what, **{"inner": "aot_eager", "min_sharing": 1.0, **options})
    with caplog.at_level("INFO", "treefx"):
        for columns in (9, 9, 12):
            ids = ids_of(columns=columns)
            train(model, ids)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "treefx"]
    assert re.match(words, line) and re.search(r"compiled in \d+\.\d s", line), line


def test_without_the_level_nothing_is_counted_for_the_log(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treefx.runtime.announce.find_view", lambda name: pytest.fail("a view was made"))
    train(compiled(min_sharing=1.0), ids_of())
    assert not [record for record in caplog.records if record.name == "treefx"]
