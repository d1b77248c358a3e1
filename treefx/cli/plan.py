"""``treefx plan``: how rollouts too large for memory would be cut, for a model that does not have to be there."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from treefx.bench.job.models import make_config, require_transformers
from treefx.bench.job.rollouts import make_tokenizer
from treefx.cli.plan_many import show_step, show_strategies
from treefx.data import load, make_samples, scripted_conversations
from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.output import notes, print_json, print_line
from treefx.planning.cost.analytic import Dimensions, estimate_cost
from treefx.planning.cost.model import CostModel
from treefx.planning.execution.profile import Profile
from treefx.planning.search.plan import Plan
from treefx.planning.search.planner import plan as make_plan
from treefx.planning.search.policies import compare_policies
from treefx.planning.views.compare import compare_strategies
from treefx.scale.step import predict_step

__all__ = ["parse_bytes", "plan"]

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


def plan(
    rollouts: Annotated[
        Path | None,
        typer.Argument(help="A file or folder: tau-bench, ToolBench or OpenAI chats. Default: a scripted sample."),
    ] = None,
    memory: Annotated[str, typer.Option(help="The limit, such as 24GiB, for parameters and gradients too.")] = "24GiB",
    model: Annotated[Path | None, typer.Option(help="A config.json of transformers; only its sizes are used.")] = None,
    profile: Annotated[Path | None, typer.Option(help="Instead: what Profile.save wrote, measured.")] = None,
    dtype: Annotated[str, typer.Option(help="Of parameters and activations, with --model.")] = "bfloat16",
    tflops: Annotated[float, typer.Option(help="Speed reached in training, with --model.")] = 200.0,
    host_gbps: Annotated[float, typer.Option(help="GB/s to host memory, with --model; 0: none is used.")] = 0.0,
    tokenizer: Annotated[str, typer.Option(help="'bpe', trained on the text at hand, or 'bytes'.")] = "bpe",
    strategy: Annotated[str, typer.Option(help="'auto', or a way to cut by name: see --compare.")] = "auto",
    compare: Annotated[
        bool, typer.Option("--compare", help="Every strategy beside each other, with --draw too.")
    ] = False,
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel processes, each with this memory.")] = 1,
    link_gbps: Annotated[float, typer.Option(help="GB/s a rank sends to others, with --ranks; 0: not counted.")] = 0.0,
    draw: Annotated[Path | None, typer.Option(help="Save a picture: the tree by part, memory over time.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Cut the tree of all rollouts into parts that fit a memory limit, and show what that costs.

    Each assistant turn is one row, as agent frameworks emit them; all rows make one forest. With --model the cost is
    an estimate from the configuration's sizes, so that no model has to run and no GPU has to be there; with --profile
    it is what `treefx.profile` measured. The last table has the same forest under the policies of other systems. With
    --ranks, rows go to that many processes as `treefx.scale.assign` shares them, and each share is planned.
    """
    limit = parse_bytes(memory)
    if ranks > 1 and (compare or draw is not None or strategy != "auto"):
        raise InputError(
            f"--ranks {ranks} plans every rank by itself: expected it without --compare, --draw and --strategy"
        )
    cost = _read_cost(model, profile, (dtype, tflops, host_gbps))
    conversations = load(rollouts) if rollouts is not None else scripted_conversations()
    rows = [sample.tokens for sample in make_samples(conversations, make_tokenizer(conversations, tokenizer))]
    forest = Forest.from_sequences(rows)
    if draw is not None:
        draw.parent.mkdir(parents=True, exist_ok=True)
    if compare:
        show_strategies(compare_strategies(forest, cost, limit), draw, json)
    elif ranks > 1:
        link = link_gbps * 1e9 if link_gbps > 0 else None
        show_step(predict_step(forest, ranks, cost, limit, link_bytes_per_second=link), json)
    else:
        _show(make_plan(forest, cost, limit, strategy=strategy), draw, json)


def _read_cost(model: Path | None, profile: Path | None, speeds: tuple[str, float, float]) -> CostModel:
    """From a configuration, for a dtype, TFLOP/s and GB/s to host memory; or from a profile."""
    if (model is None) == (profile is None):
        raise InputError(
            "expected --model CONFIG.json or --profile PROFILE.json: one of the two says what a token costs"
        )
    if profile is not None:
        return Profile.load(profile).cost
    dtype, tflops, host_gbps = speeds
    sizes = read_dimensions(str(model), dtype)
    notes.print(f"estimated for {sizes.parameters:,} parameters at {tflops:g} TFLOP/s: not measured")
    host = host_gbps * 1e9 if host_gbps > 0 else None
    return estimate_cost(sizes, flops_per_second=tflops * 1e12, host_bytes_per_second=host)


def _show(found: Plan, draw: Path | None, json: bool) -> None:
    if draw is not None:
        found.draw(draw)
    if json:
        print_json(found.to_dict() | {"policies": [item.to_dict() for item in compare_policies(found)]})
        return
    print_line(found.explain())
    if draw is not None:
        print_line(f"picture: {draw}")


def parse_bytes(text: str) -> int:
    """Bytes from text such as ``24GiB``, ``800 MB`` or ``1e9``.

    Raises:
        InputError: it is no positive number with a unit.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    try:
        value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    except (KeyError, ValueError):
        value = 0.0
    if value < 1:
        raise InputError(f"memory must be a number of bytes with a unit, such as 24GiB or 800MB, got {text!r}")
    return int(value)


def read_dimensions(model: str, dtype: str) -> Dimensions:
    """The sizes in a configuration of transformers.

    Parameters are counted on a model without storage.

    Raises:
        InputError: transformers is missing, the file is no configuration of a causal LM, or the dtype is unknown.
    """
    if dtype not in _BYTES_OF:
        raise InputError(f"dtype must be one of {', '.join(_BYTES_OF)}, got {dtype!r}")
    import torch

    config = make_config(model, vocab_size=1)
    transformers = require_transformers()
    try:
        with torch.device("meta"):
            empty = transformers.AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise InputError(f"{model} is not the configuration of a causal language model: {error}") from error
    parameters = sum(parameter.numel() for parameter in empty.parameters())
    return _dimensions(config.get_text_config(), parameters, _BYTES_OF[dtype])


def _dimensions(config: Any, parameters: int, bytes_per_number: int) -> Dimensions:
    heads = config.num_attention_heads
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
    used = getattr(config, "num_experts_per_tok", 0) or 0
    width = getattr(config, "moe_intermediate_size", None) if experts else None
    width = width or getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    idle = (experts - used) * 3 * config.hidden_size * width * config.num_hidden_layers if experts else 0
    return Dimensions(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=width * (used or 1),
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=config.vocab_size,
        parameters=parameters,
        active_parameters=max(parameters - idle, 1),
        bytes_per_number=bytes_per_number,
    )
