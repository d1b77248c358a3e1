"""Griffe: read the project's docstrings as its parser expects them.

``Example:`` becomes ``Examples:``, whose doctests are shown as code. An entry for two parameters, ``a, b: text``,
becomes one entry for each.
"""

import re
from typing import Any

from griffe import Extension, Object

_PAIR = re.compile(r"^( +)(\w+), (\w+): (.*(?:\n\1 +.*)*)", re.MULTILINE)


class Docstrings(Extension):
    """Change docstrings where they are read from the sources."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = _PAIR.sub(r"\1\2: \4\n\1\3: \4", text)
