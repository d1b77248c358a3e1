"""TRL's own loss code as a second oracle: its trainers' methods, called on separate rows."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.losses.textbook import Batch, Values, assert_equal, row_logprobs, value_and_grad
from tests.trainers.support import NEEDS_TRAINERS
from treefx import edge_entropy, edge_logprobs, losses

pytest.importorskip("trl", reason=NEEDS_TRAINERS)

from trl.experimental.cpo.cpo_trainer import CPOTrainer  # noqa: E402
from trl.experimental.orpo.orpo_trainer import ORPOTrainer  # noqa: E402
from trl.trainer.dpo_trainer import DPOTrainer  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402
from trl.trainer.kto_trainer import KTOTrainer  # noqa: E402

ROWS = [
    [1, 2, 3, 4, 5, 6],
    [1, 2, 3, 4, 7],
    [1, 2, 3, 8, 9, 10, 11],
    [1, 2, 12, 13],
    [1, 2, 3, 4, 5, 14],
    [1, 2, 3, 8, 15],
]
TOOLS = [[0, 0, 1, 1, 0, 1], [0, 0, 1, 1, 1], [0, 0, 1, 0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 1, 0, 1]]
BATCH = Batch(ROWS, [[float(w) for w in row] for row in TOOLS], 7)
FOREST, LOGITS = BATCH.forest, BATCH.logits
ADVANTAGES = [1.0, -0.8, 0.4, -1.3, 0.0, 0.6]
PAIRS = [(0, 3), (1, 4), (2, 5)]
"""TRL: the first half is chosen, the second rejected."""
PREFIX = 2
"""Tokens of the prompt, which all rows share."""


def pad(values: Any, start: int = 0) -> Tensor:
    """Rows [B, T] from column `start` on, 0 behind their ends."""
    rows = [torch.as_tensor(row)[start:] for row in values]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # type: ignore[no-any-return]


ACCELERATOR = SimpleNamespace(
    device="cpu",
    num_processes=1,
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    reduce=lambda x, reduction: x,
)
METRICS: Any = {"train": defaultdict(list)}


@pytest.fixture(autouse=True)
def _no_metrics() -> None:
    METRICS["train"].clear()


def check(packed: Any, theirs: Any, tolerance: float = 1e-10) -> None:
    """Loss and gradient of ours on edges, and of TRL's on rows."""
    assert_equal(value_and_grad(packed, LOGITS), value_and_grad(theirs, LOGITS), tolerance)


# Policies -------------------------------------------------------------------------------------------------------------


def grpo(x: Tensor, old: Values, ref: Values, importance: Values | None = None, **changes: Any) -> Tensor:
    """`GRPOTrainer._compute_loss` on rows whose log-probabilities come from `x`."""
    drop = PREFIX - 1  # log-probabilities of the first token that is predicted stand in column 0
    entropies = [torch.distributions.Categorical(logits=x[0, index[:-1]]).entropy() for index in FOREST.token_of]
    found = (pad(row_logprobs(x, FOREST), drop), pad(entropies, drop).detach(), None)
    mask = pad([torch.ones(len(row), dtype=torch.int64) for row in ROWS], PREFIX)
    inputs = {
        "prompt_ids": pad(ROWS)[:, :PREFIX],
        "prompt_mask": torch.ones(len(ROWS), PREFIX),
        "completion_ids": pad(ROWS, PREFIX),
        "completion_mask": mask,
        "tool_mask": pad(TOOLS, PREFIX),
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "old_per_token_logps": pad(old, drop),
        "ref_per_token_logps": pad(ref, drop),
        "num_items_in_batch": torch.tensor(sum(map(sum, TOOLS))),
    }
    if importance is not None:
        inputs["importance_sampling_ratio"] = pad(importance, PREFIX)
    settings = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.1,
        "epsilon_high": 0.28,
        "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        "use_vllm": importance is not None,
        **changes,
    }
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: found,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=9,
        accelerator=ACCELERATOR,
        _entropy_bonus_enabled=False,
        _metrics=METRICS,
        **settings,
    )
    return GRPOTrainer._compute_loss(trainer, None, inputs)  # type: ignore[no-any-return]


NORMS: dict[str, losses.Reduction] = {
    "grpo": "row_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": losses.Constant(9),
}


@pytest.mark.parametrize("per_edge", [True, False])
@pytest.mark.parametrize("kind", list(NORMS))
def test_reductions_of_grpo(kind: str, per_edge: bool) -> None:
    old, old_rows = BATCH.policy(2, per_edge)
    metrics = losses.Metrics()

    def packed(x: Tensor) -> Tensor:
        metrics.clear()
        logp = edge_logprobs(x, FOREST)
        return losses.clipped(logp, FOREST, old, ADVANTAGES, (0.1, 0.28), NORMS[kind], metrics=metrics)

    check(packed, lambda x: grpo(x, old_rows, old_rows, loss_type=kind))
    losses.entropy(edge_entropy(LOGITS, FOREST), FOREST, metrics=metrics)
    theirs = {name: value for name, (value,) in METRICS["train"].items() if name in metrics.means()}
    assert len(theirs) == 4 and theirs["clip_ratio/low_mean"] > 0 and theirs["clip_ratio/high_mean"] > 0
    assert {name: metrics.means()[name] for name in theirs} == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("biased", [True, False])
def test_divergence_of_grpo(biased: bool) -> None:
    (old, old_rows), (ref, ref_rows) = BATCH.policy(2, True), BATCH.policy(3, True)
    args = SimpleNamespace(delta=None, use_bias_correction_kl=not biased, steps_per_generation=1)

    def packed(x: Tensor) -> Tensor:
        logp = edge_logprobs(x, FOREST)
        divergence = losses.kl(logp, FOREST, ref, "k3", "row_mean", old_logp=None if biased else old)
        return losses.clipped(logp, FOREST, old, ADVANTAGES, (0.1, 0.28), "row_mean") + 0.3 * divergence

    check(packed, lambda x: grpo(x, old_rows, ref_rows, beta=0.3, args=args))


def test_two_sided_clip_of_grpo() -> None:
    old, old_rows = BATCH.policy(2, False)
    args = SimpleNamespace(delta=1.3, use_bias_correction_kl=False, steps_per_generation=1)
    check(
        lambda x: losses.clipped(
            edge_logprobs(x, FOREST), FOREST, old, ADVANTAGES, (0.1, 0.28), "row_mean", dual_clip=1.3
        ),
        lambda x: grpo(x, old_rows, old_rows, args=args),
    )


def test_sequence_ratios_of_gspo() -> None:
    old, old_rows = BATCH.policy(2, False)
    metrics = losses.Metrics()

    def packed(x: Tensor) -> Tensor:
        metrics.clear()
        logp = edge_logprobs(x, FOREST)
        return losses.clipped(logp, FOREST, old, ADVANTAGES, (0.05, 0.1), "row_mean", level="sequence", metrics=metrics)

    changes = {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.1}
    check(packed, lambda x: grpo(x, old_rows, old_rows, **changes))
    theirs = {name: value for name, (value,) in METRICS["train"].items() if name in metrics.means()}
    assert theirs["clip_ratio/region_mean"] > 0
    assert {name: metrics.means()[name] for name in theirs} == pytest.approx(theirs, rel=1e-6)


def test_clipped_weights_of_cispo() -> None:
    old, old_rows = BATCH.policy(2, True)
    check(
        lambda x: losses.cispo(edge_logprobs(x, FOREST), FOREST, old, ADVANTAGES, (1.0, 0.2)),
        lambda x: grpo(x, old_rows, old_rows, loss_type="cispo", epsilon_high=1.2),
    )


def test_importance_weights_of_another_engine() -> None:
    (old, old_rows), (sampled, _) = BATCH.policy(2, True), BATCH.policy(3, False)
    factors = losses.importance_weights(old, sampled, FOREST, (0.0, 1.1))
    check(
        lambda x: losses.clipped(
            edge_logprobs(x, FOREST), FOREST, old, ADVANTAGES, (0.1, 0.28), "row_mean", importance=factors
        ),
        lambda x: grpo(x, old_rows, old_rows, factors),
    )


# Preferences ----------------------------------------------------------------------------------------------------------


def sums(values: Values) -> Tensor:
    return torch.stack([(mask * value).sum() for mask, value in zip(BATCH.masks, values, strict=True)])


def means(values: Values) -> Tensor:
    return sums(values) / torch.stack([mask.sum() for mask in BATCH.masks])


def outputs(x: Tensor) -> SimpleNamespace:
    """What TRL's fused heads return: log-probabilities, 0 where there is no label."""
    logp = pad([p * m for p, m in zip(row_logprobs(x, FOREST), BATCH.masks, strict=True)])
    return SimpleNamespace(log_probs=logp, entropy=logp, mean_logits=logp, is_top1=logp > 0)


SETTINGS = {
    "model": SimpleNamespace(training=True),
    "accelerator": ACCELERATOR,
    "aux_loss_enabled": False,
    "precompute_ref_logps": True,
    "beta": 0.3,
    "_metrics": METRICS,
    "_total_train_tokens": 0,
    "_tp_size": 1,
}
INPUTS = {
    "input_ids": pad(ROWS),
    "attention_mask": pad([torch.ones(len(row)) for row in ROWS]),
    "completion_mask": pad(TOOLS),
}
CHOSEN, REJECTED = slice(0, 3), slice(3, 6)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_dpo_and_ipo(kind: str) -> None:
    ref, ref_rows = BATCH.policy(2, False)
    reference = sums(ref_rows)
    ours = {"sigmoid": losses.dpo, "ipo": losses.ipo}[kind]
    metrics = losses.Metrics()

    def packed(x: Tensor) -> Tensor:
        metrics.clear()
        return ours(edge_logprobs(x, FOREST), FOREST, ref, PAIRS, 0.3, metrics=metrics)

    def theirs(x: Tensor) -> Tensor:
        trainer = SimpleNamespace(
            **SETTINGS,
            ld_alpha=None,
            f_divergence_type="reverse_kl",
            loss_types=[kind],
            loss_weights=[1.0],
            label_smoothing=0.0,
            use_weighting=False,
        )
        given = {**INPUTS, "ref_chosen_logps": reference[CHOSEN], "ref_rejected_logps": reference[REJECTED]}
        return DPOTrainer._compute_loss(trainer, lambda **_: outputs(x), given, False)  # type: ignore[no-any-return]

    check(packed, theirs)
    assert metrics.means() == pytest.approx({name: METRICS["train"][name][0] for name in metrics.means()}, rel=1e-6)


def test_kto() -> None:
    ref, ref_rows = BATCH.policy(2, True)
    mismatched, judged = [1, 4], [0, 2, 3, 5]
    good = [True, False, False, True, False, True]
    metrics = losses.Metrics()

    def packed(x: Tensor) -> Tensor:
        metrics.clear()
        logp = edge_logprobs(x, FOREST)
        return losses.kto(
            logp, FOREST, ref, good, 0.3, kl_rows=mismatched, desirable_weight=1.2, undesirable_weight=0.9,
            metrics=metrics,
        )  # fmt: skip

    def theirs(x: Tensor) -> Tensor:
        policy, reference = sums(row_logprobs(x, FOREST)), sums(ref_rows)
        trainer = SimpleNamespace(
            **SETTINGS,
            calculate_KL=True,
            loss_type="kto",
            desirable_weight=1.2,
            undesirable_weight=0.9,
            _compute_kl_logps=lambda model, batch: policy[mismatched].detach(),
        )
        given = {name: value[judged] for name, value in INPUTS.items()}
        given |= {"label": torch.tensor(good)[judged], "ref_logps": reference[judged]}
        given["ref_KL_logps"] = reference[mismatched]
        whole = outputs(x)
        rows = SimpleNamespace(**{name: value[judged] for name, value in vars(whole).items()})
        return KTOTrainer._compute_loss(trainer, lambda **_: rows, given, False)  # type: ignore[no-any-return]

    check(packed, theirs)
    assert metrics.means() == pytest.approx({name: METRICS["train"][name][0] for name in metrics.means()}, rel=1e-6)


def test_simpo() -> None:
    trainer = SimpleNamespace(
        alpha=0.0, beta=2.0, simpo_gamma=0.5, label_smoothing=0.1, loss_type="simpo", accelerator=ACCELERATOR
    )

    def theirs(x: Tensor) -> Tensor:
        mean = means(row_logprobs(x, FOREST))
        return CPOTrainer.cpo_loss(trainer, mean[CHOSEN], mean[REJECTED])[0].mean()  # type: ignore[no-any-return]

    check(
        lambda x: losses.simpo(edge_logprobs(x, FOREST), FOREST, PAIRS, 2.0, 0.5, label_smoothing=0.1),
        theirs,
    )


def test_odds_ratios_of_orpo_which_trl_computes_in_float32() -> None:
    trainer = SimpleNamespace(beta=0.2, accelerator=ACCELERATOR)

    def theirs(x: Tensor) -> Tensor:
        mean = means(row_logprobs(x, FOREST))
        return -ORPOTrainer.odds_ratio_loss(trainer, mean[CHOSEN], mean[REJECTED])[0].mean().double()

    check(
        lambda x: losses.orpo(edge_logprobs(x, FOREST), FOREST, PAIRS, 0.2, nll=None),
        theirs,
        1e-5,
    )
