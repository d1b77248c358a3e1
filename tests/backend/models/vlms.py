"""Fourteen tiny vision-language models of transformers, and the brute-force count of their distinct tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLVisionConfig,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PixtralVisionConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SiglipVisionConfig,
)

from tests.backend.models.vision import (
    CASES,
    IMAGE,
    SIDE,
    double_of,
    draw_images,
    draw_patches,
    gemma3,
    llava,
    qwen3_vl,
    rows_of,
)
from tests.batches import IGNORED, Batch, Side, padded
from tests.models import config_of

__all__ = ["VLMS", "VLM", "batch_of", "count_distinct", "positions_of"]

_SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
_IDS = {"image_token_id": IMAGE, "video_token_id": 61}


@dataclass(frozen=True)
class VLM:
    """How a model is made and called.

    Attributes:
        make: The model, in float64 throughout.
        inputs: What it takes of images, by their names and the token ids [B, T].
        patches: How many tokens an image is.
        predicted: How many tokens see those before them alone, behind a prefix that sees all of itself; None for all.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[str, Tensor], dict[str, Tensor]]
    patches: int = 4
    predicted: int | None = None


def _siglip() -> SiglipVisionConfig:
    return SiglipVisionConfig(image_size=SIDE, patch_size=SIDE // 2, vision_use_head=False, **_SIZES)


def paligemma() -> nn.Module:
    text = config_of("gemma", vocab_size=64, head_dim=8, **_SIZES)
    return double_of(
        PaliGemmaForConditionalGeneration,
        PaliGemmaConfig(vision_config=_siglip(), text_config=text, projection_dim=16, image_token_id=IMAGE),
    )


def of_paligemma(names: str, ids: Tensor) -> dict[str, Tensor]:
    """Return types that are 1 in the last two columns, which the model predicts."""
    types = torch.zeros_like(ids)
    types[:, -2:] = 1
    return {"token_type_ids": types, **({"pixel_values": draw_images(names)} if names else {})}


def llava_onevision() -> nn.Module:
    text = config_of("qwen2", vocab_size=64, **_SIZES)
    config = LlavaOnevisionConfig(
        vision_config=_siglip(), text_config=text, image_grid_pinpoints=[[SIDE, SIDE]], vision_feature_layer=-1, **_IDS
    )
    return double_of(LlavaOnevisionForConditionalGeneration, config)


def of_llava_onevision(names: str, ids: Tensor) -> dict[str, Tensor]:
    """Each image whole, and once more as the one tile of its grid."""
    if not names:
        return {}
    pixels = draw_images(names)[:, None].repeat(1, 2, 1, 1, 1)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[SIDE, SIDE]] * len(names))}


def kimi_k25() -> nn.Module:
    vision = {**_SIZES, "patch_size": 2, "pos_emb_height": 4, "pos_emb_width": 4}
    text = config_of("deepseek_v3", vocab_size=64, num_hidden_layers=1)
    config = Kimi_K25Config(text_config=text, vision_config=vision, projection_hidden_size=16, **_IDS)
    return double_of(Kimi_K25ForConditionalGeneration, config)


def of_kimi_k25(names: str, ids: Tensor) -> dict[str, Tensor]:
    if not names:
        return {}
    tiles = draw_images(names).unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5)  # 4 x 4 patches of 2 x 2
    return {"pixel_values": tiles.reshape(-1, 3, 2, 2), "image_grid_thw": torch.tensor([[1, 4, 4]] * len(names))}


def gemma4() -> nn.Module:
    vision = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 2, "pooling_kernel_size": 2}
    vision |= {"position_embedding_size": 16}
    text = {**_SIZES, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
    text |= {"num_key_value_heads": 1, "hidden_size_per_layer_input": 4, "sliding_window": 8, "vocab_size": 64}
    text |= {"use_bidirectional_attention": "vision", "vocab_size_per_layer_input": 64}
    config = Gemma4Config(vision_config=vision, text_config=text, audio_config=None, **_IDS)
    return double_of(Gemma4ForConditionalGeneration, config)


def of_gemma4(names: str, ids: Tensor) -> dict[str, Tensor]:
    """Return types of tokens in a batch of text too, as the processor does."""
    types = {"mm_token_type_ids": (ids == IMAGE).long()}
    if not names:
        return types
    tiles = draw_images(names).unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 4, 5, 1)
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).reshape(1, 16, 2)
    given = {"pixel_values": tiles.reshape(len(names), 16, 12), "image_position_ids": places.repeat(len(names), 1, 1)}
    return types | given


_TOWER = {
    "depth": 1, "num_heads": 2, "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 1,
    "out_hidden_size": 16, "hidden_size": 16, "intermediate_size": 16,
}  # fmt: skip
"""4 x 4 patches an image, merged to 2 x 2."""
_VISION = {"vision_start_token_id": 58, "vision_end_token_id": 59}


def _text(**changes: Any) -> dict[str, Any]:
    return {**_SIZES, "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 64, **changes}


def _rope(**changes: Any) -> dict[str, Any]:
    """Rotary positions of three planes."""
    return {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4, **changes}


def of_pixels(names: str, ids: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": draw_images(names)} if names else {}


def of_gemma3(names: str, ids: Tensor) -> dict[str, Tensor]:
    return {"token_type_ids": (ids == IMAGE).long(), **of_pixels(names, ids)}


def of_patches(names: str, ids: Tensor) -> dict[str, Tensor]:
    """Return patches of all images in one dimension, as the models of Qwen and GLM take them."""
    given = {"mm_token_type_ids": (ids == IMAGE).int()}
    return given | (dict(zip(("pixel_values", "image_grid_thw"), draw_patches(names), strict=True)) if names else {})


def qwen2_5_vl() -> nn.Module:
    tower = {**_TOWER, "window_size": 8, "fullatt_block_indexes": [0]}
    config = Qwen2_5_VLConfig(vision_config=tower, text_config=_text(rope_parameters=_rope()), **_IDS, **_VISION)
    return double_of(Qwen2_5_VLForConditionalGeneration, config)


def qwen3_vl_moe() -> nn.Module:
    tower = {**_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    text = _text(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    text["rope_parameters"] = _rope(mrope_interleaved=True)
    given = {"vision_config": tower, "text_config": text, "experts_implementation": "batched_mm"}
    return double_of(Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeConfig(**given, **_IDS, **_VISION))


def qwen3_5() -> nn.Module:
    tower = {**_TOWER, "num_position_embeddings": 16}
    text = _text(head_dim=8, layer_types=["linear_attention", "full_attention"])
    text |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    text["rope_parameters"] = _rope(mrope_interleaved=True, partial_rotary_factor=1.0)
    config = Qwen3_5Config(vision_config=tower, text_config=text, **_IDS, **_VISION)
    return double_of(Qwen3_5ForConditionalGeneration, config)


def glm4v() -> nn.Module:
    ends = {"image_start_token_id": 58, "image_end_token_id": 59, "video_start_token_id": 56, "video_end_token_id": 57}
    given = {"vision_config": {**_TOWER, "image_size": SIDE}, "text_config": _text(rope_parameters=_rope())}
    return double_of(Glm4vForConditionalGeneration, Glm4vConfig(**given, **_IDS, **ends))


def mistral3() -> nn.Module:
    vision = PixtralVisionConfig(image_size=SIDE, patch_size=2, head_dim=8, **_SIZES)
    text = config_of("mistral", sliding_window=None, vocab_size=64, num_key_value_heads=1, head_dim=8, **_SIZES)
    config = Mistral3Config(vision_config=vision, text_config=text, image_token_index=IMAGE, spatial_merge_size=2)
    return double_of(Mistral3ForConditionalGeneration, config)


def of_mistral3(names: str, ids: Tensor) -> dict[str, Tensor]:
    sizes = {"image_sizes": torch.tensor([[SIDE, SIDE]] * len(names))} if names else {}
    return of_pixels(names, ids) | sizes


def idefics3() -> nn.Module:
    text = config_of("llama", vocab_size=64, num_key_value_heads=1, head_dim=8, **_SIZES)
    vision = {**_SIZES, "image_size": SIDE, "patch_size": 2}
    config = Idefics3Config(vision_config=vision, text_config=text, scale_factor=2, image_token_id=IMAGE)
    return double_of(Idefics3ForConditionalGeneration, config)


def of_idefics3(names: str, ids: Tensor) -> dict[str, Tensor]:
    """The images of each row."""
    return {"pixel_values": draw_images(names).reshape(len(ids), -1, 3, SIDE, SIDE)} if names else {}


def internvl() -> nn.Module:
    text = config_of("qwen2", vocab_size=64, num_key_value_heads=1, **_SIZES)
    vision = InternVLVisionConfig(image_size=(SIDE, SIDE), patch_size=(2, 2), **_SIZES)
    config = InternVLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, image_seq_length=4)
    return double_of(InternVLForConditionalGeneration, config)


VLMS = {
    "gemma4": VLM(gemma4, of_gemma4),
    "paligemma": VLM(paligemma, of_paligemma, predicted=2),
    "llava_onevision": VLM(llava_onevision, of_llava_onevision, patches=10),
    "qwen3_vl": VLM(qwen3_vl, of_patches),
    "kimi_k25": VLM(kimi_k25, of_kimi_k25),
    "qwen2_5_vl": VLM(qwen2_5_vl, of_patches),
    "qwen3_vl_moe": VLM(qwen3_vl_moe, of_patches),
    "qwen3_5": VLM(qwen3_5, of_patches),
    "mistral3": VLM(mistral3, of_mistral3),
    "idefics3": VLM(idefics3, of_idefics3),
    "glm4v": VLM(glm4v, of_patches),
    "llava": VLM(llava, of_pixels),
    "internvl": VLM(internvl, of_pixels),
    "gemma3": VLM(gemma3, of_gemma3),
}


def batch_of(vlm: VLM, case: str, side: Side) -> tuple[Batch, dict[str, Any]]:
    """Return rows of different lengths, and the inputs of a model; images are never predicted."""
    rows, names = CASES[case]
    batch = padded([row[: len(row) - b % 2] for b, row in enumerate(rows_of(rows, vlm.patches))], side)
    assert batch.labels is not None
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "use_cache": False}
    inputs |= {"labels": batch.labels.masked_fill(batch.input_ids == IMAGE, IGNORED)}
    return batch, inputs | vlm.inputs(names, batch.input_ids)


def positions_of(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Return the positions [B, T, planes] that the layers of a language model get."""
    found: list[Tensor] = []

    def note(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        found.append(kwargs["position_ids"] if "position_ids" in kwargs else args[1])

    rotary = [
        module for name, module in model.named_modules()
        if type(module).__name__.endswith("RotaryEmbedding") and not {"visual", "vision_tower"} & {*name.split(".")}
    ]  # fmt: skip
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in rotary]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    rows, columns = inputs["input_ids"].shape
    planes = found[0] if found[0].dim() == 3 else found[0][None]
    return planes.expand(len(planes), rows, columns).permute(1, 2, 0)


def count_distinct(vlm: VLM, batch: Batch, names: str, positions: Tensor, types: Tensor | None = None) -> int:
    """Count the distinct prefixes of (id, position, pixels), by listing them all.

    Args:
        vlm: The model; its prefix, of types 0, sees all of itself.
        batch: Padded rows.
        names: Of the images.
        positions: [B, T, planes].
        types: Of tokens [B, T].
    """
    left, paths = iter(names), set()
    assert batch.attention_mask is not None
    for row, (ids, kept) in enumerate(zip(batch.input_ids.tolist(), batch.attention_mask.tolist(), strict=True)):
        path: list[Any] = []
        image, patch, prefix = "", 0, 0
        for column, token in enumerate(ids):
            if token == IMAGE:
                image, patch = (next(left), 0) if patch % vlm.patches == 0 else (image, patch)
                patch += 1
            if kept[column]:
                seen = f"{image}{patch}" if token == IMAGE else ""
                path.append((token, *positions[row, column].tolist(), seen))
                in_prefix = vlm.predicted is not None and types is not None and not types[row, column]
                prefix = len(path) if in_prefix else prefix
        paths.update((end, *path[: max(end, prefix)]) for end in range(1, len(path) + 1))
    return len(paths)
