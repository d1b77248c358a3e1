"""Name the parts of a Megatron model that keep it from running on a tree, with ways out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

from treefx.errors import UnsupportedError
from treefx.integrations.megatron.attention import CORES

__all__ = ["check"]

_MIXERS = {"SelfAttention", "MLASelfAttention"}
_CAUSAL = {"causal", "padding_causal"}
_TOKENWISE = {
    "TransformerBlock", "TransformerLayer", "MLP", "SharedExpertMLP", "SequentialMLP", "GroupedMLP",
    "TEGroupedMLP", "BaseMoELayer", "TopKRouter", "ColumnParallelLinear", "RowParallelLinear", "TELinear",
    "TELayerNormColumnParallelLinear", "TEColumnParallelLinear", "TERowParallelLinear", "TEGroupedLinear",
    "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear", "L2Norm", "IdentityOp", "IdentityFuncOp",
    "RotaryEmbedding", "YarnRotaryEmbedding", "FusedScaleMaskSoftmax", "FusedLayerNorm", "LayerNorm", "RMSNorm",
    "Dropout", "Linear", "Identity", "SiLU", "GELU", "ReLU", "ModuleList", "ModuleDict",
    "LoRALinear", "ParallelLinearAdapter",  # of Megatron-Bridge
}  # fmt: skip
"""Names of classes that compute token by token, or hold modules that do."""
_CLOSED = {"TEFusedMLP"}
"""Classes whose submodules are not checked."""


def check(model: Any, tokenwise: Collection[str]) -> None:
    """Raise if a part of the model is not computed exactly on a tree.

    Args:
        model: A GPTModel.
        tokenwise: Names of further classes of modules that compute token by token.

    Raises:
        UnsupportedError: names the first such part.
    """
    for reason in (*_of_config(model), *_of_modules(model, tokenwise)):
        raise UnsupportedError(f"treefx cannot run this Megatron model on a tree: {reason}")


_CONFIG: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("mtp_num_layers", bool, "MTP predicts across rows; build it without multi-token prediction"),
    ("moe_expert_capacity_factor", lambda x: x is not None, "experts drop tokens by their number in a batch; use None"),
    ("moe_expert_rank_capacity_factor", lambda x: x is not None, "ranks drop tokens by their number; use None"),
    ("moe_router_padding_for_fp8", bool, "routes are padded by the number of tokens; use False"),
    ("moe_router_padding_for_quantization", bool, "routes are padded by the number of tokens; use False"),
    ("moe_input_jitter_eps", lambda x: x is not None, "the router's noise differs between equal tokens; use None"),
    ("moe_router_force_load_balancing", bool, "routes are random; use False"),
    ("moe_router_force_biased", lambda x: x is not None, "routes are random; use None"),
    ("cuda_graph_impl", lambda x: x not in (None, "none"), "a CUDA graph has one number of tokens; use 'none'"),
    ("enable_cuda_graph", bool, "a CUDA graph has one number of tokens; use False"),
    ("external_cuda_graph", bool, "a CUDA graph has one number of tokens; use False"),
    ("fp8", bool, "FP8 scales follow from all tokens of a tensor, and their number must be a multiple; use bf16"),
    ("fp4", bool, "FP4 scales follow from all tokens of a tensor, and their number must be a multiple; use bf16"),
    ("attention_dropout", bool, "dropout differs between equal tokens; use 0"),
    ("hidden_dropout", bool, "dropout differs between equal tokens; use 0"),
    ("context_parallel_size", lambda x: x not in (None, 1), "its ranks hold slices of rows; use 1, and tensor "
     "parallelism: shared prefixes make sequences shorter"),
    ("experimental_attention_variant", bool, "it has no form on a tree; use full attention"),
    ("qk_clip", bool, "tree attention does not return the largest logit; use False"),
    ("log_max_attention_logit", bool, "tree attention does not return the largest logit; use False"),
    ("batch_invariant_mode", bool, "its promise of equal bits needs its own kernels; use False"),
    ("overlap_moe_expert_parallel_comm", bool, "its schedule calls layers around the model's forward; use False"),
)  # fmt: skip


def _of_config(model: Any) -> Iterator[str]:
    config = model.config
    for name, is_refused, reason in _CONFIG:
        value = getattr(config, name, None)
        if is_refused(value):
            yield f"{name}={value}: {reason}"
    if model.position_embedding_type == "mrope":
        yield "position_embedding_type='mrope': its positions have three planes; train the text model alone"
    stages = _stages(config)
    if stages > 1 and not config.variable_seq_lengths:
        yield "variable_seq_lengths=False: stages exchange as many tokens as a call has distinct ones; use True"
    if stages > 1 and not len(model.decoder.layers):
        yield "a pipeline stage without layers, which cannot read the attention of the other stages; give it one"
    if getattr(config, "apply_rope_fusion", False) and getattr(config, "multi_latent_attention", False):
        yield "apply_rope_fusion=True: MLA then reads cached sines and cosines by row; use False"
    if getattr(model, "mtp_process", False):
        yield "multi-token prediction: it predicts across rows; build the model without mtp_block_spec"


def _stages(config: Any) -> int:
    return int(getattr(config, "pipeline_model_parallel_size", 1))


def _of_modules(model: Any, tokenwise: Collection[str]) -> Iterator[str]:
    known, closed = {*_TOKENWISE, *tokenwise}, {*_CLOSED, *CORES, *tokenwise}
    inside: list[str] = []
    for name, module in model.decoder.named_modules():
        bases = {base.__name__ for base in type(module).__mro__}
        if name.startswith(tuple(inside)):
            continue
        if getattr(module, "routing_replay", None) is not None:
            yield f"{name} replays routes, which come per position and not per distinct token; turn routing replay off"
        if getattr(module, "router_replay", None) is not None and _stages(model.config) > 1:
            yield f"{name} replays routes, which other pipeline stages do not know; use pipeline_model_parallel_size=1"
        if isinstance(module, nn.Dropout) and module.p:
            yield f"{name} is dropout, which differs between equal tokens; set its rate to 0"
        if bases & closed:
            inside.append(f"{name}.")
        elif bases & _MIXERS:
            yield from _of_attention(name, module)
        elif not bases & known:
            yield (
                f"{name} is a {type(module).__name__}, of which it is not known that it computes token by token; if "
                f"it does, pass tokenwise=({type(module).__name__!r},)"
            )


def _of_attention(name: str, module: nn.Module) -> Iterator[str]:
    core: Any = module.core_attention
    if not {base.__name__ for base in type(core).__mro__} & {*CORES}:
        yield f"{name}.core_attention is a {type(core).__name__}, not one of {', '.join(CORES)}"
    kind = getattr(getattr(module, "attn_mask_type", None), "name", None)
    if kind not in _CAUSAL:
        yield f"{name} has the mask type {kind}; build its layer with AttnMaskType.causal"
