"""A tiny GPTModel of Megatron-Core on the CPU, in float64, and its calls as engines write them."""

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "EXPERTS",
    "KINDS",
    "VOCABULARY",
    "Outcome",
    "Wrapper",
    "differ",
    "gradients",
    "model",
    "nll",
    "one_rank",
    "packed",
    "padded",
    "regroup",
    "rows_of",
    "separately",
    "sequences",
    "start",
    "stop",
]

VOCABULARY = 32
Put = Callable[[Any, str, Any], Any]
"""Sets an attribute."""
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16, "moe_aux_loss_coeff": 0.0,
    "moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none",
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": EXPERTS,
    "losses of experts": {
        **EXPERTS, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.3, 0.2, 0.1], "moe_z_loss_coeff": 0.1,
    },
    "latent": {"multi_latent_attention": True},
    "latent, YaRN": {"multi_latent_attention": True, "rope_type": "yarn"},
    "window": {"window_size": (3, 0)},
    "core recomputed": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "layer scaling": {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True, "num_layers": 2},
    "sinks": {"softmax_type": "learnable"},
    "learned positions": {"position_embedding_type": "learned_absolute"},
    "recomputed": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1, **EXPERTS,
        "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3,
    },
}  # fmt: skip


class _InDouble(types.ModuleType):
    """``torch`` for a module that computes in float32 whatever it is given."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def start(rank: int = 0, world: int = 1, port: int = 0, put: Put = setattr) -> None:
    """Initialize ranks, and replace what in Megatron is written for CUDA devices alone or rounds to float32.

    Args:
        put: As ``setattr``.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import cross_entropy, random
    from megatron.core.transformer import multi_latent_attention, torch_norm, utils
    from megatron.core.transformer.moe import moe_utils

    alone = torch.distributed.HashStore()
    store = alone if world == 1 else torch.distributed.TCPStore("127.0.0.1", port, world, rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    put(torch.cuda, "current_device", lambda: torch.device("cpu"))
    put(random.CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext())
    put(random, "_get_all_rng_states", tuple)
    put(random, "_set_all_rng_states", lambda *_: None)
    put(torch_norm.WrappedTorchNorm, "__new__", _make_norm)
    put(utils, "torch", _OnCpu("torch"))
    put(schedules, "torch", _OnCpu("torch"))
    put(torch.distributed, "all_to_all_single", _all_to_all)
    put(torch.cuda, "synchronize", lambda: None)
    put(torch.cuda, "Stream", lambda: _STREAM)
    put(torch.cuda, "current_stream", lambda: _STREAM)
    put(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    put(moe_utils, "torch", _InDouble("torch"))
    put(moe_utils, "te_general_gemm", None)  # 0.16 reads these two where Transformer Engine is missing
    put(multi_latent_attention, "TELinear", type("TELinear", (), {}))
    put(cross_entropy.VocabParallelCrossEntropy, "calculate_logits_max", staticmethod(_logits_max))
    parallel_state.initialize_model_parallel()


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Start in this process, and leave PyTorch and Megatron as they were."""
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    get_moe_layer_wise_logging_tracker().clear()  # of as many layers as the first model that counted losses had
    with pytest.MonkeyPatch.context() as patch:
        start(put=partial(patch.setattr, raising=False))
        try:
            yield
        finally:
            stop()


def regroup(**sizes: int) -> None:
    """Make groups of other sizes, as ``parallel_state.initialize_model_parallel`` takes them."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


def stop() -> None:
    """Destroy the groups."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


_exchange = torch.distributed.all_to_all_single


def _all_to_all(out: Tensor, given: Tensor, output_split_sizes: Any, input_split_sizes: Any, **others: Any) -> Any:
    """By sizes that Megatron has as tensors where they do not come from a device."""
    out_sizes, sizes = ([int(x) for x in found] for found in (output_split_sizes, input_split_sizes))
    return _exchange(out, given, out_sizes, sizes, **others)


class _Stream:
    """The only one."""

    def synchronize(self) -> None:
        pass

    def record_event(self) -> "_Stream":
        return self


_STREAM = _Stream()


class _OnCpu(types.ModuleType):
    """``torch`` for a module that names the device of what it makes."""

    def __getattr__(self, name: str) -> Any:
        make = getattr(torch, name)
        return (lambda *sizes, device=None, **more: make(*sizes, **more)) if name in ("ones", "zeros") else make


def _logits_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits.clone(), logits.max(-1).values


def _make_norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, *_: Any, **__: Any) -> Any:
    norm = torch.nn.RMSNorm(hidden_size, eps=eps)
    norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


TINY: dict[str, Any] = {
    "num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 16, "use_cpu_initialization": True,
    "params_dtype": torch.float64, "pipeline_dtype": torch.float64, "normalization": "RMSNorm", "qk_layernorm": True,
    "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False, "attention_dropout": 0.0,
    "hidden_dropout": 0.0, "attention_softmax_in_fp32": False, "bias_activation_fusion": False, "init_method_std": 0.3,
    "bias_dropout_fusion": False, "masked_softmax_fusion": False, "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 4, "qk_pos_emb_head_dim": 4, "v_head_dim": 4,
    "rope_type": "rope",
}  # fmt: skip
OF_MODEL: dict[str, Any] = {
    "pre_process": True, "post_process": True, "parallel_output": False, "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False,
}  # fmt: skip


def model(spec: str = "local", dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Build it of local layers or of Transformer Engine's, with the same weights every time."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    of_model = {name: options.pop(name, value) for name, value in OF_MODEL.items()}
    latent = options.get("multi_latent_attention", False)
    sizes = LATENT if latent else {"num_query_groups": 2}
    torch.manual_seed(0)
    config = (MLATransformerConfig if latent else TransformerConfig)(**{**TINY, **sizes, **options})
    experts = options.get("num_moe_experts")
    if spec == "local":
        layers = gpt_layer_specs.get_gpt_layer_local_spec(experts, None, True, latent, normalization="RMSNorm")
    else:
        layers = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(experts, None, True, latent)
    if latent:
        layers.submodules.self_attention.submodules.core_attention = _latent_core()
    built = GPTModel(config, layers, VOCABULARY, 64, **of_model)
    return built.to(dtype)


def _latent_core() -> Any:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class LatentCore(DotProductAttention):  # type: ignore[misc]
        """With values of another width than keys, which Megatron leaves to Transformer Engine."""

        def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 4, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return LatentCore


class Wrapper(nn.Module):
    """A module around a model, as DDP is one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.config = module, module.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def rows_of(*lengths: int, seed: int = 1) -> list[Tensor]:
    """Rows under one prompt of six tokens, of which every two share a turn of three more, and one row alone."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> Tensor:
        return torch.randint(0, VOCABULARY, (count,), generator=generator)

    root, turns = draw(6), [draw(3) for _ in lengths]
    return [*(torch.cat([root, turns[i // 2], draw(n)]) for i, n in enumerate(lengths)), draw(5)]


Outcome = tuple[Tensor, dict[str, Tensor]]


def gradients(model: Any, loss: Tensor) -> Outcome:
    """The loss and the gradients of all parameters; those that sequence parallelism splits are summed, as Megatron's
    ``finalize_model_grads`` does."""
    if not hasattr(model, "zero_grad_buffer"):  # of Megatron's DDP, which adds gradients up elsewhere
        model.zero_grad(set_to_none=True)
    loss.backward()
    found = {name: (x, x.grad.clone()) for name, x in model.named_parameters() if x.grad is not None}
    if model.config.sequence_parallel:
        for parameter, grad in found.values():
            if getattr(parameter, "sequence_parallel", False):
                torch.distributed.all_reduce(grad)
    return loss.detach(), {name: grad for name, (_, grad) in found.items()}


def nll(logits: Tensor, row: Tensor) -> Tensor:
    return F.cross_entropy(logits[: len(row) - 1], row[1:], reduction="sum")


def separately(model: Any, rows: Sequence[Tensor], multiple: int = 1) -> Outcome:
    """Each row in a separate call, padded to a multiple."""
    losses = []
    for row in rows:
        padded = F.pad(row, (0, -len(row) % multiple))
        losses.append(nll(model(padded[None], torch.arange(len(padded))[None], None)[0], row))
    return gradients(model, torch.stack(losses).sum())


def sequences(rows: Sequence[Tensor], multiple: int = 1) -> tuple[Tensor, Any, list[int]]:
    """Ids [1, L], ``PackedSeqParams``, and where each sequence begins: padded to a multiple, as SkyRL and verl do."""
    from megatron.core.packed_seq_params import PackedSeqParams

    padded = [F.pad(row, (0, -len(row) % multiple)) for row in rows]
    offsets = [F.pad(torch.tensor([len(x) for x in found]).cumsum(0), (1, 0)).int() for found in (rows, padded)]
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=offsets[0], cu_seqlens_kv=offsets[0], max_seqlen_q=max(map(len, padded)),
        max_seqlen_kv=max(map(len, padded)),
        cu_seqlens_q_padded=offsets[1] if multiple > 1 else None,
        cu_seqlens_kv_padded=offsets[1] if multiple > 1 else None,
    )  # fmt: skip
    return torch.cat(padded)[None], params, offsets[1].tolist()


def packed(model: Any, rows: Sequence[Tensor], multiple: int = 1) -> Outcome:
    """All rows as sequences of one."""
    ids, params, begins = sequences(rows, multiple)
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(begins)])[None]
    logits = model(ids, positions, None, packed_seq_params=params)[0]
    return gradients(model, torch.stack([nll(logits[at:], row) for at, row in zip(begins, rows, strict=False)]).sum())


def padded(model: Any, rows: Sequence[Tensor], call: Callable[..., Tensor] | None = None) -> Outcome:
    """All rows in a batch [B, T], padded on the right."""
    ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    logits = (call or model)(ids, torch.arange(ids.shape[1]).expand_as(ids), None)
    return gradients(model, torch.stack([nll(out, row) for out, row in zip(logits, rows, strict=True)]).sum())


def differ(got: Outcome, want: Outcome) -> float:
    """The largest relative difference among the loss and the gradients of all parameters."""
    assert got[1].keys() == want[1].keys()
    pairs = [(got[0], want[0]), *((got[1][name], x) for name, x in want[1].items())]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-300)) for a, b in pairs)
