"""Rooms keep their order: no import from a lower room to a higher one, no circles, nothing too large to read."""

import ast
import statistics
from pathlib import Path

import pytest

from tests.rooms import FOLDERS, Import, Rooms, read_order, read_sources

ROOT = Path(__file__).resolve().parents[1]
MOST_MODULES = 24
MOST_LINES = 600
MOST_LINES_OF_A_FUNCTION = 40
MEDIAN_LINES = 150
LONG_FOR_A_REASON = "# Long:"
"""A comment in front of a function, or its first one, that says why it is longer than others."""


@pytest.fixture(scope="module")
def rooms() -> Rooms:
    return Rooms(read_sources(ROOT))


def _modules_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.py") if path.name != "__init__.py"]


def _folders() -> list[Path]:
    return sorted({path.parent for name in (*FOLDERS, "tests") for path in _files(name)})


def _files(folder: str) -> list[Path]:
    return [
        path
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(parent.is_symlink() for parent in path.parents)
    ]


def _everything() -> list[Path]:
    return [path for name in (*FOLDERS, "tests") for path in _files(name)]


def test_no_module_imports_from_a_higher_room(rooms: Rooms) -> None:
    assert [f"{item.by}:{item.line} imports {item.of}" for item in rooms.wrong_imports()] == []


def test_no_modules_import_each_other(rooms: Rooms) -> None:
    assert rooms.circles() == []


def test_every_package_with_rooms_states_the_order_of_all_it_holds(rooms: Rooms) -> None:
    with_rooms = {name.rpartition(".")[0] for name in rooms.packages} - {""}
    assert with_rooms <= set(rooms.orders)
    for package, order in rooms.orders.items():
        named = {name for group in order for name in group} - {"__init__"}
        assert named == rooms.children(package), package


def test_every_room_says_what_enters_and_what_leaves(rooms: Rooms) -> None:
    silent = [name for name in rooms.packages if not (ast.get_docstring(rooms.trees[name]) or "").strip()]
    assert silent == []


@pytest.mark.parametrize(
    ("by", "of"),
    [
        ("treefx.kernels.score", "treefx.kernels.api"),
        ("treefx.passes.labels.dims", "treefx.passes.packing.layout"),
        ("treefx.kernels.common", "treefx.passes.runner"),
        ("treefx.forests.trie", "treefx.runtime.call_plan"),
        ("treefx.planning.search.plan", "treefx.planning.views.explain"),
        ("treefx.runtime.call_plan", "treefx"),
        ("treefx.integrations.trl", "treefx.tools.bench.step"),
        ("treefx.passes.scores.lift_mask", "treefx.passes.causal.domain"),
    ],
)
@pytest.mark.parametrize("statement", ["import {}", "from {} import anything", "def late():\n    import {}"])
def test_a_planted_import_is_found(rooms: Rooms, by: str, of: str, statement: str) -> None:
    path, text = rooms.sources[by]
    planted = Rooms({**rooms.sources, by: (path, f"{text}\n{statement.format(of)}\n")})
    (new,) = set(planted.wrong_imports()) - set(rooms.wrong_imports())
    assert (new.by, new.of) == (by, of)


def test_a_planted_circle_is_found() -> None:
    sources = {
        "treefx": (Path("treefx/__init__.py"), ""),
        "treefx.a": (Path("treefx/a.py"), "from treefx import b"),
        "treefx.b": (Path("treefx/b.py"), "from treefx.c import x"),
        "treefx.c": (Path("treefx/c.py"), "def late():\n    import treefx.a"),
        "treefx.d": (Path("treefx/d.py"), "import treefx.a"),
    }
    rooms = Rooms(sources)
    assert rooms.circles() == [["treefx.a", "treefx.b", "treefx.c"]]
    assert rooms.imports[-1] == Import("treefx.d", "treefx.a", 1)


def test_the_order_is_read_from_a_docstring() -> None:
    text = "A room.\n\nOrder of imports, each only of what stands before an arrow::\n\n    a, b ->\n    c -> d\n\nMore."
    assert read_order(text) == [["a", "b"], ["c"], ["d"]]
    assert read_order("A room.") == []


def test_no_folder_holds_more_modules_than_one_can_remember() -> None:
    full = {str(folder.relative_to(ROOT)): len(_modules_in(folder)) for folder in _folders()}
    assert {folder: count for folder, count in full.items() if count > MOST_MODULES} == {}


def test_no_file_is_too_long_to_read() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in _everything()}
    assert {path: length for path, length in lengths.items() if length > MOST_LINES} == {}
    assert statistics.median(lengths.values()) < MEDIAN_LINES


def test_no_function_is_too_long_without_a_reason() -> None:
    assert [where for name in FOLDERS for path in _files(name) for where in _long_functions(path)] == []


def _long_functions(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        assert node.end_lineno is not None
        first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
        length = node.end_lineno - first + 1 - _docstring_lines(node)
        explained = lines[first - 2].strip() if first > 1 else ""
        if length > MOST_LINES_OF_A_FUNCTION and not explained.startswith(LONG_FOR_A_REASON):
            found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} ({length} lines)")
    return found


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    assert first.end_lineno is not None
    return first.end_lineno - first.lineno + 1 if ast.get_docstring(node) is not None else 0
