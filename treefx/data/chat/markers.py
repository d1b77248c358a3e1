"""Find text between `{% generation %}` and `{% endgeneration %}` of a chat template.

The tags are replaced by letters of private use, and the template is rendered once more: where they stand, the marked
text begins and ends. transformers' own ``return_assistant_tokens_mask`` maps these places to tokens one by one; where a
tokenizer says of none that it holds such a character, as of spaces, it takes the rest of the row, or stops.
"""

import re

from treefx.errors import InputError

__all__ = ["has_markers", "read_marks", "show_markers"]

_TAG = re.compile(r"(\{%[-+]?)\s*(end)?generation\s*([-+]?%\})")
_BEGIN, _END = "\ue5b0", "\ue5b1"


def has_markers(template: str) -> bool:
    """Return whether a template has generation markers."""
    return _TAG.search(template) is not None


def show_markers(template: str) -> str:
    """Rewrite a template to emit a letter for each marker.

    White space around the letters is trimmed as around the tags.
    """

    def write(tag: re.Match[str]) -> str:
        letter = _END if tag[2] else _BEGIN
        return f"{tag[1]} if true %}}{{{{ '{letter}' }}}}{{% endif {tag[3]}"

    return _TAG.sub(write, template)


def read_marks(marked: str, text: str) -> list[tuple[int, int]]:
    """The marked parts [start, stop) of a text, from its rendering with `show_markers`.

    Raises:
        InputError: the letters change the template's output, or markers are not closed.
    """
    parts = re.split(f"([{_BEGIN}{_END}])", marked)
    if "".join(parts[::2]) != text or parts[1::2] != [_BEGIN, _END] * (len(parts) // 4):
        raise InputError(
            "the template's {% generation %} markers cannot be told apart from its text: they must be closed, and not "
            "nested; ChatTokenizer(..., markers=False) does not read them"
        )
    places = [0]
    for part in parts[::2]:
        places.append(places[-1] + len(part))
    return list(zip(places[1:-1:2], places[2:-1:2], strict=True))
