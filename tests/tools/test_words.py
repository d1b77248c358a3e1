"""The word check: its scope, its quotations, and its place in `make lint`."""

from pathlib import Path

import pytest

from treefx.tools import words

ROOT = Path(__file__).resolve().parents[2]


def phrases(text: str, suffix: str = ".py") -> list[tuple[int, str]]:
    return [(finding.line, finding.phrase) for finding in words.find_banned(text, suffix)]


@pytest.mark.parametrize("phrase", words.BANNED)
@pytest.mark.parametrize("form", ['"""Return {} here."""', "x = 1  # {} here", 'raise ValueError(f"{{x}} {} here")'])
def test_a_planted_phrase_is_found(phrase: str, form: str) -> None:
    assert phrases(form.format(phrase)) == [(1, phrase)]
    assert phrases(form.format(phrase.upper())) == [(1, phrase)]


def test_a_phrase_is_found_across_lines_and_files_of_text() -> None:
    assert phrases("# Here is what\n# is read.\n") == [(1, "what is")]  # words: quoted
    assert phrases('text = (\n    "Here is what "\n    "is read."\n)\n') == [(2, "what is")]  # words: quoted
    assert phrases('"""A line.\n\n    So\n    far.\n"""\n') == [(3, "so far")]  # words: quoted
    assert phrases("A line.\n\nIt is new so far.\n", ".md") == [(3, "so far")]  # words: quoted


@pytest.mark.parametrize(
    "text",
    [
        "asks = table['beside'] + somebody  # a name in code",  # words: quoted
        '"""Write `nobody`, ``what is`` and "so far" in quotes."""',  # words: quoted
        'text = "nobody sees this"  # words: quoted',
        'f"{beside} and {asks}"',
        '"""Besides, a shape of its owner: what was read is whatever the taskset has."""',
    ],
)
def test_names_and_quotations_are_left_out(text: str) -> None:
    assert phrases(text) == []


def test_files_are_sources_and_documentation_without_links_and_records(tmp_path: Path) -> None:
    names = ["a.py", "b.md", "c.png", "vendor/d.js", "examples/results/e.md", "f/g.jinja"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "f")
    found = [str(path.relative_to(tmp_path)) for path in words.find_files([tmp_path])]
    assert found == ["a.py", "b.md", "f/g.jinja"]


def test_the_command_fails_on_a_planted_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "page.md").write_text("All is well.\n\nA value that nobody reads.\n")  # words: quoted
    assert words.main([str(tmp_path)]) == 1
    assert "page.md:3: " in capsys.readouterr().out
    (tmp_path / "page.md").write_text("All is well.\n\nA value without a reader.\n")
    assert words.main([str(tmp_path)]) == 0


def test_lint_and_pre_commit_run_the_check() -> None:
    for name in ("Makefile", ".pre-commit-config.yaml"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "python -m treefx.tools.words\n" in text and "codespell\n" in text, name
