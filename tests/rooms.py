"""The order of imports: what the docstrings of packages say, and what the modules import.

A package with rooms states their order in a block ``Order of imports, ...::`` of its docstring, as names between
arrows. A module may import what belongs to a child of the same package that stands before an arrow from its own.
"""

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FOLDERS = ("treefx", "passes", "kernels")
ITSELF = "__init__"
"""A package as its users see it, in its own order."""


@dataclass(frozen=True)
class Import:
    """One import of one module by another, wherever it stands: also within functions, and for types only."""

    by: str
    of: str
    line: int


@functools.cache
def _import_statements(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def module_name(path: Path) -> str:
    """The dotted name of a file; passes/ and kernels/ are imported as treefx.passes and treefx.kernels."""
    parts = path.with_suffix("").parts
    parts = parts if parts[0] == "treefx" else ("treefx", *parts)
    return ".".join(parts).removesuffix(".__init__")


def read_sources(root: Path) -> dict[str, tuple[Path, str]]:
    """Path and text of every module of the three folders; links are not followed."""
    files = [
        path
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*.py"))
        if not any(parent.is_symlink() for parent in path.parents)
    ]
    return {module_name(path.relative_to(root)): (path, path.read_text(encoding="utf-8")) for path in files}


_parse = functools.cache(ast.parse)
"""Rooms that differ in one file share what was read of the others."""


@dataclass(frozen=True, repr=False)
class Rooms:
    """Modules and what they import, packages and their order."""

    sources: Mapping[str, tuple[Path, str]]

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        return {name: _parse(text) for name, (_, text) in self.sources.items()}

    @cached_property
    def packages(self) -> set[str]:
        return {name for name, (path, _) in self.sources.items() if path.name == "__init__.py"}

    @cached_property
    def imports(self) -> list[Import]:
        return [found for name, tree in self.trees.items() for found in self._imports_of(name, tree)]

    def _imports_of(self, name: str, tree: ast.Module) -> Iterator[Import]:
        for node in _import_statements(tree):
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            else:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                found = [item if item in self.sources else str(node.module) for item in inner]
            yield from (Import(name, item, node.lineno) for item in dict.fromkeys(found) if item in self.sources)

    @cached_property
    def orders(self) -> dict[str, list[list[str]]]:
        """For every package that states one: groups of its children, lowest first."""
        stated = {name: read_order(ast.get_docstring(self.trees[name]) or "") for name in self.packages}
        return {name: order for name, order in stated.items() if order}

    def children(self, package: str) -> set[str]:
        """What stands directly in a package."""
        depth = package.count(".") + 1
        inside = (name for name in self.sources if name.startswith(f"{package}."))
        return {name.split(".")[depth] for name in inside}

    def wrong_imports(self) -> list[Import]:
        """Imports of what does not stand before an arrow."""
        return [item for item in self.imports if not self._allowed(item)]

    def _allowed(self, item: Import) -> bool:
        package = common_package(item.by, item.of)
        above, below = (self._child(name, package) for name in (item.by, item.of))
        if above == below or (above == ITSELF and package == item.by):
            return above != ITSELF or item.by != item.of
        if package not in self.orders:
            return below != ITSELF
        place = {child: at for at, group in enumerate(self.orders[package]) for child in group}
        return above in place and below in place and place[below] < place[above]

    @staticmethod
    def _child(name: str, package: str) -> str:
        return ITSELF if name == package else name[len(package) + 1 :].split(".")[0]

    def circles(self) -> list[list[str]]:
        """Modules that import each other, directly or through others: the strongly connected sets of more than one."""
        following: dict[str, set[str]] = {name: set() for name in self.sources}
        for item in self.imports:
            if item.by not in self.packages:  # what a package hands out is for those outside of it
                following[item.by].add(item.of)
        return [sorted(circle) for circle in strongly_connected(following) if len(circle) > 1]


def common_package(first: str, second: str) -> str:
    """The innermost package that holds both; a package holds itself."""
    parts = []
    for a, b in zip(first.split("."), second.split("."), strict=False):
        if a != b:
            break
        parts.append(a)
    return ".".join(parts)


def read_order(docstring: str) -> list[list[str]]:
    """The groups of a block ``Order of imports, ...::``, lowest first; empty if there is none."""
    lines = docstring.splitlines()
    starts = [at for at, line in enumerate(lines) if line.startswith("Order of imports") and line.endswith("::")]
    if not starts:
        return []
    block: list[str] = []
    for line in lines[starts[0] + 2 :]:
        if not line.startswith("    "):
            break
        block.append(line.strip())
    return [[name.strip() for name in group.split(",")] for group in " ".join(block).split("->")]


def strongly_connected(following: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Kosaraju's algorithm: one sweep for the order of finishing, one against the imports, without recursion."""
    finished: list[str] = []
    seen: set[str] = set()
    for start in following:
        stack: list[tuple[str, Iterator[str]]] = [(start, iter(following[start]))] if start not in seen else []
        seen.add(start)
        while stack:
            name, rest = stack[-1]
            found = next((item for item in rest if item not in seen), None)
            if found is None:
                finished.append(name)
                stack.pop()
            else:
                seen.add(found)
                stack.append((found, iter(following[found])))
    before: dict[str, set[str]] = {name: set() for name in following}
    for name, items in following.items():
        for item in items:
            before[item].add(name)
    parts: list[set[str]] = []
    left = set(following)
    for name in reversed(finished):
        part, waiting = set(), [name] if name in left else []
        while waiting:
            item = waiting.pop()
            if item in left:
                left.discard(item)
                part.add(item)
                waiting += before[item]
        if part:
            parts.append(part)
    return parts
