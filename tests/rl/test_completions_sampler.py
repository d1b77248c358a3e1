"""Rollouts through an OpenAI-compatible completions endpoint, on a server of our own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.rl.server import complete, serve
from tests.rl.worlds import World, script
from treefx import InputError, TreefxError, UnsupportedError
from treefx.rl import CompletionsSampler, PortoolTree, Rollouts, rollout


def sampler(url: str, **options: Any) -> CompletionsSampler:
    return CompletionsSampler(url, "tiny", **{"max_new_tokens": 8, "pause": 0.01, **options})


def columns(rollouts: Rollouts) -> dict[str, Any]:
    return {name: value.tolist() for name, value in vars(rollouts).items() if isinstance(value, torch.Tensor)}


def without_ids(fields: dict[str, Any]) -> Any:
    """As vLLM answered before it knew `return_token_ids`."""
    answer = complete(fields)
    del answer["choices"][0]["token_ids"]
    return answer


@pytest.mark.parametrize("answer", [complete, without_ids])
def test_a_rollout_over_http_is_the_rollout_without(answer: Callable[[dict[str, Any]], Any]) -> None:
    expected = rollout(script, World(), [0, 1], PortoolTree(5), seed=3)
    with serve(answer) as server:
        assert columns(rollout(sampler(server.url), World(), [0, 1], PortoolTree(5), seed=3)) == columns(expected)


def test_branches_begin_with_their_prefix_token_by_token() -> None:
    """So a server that caches prefixes computes every distinct one once."""
    with serve() as server:
        rollouts = rollout(sampler(server.url), World(), [0], PortoolTree(6, forks=3), seed=2)
    sent = [tuple(request["prompt"]) for request in server.requests]
    assert server.computed == len({prompt[:i] for prompt in sent for i in range(1, len(prompt) + 1)})
    assert server.computed < sum(map(len, sent)) / 2
    rows = [tuple(row.tolist()) for row in rollouts.forest.sequences()]
    assert all(any(prompt == row[: len(prompt)] for prompt in sent) for row in rows)


def test_requests_say_what_is_wanted() -> None:
    with serve() as server:
        options = {"temperature": 0.7, "tempered_logprobs": True, "extra": {"min_tokens": 2}}
        sampler(server.url, stop=[7], api_key="secret", **options)([[1, 2]], [2**62 + 1])
    assert server.requests == [
        {
            "model": "tiny",
            "prompt": [1, 2],
            "seed": 2**62 + 1,
            "max_tokens": 8,
            "temperature": 0.7,
            "min_tokens": 2,
            "logprobs": 1,
            "stop_token_ids": [7],
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
    ]
    assert server.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("concurrency", [1, 8])
def test_answers_come_back_in_order(concurrency: int) -> None:
    prefixes, seeds = [[number, 1] for number in range(20)], list(range(20))
    with serve() as server:
        assert sampler(server.url, concurrency=concurrency)(prefixes, seeds) == script(prefixes, seeds)


def test_a_busy_server_is_asked_again() -> None:
    with serve() as server:
        server.failures = [(503, "busy"), (429, "slower")]
        assert sampler(server.url, retries=2)([[1]], [0]) == script([[1]], [0])
        assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("failures", "tries", "words"),
    [
        ([(503, "busy")] * 5, 3, "failed after 3 tries with HTTP 503: busy"),
        ([(400, "no such model")], 1, "failed after 1 tries with HTTP 400: no such model"),
        ([(200, "<html>")], 1, "failed after 1 tries with an answer that is not JSON"),
    ],
)
def test_a_server_that_fails_is_quoted(failures: list[tuple[int, str]], tries: int, words: str) -> None:
    with serve() as server:
        server.failures = failures
        with pytest.raises(TreefxError, match=words):
            sampler(server.url, retries=2)([[1]], [0])
        assert len(server.requests) == tries


def test_a_server_that_is_not_there_is_named() -> None:
    with serve() as server:
        url = server.url
    with pytest.raises(TreefxError, match=f"{url} failed after 2 tries"):
        sampler(url, retries=1)([[1]], [0])


def as_text(fields: dict[str, Any]) -> Any:
    return {"choices": [{"text": "ab", "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0]}}]}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (as_text, "returns tokens as texts, .*encoding them again may give other tokens"),
        (lambda fields: {"choices": [{"text": "ab", "logprobs": None}]}, "has to return log-probabilities"),
        (lambda fields: {"choices": []}, "IndexError"),
        (lambda fields: {"choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": [None]}}]}, "of every token"),
        (lambda fields: [], "has to return log-probabilities"),
    ],
)
def test_answers_without_ids_and_logprobs_are_refused(answer: Callable[[dict[str, Any]], Any], words: str) -> None:
    with serve(answer) as server, pytest.raises(UnsupportedError, match=words):
        sampler(server.url)([[1]], [0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens and concurrency"),
        ({"concurrency": 0}, "max_new_tokens and concurrency"),
        ({"retries": -1}, "retries at least 0"),
        ({"temperature": 0.5}, "temperature 0.5 needs log-probabilities from after it"),
        ({"extra": {"seed": 1}}, "extra must not set seed"),
        ({"extra": {"top_p": 0.9}, "tempered_logprobs": True}, "extra must not set top_p"),
        ({"url": "file:///etc/hosts"}, "must begin with http"),
    ],
)
def test_unfit_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        sampler(**{"url": "http://localhost:1/v1/completions", **options})
