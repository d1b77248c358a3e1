"""A tiny language model learns to use tools: a warm start on demonstrations, then GRPO on rows or PORTool on trees.

    python examples/portool.py             # three seeds; --quick for a first look, --seeds 10 for intervals

The world is scripted (`portool_world.py`): eight tools, two of which fail at times, a shortcut that few know, prices
and temperatures that change with the hour. A model with random weights imitates careless demonstrations, and then
learns from rewards alone which of their habits pay. Four ways from the same start, with the same budget of generated
tokens:

    GRPO on rows      independent trajectories of each task, one advantage per trajectory
    GRPO on trees     trajectories of a task branch from shared steps; one advantage per trajectory,
                      which is PORTool without the advantages of forks
    PORTool on trees  the same trees, one advantage per step of each trajectory
    forks on trees    the same trees, PORTool without the advantages of trajectories

All train through `model.compile(backend="treefx")`, on the tree that the trajectories make. Printed and drawn are
success on held-out tasks, steps per task, tokens generated and trained, and time: also that of the same training steps
on padded rows through inductor.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import treefx
from treefx.output import notes, print_line, refusals_end_the_command
from treefx.rl import Group, PortoolTree, Rollouts, Scheme, TransformersSampler, grpo, portool, rollout

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH, which a checkout needs, leaves this folder out
from portool_report import draw_results, print_results
from portool_world import END, TOOLS, VOCABULARY, World, demonstrate, encode


@dataclass(frozen=True)
class Settings:
    """Hold the settings of a run, besides its seed."""

    carelessness: float = 0.5
    """Probability that a demonstration cuts a corner where it can."""
    demonstrations: int = 2048
    warm_steps: int = 300
    warm_rows: int = 32
    """Demonstrations per step of the warm start."""
    warm_rate: float = 5e-3
    budget: int = 72_000
    """Tokens that each method may generate."""
    rate: float = 1e-3
    """Learning rate of both methods at the beginning; it falls to a tenth."""
    tasks: int = 16
    """Per update."""
    trajectories: int = 16
    """Per task."""
    first_steps: int = 1
    """How many steps follow the prompt of a tree."""
    max_steps: int = 10
    held_out: int = 200
    """Tasks of the evaluation, the same ones for all seeds and methods; their numbers are never trained on."""
    evaluations: int = 3
    """Per method, at even distances."""


@dataclass(frozen=True)
class Method:
    """How trajectories are sampled, and the advantages they get, per row or per token of each row."""

    scheme: Scheme
    advantages: Callable[[Rollouts], Any]


def methods(settings: Settings) -> dict[str, Method]:
    tree = PortoolTree(settings.trajectories, forks=2, first_steps=settings.first_steps)
    return {
        "GRPO on rows": Method(Group(settings.trajectories), lambda got: grpo(got.steps, got.rewards)),
        "GRPO on trees": Method(tree, lambda got: grpo(got.steps, got.rewards)),
        "PORTool on trees": Method(tree, per_step),
        "forks on trees": Method(tree, partial(per_step, w_traj=0.0)),
    }


COMPARED = ("GRPO on rows", "PORTool on trees")
"""One method per way to sample: their tokens per trajectory and their steps are timed."""


def per_step(got: Rollouts, w_traj: float = 1.0) -> Any:
    """PORTool's advantages, one number per token of each row."""
    found = portool(got.steps, got.rewards, format_rewards=got.step_rewards, w_traj=w_traj, scale="none")
    return got.steps.to_tokens(found)


@dataclass
class Course:
    """How one method went: a point per evaluation, sums over all updates."""

    generated: list[int] = field(default_factory=lambda: [0])
    success: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    greedy: float = 0.0
    """Success at temperature 0, at the end."""
    updates: int = 0
    trajectories: int = 0
    raw_tokens: int = 0
    """On all rows, prompts included: what training on rows computes."""
    trained_tokens: int = 0
    """Distinct ones: what training on the tree computes."""
    sampling_seconds: float = 0.0
    training_seconds: float = 0.0


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY), hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    return model


def edge_logprobs(model: nn.Module, forest: treefx.Forest) -> Tensor:
    """Log-probability of every distinct prediction, [E]: one packed row through the compiled model."""
    with treefx.use(forest):
        logits = model(**forest.model_inputs(), use_cache=False).logits
    return treefx.edge_logprobs(logits, forest)


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def policy_loss(model: nn.Module, got: Rollouts, advantages: Any) -> Tensor:
    logp = edge_logprobs(model, got.forest)
    return treefx.losses.clipped(logp, got.forest, got.old_logprobs, advantages)


def warm_start(model: nn.Module, settings: Settings, seed: int, advance: Callable[[], None]) -> None:
    """Imitate demonstrations, each a separate row.

    Without the description of the tools at first: among few tokens the model learns much sooner to copy what a tool
    replied.
    """
    first = 10**6 * (seed + 1)
    rows = [demonstrate(first + number, settings.carelessness) for number in range(settings.demonstrations)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.warm_rate, weight_decay=0.0, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.warm_rate, settings.warm_steps, pct_start=0.1)
    for step in range(settings.warm_steps):
        begin = len(encode(TOOLS)) - 1 if step < settings.warm_steps * 2 // 3 else 0
        numbers = [(step * settings.warm_rows + i) % len(rows) for i in range(settings.warm_rows)]
        tokens, own = zip(*((rows[i][0][begin:], rows[i][1][begin:]) for i in numbers), strict=True)
        forest = treefx.Forest.from_sequences(tokens, weights=[torch.tensor(row).double() for row in own])
        descend(model, optimizer, treefx.losses.sft(edge_logprobs(model, forest), forest, reduction="token_mean"))
        schedule.step()
        advance()


def sampler(model: nn.Module, temperature: float = 1.0) -> TransformersSampler:
    return TransformersSampler(model, max_new_tokens=8, stop=[END], temperature=temperature)


def evaluate(model: nn.Module, settings: Settings, temperature: float = 1.0) -> tuple[float, float]:
    """Success and mean number of steps on the held-out tasks, once each and with the same random numbers always."""
    with sampler(model, temperature) as generate:
        got = rollout(generate, World(), range(settings.held_out), Group(1), max_steps=settings.max_steps)
    return float((got.rewards > 0).double().mean()), float(got.steps.path_lengths.double().mean())


def train(
    model: nn.Module, method: Method, settings: Settings, seed: int, advance: Callable[[int], None]
) -> tuple[Course, list[Rollouts]]:
    """Learn from rewards until the budget of generated tokens is spent; one update per batch of trajectories."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, weight_decay=0.0)
    course, used, batches = Course(), 0, []
    _score(model, settings, course)
    while used < settings.budget:
        started = time.perf_counter()
        first = 10**9 * (seed + 1) + settings.tasks * course.updates
        tasks = range(first, first + settings.tasks)
        with sampler(model) as generate:
            got = rollout(generate, World(), tasks, method.scheme, seed=first, max_steps=settings.max_steps)
        sampled = time.perf_counter()
        optimizer.param_groups[0]["lr"] = settings.rate * (1 - 0.9 * used / settings.budget)
        descend(model, optimizer, policy_loss(model, got, method.advantages(got)))
        trained = time.perf_counter()

        generated = int(got.info["sampled_tokens"])
        used += generated
        advance(generated)
        course.updates += 1
        course.trajectories += len(got)
        course.raw_tokens += got.forest.raw_tokens
        course.trained_tokens += got.forest.num_tokens
        course.sampling_seconds += sampled - started
        course.training_seconds += trained - sampled
        batches.append(got)
        if used >= settings.budget * len(course.success) / settings.evaluations:
            course.generated.append(used)
            _score(model, settings, course)
    course.greedy = evaluate(model, settings, temperature=0)[0]
    return course, batches


def _score(model: nn.Module, settings: Settings, course: Course) -> None:
    success, steps = evaluate(model, settings)
    course.success.append(success)
    course.steps.append(steps)


def tokens_per_trajectory(model: nn.Module, settings: Settings) -> dict[str, float]:
    """Generated tokens per trajectory of both ways to sample: the same policy, the same tasks."""
    found = {}
    for name in COMPARED:
        method = methods(settings)[name]
        with sampler(model) as generate:
            got = rollout(generate, World(), range(4 * settings.tasks), method.scheme, max_steps=settings.max_steps)
        found[name] = got.info["sampled_tokens"] / len(got)
    return found


def rows_loss(model: Any, got: Rollouts, advantages: Any) -> Tensor:
    """`policy_loss` as trainers have it without a tree: padded rows."""
    of_tokens = [a.expand(len(own)) for a, own in zip(advantages, got.sampled, strict=True)]
    ids, own, old, advantage = (
        nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
        for rows in (got.spread(got.step_tokens, got.prompt_tokens), got.sampled, got.old_logprobs, of_tokens)
    )
    lengths = torch.tensor([len(row) for row in got.sampled])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    logits = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits[:, :-1]
    logp = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None]).squeeze(2)[own[:, 1:]]
    ratio = (logp - old[:, 1:][own[:, 1:]].float()).exp()
    gain = advantage[:, 1:][own[:, 1:]].float()
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


def time_steps(
    model: nn.Module, batches: Mapping[str, Sequence[Rollouts]], settings: Settings, inner: str
) -> tuple[dict[str, Any], float]:
    """Whole training steps on batches of the run, on the tree and on padded rows, in turn.

    Returns:
        Per method the medians in seconds, and the largest difference of a gradient; and the seconds that the first pass
        over rows took longer than a later one.
    """
    plain = make_model(0)
    plain.load_state_dict(model.state_dict())
    plain.compile(backend=inner)
    ways = {"treefx": (model, policy_loss), "rows": (plain, rows_loss)}
    # Weights stay as they are.
    optimizers = {way: torch.optim.AdamW(of.parameters(), lr=0.0, weight_decay=0.0) for way, (of, _) in ways.items()}

    def timed(way: str, got: Rollouts, advantages: Any) -> float:
        of, loss = ways[way]
        fresh = replace(got)  # without the tree that is kept with it
        started = time.perf_counter()
        descend(of, optimizers[way], loss(of, fresh, advantages))
        return time.perf_counter() - started

    figures, compiling = {}, 0.0
    for name, several in batches.items():
        given = [(got, methods(settings)[name].advantages(got)) for got in several]
        first = {way: sum(timed(way, *one) for one in given) for way in ways}
        again = [{way: timed(way, *one) for way in ways} for _ in range(2) for one in given]
        figures[name] = {way: median(one[way] for one in again) for way in ways}
        figures[name]["error"] = gradient_error(model, plain, *given[0])
        compiling += first["rows"] - sum(one["rows"] for one in again) / 2
    return figures, compiling


def gradient_error(model: nn.Module, plain: nn.Module, got: Rollouts, advantages: Any) -> float:
    """Largest difference of a gradient between tree and rows, relative to the largest entry of all gradients."""
    policy_loss(model, got, advantages).backward()  # type: ignore[no-untyped-call]
    rows_loss(plain, got, advantages).backward()  # type: ignore[no-untyped-call]
    pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)]
    model.zero_grad()
    plain.zero_grad()
    both = [(tree, rows) for tree, rows in pairs if tree is not None and rows is not None]
    largest = max(float(rows.abs().max()) for _, rows in both)
    return max(float((tree - rows).abs().max()) for tree, rows in both) / (largest or 1.0)


def compile_seconds(model: nn.Module) -> float:
    """Seconds of a first step on a tree."""
    started = time.perf_counter()
    forest = treefx.Forest.from_sequences([demonstrate(number, 0.5)[0] for number in range(32)])
    treefx.losses.sft(edge_logprobs(model, forest), forest).backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    return time.perf_counter() - started


def spread_out(batches: Sequence[Rollouts], count: int) -> list[Rollouts]:
    """So many of them, at even distances."""
    return [batches[i * len(batches) // count] for i in range(min(count, len(batches)))]


def run_seed(model: nn.Module, settings: Settings, seed: int, progress: Progress) -> tuple[dict[str, Any], Any]:
    """Warm start, then all methods from the same weights; figures, and the batches of every method."""
    task = progress.add_task(f"seed {seed}: warm start", total=settings.warm_steps)
    started = time.perf_counter()
    model.load_state_dict(make_model(seed).state_dict())
    warm_start(model, settings, seed, partial(progress.advance, task))
    figures: dict[str, Any] = {"seed": seed, "warm_start_seconds": time.perf_counter() - started}
    start = {name: weight.clone() for name, weight in model.state_dict().items()}
    figures["start_success"], figures["start_greedy"] = (evaluate(model, settings, t)[0] for t in (1.0, 0.0))
    figures["tokens_per_trajectory"] = {"start": tokens_per_trajectory(model, settings)}
    figures["methods"], batches = {}, {}
    for name, method in methods(settings).items():
        model.load_state_dict(start)
        task = progress.add_task(f"seed {seed}: {name}", total=settings.budget)
        course, batches[name] = train(model, method, settings, seed, partial(progress.advance, task))
        figures["methods"][name] = asdict(course)
        figures["tokens_per_trajectory"][name] = tokens_per_trajectory(model, settings)
    return figures, batches


def main(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 3,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 1,
    budget: Annotated[int, typer.Option(min=1, help="Tokens that each method may generate.")] = Settings.budget,
    quick: Annotated[bool, typer.Option(help="One seed, a short warm start and a sixth of the budget.")] = False,
    inner: Annotated[str, typer.Option(help="What compiles the graphs: inductor, aot_eager or eager.")] = "inductor",
    out: Annotated[Path, typer.Option(help="Folder for the plot and the figures.")] = Path("out/portool"),
    resume: Annotated[bool, typer.Option(help="Take the seeds that an earlier run wrote into the folder.")] = False,
) -> None:
    """Teach a tiny model to use tools with GRPO and PORTool, and compare."""
    settings = Settings(budget=budget)
    if quick:
        seeds = 1
        settings = Settings(budget=budget // 6, warm_steps=180, held_out=50, evaluations=1)
    out.mkdir(parents=True, exist_ok=True)
    figures = run(range(first_seed, first_seed + seeds), settings, inner, out / "seeds.jsonl", resume=resume)
    print_results(figures)
    (out / "figures.json").write_text(json.dumps(figures, indent=2), encoding="utf-8")
    draw_results(figures, out / "portool.png")
    print_line(f"saved: {out / 'figures.json'}, {out / 'portool.png'}")


def run(seeds: Sequence[int], settings: Settings, inner: str, record: Path, *, resume: bool = False) -> dict[str, Any]:
    """Everything, with one compiled model for all seeds and methods.

    Args:
        seeds: Of the runs.
        settings: The same for all of them.
        inner: The compiler of the graphs.
        record: A line of figures per seed, written when the seed is done.
        resume: Take the seeds that ``record`` has of the same settings, compiler and release of PyTorch.
    """
    about = {"settings": asdict(settings), "inner": inner, "torch": torch.__version__}
    found = read_record(record, about) if resume else {}
    if taken := [str(seed) for seed in seeds if seed in found]:
        print_line(f"from {record}: seeds {', '.join(taken)}")
    if not resume:
        record.write_text("", encoding="utf-8")
    started, busy = time.perf_counter(), sum(os.times()[:4])
    model = make_model(0)
    model.compile(backend="treefx", options={"inner": inner})
    with Progress(console=notes, transient=True) as progress:
        task = progress.add_task("compiling", total=None)
        compiling = {"treefx": compile_seconds(model)}
        progress.remove_task(task)
        batches: dict[str, list[Rollouts]] = {}
        for seed in seeds:
            if seed not in found:
                found[seed], batches = run_seed(model, settings, seed, progress)
                with record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**about, **found[seed]}) + "\n")
        if not batches:  # every seed is on file, but no batch to time steps on
            _, batches = run_seed(model, replace(settings, budget=1), seeds[0], progress)
        progress.add_task("training steps on rows", total=None)
        batches = {name: spread_out(batches[name], 3) for name in COMPARED}
        timing, compiling["rows"] = time_steps(model, batches, settings, inner)
    return {
        **about,
        "threads": torch.get_num_threads(),
        "seeds": [found[seed] for seed in seeds],
        "step_seconds": timing,
        "compile_seconds": compiling,
        "seconds": time.perf_counter() - started,
        "processor_seconds": sum(os.times()[:4]) - busy,  # of compilers, too
    }


def read_record(path: Path, about: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The figures of earlier runs with these settings, by seed."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    same = [one for one in found if all(one[name] == value for name, value in about.items())]
    return {one["seed"]: {name: value for name, value in one.items() if name not in about} for one in same}


if __name__ == "__main__":
    with refusals_end_the_command():
        typer.run(main)
