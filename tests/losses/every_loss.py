"""Every loss of `treefx.losses`, with what it is given, on one forest: those over edges, and those over whole rows."""

import random
from typing import Any

import torch
from torch import Tensor

import treefx
from tests.backend.native import rollouts
from tests.planning.parts import Loss
from treefx import losses

__all__ = ["ADVANTAGES", "FOREST", "OLD", "OLD_ROWS", "PAIRS", "REF", "ROWS", "SUMS", "WEIGHTS", "WHOLE_ROWS"]

ROWS = rollouts()
_DRAW = random.Random(1)
WEIGHTS = [[_DRAW.choice([0.0, 1.0, 1.0, 2.5]) for _ in row[:-1]] + [1.0] for row in ROWS]
FOREST = treefx.Forest.from_sequences(ROWS, WEIGHTS)
LONG = [number for number, row in enumerate(ROWS) if len(row) > 1]
PAIRS = list(zip(LONG, LONG[1:]))


def drawn(seed: int, shape: Any) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


ADVANTAGES = drawn(0, len(FOREST))
STEPS = [torch.arange(len(row)) // 3 for row in ROWS]
OLD = -4 + 0.3 * drawn(1, len(FOREST.edges))
REF = -4 + 0.3 * drawn(2, len(FOREST.edges))
OLD_ROWS = [-4 + 0.3 * drawn(10 + number, len(row)) for number, row in enumerate(ROWS)]
IMPORTANCE = losses.importance_weights(OLD, OLD_ROWS, FOREST, (0.5, 1.5))
PROMPTS = [number % 3 for number in range(len(ROWS))]

SUMS: dict[str, Loss] = {
    "sft": lambda logp, f: losses.sft(logp, f, losses.PromptMean(PROMPTS)),
    "policy_gradient": lambda logp, f: losses.policy_gradient(logp, f, ADVANTAGES, importance=IMPORTANCE),
    "clipped": lambda logp, f: losses.clipped(logp, f, OLD, ADVANTAGES, (0.1, 0.3), "row_mean", dual_clip=1.4),
    "clipped_by_row": lambda logp, f: losses.clipped(logp, f, OLD_ROWS, ADVANTAGES, 0.1, losses.Constant(9)),
    "on_policy": lambda logp, f: losses.clipped(logp, f, None, ADVANTAGES),
    "cispo": lambda logp, f: losses.cispo(logp, f, OLD, ADVANTAGES),
    "kl": lambda logp, f: losses.kl(logp, f, REF, "k3", old_logp=OLD_ROWS),
    "clipped_and_kl": lambda logp, f: losses.clipped(logp, f, OLD, ADVANTAGES) + 0.1 * losses.kl(logp, f, REF, "k2"),
}
WHOLE_ROWS: dict[str, Loss] = {
    "sequence": lambda logp, f: losses.clipped(logp, f, OLD, ADVANTAGES, 0.1, "row_mean", level="sequence"),
    "sequence_token": lambda logp, f: losses.clipped(logp, f, OLD_ROWS, ADVANTAGES, 0.1, level="sequence_token"),
    "steps": lambda logp, f: losses.clipped(logp, f, OLD, ADVANTAGES, 0.1, level="sequence", groups=STEPS),
    "cispo_of_sequences": lambda logp, f: losses.cispo(logp, f, OLD, ADVANTAGES, level="sequence"),
    "dpo": lambda logp, f: losses.dpo(logp, f, REF, PAIRS),
    "ipo": lambda logp, f: losses.ipo(logp, f, REF, PAIRS),
    "simpo": lambda logp, f: losses.simpo(logp, f, PAIRS),
    "orpo": lambda logp, f: losses.orpo(logp, f, PAIRS),
    "kto": lambda logp, f: losses.kto(logp, f, REF, [n % 2 == 0 for n in range(len(ROWS))], kl_rows=[LONG[0]]),
    "dpo_and_sft": lambda logp, f: losses.sft(logp, f, "row_mean") + losses.dpo(logp, f, REF, PAIRS),
}
