"""Show a comparison of training runs: a table, a summary, a chart, and JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from treefx.output import make_table
from treefx.tools.bench.job.training import StepRecord

__all__ = ["TrainingReport"]


@dataclass(frozen=True, kw_only=True)
class TrainingReport:
    """The outcome of ``compare_training`` for a backend against a baseline."""

    records: Sequence[StepRecord]
    backend: str
    baseline: str
    compile_seconds: dict[str, float]
    """By backend: the first forward and backward of every shape."""
    gradient_errors: dict[str, float] = field(default_factory=dict)
    """By backend: largest relative error of any gradient, first batch, against eager float64."""

    @property
    def raw_tokens(self) -> int:
        """Tokens of all steps that are not padding."""
        return sum(record.raw_tokens for record in self.records)

    @property
    def tokens(self) -> int:
        """Distinct tokens of all steps."""
        return sum(record.tokens for record in self.records)

    @property
    def token_bound(self) -> float:
        """Return raw over distinct tokens: the speed-up if time followed tokens without padding."""
        return self.raw_tokens / self.tokens

    @property
    def padded_share(self) -> float:
        """Share of the padded batches that is padding."""
        return 1 - self.raw_tokens / sum(record.rows * record.length for record in self.records)

    @property
    def speed_up(self) -> float:
        """Seconds of all steps, baseline over backend."""
        return self.seconds(self.baseline) / self.seconds(self.backend)

    @property
    def median_speed_up(self) -> float:
        """Return baseline over backend, the median of all steps but the first."""
        ratios = [record.seconds[self.baseline] / record.seconds[self.backend] for record in self.records]
        return median(ratios[1:] or ratios)

    @property
    def loss_error(self) -> float:
        """Relative difference of the losses of the first step, which starts from equal weights."""
        losses = self.records[0].losses
        return abs(losses[self.backend] - losses[self.baseline]) / abs(losses[self.baseline])

    def seconds(self, backend: str) -> float:
        """Seconds of all steps of one backend, without compilation."""
        return sum(record.seconds[backend] for record in self.records)

    def table(self) -> Table:
        """One line per step."""
        pair = (self.baseline, self.backend)
        columns = ["step", "shape", "raw\ntokens", "distinct\ntokens", "ratio"]
        columns += [f"{name}\nseconds" for name in pair] + [f"{name}\nloss" for name in pair]
        rows = [
            [
                record.step + 1,
                f"{record.rows}x{record.length}",
                f"{record.raw_tokens:,}",
                f"{record.tokens:,}",
                f"{record.sharing_ratio:.2f}",
                *(f"{record.seconds[name]:.2f}" for name in pair),
                *(f"{record.losses[name]:.5f}" for name in pair),
            ]
            for record in self.records
        ]
        return make_table("Training steps", columns, rows)

    def lines(self) -> list[str]:
        """The totals, one sentence each."""
        base, name = self.baseline, self.backend
        lines = [
            f"tokens: {self.raw_tokens:,} raw, {self.tokens:,} distinct; "
            f"{self.padded_share:.0%} of the batches is padding",
            f"steps: {base} {self.seconds(base):.2f} s, {name} {self.seconds(name):.2f} s: "
            f"{self.speed_up:.2f} times as fast in all, {self.median_speed_up:.2f} in the median step after the first "
            f"(raw / distinct tokens: {self.token_bound:.2f})",
            f"compilation, once per shape: {base} {self.compile_seconds[base]:.1f} s, "
            f"{name} {self.compile_seconds[name]:.1f} s",
            f"loss of the first step: relative difference {self.loss_error:.1e}",
        ]
        for backend, error in self.gradient_errors.items():
            lines.append(f"gradients of {backend} against eager float64: largest relative error {error:.1e}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {
            "backend": self.backend,
            "baseline": self.baseline,
            "raw_tokens": self.raw_tokens,
            "tokens": self.tokens,
            "token_bound": self.token_bound,
            "padded_share": self.padded_share,
            "seconds": {name: self.seconds(name) for name in (self.baseline, self.backend)},
            "compile_seconds": self.compile_seconds,
            "speed_up": self.speed_up,
            "median_speed_up": self.median_speed_up,
            "loss_error": self.loss_error,
            "gradient_errors": self.gradient_errors,
            "steps": [asdict(record) | {"sharing_ratio": record.sharing_ratio} for record in self.records],
        }

    def draw(self, path: str | Path) -> None:
        """Save a chart: seconds per step of both, and the sharing that each step had."""
        # pyplot keeps global state and takes a second to import: only a command that draws pays for it.
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 4.2), layout="constrained")
        times, losses = figure.subplots(1, 2)
        steps = [record.step + 1 for record in self.records]
        for offset, name, colour in ((-0.2, self.baseline, "#b0b7c3"), (0.2, self.backend, "#1f6f8b")):
            heights = [record.seconds[name] for record in self.records]
            times.bar([step + offset for step in steps], heights, width=0.38, color=colour, label=name)
        for record in self.records:
            top = max(record.seconds.values())
            times.annotate(f"{record.sharing_ratio:.1f}x", (record.step + 1, top), ha="center", va="bottom", fontsize=8)
        times.set(title="Step time; above: raw / distinct tokens", xlabel="step", ylabel="seconds", xticks=steps)
        styles = ((self.baseline, "#b0b7c3", "-", 4.0), (self.backend, "#1f6f8b", "--", 1.6))
        for name, colour, style, width in styles:
            values = [record.losses[name] for record in self.records]
            losses.plot(steps, values, style, color=colour, linewidth=width, label=name)
        losses.set(title="Loss", xlabel="step", ylabel="loss", xticks=steps)
        for axes in (times, losses):
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
