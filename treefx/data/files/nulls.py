"""Count or drop null fields of free-form objects.

These are arguments of calls, JSON schemas of tools, and options of templates.

Arrow keeps one struct for a column. A file that went through it (Parquet, ``datasets``) has in every call the arguments
of all calls, null where the call had none, and in every tool the fields of all tools. Such a null cannot be told from
one that the agent wrote, nor from a schema's ``"default": null``.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = ["NullFields"]

_SHOWN = 8


@dataclass
class NullFields:
    """Hold the treatment of null fields in one reading, and those it met.

    Attributes:
        drop: whether they are left out; None keeps them, and `warning` says so.
        counts: how often each name was null.
        first: where the first of them stood.
    """

    drop: bool | None = None
    counts: Counter[str] = field(default_factory=Counter)
    first: str = ""

    def read(self, fields: dict[str, Any], place: str) -> dict[str, Any]:
        """The object, without its null fields if they are dropped; null entries of lists stay.

        Args:
            fields: the object, nested as deep as the parser allows.
            place: where it stands.
        """
        before = self.counts.total()
        kept: dict[str, Any] = self._without(fields)
        if not self.first and self.counts.total() > before:
            self.first = place
        return kept if self.drop else fields

    def _without(self, raw: Any) -> Any:
        if isinstance(raw, list):
            return [self._without(entry) for entry in raw]
        if not isinstance(raw, dict):
            return raw
        self.counts.update(name for name, value in raw.items() if value is None)
        return {name: self._without(value) for name, value in raw.items() if value is not None}

    def warning(self) -> str:
        """Return a warning about null fields that were kept by default; "" without any."""
        if self.drop is not None or not self.counts:
            return ""
        names = [f"{name[:40]!a} ({count:,})" for name, count in self.counts.most_common(_SHOWN)]
        more = f" and {len(self.counts) - _SHOWN:,} more" if len(self.counts) > _SHOWN else ""
        return (
            f"{self.first}: fields of call arguments, tools or chat_template_kwargs are null, and a model that is "
            f"trained on such calls learns to write them: {', '.join(names)}{more}. Arrow (Parquet, datasets) fills in "
            "null for fields that other calls have: drop_null_arguments=True leaves them out (treefx data: "
            "--drop-null-arguments), drop_null_arguments=False says that they are meant"
        )
