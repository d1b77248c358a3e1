"""Run a training command unchanged, with treefx in each of its processes: ``treefx run``."""

import json
import os
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from treefx.cli.checks import check_output
from treefx.config import Config
from treefx.errors import InputError
from treefx.integrations import startup

__all__ = ["environment_for", "run"]


def run(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments.", metavar="-- COMMAND...")],
    inner: Annotated[
        str,
        typer.Option(help="What compiles the rewritten graph of a model that is compiled: inductor, aot_eager, eager."),
    ] = "",
    min_sharing: Annotated[
        float | None, typer.Option(help="Sharing ratio below which a call runs unchanged. [default: 1.15]")
    ] = None,
    keep_groups: Annotated[
        bool, typer.Option("--keep-groups", help="Rows of a dataset that share prefixes come in one batch.")
    ] = False,
    observe: Annotated[
        bool, typer.Option("--observe", help="Change nothing: count what the rows of each step share.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="A folder: every rank writes its reports there when it ends, as JSON and pages.")
    ] = None,
) -> None:
    """Run a training command with treefx in every Python process it starts; no line of it changes.

    \b
    treefx run -- python train.py
    treefx run -- accelerate launch train.py --config run.yaml
    treefx run -- torchrun --nproc-per-node 8 train.py

    In each process, as soon as it imports one of these (nothing is imported that it does not import):

    accelerate, and trainers that compile through it (transformers.Trainer, TRL): models are compiled with
    backend="treefx" if the program names no other backend; a program that names one keeps it, with a warning.

    transformers.Trainer: treefx/sharing, treefx/sharing_possible, fallbacks and compile time are logged with the loss.

    LLaMA-Factory: its checkpoints do not cut the graph.

    verl, SkyRL, OpenRLHF: the models of their engines are converted, Megatron's among them.

    TRL's GRPO, RLOO and distillation: the rows of a group stay in one micro-batch. The gradient of a step is the same.
    AsyncGRPO, which makes trees itself: they run on treefx's attention, on any device and with sinks.

    Trainers over a dataset keep their order, which is shuffled in most: with --keep-groups (or one line of the program,
    treefx.integrations.trl.keep_groups(trainer)) rows that share prefixes come in one batch. A loop that uses none of
    these needs one line too: model.compile(backend="treefx").

    With --report, each process writes the report (JSON, and a page for the browser) of every model that it compiled or
    converted, when it ends: by an exception, Ctrl-C or SIGTERM too. Rank 0 prints its summary.

    With --observe the run stays what it is: nothing is compiled, no row moves. Each call's token ids are copied to the
    host and counted. At the end rank 0 prints what the rows of each step share, the predicted gain and the settings
    that scatter groups; the trainer's loggers get treefx/observed_sharing and treefx/observed_sharing_possible.
    """
    options: dict[str, Any] = {"inner": inner} if inner else {}
    if min_sharing is not None:
        options["min_sharing"] = min_sharing
    if observe and (options or keep_groups):
        raise InputError("--observe changes nothing: leave --inner, --min-sharing and --keep-groups out, or --observe")
    if report is not None:
        check_output("--report", report / "report.json")
        if report.is_dir() and any(report.iterdir()):
            raise InputError(f"--report should be a folder that is empty or not there, got {report}; empty it")
    environment = environment_for(
        options, dict(os.environ), keep_groups=keep_groups, observe=observe, report=report
    )  # fmt: skip
    if shutil.which(command[0]) is None:
        raise InputError(
            f"expected a command to run, got {command[0]!r}, which is not found; write: treefx run -- COMMAND"
        )
    os.execvpe(command[0], command, environment)


def environment_for(
    options: dict[str, Any],
    environment: dict[str, str],
    *,
    keep_groups: bool = False,
    observe: bool = False,
    report: Path | None = None,
) -> dict[str, str]:
    """The environment in which every Python process is hooked.

    Args:
        options: fields of `treefx.Config`.
        environment: the environment of the command.
        keep_groups: whether trainers over a dataset put rows that share prefixes into one batch.
        observe: whether calls are counted and left as they are.
        report: folder for the records that processes write when they end.

    Raises:
        ConfigError: an unknown option, or a value it does not take.
    """
    Config.from_options(options)
    folder = str(Path(startup.__file__).parent)
    before = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path != folder]
    wanted: dict[str, Any] = {"options": options, "keep_groups": keep_groups}
    if observe:
        wanted["observe"] = True
    if report is not None:
        wanted["report"] = str(report.absolute())
    path = os.pathsep.join([folder, *before])
    return {**environment, "PYTHONPATH": path, "TREEFX_RUN": json.dumps(wanted)}
