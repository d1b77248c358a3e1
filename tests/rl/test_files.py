"""Rollouts in one file: what comes back, and what a damaged file says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.rl.worlds import World, script
from treefx import InputError, rl
from treefx.rl import PortoolTree, Rollouts


@pytest.fixture(scope="module")
def rollouts() -> Rollouts:
    return rl.rollout(script, World(), [0, 1], PortoolTree(4), seed=7)


def columns(rollouts: Rollouts) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(rollouts).items() if isinstance(value, torch.Tensor)}


def test_a_file_gives_back_what_was_saved(rollouts: Rollouts, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.safetensors"
    rollouts.save(path)
    again = Rollouts.load(path)
    assert (
        again.info == rollouts.info == {"seed": 7, "tasks": [0, 1], "sampled_tokens": rollouts.info["sampled_tokens"]}
    )
    for name, column in columns(rollouts).items():
        assert torch.equal(getattr(again, name), column), name
    assert all(torch.equal(a, b) for a, b in zip(again.forest.sequences(), rollouts.forest.sequences(), strict=True))
    assert torch.equal(again.forest.raw_weight, rollouts.forest.raw_weight)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_other_tools_read_the_file(rollouts: Rollouts, tmp_path: Path) -> None:
    rollouts.save(tmp_path / "r")
    with safe_open(tmp_path / "r", framework="np") as file:
        record = json.loads(file.metadata()["treefx.rollouts"])
        assert record["info"]["seed"] == 7
        assert file.get_tensor("rewards").tolist() == rollouts.rewards.tolist()


def test_a_file_that_cannot_be_written_leaves_the_old_one(rollouts: Rollouts, tmp_path: Path) -> None:
    path = tmp_path / "r"
    rollouts.save(path)
    before = path.read_bytes()
    odd = rl.rollout(script, World(), [0], PortoolTree(2))
    odd.info["tasks"] = [object()]
    with pytest.raises(InputError, match="must be JSON .* names of tasks"):
        odd.save(path)
    assert path.read_bytes() == before


def rewrite(path: Path, rollouts: Rollouts, record: Any = None, **changes: torch.Tensor | None) -> None:
    """Write the file by hand, with other columns; None leaves one out."""
    kept = {name: column for name, column in {**columns(rollouts), **changes}.items() if column is not None}
    record = {"version": 1, "info": {}} if record is None else record
    save_file(kept, path, {"treefx.rollouts": record if isinstance(record, str) else json.dumps(record)})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path, r: path.write_bytes(path.read_bytes()[:-9]), "not a safetensors file, or was cut off"),
        (lambda path, r: path.write_text("{}"), "not a safetensors file"),
        (lambda path, r: save_file({"x": torch.zeros(1)}, path), "no file of rollouts"),
        (lambda path, r: rewrite(path, r, "{"), "must be JSON with 'version'"),
        (lambda path, r: rewrite(path, r, {"version": 1}), "must be JSON with 'version' and 'info'"),
        (lambda path, r: rewrite(path, r, {"version": 2, "info": {}}), "version 2, this treefx reads version 1"),
        (lambda path, r: rewrite(path, r, leaf=None), "lacks the column 'leaf'"),
        (lambda path, r: rewrite(path, r, leaf=r.leaf.float()), "'leaf' must be torch.int64, got torch.float32"),
        (lambda path, r: rewrite(path, r, leaf=r.leaf[None]), "one-dimensional"),
        (lambda path, r: rewrite(path, r, leaf=r.leaf[:0]), "a step and a trajectory"),
        (lambda path, r: rewrite(path, r, rewards=r.rewards[1:]), "as long as leaf"),
        (lambda path, r: rewrite(path, r, step_rewards=r.step_rewards[1:]), "must fit parent"),
        (lambda path, r: rewrite(path, r, step_offsets=r.step_offsets - 1), "step_offsets must cut step_tokens"),
        (lambda path, r: rewrite(path, r, prompt_offsets=r.prompt_offsets[:1]), "prompt_offsets must cut"),
        (lambda path, r: rewrite(path, r, group=r.group + 1), "group must name tasks"),
        (lambda path, r: rewrite(path, r, step_sampled=r.step_sampled * 0), "between 1 and all"),
        (lambda path, r: rewrite(path, r, step_sampled=r.step_sampled + 9), "between 1 and all"),
        (lambda path, r: rewrite(path, r, step_logprobs=r.step_logprobs[1:]), "one per sampled token"),
        (lambda path, r: rewrite(path, r, rewards=r.rewards * float("nan")), "must be finite"),
    ],
)
def test_a_damaged_file_names_itself_and_the_field(
    rollouts: Rollouts, tmp_path: Path, damage: Callable[[Path, Rollouts], Any], words: str
) -> None:
    path = tmp_path / "r.safetensors"
    rollouts.save(path)
    damage(path, rollouts)
    with pytest.raises(InputError, match=words) as error:
        Rollouts.load(path)
    assert "r.safetensors" in str(error.value)


def test_a_missing_file_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Rollouts.load(tmp_path / "nothing")
