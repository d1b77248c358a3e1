"""Loaders: files of three formats to conversations, and refusals of anything else."""

import json
from pathlib import Path
from typing import Any

import pytest

from treefx.data import Message, ToolCall, load
from treefx.errors import InputError, RecordError

CALL = {"id": "1", "type": "function", "function": {"name": "get_user", "arguments": '{"id": 7}'}}
TAU_BENCH = [
    {
        "task_id": 3,
        "trial": trial,
        "reward": float(trial),
        "info": {},
        "traj": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Hello."},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "name": "get_user", "tool_call_id": "1", "content": "Ann"},
            {"role": "assistant", "content": f"Good day, Ann. {trial}"},
            {"role": "user", "content": "Bye."},
        ],
    }
    for trial in range(2)
]


def _node(kind: str, text: str, children: list[Any], observation: str | None = None) -> dict[str, Any]:
    node = {"node_type": kind, "description": text, "children": children}
    return node if observation is None else node | {"observation": observation}


TOOLBENCH = {
    "answer_generation": {
        "query": "Which flight?",
        "train_messages": [
            [
                {"role": "system", "content": "Use tools."},
                {"role": "user", "content": "Which flight?"},
                {"role": "assistant", "content": "not part of the opening"},
            ]
        ],
    },
    "tree": {
        "tree": _node(
            "Action Input",
            "",
            [
                _node(
                    "Thought",
                    "search first",
                    [
                        _node("Action", "search", [_node("Action Input", "{}", [], "none found")]),
                        _node("Action", "ask", [_node("Action Input", '{"a": 1}', [], "LH 1")]),
                    ],
                ),
                _node("Thought", "give up", []),
            ],
        )
    },
}


def _write(folder: Path, name: str, document: Any) -> Path:
    path = folder / name
    path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return path


# Loaders


def test_load_tau_bench(tmp_path: Path) -> None:
    first, second = load(_write(tmp_path, "trajectories.json", TAU_BENCH))
    assert (first.task, first.trial, second.trial, second.reward) == ("3", 0, 1, 1.0)
    assert [message.role for message in first.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert first.messages[2] == Message("assistant", "", (ToolCall("get_user", '{"id": 7}'),))
    assert first.messages[3] == Message("tool", "Ann", name="get_user")


def test_load_toolbench_gives_one_conversation_per_leaf(tmp_path: Path) -> None:
    conversations = load(_write(tmp_path, "G1_1.json", TOOLBENCH))
    opening = [Message("system", "Use tools."), Message("user", "Which flight?")]
    assert [list(conversation.messages[:2]) for conversation in conversations] == [opening] * 3
    assert [conversation.task for conversation in conversations] == ["G1_1"] * 3
    search, ask, give_up = ([*conversation.messages[2:]] for conversation in conversations)
    assert search == [
        Message("assistant", "search first", (ToolCall("search", "{}"),)),
        Message("tool", "none found", name="search"),
    ]
    assert ask == [
        Message("assistant", "search first", (ToolCall("ask", '{"a": 1}'),)),
        Message("tool", "LH 1", name="ask"),
    ]
    assert give_up == [Message("assistant", "give up")]


def test_load_toolbench_survives_deep_trees(tmp_path: Path) -> None:
    document: Any = {"tree": {"tree": {"children": []}}, "answer_generation": {"query": "q"}}
    node = document["tree"]["tree"]
    for _ in range(300):
        node["children"] = [_node("Thought", "t", [])]
        node = node["children"][0]
    (conversation,) = load(_write(tmp_path, "deep.json", document))
    assert conversation.messages == (Message("user", "q"), Message("assistant", "\n".join(["t"] * 300)))


def test_load_openai_chats_from_json_lines(tmp_path: Path) -> None:
    chats = [
        {
            "messages": [
                {
                    "role": "developer",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                }
            ]
        },
        {
            "task": "t",
            "trial": 2,
            "messages": [{"role": "assistant", "content": "c", "reasoning_content": "r"}],
        },
    ]
    first, second = load(_write(tmp_path, "chats.jsonl", "\n".join(json.dumps(chat) for chat in chats) + "\n"))
    assert first.messages == (Message("system", "ab"),)
    assert (second.task, second.trial) == ("t", 2)
    assert second.messages == (Message("assistant", "c", reasoning="r"),)


def test_load_folder_reads_all_formats(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    _write(tmp_path, "b.json", TAU_BENCH)
    _write(tmp_path / "inner", "a.json", TOOLBENCH)
    _write(tmp_path, "notes.txt", "not read")
    assert [conversation.source for conversation in load(tmp_path)] == ["b", "b", "a", "a", "a"]


@pytest.mark.parametrize(
    ("name", "document", "words"),
    [
        ("a.json", {"rows": []}, "line 1: expected a tau-bench .* got an object with the fields 'rows'"),
        ("a.json", [], "a.json: holds no record"),
        ("a.json", [{"task_id": 1}], r"line 1, field \[0\]: expected .* got an object with the fields 'task_id'"),
        ("a.json", "3", "line 1: expected .* got the number 3"),
        ("a.json", "{nonsense", "line 1: is not JSON"),
        ("a.txt", "nothing", "line 1: is not JSON"),
        ("a.json", [{"messages": []}], r"field \[0\].messages: expected at least one message, got an empty list"),
        (
            "a.json",
            [{"messages": [{"role": "robot"}]}],
            r"field \[0\].messages\[0\].role: expected a role that is one of .* got text 'robot'",
        ),
        (
            "a.json",
            [{"messages": [{"role": "user", "content": 3}]}],
            r"messages\[0\].content: expected content that is text.* got the number 3",
        ),
        (
            "a.json",
            [{"messages": [{"role": "assistant", "tool_calls": [{}]}]}],
            r"messages\[0\].tool_calls\[0\]: expected a tool call .* got an object",
        ),
        (
            "a.json",
            [{"messages": [{"role": "assistant", "token_ids": [4, -1]}]}],
            r"messages\[0\].token_ids\[1\]: expected a token id of at least 0, got the number -1",
        ),
        ("a.json", [{"messages": [{"role": "assistant", "weight": 0.5}]}], "weight: expected a weight of 0 or 1, got"),
        ("a.json", [{"messages": [{"role": "user"}], "chat_template_kwargs": []}], "kwargs: expected an object of opt"),
        ("a.json", [{"messages": [{"role": "user"}], "reward": "1"}], r"field \[0\].reward: expected a finite number"),
        ("a.json", [{"messages": [{"role": "user"}], "trial": 1.5}], r"field \[0\].trial: expected a whole number"),
        ("a.json", [{"messages": [{"role": "user"}], "tools": ["t"]}], r"tools\[0\]: expected a tool's JSON schema"),
        ("a.json", [{"task_id": 1, "traj": {}}], r"field \[0\].traj: expected a list of messages, got an object"),
        ("a.json", {"tree": {"tree": {"children": [3]}}}, r"tree.tree.children\[0\]: expected an object"),
        ("a.json", {"prompt": "p", "completions": []}, "completions: expected at least one completion"),
        (
            "a.json",
            {"prompt": "p", "completions": ["a", "b"], "rewards": [1]},
            "rewards: expected one reward per completion, 2, got 1",
        ),
        (
            "a.json",
            {"tree": {"tree": _node("x", "", [_node("Guess", "", [])])}},
            r"children\[0\].node_type: expected a node_type that is one of .* got text 'Guess'",
        ),
    ],
)
def test_load_refuses_other_files(tmp_path: Path, name: str, document: Any, words: str) -> None:
    path = _write(tmp_path, name, document)
    with pytest.raises(RecordError, match=words) as refusal:
        load(path)
    assert str(refusal.value).startswith(str(path)) and refusal.value.path == str(path)


def test_load_keeps_what_chat_templates_ask_for(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "get_user", "parameters": {}}}
    call = {"id": "c1", "function": {"name": "get_user", "arguments": {"id": "ü"}}}
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [call], "token_ids": [5, 6]},
        {"role": "tool", "content": "x", "tool_call_id": "c1"},
    ]
    path = _write(tmp_path, "chat.jsonl", "\n" + json.dumps({"messages": messages, "tools": json.dumps([tool])}))
    (conversation,) = load(path)
    assert conversation.tools == (tool,)
    assert conversation.messages[1].tool_calls[0] == ToolCall("get_user", '{"id": "ü"}')
    assert conversation.messages[1].tool_calls[0].id == conversation.messages[2].tool_call_id == "c1"
    assert conversation.messages[1].token_ids == (5, 6)
    assert conversation.place is not None and str(conversation.place) == f"{path}, line 2"


def test_load_reads_what_other_programs_write(tmp_path: Path) -> None:
    call = {"name": "get_user", "arguments": '{"id": 7}'}
    messages = [
        {"role": "assistant", "function_call": call, "weight": 0, "reasoning": "r"},
        {"role": "assistant", "content": "x", "weight": 1, "thinking": "t"},
    ]
    options = {"enable_thinking": False}
    (chat,) = load(_write(tmp_path, "chat.json", {"messages": messages, "chat_template_kwargs": options}))
    assert chat.messages == (
        Message("assistant", "", (ToolCall("get_user", '{"id": 7}'),), reasoning="r", trained=False),
        Message("assistant", "x", reasoning="t"),
    )
    assert chat.template_options == options


def test_load_a_group_of_trials_in_one_record(tmp_path: Path) -> None:
    answers = ["four", [{"role": "assistant", "content": "five"}, {"role": "user", "content": "no"}]]
    record = {"prompt": "two and two?", "completions": answers, "rewards": [1, 0.0], "task": 7}
    first, second = load(_write(tmp_path, "groups.jsonl", record))
    assert first.messages == (Message("user", "two and two?"), Message("assistant", "four"))
    assert [message.content for message in second.messages] == ["two and two?", "five", "no"]
    assert [(each.task, each.trial, each.reward) for each in (first, second)] == [("7", 0, 1.0), ("7", 1, 0.0)]


def test_load_refuses_missing_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file or folder"):
        load(tmp_path / "missing")
    with pytest.raises(InputError, match="holds no .json"):
        load(tmp_path)
