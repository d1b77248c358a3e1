"""``treefx plan``: how rollouts too large for memory would be cut, for a model that does not have to be there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treefx.cli.checks import check_choice, check_input, check_output, check_positive, parse_bytes
from treefx.cli.rollouts import Rollouts, check_tokenizer, make_encoder
from treefx.errors import InputError, shorten
from treefx.output import notes, print_json, print_line, waiting

if TYPE_CHECKING:
    from treefx.planning.cost.analytic import Dimensions
    from treefx.planning.cost.model import CostModel
    from treefx.planning.search.plan import Plan

__all__ = ["parse_bytes", "plan"]

_BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
_SAMPLE_MODEL = {
    "layers": 28, "hidden": 1024, "intermediate": 3072, "heads": 16, "kv_heads": 8, "head_dim": 128,
    "vocabulary": 151_936, "parameters": 596_049_920, "active_parameters": 596_049_920,
}  # fmt: skip
"""Qwen3 0.6B, whose embedding is its head."""
_VOCABULARY = 4096
"""The largest of a BPE that is trained on the rollouts."""


# Long: an option takes one line or three.
def plan(
    rollouts: Annotated[
        Path | None,
        typer.Argument(help="A file or folder, as for `treefx data`. Default: a scripted sample."),
    ] = None,
    memory: Annotated[str, typer.Option(help="The limit, such as 24GiB, for parameters and gradients too.")] = "24GiB",
    model: Annotated[
        str | None,
        typer.Option(
            help="A config.json of transformers, of which only sizes are used. [default: the sizes of Qwen3 0.6B]",
            show_default=False,
        ),
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="Instead: what Profile.save wrote, measured.")] = None,
    dtype: Annotated[str, typer.Option(help="Of parameters and activations, with --model.")] = "bfloat16",
    tflops: Annotated[float, typer.Option(help="Speed reached in training, with --model.")] = 200.0,
    host_gbps: Annotated[float, typer.Option(help="GB/s to host memory, with --model; 0: none is used.")] = 0.0,
    tokenizer: Annotated[
        str,
        typer.Option(help="'bpe', trained on the text at hand, 'bytes', or the folder of a Hugging Face tokenizer."),
    ] = "bpe",
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Leave out broken records and count them, instead of ending there.")
    ] = False,
    strategy: Annotated[str, typer.Option(help="'auto', or a way to cut by name: see --compare.")] = "auto",
    sharing: Annotated[
        str, typer.Option(help="'all', or 'auto': levels whose sharing is predicted to cost more are computed again.")
    ] = "all",
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare all strategies, also in the picture of --draw.")
    ] = False,
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel processes, each with this memory.")] = 1,
    link_gbps: Annotated[float, typer.Option(help="GB/s a rank sends to others, with --ranks; 0: not counted.")] = 0.0,
    draw: Annotated[Path | None, typer.Option(help="Save a picture: the tree by part, memory over time.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Cut the tree of all rollouts into parts that fit a memory limit, and show what that costs.

    Each assistant turn is one row, as agent frameworks emit them, or each branch of a trace; all rows make one forest
    (`treefx data` counts a tree per task, and so more tokens where tasks share a system prompt). The cost is an
    estimate from the sizes of a model, so that no model has to run and no GPU has to be there; with --profile it is
    what `treefx.profile` measured.
    The last table has the same forest under the policies of other systems. With --ranks, rows go to that many
    processes as `treefx.scale.shard_rows` shares them, and each share is planned.
    """
    limit = parse_bytes(memory)
    if ranks > 1 and (compare or draw is not None or strategy != "auto" or sharing != "all"):
        raise InputError(
            f"--ranks {ranks} plans every rank by itself: expected it without --compare, --draw, --sharing and "
            "--strategy"
        )
    if model is not None and profile is not None:
        raise InputError("expected --model or --profile, got both: either says what a token costs")
    check_choice("--dtype", dtype, _BYTES_OF)
    check_tokenizer(tokenizer)
    check_positive("--tflops", tflops)
    check_input(rollouts)
    check_input(profile)
    check_output("--draw", draw)
    with waiting("loading PyTorch", quiet=json) as progress:
        from treefx.cli.plan_many import show_step, show_strategies
        from treefx.data import ReadReport
        from treefx.forests.forest import Forest
        from treefx.planning.search.planner import plan as make_plan
        from treefx.planning.search.strategies import strategy_names
        from treefx.planning.views.compare import compare_strategies
        from treefx.scale.step import predict_step

        check_choice("--strategy", strategy, ("auto", *strategy_names()))
        check_choice("--sharing", sharing, ("all", "auto"))
        cost = _read_cost(model, profile, (dtype, tflops, host_gbps))
        progress.tell("reading rollouts")
        report = ReadReport()
        read = Rollouts.read(rollouts, "skip" if skip_broken else "raise", report)
        encoder = None if read.traces else make_encoder(read.spoken(), tokenizer, _VOCABULARY)
        forest = Forest.from_sequences([sample.tokens for sample in read.samples(encoder)])
        progress.tell("planning")
        if compare:
            attempts = compare_strategies(forest, cost, limit)
        elif ranks > 1:
            link = link_gbps * 1e9 if link_gbps > 0 else None
            step = predict_step(forest, ranks, cost, limit, link_bytes_per_second=link)
        else:
            found = make_plan(forest, cost, limit, strategy=strategy, sharing="auto" if sharing == "auto" else "all")
    if report.skipped:
        notes.print(report.summary(), markup=False, soft_wrap=True)
    if compare:
        show_strategies(attempts, draw, json)
    elif ranks > 1:
        show_step(step, json)
    else:
        _show(found, draw, json)


def _read_cost(model: str | None, profile: Path | None, speeds: tuple[str, float, float]) -> CostModel:
    """From a configuration, for a dtype, TFLOP/s and GB/s to host memory; or from a profile."""
    from treefx.planning.cost.analytic import Dimensions, estimate_cost
    from treefx.planning.execution.profile import Profile

    if profile is not None:
        try:
            return Profile.load(profile).cost
        except OSError as error:
            raise InputError(f"--profile {profile} cannot be read: {error.strerror}") from error
    dtype, tflops, host_gbps = speeds
    if model is None:
        sizes, source = Dimensions(**_SAMPLE_MODEL, bytes_per_number=_BYTES_OF[dtype]), "the sizes of Qwen3 0.6B"
    else:
        sizes, source = read_dimensions(model, dtype), model
    notes.print(
        f"estimated for {source}, {sizes.parameters:,} parameters, at {tflops:g} TFLOP/s: not measured", soft_wrap=True
    )
    host = host_gbps * 1e9 if host_gbps > 0 else None
    return estimate_cost(sizes, flops_per_second=tflops * 1e12, host_bytes_per_second=host)


def _show(found: Plan, draw: Path | None, json: bool) -> None:
    from treefx.planning.search.policies import compare_policies

    if draw is not None:
        found.draw(draw)
    if json:
        policies = [item.to_dict() for item in compare_policies(found)]
        print_json(found.to_dict() | {"policies": policies}, "treefx.plan/1")
        return
    print_line(found.explain())
    if draw is not None:
        print_line(f"picture: {draw}")


def read_dimensions(model: str, dtype: str) -> Dimensions:
    """The sizes in a configuration of transformers.

    Parameters are counted on a model without storage.

    Raises:
        InputError: transformers is missing, or the file is no configuration of a causal LM with attention.
    """
    import torch

    from treefx.tools.bench.job.models import make_config, require_transformers

    config = make_config(model, vocab_size=1)
    transformers = require_transformers()
    try:
        with torch.device("meta"):
            empty = transformers.AutoModelForCausalLM.from_config(config)
        parameters = sum(parameter.numel() for parameter in empty.parameters())
        return _dimensions(config.get_text_config(), parameters, _BYTES_OF[dtype])
    except Exception as error:  # sizes that do not fit each other are found in all kinds of places
        # the message of a ValueError may list every causal LM that transformers has
        cause = str(error).partition("Model type should be one of")[0].strip()
        reason = f"{type(error).__name__}: {shorten(cause, 400)}"
        raise InputError(f"{model} is not the configuration of a causal language model: {reason}") from error


def _dimensions(config: Any, parameters: int, bytes_per_number: int) -> Dimensions:
    from treefx.planning.cost.analytic import Dimensions

    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        raise InputError(
            f"expected a model with attention: the estimate counts keys and values; a {config.model_type} has no "
            "num_attention_heads; measure it with treefx.profile and give --profile"
        )
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
