"""Parse compared and judged answers in the spellings of TRL.

https://huggingface.co/docs/trl/dataset_formats

======================  ================================================================================================
explicit prompt         ``{prompt, chosen, rejected}``, each text or each a list of messages
implicit prompt         ``{chosen, rejected}``, each with the prompt in front, as their common beginning
unpaired (KTO)          ``{prompt, completion, label}``, label true or false
======================  ================================================================================================

Beyond these, as data sets have it: answers that are lists of messages may repeat the prompt, as messages or as the text
of the user's message; after a prompt of messages, an answer in plain text is one message of the assistant.
"""

from typing import Any

from treefx.data.files import Value
from treefx.data.formats.openai_chat import parse_messages, parse_template_options, parse_tools
from treefx.data.trajectories import Judged, Message, Preference, Text

__all__ = ["is_preference", "parse_answer", "parse_judged", "parse_preference"]


def is_preference(raw: Any) -> bool:
    """Whether a parsed record is a pair of answers."""
    return isinstance(raw, dict) and "chosen" in raw and "rejected" in raw


def parse_preference(record: Value) -> list[Preference]:
    """The pair of a record.

    Raises:
        RecordError: a field is missing or of the wrong type, the answers are equal, or have no prompt.
    """
    chosen, rejected = _parse_text(record["chosen"]), _parse_text(record["rejected"])
    given = record.get("prompt")
    if given is None:
        prompt, chosen, rejected = _split_common(record, chosen, rejected)
    else:
        prompt = _parse_text(given)
        prompt, (chosen, rejected) = _join(prompt, {"chosen": chosen, "rejected": rejected}, record)
    if chosen == rejected:
        raise record.place.inside("rejected").error("expected another answer than the chosen one, got the same")
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        _check_answer(answer, record[name])
    return [Preference(prompt, chosen, rejected, parse_tools(record), parse_template_options(record), record.place)]


def parse_judged(record: Value) -> list[Judged]:
    """The judged answer of a record; a pair is two of them, as TRL unpairs it.

    Raises:
        RecordError: a field is missing or of the wrong type.
    """
    if is_preference(record.raw):
        return [
            Judged(pair.prompt, answer, label, pair.tools, pair.template_options, pair.place)
            for pair in parse_preference(record)
            for answer, label in ((pair.chosen, True), (pair.rejected, False))
        ]
    label = record["label"].boolean()
    prompt, (completion,) = _join(
        _parse_text(record["prompt"]), {"completion": _parse_text(record["completion"])}, record
    )
    _check_answer(completion, record["completion"])
    return [Judged(prompt, completion, label, parse_tools(record), parse_template_options(record), record.place)]


def parse_answer(value: Value) -> tuple[Message, ...]:
    """Parse an answer to a prompt of messages: messages, or the assistant's text."""
    answer = _parse_text(value)
    answer = (Message("assistant", answer),) if isinstance(answer, str) else answer
    _check_answer(answer, value)
    return answer


def _parse_text(value: Value) -> Text:
    return value.text() if isinstance(value.raw, str) else parse_messages(_require_list(value))


def _require_list(value: Value) -> Value:
    return value if isinstance(value.raw, list) else value.fail("text or a list of messages")


def _join(prompt: Text, answers: dict[str, Text], record: Value) -> tuple[Text, list[Text]]:
    """Return prompt and answers as all text or all messages, without repeated prompts."""
    kinds = {isinstance(answer, str) for answer in answers.values()}
    if isinstance(prompt, str):
        if kinds == {True}:
            return prompt, list(answers.values())
        opening = tuple(answers.values())[0][:1]
        if opening != (Message("user", prompt),) or kinds != {False}:
            record["prompt"].fail(f"a list of messages, as {' and '.join(answers)} are, or text that these begin with")
        prompt = (Message("user", prompt),)
    answered = [(Message("assistant", each),) if isinstance(each, str) else each for each in answers.values()]
    if all(each[: len(prompt)] == prompt for each in answered):
        answered = [each[len(prompt) :] for each in answered]
    return prompt, [*answered]


def _split_common(record: Value, chosen: Text, rejected: Text) -> tuple[Text, Text, Text]:
    """Split two answers into their common beginning and the rest of each."""
    if isinstance(chosen, str) != isinstance(rejected, str):
        record["rejected"].fail("the same as chosen: both text, or both lists of messages")
    shorter = min(len(chosen), len(rejected))
    size = next((i for i in range(shorter) if chosen[i] != rejected[i]), shorter)
    if isinstance(chosen, str) and 0 < size < shorter and chosen[size - 1] == " ":
        size -= 1  # tokenizers take a space with the word behind it
    if not size:
        raise record.place.inside("prompt").error(
            "is missing, and chosen and rejected do not begin alike, so that no prompt can be told"
        )
    return chosen[:size], chosen[size:], rejected[size:]


def _check_answer(answer: Text, value: Value) -> None:
    """Check an answer: messages must have something that the agent said.

    Text may be empty: an answer that ends at once.
    """
    if not isinstance(answer, str) and not any(message.role == "assistant" for message in answer):
        value.fail("a message of the assistant after the prompt")
