"""verl's actor update in one process on the CPU: arguments MODEL CHATS OUTPUT.

verl's own engine (FSDP2), micro-batches, log-probabilities, entropies and loss, as its workers call them after a
rollout: eight random answers to each of some prompts, in random order. verl knows no CPU, so a platform for it is
registered as its plugins do.
"""

import contextlib
import json
import os
import random
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

os.environ["VERL_PLATFORM"] = "cpu"

import torch
from tensordict import TensorDict
from torch import distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from treefx.tools.bench.trainers.programs.log import write_log

__all__ = ["train"]

_ANSWERS, _STEPS, _ROWS_PER_MICRO_BATCH = 8, 3, 6


@PlatformRegistry.register(platform="cpu")
class _Cpu(PlatformBase):  # type: ignore[misc]
    device_name = vendor_name = "cpu"
    device_module = torch.cpu

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {}

    def is_ipc_supported(self) -> bool:
        return False

    def _nothing(self, *given: Any) -> None:
        """Do nothing: a CPU has no streams, caches or profiler."""

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing


def train(model: Path, chats: Path, output: Path) -> None:
    """Run a few optimizer steps; write losses, norms and sharing to ``output``."""
    from verl.utils import tensordict_utils
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import response_from_nested

    engine = _engine(str(model))
    data, longest = _rollouts(engine.model_config.tokenizer, chats)
    tensordict_utils.assign_non_tensor(
        data, use_dynamic_bsz=True, max_token_len_per_gpu=longest * _ROWS_PER_MICRO_BATCH, temperature=0.9,
        global_batch_size=len(data), calculate_entropy=True,
    )  # fmt: skip
    with engine.eval_mode():
        found = engine.infer_batch(data)
    data["old_log_probs"] = response_from_nested(found["model_output"]["log_probs"], data["response_mask"])
    config = ActorConfig(
        strategy="fsdp2", rollout_n=_ANSWERS, ppo_mini_batch_size=len(data), use_dynamic_bsz=True, entropy_coeff=0.01
    )
    log: list[dict[str, float]] = []
    for _ in range(_STEPS):
        with engine.train_mode():
            found = engine.train_batch(data, partial(ppo_loss, config))
        log.append(_entry(found))
    write_log(output, log)


def _engine(path: str) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = FSDPEngineWithLMHead(
        model_config=HFModelConfig(path=path, override_config={"attn_implementation": "sdpa"}),
        engine_config=FSDPEngineConfig(strategy="fsdp2", mixed_precision=precision),
        optimizer_config=FSDPOptimizerConfig(lr=1e-4),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def _rollouts(tokenizer: Any, chats: Path) -> tuple[TensorDict, int]:
    """Rows as verl's rollout workers hand them over, and the length of the longest."""
    draw = random.Random(7)
    lines = chats.read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["messages"][:-1] for line in lines[::_ANSWERS]]
    rows: list[tuple[list[int], list[int]]] = []
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
        answers = [[draw.randrange(3, len(tokenizer)) for _ in range(draw.randrange(8, 64))] for _ in range(_ANSWERS)]
        rows += [(ids, answer) for answer in answers]
    draw.shuffle(rows)
    fields: dict[str, list[Any]] = {
        "prompts": [prompt for prompt, _ in rows],
        "responses": [answer for _, answer in rows],
        "input_ids": [prompt + answer for prompt, answer in rows],
        "position_ids": [list(range(len(prompt) + len(answer))) for prompt, answer in rows],
        "response_mask": [[1] * len(answer) for _, answer in rows],
        "loss_mask": [[1] * len(answer) for _, answer in rows],
        "advantages": [[draw.gauss(0, 1)] * len(answer) for _, answer in rows],
    }
    data = TensorDict({name: _nested(values) for name, values in fields.items()}, batch_size=[len(rows)])
    return data, max(len(prompt) + len(answer) for prompt, answer in rows)


def _nested(values: list[Any]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(value) for value in values], layout=torch.jagged)


def _entry(found: Any) -> dict[str, float]:
    """A step's figures under the names of transformers' trainer."""
    shared = {name: float(value[0]) for name, value in found["metrics"].items() if name.startswith("treefx/")}
    more = {"treefx/compiles": 0.0, "treefx/fallback": 0.0} if shared else {}
    return {"loss": float(sum(found["loss"])), "grad_norm": float(found["metrics"]["grad_norm"]), **shared, **more}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        train(*(Path(path) for path in sys.argv[1:4]))
        distributed.destroy_process_group()
