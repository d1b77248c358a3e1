"""Sampling with kept keys and values: exact log-probabilities, and every prefix token fed once."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.doge import modeling_doge

import treefx
from tests.models import SUITE, double, zoo
from treefx import InputError, UnsupportedError
from treefx.rl import (
    Completion,
    Group,
    Outcome,
    PortoolTree,
    RandomExpansion,
    Rollouts,
    Scheme,
    TransformersSampler,
    portool,
    rollout,
)

STOP = 5
TEMPERATURE = 0.7


class Talk:
    """Tasks with a common beginning and prompts of unequal length; tools answer three tokens."""

    def start(self, task: int) -> tuple[int, list[int]]:
        return 0, [30, 31, 32, *[40 + task] * (1 + 2 * task)]

    def act(self, state: int, tokens: list[int], seed: int) -> Outcome:
        done = tokens[-1] == STOP and state > 0
        return Outcome(state + 1, [] if done else [20, 21 + sum(tokens) % 3, 33], done, float(sum(tokens) % 2))


@dataclass
class Feeds:
    """Counts the real tokens that a model is fed, from outside."""

    tokens: int = 0
    calls: int = 0

    def __call__(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.calls += 1
        width = kwargs["input_ids"].shape[1]
        self.tokens += int(kwargs["attention_mask"][:, -width:].sum())


@dataclass
class Watched:
    """A sampler and the distinct tokens that its calls need: prefix tokens not seen before, then the draws."""

    sampler: TransformersSampler
    needed: int = 0
    seen: set[tuple[int, ...]] = field(default_factory=set)

    def __call__(self, prefixes: Sequence[list[int]], seeds: Sequence[int]) -> list[Completion]:
        completions = self.sampler(prefixes, seeds)
        read = {tuple(prefix[:i]) for prefix in prefixes for i in range(1, len(prefix) + 1)}
        pairs = list(zip(prefixes, completions, strict=True))
        drawn = {(*p, *c.tokens[:i]) for p, c in pairs for i in range(1, len(c.tokens))}
        self.needed += len(read - self.seen) + len(drawn)
        self.seen |= read | drawn
        return completions


def sample(model: nn.Module, scheme: Scheme, seed: int = 1, **options: Any) -> Rollouts:
    options = {"max_new_tokens": 5, "stop": [STOP], "temperature": TEMPERATURE, **options}
    with TransformersSampler(model, **options) as sampler:
        return rollout(sampler, Talk(), [0, 1], scheme, seed=seed, max_steps=3)


def largest_error(model: nn.Module, rollouts: Rollouts) -> float:
    """Of old log-probabilities, against the model on every row alone."""
    worst = 0.0
    for row, old, sampled in zip(rollouts.forest.sequences(), rollouts.old_logprobs, rollouts.sampled, strict=True):
        with torch.no_grad():
            logits = model.eval()(input_ids=row[None], use_cache=False).logits[0, :-1].double()
        expected = torch.log_softmax(logits / TEMPERATURE, -1).gather(1, row[1:, None]).squeeze(1)
        worst = max(worst, float((expected - old[1:])[sampled[1:]].abs().max()))
    return worst


# Rotary, learned and ALiBi positions, windows (of 8 tokens and less), soft caps, a built-in prefix (OPT).
EXACT = ["llama", "qwen3", "gpt2", "opt", "bloom", "mistral", "gemma2", "gemma3_text", "biogpt", "falcon"]


@pytest.mark.parametrize("name", EXACT)
def test_old_logprobs_are_those_of_whole_rows(name: str) -> None:
    model = double(name)
    for scheme in (PortoolTree(4, forks=2), RandomExpansion(2, nodes=2)):
        assert largest_error(model, sample(model, scheme)) < 1e-10


REFUSED = {"mamba2", "qwen3_next", "jamba", "llama4_text", "minimax", "lfm2", "recurrent_gemma", "rwkv", "bamba"}
"""Recurrent, or with attention in chunks."""
if "allow_is_causal_skip" not in inspect.getsource(modeling_doge):
    REFUSED.add("doge")  # that of transformers 5.17 sees the tokens behind in a row without padding


@pytest.mark.parametrize("name", SUITE)
def test_every_architecture_is_sampled_exactly_or_refused_by_name(name: str) -> None:
    model = zoo(name)
    if name in REFUSED:
        with pytest.raises(UnsupportedError, match=type(model).__name__):
            sample(model, Group(1))
    else:
        assert largest_error(model, sample(model, PortoolTree(4))) < 2e-5


def test_a_window_shorter_than_the_rows_is_kept() -> None:
    model = double("mistral", sliding_window=4)
    rollouts = sample(model, PortoolTree(4))
    assert int(rollouts.forest.row_lengths.min()) > 8
    assert largest_error(model, rollouts) < 1e-10
    wide = double("mistral", sliding_window=4096)
    wide.load_state_dict(model.state_dict())
    assert largest_error(wide, rollouts) > 1e-3


@pytest.mark.parametrize("scheme", [Group(4), PortoolTree(6, forks=3), RandomExpansion(2, nodes=2, rounds=2)])
def test_no_prefix_is_decoded_twice(scheme: Scheme) -> None:
    model, feeds = zoo("llama"), Feeds()
    model.register_forward_pre_hook(feeds, with_kwargs=True)
    options = {"max_new_tokens": 5, "stop": [STOP], "temperature": 0.3}
    with TransformersSampler(model, check=False, **options) as sampler:
        watched = Watched(sampler)
        rollouts = rollout(watched, Talk(), [0, 1], scheme, seed=4, max_steps=4)
    assert feeds.tokens == sampler.fed_tokens == watched.needed
    # Row by row it would be every token of every row.
    assert feeds.tokens < rollouts.forest.raw_tokens


def test_branches_that_draw_the_same_tokens_are_one_row_until_they_part() -> None:
    """At temperature 0 all do, to the end; only the last token and its observation are never read."""
    with TransformersSampler(zoo("llama"), max_new_tokens=6, temperature=0) as sampler:
        rollouts = rollout(sampler, Talk(), [0, 1], Group(8), max_steps=3)
    assert rollouts.forest.raw_tokens == 8 * (rollouts.forest.num_tokens + 3)
    assert sampler.fed_tokens == rollouts.forest.num_tokens - 2 * 4


def test_waves_are_batches() -> None:
    model, feeds = zoo("llama"), Feeds()
    model.register_forward_pre_hook(feeds, with_kwargs=True)
    rollouts = sample(model, Group(8), max_new_tokens=4, stop=[], check=False)
    # Per wave three decoding calls, and the pieces of prefixes by depth of their forks; 2 tasks x 8 x 3 steps.
    assert feeds.calls <= 3 * (3 + 4) and int(rollouts.steps.path_lengths.sum()) == 48


def columns(rollouts: Rollouts) -> list[Any]:
    return [rollouts.step_tokens.tolist(), rollouts.parent.tolist(), rollouts.leaf.tolist()]


def test_a_draw_depends_on_its_seed_and_not_on_its_batch() -> None:
    model = double("llama")
    together, alone = (sample(model, PortoolTree(4), max_rows=rows) for rows in (None, 1))
    assert columns(together) == columns(alone) != columns(sample(model, PortoolTree(4), seed=2))
    assert torch.allclose(together.step_logprobs, alone.step_logprobs, atol=1e-12)


def test_temperature_zero_is_greedy_search_of_transformers() -> None:
    model = double("qwen3")
    prompts = [[30, 31, 32], [30, 31, 32, 33, 34], [7]]
    with TransformersSampler(model, max_new_tokens=8, temperature=0) as sampler:
        completions = sampler(prompts, [0, 1, 2])
    for prompt, completion in zip(prompts, completions, strict=True):
        out = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=8, eos_token_id=None, pad_token_id=0
        )
        assert completion.tokens == out[0, len(prompt) :].tolist()


def test_prefixes_within_others_and_ends_inside_of_what_is_held() -> None:
    """[1, 2] is held as part of a longer prefix before its logits are asked for."""
    model = double("llama")
    with TransformersSampler(model, max_new_tokens=2, temperature=0) as sampler:
        sampler([[1, 2, 3, 4]], [0])
        nested = sampler([[1, 2], [1, 2, 3, 4], [1], [1, 2, 9]], [0] * 4)
    with TransformersSampler(model, max_new_tokens=2, temperature=0) as sampler:
        fresh = [sampler([prefix], [0])[0] for prefix in ([1, 2], [1, 2, 3, 4], [1], [1, 2, 9])]
    for one, other in zip(nested, fresh, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-12)


def test_the_mode_of_the_model_is_kept_and_dropout_is_off() -> None:
    model = zoo("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).train()
    model.transformer.h[0].eval()  # frozen by its owner
    first, second = (sample(model, Group(2)) for _ in range(2))
    assert model.training and not model.transformer.h[0].mlp.training and model.transformer.h[1].training
    assert torch.equal(first.step_logprobs, second.step_logprobs)
    assert largest_error(model, first) < 1e-5


def test_a_compiled_model_is_sampled_and_then_trained_on_the_forest() -> None:
    """On the policy that sampled, every ratio is 1."""
    model = double("llama", num_hidden_layers=1)
    expected = sample(model, PortoolTree(4))
    model.compile(backend="treefx", options={"inner": "eager", "min_sharing": 1.0})
    rollouts = sample(model, PortoolTree(4))
    assert columns(rollouts) == columns(expected)
    forest = rollouts.forest
    with treefx.use(forest):
        logits = model(**forest.model_inputs(), use_cache=False).logits
    logp = treefx.edge_logprobs(logits, forest, TEMPERATURE)
    edges = forest.edges
    old = torch.cat(rollouts.old_logprobs)[edges.raw_index]
    trained = edges.row_weight > 0
    assert trained.any() and torch.allclose(logp[edges.edge_of_entry][trained], old[trained], rtol=0, atol=1e-10)
    advantages = portool(rollouts.steps, rollouts.rewards)
    treefx.losses.policy(logp, forest, rollouts.old_logprobs, rollouts.steps.to_tokens(advantages)).backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())
    assert columns(sample(model, PortoolTree(4))) == columns(expected)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    assert columns(sample(model, PortoolTree(4))) != columns(expected)


def test_what_torch_compile_returns_is_sampled_as_the_model_within() -> None:
    model = double("llama")
    assert columns(sample(torch.compile(model, backend="eager"), Group(2))) == columns(sample(model, Group(2)))


def test_adapters_are_part_of_the_policy() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        zoo("llama"), peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    rollouts = sample(model, PortoolTree(4))
    assert largest_error(model, rollouts) < 1e-5
    with model.disable_adapter():
        assert largest_error(model, rollouts) > 1e-3


def columns_for_positions(given: list[Tensor]) -> None:
    mask, positions = given
    positions += (mask.shape[1] - positions.shape[1]) - positions[:, :1]


def padding_in_sight(given: list[Tensor]) -> None:
    given[0] = torch.ones_like(given[0])


@pytest.mark.parametrize("mistake", [columns_for_positions, padding_in_sight])
def test_mistakes_with_padding_are_found_by_the_check(
    mistake: Callable[[list[Tensor]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = TransformersSampler._forward

    def wrong(self: Any, past: Any, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        given = [mask, positions.clone()]
        mistake(given)
        return right(self, past, ids, given[0], given[1])

    prompts = [[1, 2], [9, 8, 7, 6, 5, 4]]
    for name in ("llama", "gpt2"):
        with TransformersSampler(zoo(name), max_new_tokens=4, temperature=0) as sampler:
            sampler(prompts, [0, 1])
    monkeypatch.setattr(TransformersSampler, "_forward", wrong)
    # Rotary positions are relative: the whole row may be shifted, so it takes learned ones to see that.
    model = zoo("gpt2")
    with (
        pytest.raises(UnsupportedError, match="other log-probabilities"),
        TransformersSampler(model, max_new_tokens=4, temperature=0) as sampler,
    ):
        sampler(prompts, [0, 1])


def changes_inside(model: nn.Module) -> None:
    with TransformersSampler(model, max_new_tokens=2) as sampler:
        sampler([[1, 2]], [0])
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        sampler([[1, 2]], [0])


def samples_nothing(model: nn.Module) -> None:
    with TransformersSampler(model, max_new_tokens=2) as sampler:
        sampler([[1], []], [0, 1])


def shifted_cache(model: Any) -> None:
    """A model whose answer depends on whether there is a cache."""
    plain = model.forward

    def forward(input_ids: Any, use_cache: bool = True, **kwargs: Any) -> Any:
        out = plain(input_ids=input_ids, use_cache=use_cache, **kwargs)
        out.logits = out.logits * (1.5 if use_cache else 1.0)
        return out

    model.forward = forward
    with TransformersSampler(model, max_new_tokens=2) as sampler:
        sampler([[1, 2, 3]], [0])


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda m: TransformersSampler(m, max_new_tokens=0), InputError, "max_new_tokens must be at least 1"),
        (lambda m: TransformersSampler(m, max_new_tokens=1, max_rows=0), InputError, "max_rows must be at least 1"),
        (lambda m: TransformersSampler(nn.Linear(1, 1), max_new_tokens=1), InputError, "got Linear without its config"),
        (lambda m: TransformersSampler(m, max_new_tokens=1)([[1]], [0]), InputError, "inside a with-block"),
        (changes_inside, InputError, "weights changed inside"),
        (samples_nothing, InputError, "a prefix has no tokens"),
        (shifted_cache, UnsupportedError, "other log-probabilities from kept keys and values"),
    ],
)
def test_what_cannot_be_right_is_refused(call: Callable[[Any], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call(zoo("llama"))


@pytest.mark.parametrize(("name", "what"), [("mamba2", "LinearAttentionLayer"), ("llama4_text", "chunked_attention")])
def test_models_without_keys_and_values_per_token_are_refused_with_the_reason(name: str, what: str) -> None:
    with pytest.raises(UnsupportedError, match=f"has .*{what}"):
        TransformersSampler(zoo(name), max_new_tokens=1)
