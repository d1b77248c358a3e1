"""Chat templates of transformers' tokenizers: rows as they write them, and masks of what the assistant wrote."""

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("tokenizers")

from tests.data.chats import CHAT, TEMPLATES, chatml, conversations, make_engine  # noqa: E402
from tests.losses.textbook import assert_equal, row_logprobs, value_and_grad  # noqa: E402
from treefx import Forest, edge_logprobs, losses  # noqa: E402
from treefx.data import (  # noqa: E402
    IGNORED,
    ByteTokenizer,
    ChatTokenizer,
    Conversation,
    Message,
    Place,
    Sample,
    forest_of,
    make_samples,
    merge_turns,
    turn_samples,
    whole_sample,
)
from treefx.errors import InputError, RecordError  # noqa: E402

MASK: Any = {"return_dict": True, "return_assistant_tokens_mask": True}
TOLD = dataclasses.replace(CHAT, messages=(*CHAT.messages[:2], *CHAT.messages[4:]))
"""Without a call."""
CALL = '<call>{"name": "clock", "arguments": {"zone": "UTC"}}'
KEPT = [name for name in TEMPLATES if name in ("chatml", "marked", "no_think")]
"""Templates that write messages alike, whatever follows."""


def trained(sample: Sample, engine: Any) -> list[str]:
    """Text of every run of labelled tokens."""
    runs, labels = [], sample.labels.tolist()
    for at, label in enumerate(labels):
        if label != IGNORED:
            assert label == sample.tokens[at]
            if at == 0 or labels[at - 1] == IGNORED:
                runs.append([])
            runs[-1].append(label)
    return [engine.decode(run) for run in runs]


# Rows and masks -------------------------------------------------------------------------------------------------------


def test_a_turn_is_the_templates_text_with_the_answer_trained() -> None:
    engine = make_engine("chatml")
    samples = turn_samples(CHAT, engine)
    assert [trained(sample, engine) for sample in samples] == [
        [f"let me see{CALL}<|im_end|>\n"],
        ["it is noon<|im_end|>\n"],
        ["bye<|im_end|>\n"],
    ]
    assert engine.decode(samples[0].tokens) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nwhat time is it?<|im_end|>\n"
        f"<|im_start|>assistant\nlet me see{CALL}<|im_end|>\n"
    )
    assert [(sample.task, sample.turn) for sample in samples] == [("t", 0), ("t", 1), ("t", 2)]


def test_markers_of_the_template_narrow_what_is_trained() -> None:
    engine = make_engine("marked")
    kept = [f"let me see{CALL}<|im_end|>", "it is noon<|im_end|>", "bye<|im_end|>"]
    assert [trained(sample, engine) for sample in turn_samples(CHAT, engine)] == [[text] for text in kept]
    assert trained(whole_sample(CHAT, engine), engine) == kept
    assert trained(whole_sample(CHAT, ChatTokenizer(engine, cut_at_turns=True)), engine) == kept
    without = ChatTokenizer(engine, markers=False)
    assert trained(whole_sample(CHAT, without), engine) == [f"{text}\n" for text in kept]


@pytest.mark.parametrize("inside", [True, False])
def test_markers_around_white_space_train_no_other_message(inside: bool) -> None:
    engine = make_engine("chatml", trim_offsets=True)
    space, after = ("{{ ' ' }}", "") if inside else ("", "{{ ' ' }}")
    spoken = "{% generation %}{{ m.content }}<|im_end|>" + space + "{% endgeneration %}" + after
    engine.chat_template = TEMPLATES["marked"].split("{% if")[0] + "{% if m.role == 'assistant' %}" + spoken
    engine.chat_template += "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    end = " " if inside else ""
    assert trained(whole_sample(TOLD, engine), engine) == [f"it is noon<|im_end|>{end}", f"bye<|im_end|>{end}"]


def test_markers_that_cannot_be_read_are_refused() -> None:
    engine = make_engine("marked")
    private = dataclasses.replace(TOLD, messages=(Message("user", "\ue5b0"), *TOLD.messages[2:]))
    with pytest.raises(InputError, match="cannot be told apart from its text"):
        turn_samples(private, engine)
    assert len(turn_samples(private, ChatTokenizer(engine, markers=False))) == 2
    # What a marked part sets is not seen behind it, unless the marker is taken away.
    engine.chat_template = TEMPLATES["marked"].replace("{% generation %}", "{% generation %}{% set said = 1 %}")
    assert len(turn_samples(TOLD, engine)) == 2
    engine.chat_template = engine.chat_template.replace("{% endgeneration %}", "{% endgeneration %}{{ said }}")
    with pytest.raises(InputError, match="cannot be told apart from its text"):
        turn_samples(TOLD, engine)


def test_markers_without_a_token_are_refused() -> None:
    engine = make_engine("marked")
    engine.chat_template = TEMPLATES["marked"].replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    assert len(turn_samples(TOLD, engine)) == 2
    with pytest.raises(InputError, match=r"no token of message 2 \(assistant\) stands between {% generation %}"):
        whole_sample(TOLD, engine)


def test_markers_never_widen_it() -> None:
    engine = make_engine("marked")
    engine.chat_template = "{% generation %}" + TEMPLATES["chatml"] + "{% endgeneration %}"
    assert trained(whole_sample(CHAT, engine), engine)[1:] == ["it is noon<|im_end|>\n", "bye<|im_end|>\n"]


@pytest.mark.parametrize("template", KEPT)
def test_whole_and_merged_rows_are_one_where_the_template_keeps_history(template: str) -> None:
    engine = make_engine(template)
    whole, (merged,) = whole_sample(CHAT, engine), merge_turns(turn_samples(CHAT, engine))
    assert np.array_equal(whole.tokens, merged.tokens) and np.array_equal(whole.labels, merged.labels)
    assert np.array_equal(whole.tokens, make_engine(template).apply_chat_template(CHATS[0])["input_ids"])


CHATS = [
    [
        {"role": message.role, "content": message.content}
        | (
            {"tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}]}
            if message.tool_calls
            else {}
        )
        for message in CHAT.messages
    ]
]


def test_a_template_that_drops_thinking_forks_the_rows() -> None:
    engine = make_engine("thinking")
    turns = turn_samples(CHAT, engine)
    assert trained(turns[1], engine) == ["<think>12:00 is noon</think>it is noon<|im_end|>\n"]
    assert "think" not in engine.decode(turns[2].tokens)
    assert [len(trained(row, engine)) for row in make_samples([CHAT], engine, "merged")] == [1, 1, 1]
    assert forest_of(turns).num_tokens < sum(map(len, turns))
    with pytest.raises(InputError, match="messages 0 to 2 differently when others follow .* 'turns' or 'merged'"):
        whole_sample(CHAT, engine)


def test_an_answer_begins_where_its_row_leaves_the_prompt() -> None:
    engine = make_engine("no_think")
    assert trained(turn_samples(CHAT, engine)[1], engine) == ["it is noon<|im_end|>\n"]
    plain = make_engine("plain")
    row = turn_samples(CHAT, plain)[2]
    prompt = plain.apply_chat_template(CHATS[0][:6], tokenize=False, add_generation_prompt=True)
    ends = [end for _, end in plain(plain.decode(row.tokens), return_offsets_mapping=True)["offset_mapping"]]
    assert [end > len(prompt) for end in ends] == (row.labels != IGNORED).tolist()
    (text,) = trained(row, plain)
    assert text.endswith("bye ") and len(text) > len("bye "), "the test needs a token over the border"


@settings(max_examples=25, deadline=None)
@given(conversations(), st.booleans())
def test_what_is_trained_is_what_the_assistant_wrote(trials: list[Conversation], trim_offsets: bool) -> None:
    engine = make_engine("thinking", trim_offsets)
    for conversation in trials:
        spoken = [message for message in conversation.messages if message.role == "assistant"]
        thoughts = [f"<think>{each.reasoning}</think>" if each.reasoning else "" for each in spoken]
        expected = [f"{thought}{each.content}<|im_end|>\n" for thought, each in zip(thoughts, spoken, strict=True)]
        assert [trained(row, engine) for row in turn_samples(conversation, engine)] == [[text] for text in expected]


def test_tools_and_options_reach_the_template() -> None:
    tool = {"type": "function", "function": {"name": "clock", "parameters": {}}}
    told = dataclasses.replace(CHAT, tools=(tool,))
    engine = make_engine("chatml")
    assert engine.decode(turn_samples(told, engine)[0].tokens).startswith('<|im_start|>tools\n[{"type": "function"')
    other = ChatTokenizer(engine, chat_template="{{ mark }}" + TEMPLATES["chatml"], mark="seen")
    assert engine.decode(turn_samples(CHAT, other)[0].tokens).startswith("seen<|im_start|>system")


def test_options_of_a_record_reach_the_template() -> None:
    engine = make_engine("chatml")
    engine.chat_template = "{{ mark }}" + TEMPLATES["chatml"]
    marked = dataclasses.replace(CHAT, template_options={"mark": "seen"})
    assert engine.decode(turn_samples(marked, ChatTokenizer(engine, mark="unseen"))[0].tokens).startswith("seen")


@pytest.mark.parametrize("own", [True, False])
def test_a_message_of_weight_0_is_read_only(own: bool) -> None:
    tokenizer = ByteTokenizer() if own else make_engine("chatml")
    unsaid = dataclasses.replace(CHAT.messages[4], trained=False)
    chat = dataclasses.replace(CHAT, messages=(*CHAT.messages[:4], unsaid, *CHAT.messages[5:]))
    first, _, third = turn_samples(CHAT, tokenizer)
    kept = turn_samples(chat, tokenizer)
    assert [row.labels.tolist() for row in kept] == [first.labels.tolist(), third.labels.tolist()]
    assert [len(trained(whole_sample(each, tokenizer), tokenizer)) for each in (chat, CHAT)] == [2, 3]


def test_recorded_ids_are_the_turns_tokens() -> None:
    engine = make_engine("chatml")
    sampled = tuple(engine(letter)["input_ids"][0] for letter in "it is noon") + (3,)
    spoken = dataclasses.replace(CHAT.messages[4], token_ids=sampled)
    recorded = dataclasses.replace(CHAT, messages=(*CHAT.messages[:4], spoken, *CHAT.messages[5:]))
    row, plain = turn_samples(recorded, engine)[1], turn_samples(CHAT, engine)[1]
    assert row.labels[-len(sampled) :].tolist() == list(sampled) and row.weights.sum() == len(sampled)
    assert np.array_equal(row.tokens[: -len(sampled)], plain.tokens[: len(row) - len(sampled)])
    again = turn_samples(recorded, ChatTokenizer(engine, recorded=False))[1]
    assert np.array_equal(again.tokens, plain.tokens)
    with pytest.raises(InputError, match="recorded token_ids are those of one turn each"):
        whole_sample(recorded, engine)


# Cut at turns ---------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(conversations(), st.sampled_from(["chatml", "plain", "marked", "no_think"]))
def test_cut_at_turns_shares_whatever_is_said_alike(trials: list[Conversation], template: str) -> None:
    engine = make_engine(template)
    cut = ChatTokenizer(engine, cut_at_turns=True)
    for conversation in trials:
        rows = turn_samples(conversation, cut)
        texts = [engine.decode(row.tokens) for row in rows]
        assert texts == [engine.decode(row.tokens) for row in turn_samples(conversation, engine)]
        for before, after in zip(rows, rows[1:], strict=False):
            assert np.array_equal(before.tokens, after.tokens[: len(before)])
    merged = make_samples(trials, cut, "merged")
    assert len(merged) == len(trials)


def test_cut_at_turns_refuses_a_tokenizer_that_adds_spaces() -> None:
    engine = make_engine("plain")

    class Spaced:
        is_fast = False

        def __call__(self, text: str, **options: Any) -> Any:
            return engine(" " + text, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

    with pytest.raises(InputError, match="cut_at_turns=True needs a tokenizer that encodes pieces"):
        turn_samples(CHAT, ChatTokenizer(Spaced(), cut_at_turns=True))  # type: ignore[arg-type]


# Refusals -------------------------------------------------------------------------------------------------------------


def test_refusals_name_the_reason_and_the_line() -> None:
    here = dataclasses.replace(CHAT, place=Place("chats.jsonl", 7))
    with pytest.raises(RecordError, match="chats.jsonl, line 7: .*refused messages 0 to 3: no tools here") as refusal:
        turn_samples(here, make_engine("strict"))
    assert refusal.value.line == 7
    with pytest.raises(InputError, match="must not begin with the assistant"):
        turn_samples(Conversation("t", 0, (Message("assistant", "hello"),)), make_engine("chatml"))
    assert len(turn_samples(CHAT, make_engine("ended"))) == 3
    with pytest.raises(InputError, match="differently when others follow"):
        whole_sample(CHAT, make_engine("ended"))
    with pytest.raises(InputError, match="expected a tokenizer with apply_chat_template"):
        make_samples([CHAT], object())  # type: ignore[arg-type]


def test_a_template_that_asks_in_another_way_is_refused() -> None:
    engine = make_engine("chatml")
    engine.chat_template = "{% if add_generation_prompt %}ASK {% endif %}" + TEMPLATES["chatml"]
    with pytest.raises(InputError, match="messages 0 to 1 differently when the agent is asked"):
        turn_samples(CHAT, engine)


def test_markers_need_a_fast_tokenizer() -> None:
    engine = make_engine("marked")

    class Slow:
        is_fast = False

        def __call__(self, *given: Any, **options: Any) -> Any:
            return engine(*given, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

    with pytest.raises(InputError, match="only a fast tokenizer can"):
        turn_samples(CHAT, Slow())  # type: ignore[arg-type]
    assert len(turn_samples(CHAT, ChatTokenizer(Slow(), markers=False))) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (chatml("{% if m.role != 'assistant' %}{{ m.content }}{% endif %}"), r"the content of message 2 \(assistant\)"),
        (chatml("{{ m.content if m.role != 'user' }}"), r"the content of message 1 \(user\)"),
        (chatml("{{ m.content }}"), "the tool calls of message 2"),
    ],
)
def test_a_template_that_leaves_out_what_was_said_is_refused(template: str, words: str) -> None:
    with pytest.raises(InputError, match=f"the chat template leaves out {words}"):
        turn_samples(CHAT, ChatTokenizer(make_engine("chatml"), chat_template=template))


def test_arguments_of_calls_are_objects_or_the_recorded_text() -> None:
    engine = make_engine("chatml")
    joining = chatml(
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}"
    )
    with pytest.raises(InputError, match="arguments='text' helps"):
        turn_samples(CHAT, ChatTokenizer(engine, chat_template=joining))
    first = turn_samples(CHAT, ChatTokenizer(engine, chat_template=joining, arguments="text"))[0]
    assert trained(first, engine) == ['let me seeclock {"zone": "UTC"}<|im_end|>\n']
    with pytest.raises(InputError, match="arguments must be 'object' or 'text', got 'json'"):
        ChatTokenizer(engine, arguments="json")  # type: ignore[arg-type]


TALK = (
    Message("user", "Which way?"),
    Message("assistant", "Leftwards.", reasoning="North is up."),
    Message("user", "Really so?"),
    Message("assistant", "Certainly.", reasoning="It is."),
    Message("user", "Thanks!"),
    Message("assistant", "Welcome."),
)


def published_templates() -> list[Path]:
    """The templates of models that TRL brings along."""
    found = importlib.util.find_spec("trl")
    folder = Path(str(found.origin)).parent / "chat_templates" if found else Path("nowhere")
    return sorted(folder.glob("*.jinja"))


@pytest.mark.skipif(not published_templates(), reason="no TRL, no templates")
@pytest.mark.parametrize("path", published_templates(), ids=lambda path: path.stem)
def test_templates_of_models_train_what_the_assistant_wrote(path: Path) -> None:
    engine = make_engine("chatml")
    engine.chat_template, engine.bos_token = path.read_text(), "<eos>"
    try:
        samples = turn_samples(Conversation("t", 0, TALK), engine)
    except InputError as refusal:
        assert re.search("leaves out the content of message|refused messages", str(refusal))
        assert path.stem.startswith(("idefics", "llava", "smolvlm")), "these take content as a list of parts only"
        return
    for number, sample in enumerate(samples):
        (text,) = trained(sample, engine)
        assert [said.content for said in TALK if said.content in text] == [TALK[2 * number + 1].content]
    if "generation %}" in engine.chat_template:
        row = to_template_row(TALK)
        last = np.flatnonzero(engine.apply_chat_template(row, **MASK)["assistant_masks"])
        ours = np.flatnonzero(samples[-1].weights)
        assert np.array_equal(ours, last[-len(ours) :])


def to_template_row(messages: tuple[Message, ...]) -> list[dict[str, str]]:
    """Messages for transformers."""
    fields = ({"role": m.role, "content": m.content, "reasoning_content": m.reasoning or None} for m in messages)
    return [{name: text for name, text in each.items() if text} for each in fields]


# Masks at forks -------------------------------------------------------------------------------------------------------


def on_rows(logits: Tensor, forest: Forest, samples: list[Sample]) -> Tensor:
    """Cross-entropy of every row on its own, by its own labels."""
    logps = row_logprobs(logits, forest)
    masks = [torch.from_numpy(sample.labels[1:] != IGNORED) for sample in samples]
    return -torch.stack([logp[mask].sum() for logp, mask in zip(logps, masks, strict=True)]).sum()


@settings(max_examples=25, deadline=None)
@given(
    conversations(), st.sampled_from(["chatml", "marked", "thinking", "plain"]), st.sampled_from(["turns", "merged"])
)
def test_masks_at_forks_are_those_of_the_rows(trials: list[Conversation], template: str, form: Any) -> None:
    samples = make_samples(trials, make_engine(template), form)
    forest = forest_of(samples)
    generator = torch.Generator().manual_seed(len(samples))
    logits = torch.randn(1, forest.num_tokens, 340, generator=generator, dtype=torch.float64)
    packed = value_and_grad(lambda x: losses.sft(edge_logprobs(x, forest), forest), logits)
    assert_equal(packed, value_and_grad(lambda x: on_rows(x, forest, samples), logits))


@pytest.mark.parametrize("wrong", ["any row", "first row", "every row"])
def test_one_mask_per_token_is_told_apart(wrong: str) -> None:
    samples = turn_samples(CHAT, make_engine("chatml"))
    right = forest_of(samples)
    by_token = torch.zeros(len(samples), right.num_tokens)
    for row, (index, sample) in enumerate(zip(right.token_of, samples, strict=True)):
        by_token[row, index] = torch.from_numpy(sample.weights).float()
    mask = {"any row": by_token.amax(0), "first row": by_token[2], "every row": by_token.amin(0)}[wrong]
    forest = Forest.from_sequences([sample.tokens for sample in samples], [mask[index] for index in right.token_of])
    logits = torch.randn(1, forest.num_tokens, 340, dtype=torch.float64)
    expected = value_and_grad(lambda x: on_rows(x, right, samples), logits)
    with pytest.raises(AssertionError):
        assert_equal(value_and_grad(lambda x: losses.sft(edge_logprobs(x, forest), forest), logits), expected)
