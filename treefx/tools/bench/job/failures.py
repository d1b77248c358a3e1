"""What a process wrote of the error that ended it."""

import re

__all__ = ["what_failed"]

_START = "Traceback (most recent call last):"
_RANK = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_LAUNCHER = "torch.distributed.elastic."
_ADVICE = "Set TORCHDYNAMO_VERBOSE="
_FRAME_LINES = 6
"""Of a traceback: the last two or three calls."""


def what_failed(said: str, limit: int = 2000) -> str:
    """Return the end of the last traceback and its error, with compiler errors last.

    The end of what a process wrote is not that: warnings of a compiler, in the error's message or after it, exceptions
    that Python ignored while it ended, or a launcher's own traceback.

    Args:
        said: standard error, maybe standard output before it.
        limit: of characters.

    Returns:
        The end of ``said`` where nothing in it is a traceback.
    """
    before, *parts = _RANK.sub("", said).split(_START)
    tracebacks = []
    for part in parts:
        if not before.rstrip().rpartition("\n")[2].startswith("Exception ignored"):
            tracebacks.append(_frames_and_message(part))
        before = part
    told = [(frames, message) for frames, message in tracebacks if message]
    if not told:
        return said.strip()[-limit:]
    frames, message = next((each for each in reversed(told) if not each[1][0].startswith(_LAUNCHER)), told[-1])
    shown = [*frames[-_FRAME_LINES:], *message]
    if len("\n".join(shown)) > limit:
        errors = [line for line in message[1:] if re.search(r"\berror\b", line, re.IGNORECASE)]
        shown = [*frames[-_FRAME_LINES:], message[0], *(errors or message[1:])]
    return "\n".join(shown)[:limit]


def _frames_and_message(traceback: str) -> tuple[list[str], list[str]]:
    lines = [line for line in traceback.splitlines() if line.strip() and not line.startswith(_ADVICE)]
    first = next((at for at, line in enumerate(lines) if not line[0].isspace()), len(lines))
    return lines[:first], lines[first:]
