"""Time lines as a page of html that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from treefx.passes.overlap.time_line import COMPUTE, LINK, Span, TimeLine

__all__ = ["draw_page"]

_WIDTH, _LANE, _LEFT = 1000, 26, 80
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>treefx: overlapped collectives</title>
<style>
:root { color-scheme: light dark; }
body { margin: 24px auto; max-width: 1120px; font: 15px/1.5 system-ui, sans-serif; }
svg { width: 100%%; height: auto; font: 12px ui-monospace, monospace; }
svg text { fill: currentColor; }
rect { stroke: #ffffff; stroke-width: 0.5; }
rect.products { fill: #2e7d5b; }
rect.link { fill: #c9a227; }
</style>
</head>
<body>
<h1>Products and their collectives</h1>
<p>Predicted by the gate's rates. Only products and collectives take time here, and both lanes run at full rate at once.
Point at a piece for its node and its milliseconds.</p>
%s
</body>
</html>
"""


def draw_page(time_lines: Sequence[TimeLine]) -> str:
    """Two pictures of every graph: as it was, and in chunks, in the same scale."""
    return _PAGE % "\n".join(part for at, line in enumerate(time_lines, 1) for part in _draw(at, line))


def _draw(number: int, line: TimeLine) -> Iterator[str]:
    longest = max(span.stop for span in (*line.before, *line.after)) or 1.0
    yield f"<h2>Graph {number}: {line.count} collectives cut</h2>"
    for name, found in (("as it was", line.before), ("in chunks", line.after)):
        end, sent = max(span.stop for span in found), sum(s.stop - s.start for s in found if s.lane == LINK)
        computed = sum(span.stop - span.start for span in found if span.lane == COMPUTE)
        hidden = max(0.0, computed + sent - end)
        yield f"<p>{name}: {_ms(end)} ms, of {_ms(sent)} ms on the link {_ms(hidden)} ms behind products</p>"
        yield _lanes(found, _WIDTH / longest)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _lanes(found: Sequence[Span], scale: float) -> str:
    labels = "".join(f'<text x="0" y="{_LANE * at + 18}">{lane}</text>' for at, lane in enumerate((COMPUTE, LINK)))
    pieces = "".join(
        f'<rect class="{span.lane}" x="{_LEFT + scale * span.start:.2f}" y="{_LANE * (span.lane == LINK) + 2}" '
        f'width="{scale * (span.stop - span.start):.2f}" height="{_LANE - 4}"><title>{html.escape(span.name)}: '
        f"{_ms(span.start)} to {_ms(span.stop)} ms</title></rect>"
        for span in found
    )
    return f'<svg viewBox="0 0 {_WIDTH + _LEFT} {2 * _LANE}">{labels}{pieces}</svg>'
