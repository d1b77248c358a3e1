"""Tiny vision-language models of transformers whose images are cut out, numbered or seen in blocks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import (
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    SiglipVisionConfig,
)

from tests.backend.models.vision import IMAGE, SIDE, double_of, draw_images
from tests.models import config_of

__all__ = ["VLMS", "VLM"]

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


VLMS = {
    "gemma4": VLM(gemma4, of_gemma4),
    "kimi_k25": VLM(kimi_k25, of_kimi_k25),
    "llava_onevision": VLM(llava_onevision, of_llava_onevision, patches=10),
    "paligemma": VLM(paligemma, of_paligemma, predicted=2),
}
