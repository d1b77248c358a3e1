"""Every reader of a file that a user can hand over: a damaged one is an error of treefx that names file and field."""

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from tests.rl.worlds import World, script
from treefx import InputError, TreefxError, rl
from treefx.cli.app import app
from treefx.data import load
from treefx.documents import Field, parse_document
from treefx.planning.cost.model import Bytes, CostModel, Seconds, Size
from treefx.planning.execution.measure import Sample
from treefx.planning.execution.profile import Flops, Profile
from treefx.rl import Group, Rollouts
from treefx.tools.bench.job.models import make_config
from treefx.tools.bench.zoo.batches import describe_batches
from treefx.tools.bench.zoo.record import ZooRecord
from treefx.tools.bench.zoo.run import ZooBatch, ZooRow
from treefx.tools.fuzz.journal import Finding, Journal

BYTES, SECONDS = Bytes([[1.0, 2.0]]), Seconds(0.1, 0.2, 0.3)
PROFILE = Profile(
    cost=CostModel(
        resident_bytes=5.0,
        saved=BYTES,
        forward=BYTES,
        backward=BYTES,
        kv=BYTES,
        kv_bytes_per_token=1.0,
        kv_grad_bytes_per_token=1.0,
        forward_seconds=SECONDS,
        backward_seconds=SECONDS,
        kv_seconds=SECONDS,
    ),
    flops={"forward": Flops(1.0, 2.0)},
    samples=(Sample("forward", Size(4, 0, 3, 0, 10), 100, 50, 0.5),),
    inner="eager",
    device="cpu",
)
CONFIG = {"model_type": "llama", "vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
CONFIG |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
ROW = ZooRow("m", "here", "wrong", float("nan"), 0.5, float64_errors=(0.1, 0.2), batches=[ZooBatch("5 x 20", "wrong")])
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "reward": 1.0}


@dataclass(frozen=True)
class Reader:
    """How a kind of file is written whole, and read."""

    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    strict: bool = True
    """Whether every field of its JSON has to be there, of its type."""


def _zoo(path: Path) -> Any:
    return ZooRecord(path, "eager", resume=True).rows


def _write_zoo(path: Path) -> None:
    ZooRecord(path, "eager").add(ROW)


def _journal(path: Path) -> Any:
    (path.parent / "settings.json").write_text("{}")
    return Journal(path.parent, {}).findings


READERS = {
    "profile.json": Reader(PROFILE.save, Profile.load),
    "zoo.json": Reader(_write_zoo, _zoo),
    "programs.jsonl": Reader(
        lambda path: path.write_text(json.dumps(vars(Finding(1, "f", "eager", "exact")))), _journal
    ),
    "config.json": Reader(
        lambda path: path.write_text(json.dumps(CONFIG)),
        lambda path: make_config(str(path), vocab_size=1),
        strict=False,
    ),
    "chats.jsonl": Reader(lambda path: path.write_text(json.dumps(CHAT)), load, strict=False),
}
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "no UTF-8": lambda data: b"\xff\xfe" + data,
    "zeros": lambda data: b"\0" * len(data),
    "a list": lambda data: b"[" + data + b", 3]",
    "a number": lambda data: b"7",
    "null": lambda data: b"null",
    "text": lambda data: b'"x"',
    "an empty object": lambda data: b"{}",
    "nested": lambda data: b"[" * 100_000,
    "a large number": lambda data: b"9" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, name: str, damage: str) -> None:
    path = tmp_path / name
    READERS[name].write(path)
    assert READERS[name].read(path)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    if (name, damage) in {("programs.jsonl", "empty"), ("programs.jsonl", "truncated")}:  # an interruption cut it short
        assert READERS[name].read(path) == []
        return
    if name == "programs.jsonl" and damage in ("no UTF-8", "zeros", "nested", "a large number"):
        path.write_bytes(path.read_bytes() + b"\n{}")
    with pytest.raises(TreefxError) as refusal:
        READERS[name].read(path)
    assert str(path) in str(refusal.value) and len(str(refusal.value)) < 2000


def _places(raw: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for name, value in raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ():
        yield (*place, name)
        yield from _places(value, (*place, name))


def _changed(raw: Any, place: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    copy = raw.copy()
    copy[place[0]] = change(raw[place[0]]) if len(place) == 1 else _changed(raw[place[0]], place[1:], change)
    return copy


WRONG = [None, True, -1, 10**400, float("nan"), float("-inf"), "x", [], {}, [[]], {"x": 1}, [None] * 9]


@pytest.mark.parametrize("name", READERS)
def test_every_field_of_another_type_is_refused_or_read(tmp_path: Path, name: str) -> None:
    """Never anything else than an error of treefx; and where it is one, it names the field."""
    path = tmp_path / name
    READERS[name].write(path)
    whole = json.loads(path.read_text())
    for place in _places(whole):
        for wrong in WRONG:
            path.write_text(json.dumps(_changed(whole, place, lambda old, wrong=wrong: wrong)))
            try:
                READERS[name].read(path)
            except TreefxError as refusal:
                assert str(path) in str(refusal) and len(str(refusal)) < 2000
                named = [part for part in place if isinstance(part, str)]
                assert not READERS[name].strict or named[0] in str(refusal), (place, wrong, str(refusal))


@pytest.mark.parametrize("name", ["profile.json", "zoo.json", "programs.jsonl"])
def test_a_missing_field_and_one_too_many_are_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    READERS[name].write(path)
    whole = json.loads(path.read_text())
    optional = {
        "batches",
        "rows",
        "conditions",
        "torch",
        "transformers",
        "note",
        "error",
        "seconds",
        "program",
        "script",
    }
    for place in _places(whole):
        if isinstance(place[-1], str) and len(place) == 1 and place[-1] not in optional:
            path.write_text(json.dumps({key: value for key, value in whole.items() if key != place[-1]}))
            with pytest.raises(InputError, match=f"the field '{place[-1]}', got"):
                READERS[name].read(path)
    if name != "zoo.json":
        path.write_text(json.dumps({**whole, "another": 1}))
        with pytest.raises(InputError, match="expected an object with fields among|, which is an object with fields"):
            READERS[name].read(path)


@pytest.mark.parametrize(
    ("place", "wrong", "words"),
    [
        (("cost", "saved", 0, 1), -1.0, r"field cost.saved: .*at least 0"),
        (("cost", "saved", 0, 1), "x", r"field cost.saved\[0\]\[1\]: expected a finite number, got text 'x'"),
        (("cost", "resident_bytes"), float("nan"), "field cost.resident_bytes: expected a finite number, got .* nan"),
        (("cost", "resident_bytes"), -5, "field cost: resident_bytes must be finite and at least 0, got -5"),
        (("cost", "kv_seconds"), [1.0], "field cost.kv_seconds: expected a list of part, token, pair, got a list of 1"),
        (("samples", 0, "kind"), "x", r"field samples\[0\].kind: expected one of 'forward'"),
        (("samples", 0, "size", 2), True, r"field samples\[0\].size\[2\]: expected a whole number, got true"),
        (("flops", "forward", "pair"), None, "field flops.forward.pair: expected a finite number, got null"),
    ],
)
def test_a_profile_names_the_field(tmp_path: Path, place: tuple[Any, ...], wrong: Any, words: str) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    path.write_text(json.dumps(_changed(json.loads(path.read_text()), place, lambda old: wrong)))
    with pytest.raises(InputError, match=words):
        Profile.load(path)


def test_whole_files_come_back(tmp_path: Path) -> None:
    for name in ("profile.json", "zoo.json", "programs.jsonl"):
        READERS[name].write(tmp_path / name)
    assert Profile.load(tmp_path / "profile.json") == PROFILE == Profile.from_json(PROFILE.to_json())
    (row,) = _zoo(tmp_path / "zoo.json").values()
    assert repr(row) == repr(ROW)  # its error is NaN
    assert describe_batches(2) in (tmp_path / "zoo.json").read_text()
    assert _journal(tmp_path / "programs.jsonl") == [Finding(1, "f", "eager", "exact")]


# Rollouts -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rollouts() -> Rollouts:
    return rl.rollout(script, World(), [0, 1], Group(2), seed=3)


def test_every_column_that_is_wrong_is_refused(rollouts: Rollouts, tmp_path: Path) -> None:
    """As wrong types, sizes, ids below 0 and parents that are none."""
    path = tmp_path / "r.safetensors"
    columns = {name: value for name, value in vars(rollouts).items() if isinstance(value, torch.Tensor)}
    record = {"treefx.rollouts": json.dumps({"version": 1, "info": {}})}
    for name, column in columns.items():
        flat = column.double() if column.dtype == torch.bool else column
        for wrong in (column[:-1], column[None], flat * -1 - 1, flat + 2**40, flat.float(), column[:0], flat * 0 - 7):
            save_file({**columns, name: wrong.contiguous()}, path, record)
            try:
                read = Rollouts.load(path)
                assert read.forest.num_tokens and read.steps.paths
            except TreefxError as refusal:
                assert str(path) in str(refusal)
            else:
                assert name in ("rewards", "step_rewards", "step_logprobs", "step_tokens", "prompt_tokens", "tree"), (
                    name
                )


@pytest.mark.parametrize("info", [None, 3, "x", [1], {"version": 1}, {"version": None, "info": {}}, {"info": {}}])
@pytest.mark.parametrize("nested", [False, True])
def test_a_record_that_is_none_is_refused(rollouts: Rollouts, tmp_path: Path, info: Any, nested: bool) -> None:
    path = tmp_path / "r.safetensors"
    rollouts.save(path)
    columns = {name: value for name, value in vars(rollouts).items() if isinstance(value, torch.Tensor)}
    record = {"version": 1, "info": info} if nested else info
    if nested and isinstance(info, dict):
        return
    save_file(columns, path, {"treefx.rollouts": json.dumps(record)})
    with pytest.raises(InputError, match="r.safetensors"):
        Rollouts.load(path)


@pytest.mark.parametrize("damage", [*DAMAGE, "a huge header", "a header that is none"])
def test_a_damaged_file_of_rollouts_is_refused(rollouts: Rollouts, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "r.safetensors"
    rollouts.save(path)
    headers = {"a huge header": struct.pack("<Q", 2**60), "a header that is none": struct.pack("<Q", 4) + b"oops"}
    path.write_bytes(headers[damage] if damage in headers else DAMAGE[damage](path.read_bytes()))
    with pytest.raises(InputError, match="r.safetensors"):
        Rollouts.load(path)


# The command line -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--profile", "--model"])
@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff"])
def test_commands_say_which_file_is_wrong(tmp_path: Path, option: str, content: bytes | None) -> None:
    path = tmp_path / "given.json"
    if content is not None:
        path.write_bytes(content)
    result = CliRunner().invoke(app, ["plan", option, str(path)])
    assert isinstance(result.exception, TreefxError) and str(path) in str(result.exception)


# The reader -----------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: int
    second: float = 0.5


@dataclass
class Inner:
    kind: Literal["a", "b"]
    pair: Pair
    maybe: float | None = None
    many: list[str] = field(default_factory=list)
    both: tuple[int, str] = (0, "")


def test_values_are_read_by_their_types() -> None:
    text = '{"kind": "b", "pair": [1], "maybe": 2, "many": ["x"], "both": [3, "y"]}'
    assert parse_document(text, "d", "w").read(Inner) == Inner("b", Pair(1, 0.5), 2.0, ["x"], (3, "y"))
    assert Field({"kind": "a", "pair": [1, 2]}, "d").read(Inner) == Inner("a", Pair(1, 2.0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "c"}, "d, field kind: expected one of 'a', 'b', got text 'c'"),
        ({"pair": []}, "d, field pair: expected a list of first, second, got an empty list"),
        ({"pair": [1.0]}, r"d, field pair\[0\]: expected a whole number, got the number 1.0"),
        ({"maybe": True}, "d, field maybe: expected a finite number, got true"),
        ({"maybe": float("inf")}, "d, field maybe: expected a finite number, got the number inf"),
        ({"many": "x"}, "d, field many: expected a list, got text 'x'"),
        ({"both": [1]}, "d, field both: expected a list of 2 values, got a list of 1"),
        ({"x": 1}, "d: expected an object with fields among kind, pair, maybe, many, both, got"),
    ],
)
def test_what_is_of_another_type_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Field({"kind": "a", "pair": [1]} | change, "d").read(Inner)


# Configurations fetch no code -----------------------------------------------------------------------------------------

REFUSED = [
    {"attn_implementation": "org/kernel"},
    {"_attn_implementation": "org/kernel:function"},
    {"attn_implementation": {"": "sdpa", "text_config": "org/kernel"}},
    {"attn_implementation": "flash_attention_2"},
    {"attn_implementation": "paged|org/kernel"},
    {"attn_implementation": 3},
    {"_attn_implementation_internal": "org/kernel"},
    {"experts_implementation": "deepgemm"},
    {"text_config": {"model_type": "llama", "attn_implementation": "org/kernel"}},
    {"anything": [{"attn_implementation": "org/kernel"}]},
]
LEFT_OUT = {"auto_map": {"AutoModelForCausalLM": "org/repo--modeling.Model"}, "trust_remote_code": True}


@pytest.fixture
def no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.auto import auto_factory

    def fetched(*given: Any, **named: Any) -> None:
        raise AssertionError("code was fetched")

    for name in ("resolve_trust_remote_code", "get_class_from_dynamic_module"):
        monkeypatch.setattr(auto_factory, name, fetched, raising=False)
    for name in ("get_kernel", "load_and_register_attn_kernel"):
        monkeypatch.setattr(f"transformers.integrations.hub_kernels.{name}", fetched, raising=False)


@pytest.mark.parametrize("command", [["plan", "--model"], ["inspect"]])
@pytest.mark.parametrize("fields", REFUSED, ids=str)
def test_a_configuration_may_not_choose_code_to_fetch(
    tmp_path: Path, no_code: None, command: list[str], fields: dict[str, Any]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **fields}))
    result = CliRunner().invoke(app, [*command, str(path)])
    assert isinstance(result.exception, InputError)
    assert f"{path}, field " in str(result.exception) and "_implementation" in str(result.exception)
    assert "expected one of" in str(result.exception) and "which are part of transformers" in str(result.exception)


@pytest.mark.parametrize("nested", [False, True])
def test_code_that_a_configuration_names_is_left_out_with_a_line(
    tmp_path: Path, no_code: None, nested: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    path = tmp_path / "config.json"
    fields = {"text_config": {**CONFIG, **LEFT_OUT}, "model_type": "llava"} if nested else {**CONFIG, **LEFT_OUT}
    path.write_text(json.dumps(fields))
    config = make_config(str(path), vocab_size=1)
    told = capsys.readouterr().err
    for name in LEFT_OUT:
        assert f"{path}: {'text_config.' * nested}{name} is left out: " in told
    text = config.get_text_config()
    assert not hasattr(text, "auto_map") and not getattr(text, "trust_remote_code", False)
    if not nested:
        AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("value", ["eager", "sdpa", None])
def test_what_is_part_of_transformers_may_be_chosen(tmp_path: Path, value: str | None) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "attn_implementation": value}))
    assert make_config(str(path), vocab_size=1)._attn_implementation == value
