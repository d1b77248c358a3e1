"""`examples/portool.py`: its world by hand, its demonstrations, and a run of the whole with few tokens."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


world: Any = load("portool_world")
report: Any = load("portool_report")
example: Any = load("portool")
LUCKY, UNLUCKY = 0, 2


def say(task: Any, text: str, seed: int = LUCKY) -> Any:
    return world.World().act(task, world.encode(f"{text} end"), seed)


def reply(task: Any, text: str, seed: int = LUCKY) -> str:
    outcome = say(task, text, seed)
    assert not outcome.done and outcome.reward == -1  # what counts if the trajectory is cut off here
    return str(world.decode(outcome.observation))


def test_tools_answer_from_the_facts_of_the_task() -> None:
    task = world.Task.draw(5)
    place, shop = task.places["anna"], task.places["tea"]
    assert reply(task, "clock") == f"-> it is {task.hour} ."
    assert reply(task, "calendar lunch") == f"-> lunch is at {task.events['lunch']} ."
    assert reply(task, "search anna") == f"-> anna is in {place} ."
    assert reply(task, "search tea") == f"-> tea is in {shop} ."
    assert reply(task, "search tea", UNLUCKY) == "-> nothing found , try again ."
    assert reply(task, f"weather {place} 7") == f"-> {place} has {task.weather[place][7]} ."
    assert reply(task, f"price {shop} 8") == f"-> {shop} takes {task.prices[shop][8]} ."
    assert reply(task, "look anna 7") == f"-> anna has {task.weather[place][7]} ."
    assert reply(task, "look tea 8") == f"-> tea has {task.prices[shop][8]} ."
    assert reply(task, "look tea 8", UNLUCKY) == "-> nothing found , try again ."
    assert reply(task, "convert 20 fahrenheit") == "-> that is 68 ."
    assert reply(task, "convert 20 dollar") == "-> that is 22 ."
    assert reply(task, "calc 3 times 8") == "-> that is 24 ."
    assert reply(task, "calc 9 minus 8") == "-> that is 1 ."


def test_look_ups_change_with_the_hour_and_tasks_have_facts_of_their_own() -> None:
    first, second = world.Task.draw(1), world.Task.draw(2)
    assert all(len(set(first.prices[shop])) > 1 for shop in world.SHOPS)
    assert first.weather != second.weather and first.prices != second.prices
    assert world.Task.draw(1) == first


@pytest.mark.parametrize(
    "text",
    ["clock clock", "weather rome", "weather rome 24", "weather tea 3", "look rome 3", "look anna", "calc 3 times",
     "calc 3 minus 4", "search rome", "calc 50 times 50", "convert 3 clock", "answer", "answer rome", "tea", ""],
)  # fmt: skip
def test_what_is_no_call_is_told_and_costs(text: str) -> None:
    task = world.Task.draw(5)
    assert reply(task, text) == "-> that is not a call ."
    assert say(task, text).step_reward < 0 == say(task, "clock").step_reward


def test_answers_end_a_task() -> None:
    task = world.Task.draw(5)
    right, wrong, unknown = (say(task, f"answer {x}") for x in (task.truth, task.truth + 1, "unknown"))
    assert right.done and wrong.done and unknown.done
    assert (right.reward, wrong.reward, unknown.reward) == (1, -1, 0)


def test_careful_demonstrations_succeed_and_careless_ones_do_at_times() -> None:
    careful = [world.demonstrate(number, 0.0) for number in range(300)]
    assert all(reward == 1 for _, _, reward in careful)
    rewards = [reward for _, _, reward in (world.demonstrate(number, 0.5) for number in range(300))]
    assert {-1.0, 0.0, 1.0} == set(rewards) and 0.15 < rewards.count(1.0) / 300 < 0.5


def test_a_demonstration_trains_what_the_agent_said_only() -> None:
    row, own, _ = world.demonstrate(3, 0.0)
    said = world.decode([token for token, mine in zip(row, own, strict=True) if mine])
    assert "->" not in said and "question" not in said and said.count("answer") == 1 and said.endswith("end")
    assert world.decode(row).startswith(world.decode(world.World().start(3)[1]))


def test_the_loss_on_trees_is_that_on_rows() -> None:
    settings = example.Settings(tasks=2, trajectories=3)
    model = example.make_model(0).double()
    rows = example.make_model(0).double()
    model.compile(backend="treefx", options={"inner": "eager"})
    for name in example.COMPARED:
        method = example.methods(settings)[name]
        with example.sampler(model) as generate:
            got = example.rollout(generate, world.World(), range(2), method.scheme, seed=1, max_steps=3)
        given = method.advantages(got)
        # None of them 0.
        given = [row + 0.3 for row in given] if isinstance(given, list) else given + 0.3
        # The old log-probabilities of rows are rounded to float32.
        assert example.gradient_error(model, rows, got, given) < 1e-6
        wrong = [row * -1 for row in given] if isinstance(given, list) else -given
        on_tree, on_rows = (
            loss(of, got, given) for loss, of in ((example.policy_loss, model), (example.rows_loss, rows))
        )
        torch.testing.assert_close(on_tree, on_rows, rtol=1e-6, atol=1e-6)
        assert abs(example.rows_loss(rows, got, wrong) - on_tree) > 0.1


def test_intervals_are_those_of_students_t() -> None:
    """Of 0, 1, 2: a mean of 1, and 4.303 standard errors of 1 / sqrt(3)."""
    mean, half = report.interval([0.0, 1.0, 2.0])
    assert mean == 1 and half == pytest.approx(4.303 / 3**0.5, rel=0.01)


def test_a_small_run_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    run_seed = example.run_seed
    settings = example.Settings(
        demonstrations=16, warm_steps=4, warm_rows=4, budget=60, tasks=2, trajectories=3, max_steps=2, held_out=2,
        evaluations=1,
    )  # fmt: skip
    figures = json.loads(json.dumps(example.run([7], settings, "eager", tmp_path / "seeds.jsonl")))
    example.print_results(figures)
    example.draw_results(figures, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert {"settings", "inner", "seeds", "step_seconds", "compile_seconds", "processor_seconds"} <= set(figures)
    (seed,) = figures["seeds"]
    assert seed["seed"] == 7 and [*seed["methods"]] == [*example.methods(settings)]
    for course in seed["methods"].values():
        assert course["generated"][-1] >= 60 and len(course["success"]) == len(course["steps"]) == 2
        assert course["trained_tokens"] < course["raw_tokens"]
    assert {course["success"][0] for course in seed["methods"].values()} == {seed["start_success"]}
    assert all(timing["error"] < 1e-4 for timing in figures["step_seconds"].values())
    about = {name: figures[name] for name in ("settings", "inner", "torch")}
    assert example.read_record(tmp_path / "seeds.jsonl", about) == {7: seed}
    assert example.read_record(tmp_path / "seeds.jsonl", {**about, "inner": "inductor"}) == {}
    monkeypatch.setattr(
        example, "run_seed", lambda model, given, *rest: ran.append(given.budget) or run_seed(model, given, *rest)
    )
    again = example.run([7], settings, "eager", tmp_path / "seeds.jsonl", resume=True)
    assert again["seeds"] == [seed] and ran == [1], "one update, for batches to time"
