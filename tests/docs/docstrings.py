"""Check the docstrings of public callables: shapes of tensors, units of numbers, errors.

The rules, which read annotations, docstrings and the source, and call nothing:

1. A parameter or field whose annotation names ``Tensor`` or ``ndarray`` states a shape: ``[B, T]``, ``[E]``,
   "scalar", or "as `other`", a parameter or function that states it. ``Callable[...]`` does not count. A result of
   that kind states a shape in "Returns"; in a docstring without that section, anywhere.
2. A parameter or field that is a number, and whose name has a word of ``UNITS``, names that unit in its text, or is
   described "as `other`". A function or property that returns such a number names the unit in its docstring.
3. Each class after ``raise X(`` stands in "Raises". The function's own body counts, and the bodies of functions of
   the same module with an underscore, and of methods with an underscore of its class, that it calls. Functions inside
   of these bodies run later and do not count.

Fields of a dataclass are described in "Attributes" or "Args" of its class, or in a string below the field.
``PYTHONPATH=. python -m tests.docs.docstrings`` prints all complaints.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import Any

import treefx
from tests.docs.test_api import ENTRIES, NAMES

__all__ = ["Entry", "complaints_about", "entries_of", "public_entries"]

SHAPE = re.compile(r"(?<![\w\])])\[[\w.+*/() -]+(?:, [\w.+*/() -]+)*\]|\b[Ss]calars?\b")
"""Dimensions in brackets, or a scalar."""
SAME = re.compile(r"\b(?:as|like|see)(?: for| in| of)? `[\w.]+`", re.IGNORECASE)
UNITS = {
    r"bytes|memory": r"\b(?:bytes?|[KMG]i?B)\b",
    r"seconds|timeout": r"\bseconds?\b",
    r"tokens?|lengths?|window|columns|max_length": r"\b(?:tokens?|positions?|columns?|tasks)\b",
    r"flops": r"\bFLOPs?\b",
}
"""A word in the name of a number, and the units that it may have."""
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples|Note|Notes|Warns):$", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """One public callable or property."""

    name: str
    doc: str
    parameters: Mapping[str, str]
    """Annotations by name."""
    texts: Mapping[str, str]
    """Descriptions by name."""
    result: str = ""
    """The annotation of the result; "" for none."""
    raised: frozenset[str] = field(default=frozenset())


def complaints_about(entry: Entry) -> list[str]:
    """What the docstring does not say; empty where it says all."""
    found = []
    for name, annotation in entry.parameters.items():
        text = entry.texts.get(name, "")
        if _is_tensor(annotation) and not (SHAPE.search(text) or SAME.search(text)):
            found.append(f"{entry.name}: {name} states no shape")
        unit = _unit_of(name, annotation)
        if unit and not (re.search(unit, text, re.IGNORECASE) or SAME.search(text)):
            found.append(f"{entry.name}: {name} states no unit")
    sections = sections_of(entry.doc)
    returned = sections.get("Returns", sections.get("Yields", entry.doc))
    if _is_tensor(entry.result) and not (SHAPE.search(returned) or SAME.search(returned)):
        found.append(f"{entry.name}: the result states no shape")
    unit = _unit_of(entry.name.rpartition(".")[2], entry.result)
    if unit and not re.search(unit, entry.doc, re.IGNORECASE):
        found.append(f"{entry.name}: the result states no unit")
    missing = [name for name in sorted(entry.raised) if not re.search(rf"\b{name}\b", sections.get("Raises", ""))]
    return [*found, *(f"{entry.name}: Raises does not name {name}" for name in missing)]


def sections_of(doc: str) -> dict[str, str]:
    """The text of each section of a docstring."""
    parts = _SECTION.split(inspect.cleandoc(doc))
    return {name: re.split(r"\n(?=\S)", text)[0] for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def texts_of(doc: str) -> dict[str, str]:
    """Descriptions in "Args" and "Attributes"; ``a, b: text`` describes both."""
    texts = {}
    for section in ("Args", "Attributes"):
        text = textwrap.dedent(sections_of(doc).get(section, ""))
        entries = re.split(r"^\*{0,2}(\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?: ", text, flags=re.MULTILINE)
        for names, description in zip(entries[1::2], entries[2::2], strict=True):
            texts.update(dict.fromkeys(re.findall(r"\w+", names), " ".join(description.split())))
    return texts


def _is_tensor(annotation: str) -> bool:
    return bool(re.search(r"\b(?:Tensor|ndarray|NDArray)\b", _without_callables(annotation)))


def _unit_of(name: str, annotation: str) -> str:
    """The pattern of the unit that a number of this name has; "" for none."""
    if not re.search(r"\b(?:int|float)\b", re.sub(r"\[.*", "", _without_callables(annotation))):
        return ""
    return next((unit for word, unit in UNITS.items() if re.search(rf"(?:^|_)(?:{word})(?:_|$)", name)), "")


def _without_callables(annotation: str) -> str:
    while (start := annotation.find("Callable[")) >= 0:
        depth, end = 0, start
        for end in range(start + len("Callable"), len(annotation)):
            depth += {"[": 1, "]": -1}.get(annotation[end], 0)
            if not depth:
                break
        annotation = annotation[:start] + annotation[end + 1 :]
    return annotation


# Reading the library --------------------------------------------------------------------------------------------------


def public_entries() -> Iterator[Entry]:
    """Every callable of every public ``__all__``, with methods and properties of classes."""
    for name in NAMES:
        if name.startswith("integrations."):
            continue
        yield from entries_of(name, attrgetter(name)(treefx))
    for module in ENTRIES["integrations"]:
        found = import_module(module)
        for name in found.__all__:
            yield from entries_of(f"{module.removeprefix('treefx.')}.{name}", getattr(found, name))


def entries_of(name: str, item: Any) -> Iterator[Entry]:
    """The entries of a function, or of a class with its own public members."""
    if inspect.isfunction(item):
        yield _entry(name, inspect.unwrap(item), texts_of(item.__doc__ or ""))
    elif isinstance(item, type) and item.__module__.startswith(("treefx", "tests")):
        yield _class_entry(name, item)
        for member, value in vars(item).items():
            function = value.fget if isinstance(value, property) else getattr(value, "func", value)
            function = inspect.unwrap(getattr(function, "__func__", function))
            if not member.startswith("_") and inspect.isfunction(function):
                yield _entry(f"{name}.{member}", function, texts_of(function.__doc__ or ""), item)


def _entry(name: str, function: Any, texts: Mapping[str, str], owner: type | None = None) -> Entry:
    parameters = {key: _text(value, function) for key, value in function.__annotations__.items()}
    result = parameters.pop("return", "")
    return Entry(name, function.__doc__ or "", parameters, texts, result, frozenset(_raised(function, owner)))


def _class_entry(name: str, cls: type) -> Entry:
    """The class itself: what it is made of, and what making it raises."""
    own: Any = vars(cls)
    texts = {**_strings_below(cls), **texts_of(own.get("__init__").__doc__ or "" if "__init__" in own else "")}
    texts |= texts_of(cls.__doc__ or "")
    makers = [own[key] for key in ("__init__", "__post_init__") if key in own and _has_source(own[key])]
    names = own.get("__annotations__", {}) if is_dataclass(cls) else {}
    parameters = {key: _text(value, cls) for key, value in names.items() if not key.startswith("_")}
    for maker in makers:
        parameters |= {key: _text(value, maker) for key, value in maker.__annotations__.items() if key != "return"}
    raised = {error for maker in makers for error in _raised(maker, cls)}
    docs = "\n\n".join(inspect.cleandoc(item.__doc__ or "") for item in (cls, *makers))
    return Entry(name, docs, parameters, texts, "", frozenset(raised))


def _text(annotation: Any, item: Any) -> str:
    """An annotation with its aliases resolved, as text."""
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, vars(sys.modules[item.__module__]))
        except (NameError, AttributeError, TypeError):
            return str(annotation)
    plain = isinstance(annotation, type) and not hasattr(annotation, "__args__")
    return annotation.__name__ if plain else str(annotation)


def _has_source(function: Any) -> bool:
    return inspect.isfunction(function) and not function.__code__.co_filename.startswith("<")


@cache
def _tree(module: ModuleType) -> ast.Module:
    return ast.parse(inspect.getsource(module))


def _functions_of(body: list[ast.stmt]) -> dict[str, ast.FunctionDef]:
    return {item.name: item for item in body if isinstance(item, ast.FunctionDef)}


@cache
def _class_body(cls: type) -> list[ast.stmt]:
    tree = _tree(sys.modules[cls.__module__])
    return next((x.body for x in ast.walk(tree) if isinstance(x, ast.ClassDef) and x.name == cls.__name__), [])


def _strings_below(cls: type) -> dict[str, str]:
    """The strings below fields."""
    body, texts = _class_body(cls), {}
    for item, after in zip(body, body[1:], strict=False):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(after, ast.Expr):
            if isinstance(after.value, ast.Constant):
                texts[item.target.id] = str(after.value.value)
    return texts


def _raised(function: Any, owner: type | None) -> Iterator[str]:
    """Names of the errors that a function raises, itself or in private helpers that it calls."""
    helpers = _functions_of(_tree(sys.modules[function.__module__]).body)
    methods = _functions_of(_class_body(owner)) if owner else {}
    own = (methods if owner else helpers).get(function.__name__)
    if own is None:
        return
    yield from _errors_in(own, helpers)
    for call in (node.func for node in _walk(own) if isinstance(node, ast.Call)):
        known, name = (helpers, call.id) if isinstance(call, ast.Name) else (methods, getattr(call, "attr", ""))
        by_self = isinstance(call, ast.Name) or isinstance(getattr(call, "value", None), ast.Name)
        if name.startswith("_") and not name.startswith("__") and by_self and name in known:
            yield from _errors_in(known[name], helpers)


def _walk(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """All nodes, without the bodies of functions inside, which run later."""
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _errors_in(function: ast.FunctionDef, helpers: Mapping[str, ast.FunctionDef]) -> Iterator[str]:
    """A helper that returns an error stands for its class."""
    for node in _walk(function):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = ast.unparse(node.exc.func).rpartition(".")[2]
            if name in helpers and helpers[name].returns is not None:
                name = ast.unparse(helpers[name].returns)  # type: ignore[arg-type]
            if name[:1].isupper() and name not in ("AssertionError", "NotImplementedError"):
                yield name


if __name__ == "__main__":
    everything = [text for entry in public_entries() for text in complaints_about(entry)]
    print("\n".join(everything))
    print(len(everything), "complaints about", len(list(public_entries())), "entries")
