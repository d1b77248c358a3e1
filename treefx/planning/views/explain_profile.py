"""Format a profile: its expressions, and predictions next to measurements."""

from rich.table import Table

from treefx.planning.execution.profile import Profile
from treefx.planning.views.tables import format_bytes, format_seconds, make_figures, make_texts, render_tables

__all__ = ["explain_profile"]


def explain_profile(profile: Profile) -> str:
    """The text of `Profile.explain`."""
    cost = profile.cost
    lines = [
        f"Parts on {profile.device}, graphs for {profile.inner}; N tokens, P boundary tokens, A visible pairs",
        f"resident: {format_bytes(cost.resident_bytes)}; K/V per outgoing token: {cost.kv_bytes_per_token:,.0f} bytes",
    ]
    if cost.states is not None:
        lines.append(f"a state of all recurrences that crosses a cut: {format_bytes(cost.states.state_bytes)}")
    figures = [
        *((f"{name} bytes", str(expression)) for name, expression in profile.bytes.items()),
        *((f"{name} FLOPs", str(expression.evalf(4))) for name, expression in profile.flop_expressions.items()),
        *((f"{name} seconds", str(expression.evalf(3))) for name, expression in profile.seconds.items()),
    ]
    return render_tables(*lines, make_texts(("figure", "expression"), figures), _samples_table(profile))


def _samples_table(profile: Profile) -> Table:
    columns = ("step", "tokens", "boundary", "pairs", "bytes", "predicted", "time", "fitted")
    rows = []
    for sample in profile.samples:
        fit = getattr(profile.cost, f"{sample.kind}_seconds")
        rows.append(
            (
                sample.kind,
                f"{sample.size.tokens:,}",
                f"{sample.size.boundary:,}",
                f"{sample.size.pairs:,}",
                format_bytes(sample.bytes),
                format_bytes(sample.predicted_bytes(profile.cost)),
                format_seconds(sample.seconds),
                format_seconds(fit(sample.size)),
            )
        )
    return make_figures("Measured steps: bytes above their beginning, and time", columns, rows)
