"""Re-tokenisation drift: every place where equal texts have different tokens is found, and no other."""

import dataclasses

import pytest
from hypothesis import given, settings

pytest.importorskip("tokenizers")

from tests.data.chats import CHAT, conversations, make_engine  # noqa: E402
from treefx.data import (  # noqa: E402
    ChatTokenizer,
    Conversation,
    Message,
    Place,
    find_drift,
    find_row_drift,
    forest_of,
    turn_samples,
)


def test_special_tokens_between_messages_leave_no_drift() -> None:
    report = find_drift([CHAT], make_engine("chatml"))
    assert (report.rows, report.found, report.unshared_tokens) == (3, [], 0)
    assert report.tokens == sum(len(row) for row in turn_samples(CHAT, make_engine("chatml")))


def test_tokens_over_borders_are_found_with_their_place() -> None:
    engine = make_engine("plain")
    messages = (Message("user", "what time is it?"), Message("assistant", "it is noon"))
    chat = Conversation("t", 0, (*messages, Message("user", "thanks"), Message("assistant", "bye")), source="s")
    report = find_drift([dataclasses.replace(chat, place=Place("chats.jsonl", 4))], engine)
    border = next(drift for drift in report.found if drift.kind == "border" and drift.turn == 1)
    rows = turn_samples(chat, engine)
    text = engine.decode(rows[1].tokens)
    assert border.where == "chats.jsonl, line 4"
    assert border.character == len(engine.decode(rows[1].tokens[: border.token]))
    prompt = engine("user: what time is it? assistant: it is noon user: thanks assistant: ")["input_ids"]
    assert prompt[: border.token] == rows[1].tokens[: border.token].tolist()
    assert prompt[border.token] != rows[1].tokens[border.token]
    assert text[border.character :].startswith(border.got.strip("'.").split("|")[0])
    assert report.counts["template"] == report.counts["recorded"] == 0


def test_history_that_splits_is_counted_in_tokens() -> None:
    engine = make_engine("plain")
    messages = (Message("user", "good "), Message("assistant", "it is noon"), Message("user", "thanks"))
    chat = Conversation("t", 0, (*messages, Message("assistant", "bye")), source="s")
    report = find_drift([chat], engine)
    (history,) = [drift for drift in report.found if drift.kind == "history"]
    first, second = turn_samples(chat, engine)
    assert history.tokens == len(first) - history.token == report.unshared_tokens
    assert history.where == "task t, trial 0"
    assert forest_of([first, second]).num_tokens == len(second) + history.tokens
    assert "1 history" in report.summary() and str(history) in report.summary()
    assert find_drift([chat], ChatTokenizer(engine, cut_at_turns=True)).found == []


@settings(max_examples=25, deadline=None)
@given(conversations())
def test_without_drift_every_turn_goes_on_where_the_last_one_ended(trials: list[Conversation]) -> None:
    engine = make_engine("plain")
    for chat in trials:
        splits = [drift for drift in find_drift([chat], engine).found if drift.kind == "history"]
        rows = turn_samples(chat, engine)
        forks = [
            turn
            for turn, (before, after) in enumerate(zip(rows, rows[1:], strict=False), start=1)
            if before.tokens.tolist() != after.tokens[: len(before)].tolist()
        ]
        assert [drift.turn for drift in splits] == forks
        for drift in splits:
            pair = rows[drift.turn - 1 : drift.turn + 1]
            assert forest_of(pair).num_tokens == sum(map(len, pair)) - drift.token


def test_what_the_template_writes_differently_is_told_from_drift() -> None:
    report = find_drift([CHAT], make_engine("thinking"))
    assert report.counts == {"border": 0, "history": 0, "template": 2, "recorded": 0}
    assert report.unshared_tokens == 0
    assert "<think>" in report.found[0].expected.replace("|", "")
    assert find_drift([CHAT], make_engine("no_think")).counts["template"] == 3


def test_recorded_ids_are_compared_with_their_text() -> None:
    engine = make_engine("chatml")
    spelled = tuple(engine(letter)["input_ids"][0] for letter in "it is noon")
    whole = tuple(engine("it is noon<|im_end|>")["input_ids"])
    for ids, count in ((spelled, 1), (whole, 0)):
        spoken = dataclasses.replace(CHAT.messages[4], token_ids=ids)
        chat = dataclasses.replace(CHAT, messages=(*CHAT.messages[:4], spoken, *CHAT.messages[5:]))
        report = find_drift([chat], engine)
        assert report.counts["recorded"] == len(report.found) == count
    (drift,) = find_row_drift([whole, spelled], engine, "rollouts.safetensors").found
    assert (drift.where, drift.turn, drift.token, drift.character) == ("rollouts.safetensors", 1, 0, 0)
    assert drift.tokens == len(spelled) and drift.expected.startswith("'i|t|")


def test_a_tokenizer_that_tells_no_places_still_counts() -> None:
    engine = make_engine("plain")

    class Slow:
        is_fast = False

        def __call__(self, text: str, **options: object) -> object:
            return engine(text, **options)

        def __getattr__(self, name: str) -> object:
            return getattr(engine, name)

    slow, fast = find_drift([CHAT], Slow()), find_drift([CHAT], engine)  # type: ignore[arg-type]
    assert slow.counts == fast.counts and sum(slow.counts.values())
    assert {drift.character for drift in slow.found} == {None}
