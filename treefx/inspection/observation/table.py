"""The table of an observation, as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from treefx.inspection.observation.records import Cost, Figures, Origin, Prediction, Scatter

__all__ = ["describe"]

_INDENT = 22
_MEBIBYTE = 2**20


# Long: one argument a line.
def describe(
    origin: Origin,
    figures: Figures,
    cost: Cost,
    scatter: Sequence[Scatter],
    prediction: Prediction | None,
    not_predicted: str,
    stopped: str,
) -> str:
    """All figures for people."""
    whose = ", ".join(text for text in (origin.trainer, origin.line, f"rank {origin.rank}") if text)
    lines = [f"treefx observed {origin.model} ({whose}) and changed nothing"]
    if not figures.steps:
        return f"{lines[0]}\nno call with gradients had token ids [B, T] among its arguments"
    lines += [f"{label:<{_INDENT}}{text}" for label, text in _sharing(figures)]
    lines += [f"{label:<{_INDENT}}{text}" for label, text in _predicted(prediction, not_predicted)]
    for item in scatter:
        share = 100 * item.tokens / max(1, item.of_tokens)
        lines.append(f"{'scattered by':<{_INDENT}}{item.setting}: {share:.0f} % more tokens")
        lines.append(f"{'    way out':<{_INDENT}}{item.way_out}")
    each = 1000 * cost.seconds / max(1, figures.calls)
    of_run = f", {100 * cost.share:.2f} % of the run" if figures.steps > 1 else ""  # one call has no length of time
    lines.append(f"{'cost of observing':<{_INDENT}}{each:.3f} ms a call{of_run}")
    if stopped:
        lines.append(f"{'stopped observing':<{_INDENT}}{stopped}")
    return "\n".join(lines)


def _sharing(figures: Figures) -> Iterator[tuple[str, str]]:
    more = f"; {figures.calls_without_gradients:,} calls without gradients" if figures.calls_without_gradients else ""
    again = f"; {figures.repeats:,} calls of the same tensor again" if figures.repeats else ""
    yield "steps", f"{figures.steps:,}, of {figures.calls:,} calls and {figures.rows:,} rows{more}{again}"
    yield "tokens", f"{'raw':>15}{'distinct':>15}{'ideal speed-up':>17}"
    for label, tokens, ratio in (
        ("  calls as they come", figures.call_tokens, figures.sharing),
        ("  a step in one call", figures.step_tokens, figures.possible),
    ):
        yield label, f"{figures.raw_tokens:>15,}{tokens:>15,}{ratio:>16.2f}x"
    if figures.suffix_without_loss is not None:
        yield "suffix tokens", f"{100 * figures.suffix_without_loss:.1f} % of {figures.suffix_tokens:,} carry no loss"


def _predicted(prediction: Prediction | None, not_predicted: str) -> Iterator[tuple[str, str]]:
    if prediction is None:
        yield "predicted", f"nothing: {not_predicted}"
        return
    if prediction.seconds is not None and prediction.seconds_packed is not None:
        together = prediction.seconds_together
        text = f"{prediction.seconds:.3f} s -> {prediction.seconds_packed:.3f} s"
        yield "predicted step", text + (f", {together:.3f} s with all rows in one call" if together else "")
    if prediction.kept_bytes:
        before, after = (x / _MEBIBYTE for x in (prediction.kept_bytes, prediction.kept_bytes_packed))
        yield "kept for backward", f"{before:,.1f} MiB -> {after:,.1f} MiB in the largest call"
    yield "treefx would say", prediction.verdict
