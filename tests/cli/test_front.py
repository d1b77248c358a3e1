"""Help, version, early refusals, progress, tables, and the public names of the package."""

import dataclasses
import importlib
import importlib.metadata
import inspect
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import treefx
from treefx import output
from treefx.cli import app
from treefx.cli.app import COMMANDS
from treefx.cli.lazy import flow
from treefx.tools.bench.zoo.run import ZooRow
from treefx.tools.bench.zoo.table import show_zoo
from treefx.tools.fuzz.truth import CLASSES
from treefx.tools.simulate.report import COLUMNS

WITHOUT_TORCH = (
    ["--help"],
    ["--version"],
    ["inspect", "--help"],
    ["bench", "--help"],
    ["simulate", "chunks", "--help"],
    ["inspect", "llama", "--stage", "nope"],
    ["inspect", "llama", "--inner", "nope"],
    ["inspect", "llama", "--html", "/"],
    ["inspect", "llama", "--model-explorer", "/"],
    ["explain", "--help"],
    ["explain", "no/such.py:model"],
    ["explain", "llama", "--batch", "4 rows"],
    ["explain", "llama", "--batch", "0x4+4"],
    ["explain", "llama", "--min-sharing", "-1"],
    ["explain", "llama", "--on-unsupported", "nope"],
    ["plan", "--memory", "24Gbi"],
    ["plan", "--dtype", "int8"],
    ["plan", "no/such/file"],
    ["data", "--tokenizer", "no/such/folder"],
    ["data", "--nope"],
    ["doctor", "--inner", "nope"],
    ["doctor", "--model", "llama"],
    ["fuzz", "--family", "nope"],
    ["bench", "attention", "--device", "tpu"],
    ["bench", "sampler", "--tokenizer", "words"],
    ["bench", "gpu", "--stage", "nope"],
    ["bench", "shapes", "--series", "nope"],
    ["bench", "kernel", "--path", "nope"],
    ["simulate", "chunks", "--gemm-ms", "-1", "--mib", "1", "--link-gbps", "1"],
)


def test_help_and_refused_options_load_no_torch() -> None:
    """One process, so that each command finds what those before it have loaded."""
    code = """
import json, sys
from typer.testing import CliRunner
from treefx.cli import app
for arguments in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, arguments)
    print(json.dumps([done.exit_code, "torch" in sys.modules, type(done.exception).__name__]))
"""
    command = [sys.executable, "-P", "-c", code, json.dumps(WITHOUT_TORCH)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    for arguments, line in zip(WITHOUT_TORCH, lines, strict=True):
        status, loaded, error = json.loads(line)
        helped = "--help" in arguments or "--version" in arguments
        assert not loaded, arguments
        assert (status == 0) is helped and (helped or error in ("InputError", "ConfigError", "SystemExit")), arguments


def _commands() -> Iterator[tuple[str, Any]]:
    """Every command with its full name, groups among them."""
    for name, lazy in COMMANDS.items():
        command = lazy.load(name)
        yield name, command
        for inner in getattr(command, "commands", {}):
            yield f"{name} {inner}", command.commands[inner]


def test_the_list_of_commands_shows_their_own_first_lines() -> None:
    for name, lazy in COMMANDS.items():
        assert lazy.load(name).help.split("\n\n")[0] == lazy.summary, name


@pytest.mark.parametrize("name", [name for name, _ in _commands()])
def test_help_fits_a_terminal_and_wraps_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = CliRunner().invoke(app, [*name.split(), "--help"], catch_exceptions=False).output
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text and "<bool>" not in text and "range>" not in text and "\b" not in text
    command = dict(_commands())[name]
    for paragraph in command.help.split("\n\n"):
        lines = paragraph.splitlines()
        assert len(lines) == 1 or all(len(line) <= 78 for line in lines), "lines that are kept must fit"


def test_square_brackets_survive_in_help() -> None:
    text = " ".join(CliRunner().invoke(app, ["doctor", "--help"]).output.replace("│", " ").split())
    assert "pip install 'treefx[examples]'" in text and "[default: inductor; for the zoo aot_eager]" in text


def test_paragraphs_flow_and_examples_stay() -> None:
    assert flow("One\ntwo.\n\n\b\na  b\nc  d\n\n    code [x]\n    more") == (
        "One two.\n\na  b\nc  d\n\n    code \\[x]\n    more"
    )


def test_version_is_that_of_the_package() -> None:
    assert treefx.__version__ == importlib.metadata.version("treefx")
    assert CliRunner().invoke(app, ["--version"]).output == f"treefx {treefx.__version__}\n"


def test_the_package_shows_what_is_public_and_nothing_else() -> None:
    code = "import sys, treefx; print('torch' in sys.modules, *dir(treefx)); print(treefx.data.load, treefx.overlap)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    loaded, *names = done.stdout.splitlines()[0].split()
    assert loaded == "False" and names == sorted(treefx.__all__) == dir(treefx)
    assert {"convert", "inspect", "plan", "Config", "data", "rl", "scale", "losses"} <= set(names)
    values = {name: getattr(treefx, name) for name in names}
    modules = {name: x for name, x in values.items() if isinstance(x, ModuleType)}
    assert {"data", "overlap"} < set(modules) and None not in values.values()
    assert {name: importlib.import_module(f"treefx.{name}") for name in modules} == modules
    assert issubclass(treefx.RecordError, treefx.TreefxError)
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        treefx.nope  # noqa: B018


def test_every_option_of_the_backend_is_documented() -> None:
    text = inspect.getdoc(treefx.Config) or ""
    attributes = text[text.index("Attributes:") : text.index("Raises:")]
    for field in dataclasses.fields(treefx.Config):
        assert re.search(rf"^    {field.name}: \S", attributes, re.MULTILINE), field.name


def test_a_config_is_accepted_as_options() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8))
    config: Any = treefx.Config(inner="eager", min_sharing=1.5)
    ids = torch.tensor([[1, 2], [1, 3]])
    compiled = torch.compile(model, backend="treefx", options=config)
    torch.testing.assert_close(compiled(ids), model(ids))
    stats = treefx.inspect(compiled).stats
    assert (stats["inner"], stats["min_sharing"]) == ("eager", 1.5)


# Progress


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Console:
    console = Console(file=io.StringIO(), highlight=False)
    monkeypatch.setattr(output, "notes", console)
    return console


def test_progress_is_plain_lines_where_there_is_no_terminal(notes: Console) -> None:
    with output.waiting("compiling [x]", total=2) as progress:
        progress.tell("compiling [x]")
        progress.tell("comparing")
        assert list(progress.each("ab")) == ["a", "b"]
    assert notes.file.getvalue() == "compiling [x] ...\ncomparing ...\n"  # type: ignore[attr-defined]


def test_long_loops_say_how_far_they_are(notes: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_SECONDS_BETWEEN_LINES", 0.0)
    assert list(output.watch([1, 2], "timing")) == [1, 2]
    text = "timing ...\ntiming, 1 of 2 ...\ntiming, 2 of 2 ...\n"
    assert notes.file.getvalue() == text  # type: ignore[attr-defined]


def test_json_has_no_progress(notes: Console) -> None:
    with output.waiting("compiling", quiet=True) as progress:
        progress.tell("comparing")
        progress.advance()
    assert notes.file.getvalue() == ""  # type: ignore[attr-defined]


def test_a_terminal_gets_a_spinner(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr(output, "notes", console)
    with output.waiting("compiling [x]"):
        pass
    assert "compiling [x]" in console.file.getvalue()  # type: ignore[attr-defined]


# Tables


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Console:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    for module in ("treefx.output", "treefx.tools.bench.zoo.table", "treefx.cli.bench.app"):
        monkeypatch.setattr(f"{module}.console", console)
    return console


def _lines(console: Console) -> list[str]:
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text.splitlines()


def test_the_table_of_the_zoo_fits_a_terminal(narrow: Console) -> None:
    rows = [
        ZooRow("recurrent_gemma", "transformers", "packed", 2e-7, 1e-6, 184, 111, packed_share=1.0, compiles=2),
        ZooRow("litgpt-llama", "litgpt", "not installed"),
    ]
    show_zoo(rows, {"inner": "aot_eager", "batches": "5 x 20"})
    lines = _lines(narrow)
    assert any(line.split()[:5] == ["recurrent_gemma", "packed", "2e-07", "1e-06", "111/184"] for line in lines)
    assert " model " in lines[2] + lines[3] and "grad." in lines[2]
    assert max(map(len, lines[:7])) <= 80


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        (COLUMNS, ("Mega-GPT-2 FC-2", "16", "1,234", "1,234", *["1.23"] * 4, "16", "22%", "22%")),
        (("family", *CLASSES), ("embeddings", *["300"] * len(CLASSES))),
    ],
)
def test_wide_tables_lose_no_letter(columns: tuple[str, ...], row: tuple[str, ...], narrow: Console) -> None:
    narrow.print(output.make_table("", columns, [row], tight=True))
    assert any(line.split() == list(columns) for line in _lines(narrow))
    assert any(line.split() == " ".join(row).split() for line in _lines(narrow))


def test_records_that_do_not_fit_are_written_below_each_other(narrow: Console) -> None:
    from treefx.cli.bench.app import show

    records = [
        {"case": f"a long name of a case {at}"} | {f"figure_number_{k}": 1.5 for k in range(6)} for at in "1234567"
    ]
    show("Times", records, False, "times")
    lines = _lines(narrow)
    assert max(map(len, lines)) <= 80 and sum("figure number 5" in line for line in lines) == 4
    assert all(any(f"a long name of a case {at}" in line for line in lines) for at in "1234567")


def test_numbers_agree_with_their_nouns() -> None:
    assert (output.count(1, "tree"), output.count(2000, "tree")) == ("1 tree", "2,000 trees")


def test_choices_that_are_checked_early_are_those_there_are() -> None:
    from treefx.cli import inspect_model
    from treefx.cli.bench import kernels
    from treefx.inspection.inspector import STAGES
    from treefx.tools.bench.attention.kernel import PATHS
    from treefx.tools.bench.gpu.stages import STAGES as GPU_STAGES
    from treefx.tools.bench.shapes import SERIES

    assert inspect_model._STAGES == STAGES and kernels._STAGES == tuple(GPU_STAGES)
    assert set(SERIES) == {"near", "wide"} and set(PATHS) == {"plain", "gluon"}
