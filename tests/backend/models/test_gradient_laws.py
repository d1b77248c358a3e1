"""The sum of gradients over rows is what the rows would have done: only below a backward that is linear and counts
no tokens. Anything else runs on rows, and is named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.torch_version import TorchVersion

from tests.backend.small import Small
from tests.backend.support import assert_packed, compare, compile_with
from tests.batches import Batch, distinct_tokens, shared_batch
from tests.oracle import loss_of, stats_of
from tests.spellings import SPELLINGS
from treefx.passes.labels.laws import gradients
from treefx.passes.labels.laws.gradients import is_pointwise

VOCAB = 61


def batch_with_forks() -> Batch:
    return shared_batch(rows=4, length=12, shared=6, vocab=VOCAB, padding=None)


class Apply(nn.Module):
    """A module that is one function of the hidden states."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def model_with(after: nn.Module | Callable[[Tensor], Tensor]) -> nn.Module:
    module = after if isinstance(after, nn.Module) else Apply(after)
    return Small(SPELLINGS["sdpa_is_causal"], after=module).double()


def with_backward(backward: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """x tanh(x), with a backward that is a function of the gradient and x."""

    class Custom(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x.tanh()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return backward(grad, *ctx.saved_tensors)

    return Custom.apply  # type: ignore[no-any-return]


def overwritten(grad: Tensor, x: Tensor) -> Tensor:
    grad = grad.clone()
    grad[x < 0] = 0
    return grad


LINEAR: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "reversed": lambda g, x: -g,
    "scaled by a constant": lambda g, x: g * 0.3,
    "times a saved value": lambda g, x: g * x + 2 * g,
    "straight through inside of a range": lambda g, x: g * (x.abs() <= 1),
    "filled where a saved value says so": lambda g, x: g.masked_fill(x.abs() > 1, 0),
    "overwritten where a saved value says so": overwritten,
    "a branch by a saved value": lambda g, x: torch.where(x > 0, g, 0.1 * g),
    "zero in a branch": lambda g, x: torch.where(x > 0, g, torch.zeros_like(g)),
    "zero in a branch, as a constant": lambda g, x: torch.where(x > 0, g, torch.tensor(0.0, dtype=g.dtype)),
    "in place": lambda g, x: (g * 1).mul_(2).mul_(x),
    "divided by the number of rows": lambda g, x: g / x.shape[0],
    "a derivative of PyTorch's": torch.ops.aten.tanh_backward,
    "nothing": lambda g, x: None,
}
NOT_LINEAR: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "clipped": lambda g, x: g.clamp(-1e-3, 1e-3),
    "its sign": lambda g, x: g.sign(),
    "squared": lambda g, x: g * g,
    "a constant added": lambda g, x: g + 1e-3,
    "a saved value added": lambda g, x: g + 1e-3 * x,
    "bent": lambda g, x: g.tanh(),
    "rounded": lambda g, x: (g * 1e4).round(),
    "cut to integers": lambda g, x: (g * 1e4).long().double(),
    "divided and floored": lambda g, x: torch.div(g, 1e-3, rounding_mode="floor"),
    "a branch by its own sign": lambda g, x: torch.where(g > 0, g, 0.0),
    "another constant in a branch": lambda g, x: torch.where(x > 0, g, torch.tensor(1e-3, dtype=g.dtype)),
    "numbers made finite": lambda g, x: torch.nan_to_num(g, posinf=1.0),
    "whatever comes, ones": lambda g, x: torch.ones_like(g),
}


def side_by_side(functions: dict[str, Callable[[Tensor, Tensor], Any]]) -> nn.Module:
    """A model in which a function with each of the backwards reads the same hidden states."""
    parts = [with_backward(backward) for backward in functions.values()]
    return model_with(lambda x: x + sum(function(x) for function in parts))


def test_functions_with_a_linear_backward_stay_packed() -> None:
    """All of them in one graph; an error in a gradient or an expansion fails the whole."""
    batch = batch_with_forks()
    checked = compare(side_by_side(LINEAR), batch)
    assert_packed(checked, distinct_tokens(batch), layers=1)
    assert checked.stats["expansions"] == []


def test_functions_with_another_backward_run_on_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has them as one, as they stand on one line; the law judges each of them."""
    judged, original = list[bool](), gradients._is_linear
    monkeypatch.setattr(gradients, "_is_linear", lambda *given: judged.append(original(*given)) or judged[-1])
    stats = compare(side_by_side(NOT_LINEAR), batch_with_forks()).stats
    assert stats["attention_rewritten"] == 1
    assert any("not linear in the gradient" in item["reason"] for item in stats["expansions"])
    assert judged == [False] * len(NOT_LINEAR)


def test_linearity_is_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for linear, a clipped gradient is another one."""
    monkeypatch.setattr("treefx.passes.labels.laws.gradients._is_linear", lambda backward, gradients: True)
    with pytest.raises(AssertionError):
        compare(model_with(with_backward(lambda g, x: g.clamp(-2e-3, 1e-3))), batch_with_forks())


def test_function_that_normalises_over_features_runs_on_rows() -> None:
    stats = compare(model_with(with_backward(lambda g, x: g / (g.norm(dim=-1, keepdim=True) + 1))), batch_with_forks())
    assert any("mixes elements" in item["reason"] for item in stats.stats["expansions"])


class Dropped(Function):
    """Dropout whose mask the forward draws and the backward reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.rand_like(x) < 0.7
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (mask,) = ctx.saved_tensors
        return grad * mask


def test_function_that_draws_keeps_its_draw_for_the_backward() -> None:
    def step(model: nn.Module) -> Tensor:
        torch.manual_seed(3)
        return loss_of(batch_with_forks())(model)

    stats = compare(model_with(Dropped.apply), step).stats
    assert any("draws random numbers" in item["reason"] for item in stats["expansions"])


class Several(Function):
    """Numbers among the inputs, a size kept on the context, two outputs with gradients and one without."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, factor: float, both: bool) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.factor, ctx.length = factor, x.shape[1]
        size = x.abs()
        ctx.mark_non_differentiable(size)
        return x * y, (x + y) if both else x, size

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor, third: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return first * x * ctx.factor + second + third / ctx.length, second * 2, None, None


def test_functions_pack_every_shape() -> None:
    """From the second shape on, sizes are among the inputs and saved values of Dynamo's bodies."""
    model = model_with(lambda x: sum(Several.apply(x, x.sin(), 0.3, True)))
    compiled = compile_with(model)
    for rows, length in ((4, 12), (3, 14), (5, 10)):
        batch = shared_batch(rows=rows, length=length, shared=6, vocab=VOCAB, padding=None)
        model.zero_grad()
        loss_of(batch)(model).backward()
        expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        loss_of(batch)(compiled).backward()
        assert stats_of(compiled)["tokens"] == distinct_tokens(batch)
        assert stats_of(compiled)["expansions"] == []
        for name, p in model.named_parameters():
            if name in expected:
                assert p.grad is not None
                torch.testing.assert_close(p.grad, expected[name], rtol=1e-10, atol=1e-12)


def test_clipping_the_gradient_of_a_weight_stays_packed() -> None:
    """Its gradient is one sum over all tokens in any form, so that its backward may be anything."""

    clipped = with_backward(NOT_LINEAR["clipped"])

    class Clipped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, clipped(self.weight), self.bias)

    batch = batch_with_forks()
    assert_packed(compare(model_with(Clipped(32, 32)), batch), distinct_tokens(batch), layers=1)


class ByToken(nn.Module):
    """A model with one more embedding between blocks and head."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.model, self.table = model_with(nn.Identity()), nn.Embedding(VOCAB, 32, dtype=torch.float64, **options)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        self.model.after = Apply(lambda x: x + self.table(input_ids))
        return self.model(input_ids, attention_mask, labels)


def test_embeddings_that_count_nothing_stay_packed() -> None:
    """A padding index drops the gradient of its token, whether rows have that token or not."""
    batch = batch_with_forks()
    model = ByToken(padding_idx=int(batch.input_ids[0, 2]))
    model.model.embed = nn.Embedding(VOCAB, 32, dtype=torch.float64, padding_idx=0)
    assert_packed(compare(model, batch), distinct_tokens(batch), layers=1)


class Embeds(nn.Module):
    """A model whose tokens are looked up in a table with options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.model = model_with(nn.Identity())
        self.model.embed = nn.Embedding(VOCAB, 32, dtype=torch.float64, **options)

    def forward(self, **inputs: Tensor) -> Any:
        return self.model(**inputs)


@pytest.mark.parametrize("option", [{"scale_grad_by_freq": True}, {"max_norm": 1.0}], ids=str)
@pytest.mark.parametrize("where", [Embeds, ByToken])
def test_table_that_stands_in_the_way_is_named(where: type[nn.Module], option: dict[str, Any]) -> None:
    stats = compare(where(**option), batch_with_forks()).stats
    named = [item["reason"] for item in stats["expansions"]] + [stats["fallback"] or ""]
    assert any(next(iter(option)) in text for text in named), named
    if where is ByToken and "max_norm" not in option:
        assert stats["attention_rewritten"] == 1


def clip_hook(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return x


def unseen_clamp(x: Tensor) -> Tensor:
    y = x * 1
    with torch.no_grad():
        y.clamp_(-0.5, 0.5)
    return y


def clamp_of_detached(x: Tensor) -> Tensor:
    y = x * 1
    y.detach().clamp_(-0.5, 0.5)
    return y


@pytest.mark.parametrize(("function", "word"), [(unseen_clamp, "torch.no_grad"), (clamp_of_detached, "detach()")])
def test_gradients_that_a_graph_cannot_say_are_refused_by_name(function: Callable[[Tensor], Tensor], word: str) -> None:
    assert word in compare(model_with(function), batch_with_forks()).stats["fallback"]


def test_gradient_hooks_are_refused_by_name() -> None:
    """Dynamo of PyTorch 2.11 writes them as functions with a backward, which runs on rows for what it does."""
    stats = compare(model_with(clip_hook), batch_with_forks()).stats
    if TorchVersion(torch.__version__) < "2.13":
        assert any("not linear in the gradient" in item["reason"] for item in stats["expansions"])
    else:
        assert "register_hook" in stats["fallback"]


def test_a_trace_that_ends_inside_of_vmap_leaves_no_level_of_it() -> None:
    stats = compare(model_with(lambda x: torch.vmap(unseen_clamp)(x)), batch_with_forks()).stats
    assert "could not be traced" in stats["fallback"]
    assert torch._C._functorch.peek_interpreter_stack() is None


class Doubling(Function):
    """Its backward changes what the forward saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return grad * slope + grad * slope.mul_(2)


def test_backward_that_changes_a_saved_tensor_is_refused_by_name() -> None:
    assert "changes a saved tensor" in compare(model_with(Doubling.apply), batch_with_forks()).stats["fallback"]


def test_weight_that_the_forward_computes_is_refused_by_name() -> None:
    """By numbers alone it is changed before the graph (``general/test_parameter_changes``)."""

    class Squashed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.copy_(self.weight.tanh())
            return super().forward(x)

    assert "without its gradient" in compare(model_with(Squashed(32, 32)), batch_with_forks()).stats["fallback"]


def changed_in_place(x: Tensor) -> Tensor:
    y = x * 1
    y.mul_(2)
    with torch.no_grad():
        copy = y.clone()
        copy.clamp_(-1, 1)
    return y + copy


def rounded_straight_through(x: Tensor) -> Tensor:
    y = x.tanh()
    return y + (y.round() - y).detach()


def test_gradients_that_a_graph_can_say_stay_packed() -> None:
    batch = batch_with_forks()
    parts = (changed_in_place, rounded_straight_through, lambda x: torch.lerp(x, x.sin(), x))
    checked = compare(model_with(lambda x: sum(part(x) for part in parts)), batch)
    assert_packed(checked, distinct_tokens(batch), layers=1)
    assert checked.stats["expansions"] == []


def test_operator_of_another_library_that_says_it_is_pointwise_runs_on_rows() -> None:
    """Nothing is known of its backward."""
    library = torch.library.Library("treefx_test", "FRAGMENT")
    library.define("clip(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
    library.impl("clip", lambda x: x.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake("treefx_test::clip", torch.empty_like, lib=library)
    torch.library.register_autograd("treefx_test::clip", lambda ctx, grad: grad.clamp(-1e-3, 1e-3), lib=library)
    assert not is_pointwise(torch.ops.treefx_test.clip.default)
    stats = compare(model_with(torch.ops.treefx_test.clip), batch_with_forks()).stats
    assert any("treefx_test.clip" in item["op"] for item in stats["expansions"])
