"""Sample from a server with an OpenAI-compatible completions endpoint.

Servers are vLLM, SGLang and others with `/v1/completions`.

Prompts are sent as token ids and token ids are asked for, never text: encoding a text again may give other tokens, and
a branch would no longer begin with its prefix. Branches send equal prompts, so the server's prefix caching finds them.
"""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from treefx.arguments import check_number, is_whole
from treefx.errors import InputError, TreefxError, UnsupportedError
from treefx.rl.rollouts.protocol import Completion

__all__ = ["CompletionsSampler"]

_ID = "token_id:"
"""How vLLM writes a token under `return_tokens_as_token_ids`."""
_TRUNCATING = {"top_p", "top_k", "min_p"}
_PASSING = {408, 429, 500, 502, 503, 504}
"""HTTP statuses that may be gone at the next try."""


@dataclass(frozen=True)
class CompletionsSampler:
    """Implement `Generate` for `rollout`: a request per completion, several at a time.

    Args:
        url: of the endpoint, for example "http://localhost:8000/v1/completions".
        model: name the server knows the model by.
        max_new_tokens: most tokens of a completion.
        stop: token ids that end a completion (`stop_token_ids`; vLLM, SGLang). Servers stop at their model's end token
            by themselves.
        temperature: as the server takes it. Servers may report log-probabilities from before it, which are not those of
            the policy that sampled; so values other than 1 need `tempered_logprobs`.
        tempered_logprobs: the server's log-probabilities are those after the temperature (vLLM: started with
            `--logprobs-mode processed_logprobs`). They are then after `top_p` and its like, too, which no training step
            computes; so those cannot be asked for as well.
        api_key: sent as a bearer token.
        concurrency: requests at a time.
        timeout: seconds for one request.
        retries: further tries of a request that failed in a passing way, after 1, 2, 4, ... times `pause`.
        pause: seconds.
        extra: further fields of every request, `min_tokens` for example.

    Raises:
        InputError: an argument is out of range.
        UnsupportedError: when called, the server does not return token ids with log-probabilities.
        TreefxError: when called, the server refuses a request or cannot be reached; the message has its answer.

    Example:
        >>> sampler = CompletionsSampler("http://localhost:8000/v1/completions", "my-model", max_new_tokens=256)
        >>> rollouts = rollout(sampler, environment, tasks, PortoolTree(trajectories=8))
    """

    url: str
    model: str
    _: KW_ONLY
    max_new_tokens: int
    stop: Sequence[int] = ()
    temperature: float = 1.0
    tempered_logprobs: bool = False
    api_key: str | None = field(default=None, repr=False)
    concurrency: int = 16
    timeout: float = 300.0
    retries: int = 3
    pause: float = 1.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (is_whole(self.max_new_tokens, 1) and is_whole(self.concurrency, 1) and is_whole(self.retries)):
            raise InputError(
                "max_new_tokens and concurrency must be at least 1 and retries at least 0, "
                f"got {self.max_new_tokens!r}, {self.concurrency!r} and {self.retries!r}"
            )
        check_number(self.temperature, "temperature", "a finite number of at least 0", least=0)
        check_number(self.timeout, "timeout", "a number of seconds above 0", above=0)
        check_number(self.pause, "pause", "a number of seconds of at least 0", least=0)
        if not self.url.startswith(("http://", "https://")):
            raise InputError(f"url must begin with http:// or https://, got {self.url!r}")
        if self.temperature != 1 and not self.tempered_logprobs:
            raise InputError(
                f"temperature {self.temperature} needs log-probabilities from after it: have the server return those "
                "(vLLM: --logprobs-mode processed_logprobs) and pass tempered_logprobs=True, or use temperature 1"
            )
        taken = {*self._fields([], 0), "n", "echo", *(_TRUNCATING if self.tempered_logprobs else ())}
        if unfit := sorted(taken & set(self.extra)):
            raise InputError(f"extra must not set {', '.join(unfit)}; see the arguments of CompletionsSampler")

    def __call__(self, prefixes: Sequence[list[int]], seeds: Sequence[int], /) -> list[Completion]:
        """Sample one completion after each prefix; see `Generate`."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(self._complete, prefixes, seeds))

    def _complete(self, prefix: list[int], seed: int) -> Completion:
        answer = self._post({**self._fields(prefix, seed), **self.extra})
        try:
            choice = answer["choices"][0]
            logprobs = choice["logprobs"]
            tokens = choice.get("token_ids") or _read_ids(logprobs["tokens"])
            values = logprobs["token_logprobs"]
            if None in values:
                raise KeyError("token_logprobs of every token")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise UnsupportedError(
                f"{self.url} answered without choices[0].logprobs.tokens and .token_logprobs ({error!r}): the server "
                f"has to return log-probabilities of completions; got {json.dumps(answer):.200}"
            ) from error
        if tokens is None:
            raise UnsupportedError(
                f"{self.url} returns tokens as texts, {logprobs['tokens']!r:.60}, and encoding them again may give "
                "other tokens; use a server that returns ids (vLLM: return_token_ids)"
            )
        return Completion(tokens, values)

    def _fields(self, prefix: list[int], seed: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prefix,
            "seed": seed,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "stop_token_ids": [int(token) for token in self.stop],
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    def _post(self, fields: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(self.url, json.dumps(fields).encode(), headers)
        for attempt in range(self.retries + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as response:
                    return json.loads(response.read())
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}: {error.read().decode(errors='replace'):.500}"
                passing = error.code in _PASSING
            except json.JSONDecodeError as error:
                reason, passing = f"an answer that is not JSON: {error}", False
            except OSError as error:  # URLError, timeouts, broken connections
                reason, passing = str(error), True
            if not passing or attempt == self.retries:
                raise TreefxError(
                    f"{self.url} failed after {attempt + 1} tries with {reason}; check url, model and key"
                )
            time.sleep(self.pause * 2**attempt)
        raise AssertionError("the last try returns or raises")


def _read_ids(tokens: Sequence[str]) -> list[int] | None:
    """Ids of tokens written as "token_id:17"; None where they are texts."""
    if not all(token.startswith(_ID) for token in tokens):
        return None
    return [int(token.removeprefix(_ID)) for token in tokens]
