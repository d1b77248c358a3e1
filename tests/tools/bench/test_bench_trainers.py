"""``treefx bench trainers``: its rows, its recipes, and no times for a trainer that fails or computes something else.

The trainers themselves are installed and run by the command alone; a program in their place writes what they write.
"""

import functools
import json
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tests.cli.validation import assert_measured
from treefx.cli import app
from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.tools.bench.trainers import environment, run
from treefx.tools.bench.trainers.environment import EnvironmentFailed, make_environment, own_requirement
from treefx.tools.bench.trainers.loops import PROGRAMS
from treefx.tools.bench.trainers.material import Material, make_material
from treefx.tools.bench.trainers.recipes import RECIPES, Recipe
from treefx.tools.bench.trainers.run import TrainersError

_STAND_IN = """#!{python}
import json, os, sys
from pathlib import Path
way = "treefx" if os.environ.get("TREEFX_RUN") else sys.argv[1]
losses, status = json.loads(sys.argv[2]).get(way, [[2.0, 1.5], 0])
shared = {{"treefx/sharing": 2.5, "treefx/sharing_possible": 3.0, "treefx/compiles": 1.0, "treefx/fallback": 0.0}}
more = shared if way == "treefx" else {{}}
for step in range(1, len(losses) + 1):
    history = [{{"loss": loss, "grad_norm": 1.0, **more}} for loss in losses[:step]] + [{{"train_runtime": 3.0}}]
    folder = Path("output") / f"checkpoint-{{step}}"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({{"log_history": history}}))
print("no such kernel", file=sys.stderr)
sys.exit(status)
"""


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("material"), rows=9, layers=1, hidden_size=64)


def test_rows_are_turns_of_conversations_that_share_their_beginnings(material: Material) -> None:
    chats = [json.loads(line)["messages"] for line in material.chats.read_text(encoding="utf-8").splitlines()]
    assert len(chats) == 9
    for chat in chats:
        roles = [message["role"] for message in chat]
        assert roles[0] == "system" and roles[1::2] == ["user"] * (len(roles) // 2)
        assert roles[2::2] == ["assistant"] * (len(roles) // 2)
        assert all(message["content"] for message in chat)
    tokenizer = AutoTokenizer.from_pretrained(material.model)
    rows = [tokenizer.apply_chat_template(chat, tokenize=True)["input_ids"] for chat in chats]
    assert tokenizer.decode(rows[0]).startswith("<|im_start|>system\nYou work at the service desk")
    assert 2.5 < sum(map(len, rows)) / Forest.from_sequences(rows).num_tokens < len(rows)
    pairs = json.loads(material.pairs.read_text(encoding="utf-8"))
    assert [pair["messages"] + [pair["chosen"]] for pair in pairs] == chats
    assert any(pair["chosen"] != pair["rejected"] for pair in pairs)


def test_the_model_has_the_tokenizer_s_vocabulary(material: Material) -> None:
    model = AutoModelForCausalLM.from_pretrained(material.model)
    tokenizer = AutoTokenizer.from_pretrained(material.model)
    assert model.config.vocab_size == len(tokenizer)
    assert (model.config.pad_token_id, model.config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)


@pytest.mark.parametrize("rows", [1, 10_000])
def test_more_rows_than_there_are_turns_are_refused(tmp_path: Path, rows: int) -> None:
    with pytest.raises(InputError, match=f"rows must be 2 to \\d+, .* got {rows}"):
        make_material(tmp_path, rows=rows, layers=1, hidden_size=64)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_recipe_names_rows_and_model_and_asks_for_a_compiler_only_then(
    name: str, compiled: bool, material: Material, tmp_path: Path
) -> None:
    command = RECIPES[name].write(material, tmp_path, compiled)
    written = " ".join([*command, *(path.read_text(encoding="utf-8") for path in sorted(tmp_path.iterdir()))])
    rows = material.pairs if name.endswith("dpo") else material.chats
    assert str(rows) in written and str(material.model) in written and str(tmp_path / "output") in written
    switch = {
        "ms-swift": f"--torch_compile {json.dumps(compiled)}",
        "lightning": "--compile" if compiled else "output",
        "ray-train": "--compile" if compiled else "output",
        "torchtitan": "--compile.enable" if compiled else "output",
        "torchtune": f'"compile": {json.dumps(compiled)}',
    }.get(name, f'"torch_compile": {json.dumps(compiled)}')
    assert (switch in written) == RECIPES[name].compiles
    ours = [PROGRAMS, str(material.model.parent), str(tmp_path)]
    assert "treefx" not in functools.reduce(lambda text, known: text.replace(known, ""), ours, written)


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **outcomes: Any) -> None:
    """A trainer whose program gives each way losses and an exit status."""
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / "trainer"
    program.write_text(_STAND_IN.format(python=sys.executable), encoding="utf-8")
    (programs / "treefx").symlink_to(Path(sys.executable).parent / "treefx")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def write(material: Material, folder: Path, compiled: bool) -> list[str]:
        return ["trainer", "inductor" if compiled else "eager", json.dumps(outcomes)]

    recipe = Recipe(name="some-trainer", requirements=("some==1",), write=write)
    monkeypatch.setattr(run, "RECIPES", {recipe.name: recipe})
    monkeypatch.setattr(run, "make_environment", lambda recipe, folder: programs)


def records(*arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["bench", "trainers", "--rows", "4", "--layers", "1", "--width", "64", *arguments])
    if result.exception is not None:
        raise result.exception
    return list(json.loads(result.stdout)) if "--json" in arguments else [{"text": result.stdout}]


def test_ways_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, treefx=[[2.0, 1.5 + 3e-5], 0])
    eager, inductor, treefx = found = records("--only", "some-trainer", "--json")
    assert_measured("trainers", found)
    assert (eager["run"], eager["steps"], eager["error"]) == ("some-trainer, eager", 2, 0.0)
    assert inductor["whole"] == 1.0 and inductor["error"] == 0.0
    assert treefx["error"] == pytest.approx(2e-5)
    assert treefx["whole"] == pytest.approx(treefx["whole_seconds"] / inductor["whole_seconds"])
    shared = {name: treefx[name] for name in ("sharing", "sharing_possible", "compiles", "fallbacks")}
    assert shared == {
        "sharing": "2.50 to 2.50", "sharing_possible": "3.00 to 3.00", "compiles": 1, "fallbacks": 0
    }  # fmt: skip


def test_a_switch_of_the_trainer_that_fails_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, inductor=[[2.0], 1])
    eager, inductor, treefx = found = records("--json")
    assert_measured("trainers", found)
    assert inductor["note"] == "no such kernel" and inductor["whole_seconds"] == ""
    assert "whole" not in treefx and treefx["error"] == 0.0 and eager["steps"] == 2
    assert "no such kernel" in records()[0]["text"]


def test_a_trainer_that_compiles_no_model_is_compared_with_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, inductor=[[9.0], 1])
    monkeypatch.setattr(run, "RECIPES", {"some": replace(run.RECIPES["some-trainer"], compiles=False)})
    eager, inductor, treefx = records("--json")
    assert inductor["note"] == "it compiles no model" and treefx["error"] == 0.0 and eager["steps"] == 2


@pytest.mark.parametrize("by_switch", [False, True])
def test_treefx_takes_the_compiler_s_place_where_it_needs_the_switch(
    by_switch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch)
    known, asked = run.RECIPES["some-trainer"], list[bool]()

    def write(material: Material, folder: Path, compiled: bool) -> list[str]:
        asked.append(compiled)
        return known.write(material, folder, compiled)

    monkeypatch.setattr(run, "RECIPES", {"some": replace(known, write=write, by_switch=by_switch)})
    records("--json")
    assert asked == [False, True, by_switch]


@pytest.mark.parametrize("way", ["eager", "treefx"])
def test_a_run_that_fails_is_an_error(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, **{way: [[2.0, 1.5], 3]})
    with pytest.raises(TrainersError, match=f"(?s)some-trainer with {way} .* status 3 after 2 steps.*no such kernel"):
        run.run(rows=4, layers=1, hidden_size=64)


@pytest.mark.parametrize("losses", [[2.0, 1.51], [2.0, float("nan")]])
def test_other_losses_are_an_error(losses: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, treefx=[losses, 0])
    with pytest.raises(TrainersError, match="with treefx and some-trainer with eager should compute the same"):
        run.run(rows=4, layers=1, hidden_size=64)


def test_an_unknown_trainer_is_named() -> None:
    with pytest.raises(InputError, match="expected trainers of llama-factory, .* got trl, slime"):
        run.choose(["axolotl", "trl", "slime"])


def test_an_environment_is_made_once_for_the_same_requirements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def called(recipe: Recipe, command: list[str]) -> str:
        commands.append(command)
        (tmp_path / "some-1").mkdir(exist_ok=True)
        return str(tmp_path)

    monkeypatch.setattr(environment, "_run", called)
    monkeypatch.setattr(environment.torch.version, "cuda", None)
    recipe = replace(RECIPES["llama-factory"], requirements=("some==1",))
    assert make_environment(recipe, tmp_path) == tmp_path / "some-1" / "bin"
    made = len(commands)
    installs = [command[command.index("install") + 1 :] for command in commands if "install" in command]
    assert installs[0][0].startswith("torch==")  # alone, before all others
    assert "some==1" in installs[1] and set(own_requirement()) <= set(installs[1])
    assert (tmp_path / "torchaudio.py").is_file()  # in its place, as the trainer imports it
    make_environment(recipe, tmp_path)
    assert len(commands) == made
    monkeypatch.setattr(environment, "own_requirement", lambda: ["treefx==9"])
    make_environment(recipe, tmp_path)
    assert len(commands) == 2 * made


def test_an_installation_that_fails_says_what_pip_said(tmp_path: Path) -> None:
    recipe = replace(RECIPES["axolotl"], requirements=("some==1",))
    with pytest.raises(EnvironmentFailed, match="(?s)expected to install axolotl, but .* failed:.*no such option"):
        environment._run(recipe, [sys.executable, "-m", "pip", "install", "--not-an-option"])
