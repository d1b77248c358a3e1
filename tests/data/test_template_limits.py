"""What a record may say about its template, and how long a template may take."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data.chats import CHAT, make_engine
from treefx.data import ChatTokenizer, load, make_samples, read_judged, read_preferences
from treefx.data.chat import time_limit
from treefx.data.chat.time_limit import run_within
from treefx.data.formats.openai_chat import RESERVED_OPTIONS
from treefx.errors import InputError, RecordError

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
RECURSIVE = "{% macro f() %}{% for i in range(9) %}{{ f() }}{% endfor %}{% endmacro %}{{ f() }}"
ANSWER = [{"role": "assistant", "content": "b"}]


def test_the_names_are_those_of_transformers() -> None:
    import inspect

    names = set(inspect.signature(make_engine("chatml").apply_chat_template).parameters) - {"kwargs"}
    assert names <= RESERVED_OPTIONS


@pytest.mark.parametrize("name", sorted(RESERVED_OPTIONS))
def test_a_record_may_not_set_arguments_of_the_tokenizer(tmp_path: Path, name: str) -> None:
    prompt = [{"role": "user", "content": "a"}]
    path = tmp_path / "x.jsonl"
    options: dict[str, Any] = {"chat_template_kwargs": {"mark": "m", name: None}}
    for read, record in (
        (load, {"messages": prompt + ANSWER}),
        (load, {"task_id": 1, "traj": prompt + ANSWER}),
        (load, {"prompt": prompt, "completions": [ANSWER]}),
        (read_preferences, {"prompt": "a", "chosen": "b", "rejected": "c"}),
        (read_judged, {"prompt": "a", "completion": "b", "label": True}),
    ):
        path.write_text(json.dumps({**record, **options}))
        with pytest.raises(RecordError, match=f"field chat_template_kwargs.{name}: a record may set .* leave '{name}'"):
            list(read(path, drop_null_arguments=False))


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "eos_token", "tools"])
def test_nor_may_a_conversation_that_was_made_by_hand(name: str) -> None:
    from dataclasses import replace

    encoder = ChatTokenizer(make_engine("chatml"))
    with pytest.raises(InputError, match=f"template_options are what the template reads, got '{name}'"):
        make_samples([replace(CHAT, template_options={name: "x"})], encoder)


def _in_another_thread(function: Callable[[], Any]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@pytest.mark.parametrize("where", [lambda function: function(), _in_another_thread])
@pytest.mark.parametrize("template", [ENDLESS, ENDLESS.replace("{% for j", "text{% for j")])
def test_a_template_without_end_is_refused(template: str, where: Any) -> None:
    encoder = ChatTokenizer(make_engine("chatml"), chat_template=template, template_seconds=0.2)
    began = time.monotonic()
    with pytest.raises(InputError, match=r"did not end for messages 0 to \d \(0.2 seconds are over\).*seconds="):
        where(lambda: encoder.turns(CHAT))
    assert time.monotonic() - began < 5
    assert ChatTokenizer(make_engine("chatml"), template_seconds=0.2).turns(CHAT)


def test_a_template_without_end_of_its_calls_is_refused() -> None:
    with pytest.raises(InputError, match="the chat template (refused|did not end)"):
        ChatTokenizer(make_engine("chatml"), chat_template=RECURSIVE, template_seconds=1).turns(CHAT)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), True, "1"])
def test_limits_that_are_none_are_refused(seconds: Any) -> None:
    with pytest.raises(InputError, match="template_seconds must be a number of seconds above 0, or None"):
        ChatTokenizer(make_engine("chatml"), template_seconds=seconds)


def test_what_ends_in_time_is_left_alone() -> None:
    """Also where the limit passes just when a function returns: the exception comes inside, or not at all."""
    outcomes = []
    for _ in range(15):
        try:
            run_within(0.1, lambda: time.sleep(0.1))
            outcomes.append(True)
        except TimeoutError:
            outcomes.append(False)
        sum(range(20000))  # an exception that came too late would be raised here
    with pytest.raises(KeyError, match="mine"):
        run_within(5, lambda: {}["mine"])
    assert run_within(None, lambda: 3) == run_within(5, lambda: run_within(5, lambda: 3)) == 3


def test_the_limit_holds_in_a_forked_process() -> None:
    run_within(5, lambda: None)  # the thread that watches is there
    child = os.fork()
    if not child:
        try:
            run_within(0.1, _loop)
        except TimeoutError:
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def _loop() -> None:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        pass


_PROFILED = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("time_limit", sys.argv[1])
time_limit = importlib.util.module_from_spec(spec)
sys.modules["time_limit"] = time_limit
spec.loader.exec_module(time_limit)
def endless():
    while True: pass
def late():  # it ends by itself, before it reaches a step at which the exception comes
    time.sleep(0.4)
for function in (endless, late):
    try: time_limit.run_within(0.1, function)
    except TimeoutError: print("late")
sys.setprofile(lambda *event: None)
(lambda: None)()
sys.setprofile(None)
print("profiled")
"""


def test_a_process_may_be_profiled_after_a_limit() -> None:
    """An exception that is sent to a thread and taken back makes Python 3.11 hang at the next profiled call."""
    command = [sys.executable, "-c", _PROFILED, str(time_limit.__file__)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout.split() == ["late", "late", "profiled"], result.stderr
