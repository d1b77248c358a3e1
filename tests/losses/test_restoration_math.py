"""Where the gradient must be scaled: the one right place against separate rows, and every wrong one.

The model, its mask and the scale are written out here in plain torch; only the forest comes from treefx. A
suite that accepted one of the wrong variants would accept a broken backend.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from tests.reference_model import ReferenceModel, causal_visibility, tree_visibility
from treefx import Forest, edge_logprobs, losses

EXACT = 1e-12
WRONG = 1e-3
ROWS = [
    [1, 2, 3, 4, 5, 6, 7, 8, 9],
    [1, 2, 3, 4, 5, 6, 7, 8, 10, 11],
    [1, 2, 3, 4, 5, 12, 13, 14],
    [1, 2, 3, 4, 5, 12, 13, 14],
    [1, 2, 3, 4, 5, 12, 13, 15, 16],
    [1, 2, 3, 4],
    [20, 21, 22, 23, 24],
    [20, 21, 25],
]
Gradients = torch.Tensor


@dataclass(frozen=True)
class Setting:
    """A model, its forest and the gradients of separate rows."""

    model: ReferenceModel
    forest: Forest
    expected_loss: torch.Tensor
    expected: Gradients

    def error(self, gradients: Gradients) -> float:
        """Relative error over all parameter gradients together."""
        return float((gradients - self.expected).norm() / self.expected.norm())


def gradients_of(model: ReferenceModel, loss: torch.Tensor) -> Gradients:
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))])


def row_logp(model: ReferenceModel, row: torch.Tensor) -> torch.Tensor:
    """Log-prob of every token but the first of one row, alone."""
    logits = model(row, torch.arange(len(row)), causal_visibility(len(row)))
    return logits[:-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]


def separate_loss(model: ReferenceModel, rows: list[torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
    terms = [-(weight[1:] * row_logp(model, row)).sum() for row, weight in zip(rows, weights, strict=True)]
    return torch.stack(terms).sum()


@pytest.fixture(params=["ones", "fractions"])
def setting(request: pytest.FixtureRequest) -> Setting:
    torch.manual_seed(0)
    model = ReferenceModel()
    weights = [torch.ones(len(row), dtype=torch.float64) for row in ROWS]
    if request.param == "fractions":
        weights = [0.2 + torch.rand(len(row), dtype=torch.float64) for row in ROWS]
    forest = Forest.from_sequences(ROWS, weights)
    loss = separate_loss(model, forest.sequences(), weights)
    return Setting(model, forest, loss.detach(), gradients_of(model, loss))


def packed_logp(
    setting: Setting,
    positions: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
    hook: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Log-probs [E] of the packed row, under the tree's positions and mask where none are given."""
    forest = setting.forest
    logits = setting.model(
        forest.tokens,
        forest.depth if positions is None else positions,
        tree_visibility(forest.subtree_end) if visible is None else visible,
        hook,
    )
    return logits.log_softmax(-1)[forest.edges.source, forest.edges.token]


def loss_error(setting: Setting, logp: torch.Tensor, scale: torch.Tensor) -> float:
    return setting.error(gradients_of(setting.model, -(scale * logp).sum()))


def scale_backward(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Leave the value and multiply the gradient by a number per token."""
    scaled = x * scale[:, None]
    return scaled + (x - scaled).detach()


def source_scale(forest: Forest) -> torch.Tensor:
    """[N], what all edges out of a token weigh together; 0 where nothing is predicted."""
    return torch.zeros(forest.num_tokens).double().index_add(0, forest.edges.source, forest.edges.weight)


def test_scale_per_edge_by_the_targets_weight_is_exact(setting: Setting) -> None:
    assert loss_error(setting, packed_logp(setting), setting.forest.edges.weight) <= EXACT


def test_backward_only_scale_per_edge_has_exact_gradients_and_another_value(setting: Setting) -> None:
    logp = packed_logp(setting)
    loss = -scale_backward(logp[:, None], setting.forest.edges.weight).sum()
    assert setting.error(gradients_of(setting.model, loss)) <= EXACT
    assert abs(float(loss.detach() / setting.expected_loss) - 1) > WRONG


def test_public_functions_are_exact_in_value_and_gradient(setting: Setting) -> None:
    forest = setting.forest
    logits = setting.model(forest.tokens, forest.depth, tree_visibility(forest.subtree_end))
    loss = losses.sft(edge_logprobs(logits, forest), forest)
    assert abs(float(loss.detach() / setting.expected_loss) - 1) <= EXACT
    assert setting.error(gradients_of(setting.model, loss)) <= EXACT


def test_no_scale_is_wrong(setting: Setting) -> None:
    assert loss_error(setting, packed_logp(setting), torch.ones(len(setting.forest.edges))) > WRONG


def test_scale_by_the_source_at_forks_is_wrong(setting: Setting) -> None:
    edges = setting.forest.edges
    children = torch.bincount(edges.source, minlength=setting.forest.num_tokens)[edges.source]
    scale = torch.where(children > 1, source_scale(setting.forest)[edges.source], edges.weight)
    assert loss_error(setting, packed_logp(setting), scale) > WRONG


def test_scale_on_the_final_hidden_state_only_is_wrong(setting: Setting) -> None:
    scale = source_scale(setting.forest)

    def hook(name: str, x: torch.Tensor) -> torch.Tensor:
        return scale_backward(x, scale) if name == "final" else x

    assert loss_error(setting, packed_logp(setting, hook=hook), torch.ones(len(setting.forest.edges))) > WRONG


def test_scale_on_every_blocks_output_is_wrong(setting: Setting) -> None:
    scale = setting.forest.multiplicity.double()

    def hook(name: str, x: torch.Tensor) -> torch.Tensor:
        return scale_backward(x, scale) if name == "block" else x

    assert loss_error(setting, packed_logp(setting, hook=hook), setting.forest.edges.weight) > WRONG


def test_packed_positions_are_wrong(setting: Setting) -> None:
    positions = torch.arange(setting.forest.num_tokens)
    assert loss_error(setting, packed_logp(setting, positions=positions), setting.forest.edges.weight) > WRONG


def test_plain_causal_mask_is_wrong(setting: Setting) -> None:
    visible = causal_visibility(setting.forest.num_tokens)
    assert loss_error(setting, packed_logp(setting, visible=visible), setting.forest.edges.weight) > WRONG


@dataclass(frozen=True)
class PolicySetting:
    """Advantages of both signs on shared edges, old log-probs off the clip range, gradients of rows alone."""

    setting: Setting
    old_logp: torch.Tensor
    advantages: torch.Tensor
    expected: Gradients


@pytest.fixture
def policy_setting(setting: Setting) -> PolicySetting:
    forest, model = setting.forest, setting.model
    advantages = torch.tensor([1.5, -1.0, 0.8, -0.6, 0.3, 1.0, -1.2, 0.7], dtype=torch.float64)
    old_logp = packed_logp(setting).detach() + 0.3 * torch.randn(len(forest.edges), dtype=torch.float64)
    by_token = torch.zeros(forest.num_tokens, dtype=torch.float64)
    by_token[forest.edges.target] = old_logp
    loss = torch.zeros((), dtype=torch.float64)
    for number, (row, index) in enumerate(zip(forest.sequences(), forest.token_of, strict=True)):
        ratio = (row_logp(model, row) - by_token[index[1:]]).exp()
        weight = torch.split(forest.raw_weight, forest.row_lengths.tolist())[number][1:]
        gain = torch.minimum(ratio * advantages[number], ratio.clamp(0.8, 1.2) * advantages[number])
        loss = loss - (weight * gain).sum()
    return PolicySetting(setting, old_logp, advantages, gradients_of(model, loss))


def policy_error(given: PolicySetting, loss: torch.Tensor) -> float:
    gradients = gradients_of(given.setting.model, loss)
    return float((gradients - given.expected).norm() / given.expected.norm())


def test_policy_loss_with_split_advantages_is_exact(policy_setting: PolicySetting) -> None:
    logp = packed_logp(policy_setting.setting)
    loss = losses.policy(
        logp, policy_setting.setting.forest, policy_setting.old_logp, policy_setting.advantages, 0.2, "sum"
    )
    assert policy_error(policy_setting, loss) <= EXACT


def test_policy_loss_with_the_summed_advantage_is_wrong(policy_setting: PolicySetting) -> None:
    edges = policy_setting.setting.forest.edges
    summed = edges.sum_entries(edges.row_weight * policy_setting.advantages[edges.row_index])
    ratio = (packed_logp(policy_setting.setting) - policy_setting.old_logp).exp()
    loss = -torch.minimum(ratio * summed, ratio.clamp(0.8, 1.2) * summed).sum()
    assert policy_error(policy_setting, loss) > WRONG
