"""Code from a cache folder runs only if no other user could write it and its content is right."""

import os
import py_compile
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from treefx.kernels import code_files
from treefx.kernels.code_files import cache_folder, code_folder, is_private, temporary_folder, write_whole
from treefx.kernels.gpu.triton_tree import codegen, tuning
from treefx.planning.cost import memory

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners of files here")

BUILT = b"\x7fELF the library"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREEFX_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(memory, "_compiled", lambda compiler, scratch: found.append(compiler) or BUILT)
    return found


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# The folder -----------------------------------------------------------------------------------------------------------


def test_the_folder_is_made_for_this_user_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        assert code_folder() == folder and _mode(folder) == 0o700
    finally:
        os.umask(before)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o775, 0o707, 0o1777])
def test_a_folder_that_others_write_to_holds_a_private_one(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    found = code_folder()
    assert found == folder / f"user-{os.getuid()}" and _mode(found) == 0o700 and _mode(folder) == mode


def test_a_folder_of_another_user_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / f"user-{os.getuid() + 1}").mkdir(parents=True)
    monkeypatch.setattr(code_files.os, "getuid", lambda mine=os.getuid(): mine + 1)
    assert not is_private(folder) and code_folder() is None


def test_without_a_home_there_is_a_folder_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TREEFX_CACHE_DIR", raising=False)

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    assert cache_folder().name == f"treefx-user-{os.getuid()}"


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "a", b"old")

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(code_files.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "a", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


# The counting allocator -----------------------------------------------------------------------------------------------


def test_the_library_is_built_once(folder: Path, builds: list[str]) -> None:
    first = memory._built("c++")
    assert first is not None and first.parent == folder and first.read_bytes() == BUILT
    assert memory._built("c++") == first and len(builds) == 1
    assert [path.name for path in folder.iterdir()] == [first.name]


@pytest.mark.parametrize("content", [b"", BUILT[:-1], BUILT + b"x", b"x" * 100])
def test_another_content_is_built_again(folder: Path, builds: list[str], content: bytes) -> None:
    path = memory._built("c++")
    assert path is not None
    path.write_bytes(content)
    again = memory._built("c++")
    assert again is not None and again.read_bytes() == BUILT and len(builds) == 2


def test_a_file_that_others_may_write_is_built_again(folder: Path, builds: list[str]) -> None:
    path = memory._built("c++")
    assert path is not None
    path.chmod(0o666)
    again = memory._built("c++")
    assert again is not None and is_private(again) and len(builds) == 2


def test_what_an_older_version_kept_is_not_loaded(folder: Path, builds: list[str]) -> None:
    path = memory._built("c++")
    assert path is not None
    old = path.with_name(path.name[: path.name.rindex("_")] + ".so")
    path.rename(old)
    assert memory._built("c++") == path and len(builds) == 2


@pytest.mark.parametrize("case", ["a file", "no code", "full"])
def test_what_cannot_be_built_is_false(folder: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory, "_compiled", full if case == "full" else lambda compiler, scratch: BUILT)
    if case == "a file":
        folder.write_text("")
    elif case == "no code":  # a library that the loader refuses, as on a file system that may hold no code
        monkeypatch.setattr(memory.shutil, "which", lambda name: name)
    assert memory._library.__wrapped__() is None


# Sources of kernels ---------------------------------------------------------------------------------------------------


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of a source as kernels are."""
    made: list[str] = []

    def load(source: str) -> Any:
        monkeypatch.setattr(codegen, "kernel_source", lambda request: source)
        module = codegen.kernel_module.__wrapped__(SimpleNamespace())  # type: ignore[attr-defined]
        made.append(module.__name__)
        return module

    yield load
    for name in made:
        sys.modules.pop(name, None)


SOURCE = "VALUE = 1\n"


def test_neither_a_changed_source_nor_planted_byte_code_runs(folder: Path, kernels: Any) -> None:
    path = Path(kernels(SOURCE).__file__)
    assert path.parent == folder / "kernels" and _mode(path.parent) == 0o700
    del sys.modules[path.stem]
    planted = path.with_name("planted.py")
    planted.write_text("VALUE = 2\n")
    os.utime(planted, (path.stat().st_atime, path.stat().st_mtime))
    (path.parent / "__pycache__").mkdir(exist_ok=True)
    cached = path.parent / "__pycache__" / f"{path.stem}.{sys.implementation.cache_tag}.pyc"
    py_compile.compile(str(planted), str(cached), dfile=str(path))
    assert kernels(SOURCE).VALUE == 1
    del sys.modules[path.stem]
    path.write_text("VALUE = 3\n")
    assert kernels(SOURCE).VALUE == 1 and path.read_text() == SOURCE


def test_a_folder_of_sources_that_others_write_to_is_closed(folder: Path, kernels: Any) -> None:
    (folder / "kernels").mkdir(parents=True, mode=0o700)
    folder.chmod(0o755)
    (folder / "kernels").chmod(0o777)
    assert Path(kernels(SOURCE).__file__).parent == folder / "kernels" and _mode(folder / "kernels") == 0o700


def test_without_a_folder_sources_go_to_one_that_nobody_else_knows(folder: Path, kernels: Any) -> None:
    folder.write_text("a file")
    module = kernels("VALUE = 4\n")
    found = Path(module.__file__).parent
    assert module.VALUE == 4 and found == temporary_folder() and _mode(found) == 0o700


# Rates and findings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", "[1]", "[" * 5000, '{"d": 5}', '{"d": {"k": 5}}', '{"d": {"k": {"t": 5}}}', '{"d": {"k": {"t": [1, 2]}}}']
    + ['{"d": {"k": {"t": [1, 2, NaN]}}}', '{"d": {"k": {"t": [1, 2, "3"]}}}', '{"d": {"k": {"t": [1, 2, null]}}}'],
)
def test_rates_that_are_none_count_as_unknown(folder: Path, text: str) -> None:
    folder.mkdir()
    good = '"good": {"k": {"t": [1, 2.5, 0]}}'
    (folder / "rates.json").write_text(f"{text[:-1]}, {good}}}" if text.startswith("{") else text)
    tuning._rates.cache_clear()
    try:
        rates = tuning._rates()
    finally:
        tuning._rates.cache_clear()
    assert "d" not in rates and ("good" in rates) == text.startswith("{")
