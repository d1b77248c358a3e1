"""A tiny vision-language model, batches of rows with images, and the brute-force count of their distinct tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModel,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SiglipVisionConfig,
)

from tests.batches import Batch
from tests.models import TinyLM, config_of, double_from, lifted
from tests.spellings import PADDED

__all__ = [
    "IMAGE", "PATCHES", "CASES", "TinyVLM", "distinct", "draw_images", "draw_patches", "double_of", "gemma3", "llava",
    "qwen3_vl", "rows_of",
]  # fmt: skip

IMAGE, PATCHES, SIDE = 60, 4, 8
"""The id of image tokens, how many an image has, and its height and width in pixels."""
_PIXELS = {"image_size": SIDE, "patch_size": SIDE // 2}
_SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
_IDS = {"image_token_id": IMAGE}

CASES = {
    "text alone": ([[1, 2, 3, 4, 5, last, last + 1] for last in (10, 12, 14, 10)], ""),
    "one image per group": ([[1, 2, -1, 5, last, last + 1] for last in (10, 12, 14, 10)], "aaaa"),
    "an image per row": ([[1, 2, -1, 5, last, last + 1] for last in (10, 12, 14, 10)], "abca"),
    "two images, one shared": ([[1, -1, 5, -1, 6, last] for last in (10, 12, 14, 12)], "abacabab"),
}
"""Rows of ids, -1 where an image stands, and the names of the images in order."""


def rows_of(rows: Sequence[Sequence[int]], patches: int = PATCHES) -> list[list[int]]:
    """Rows of token ids: each image is as many tokens as it has patches."""
    return [[i for token in row for i in ([token] if token >= 0 else [IMAGE] * patches)] for row in rows]


def draw_images(names: str) -> Tensor:
    """float64 [n, 3, 8, 8], equal for equal names."""
    drawn = {name: torch.randn(3, SIDE, SIDE, generator=torch.Generator().manual_seed(ord(name))) for name in names}
    return torch.stack([drawn[name] for name in names]).double()


def draw_patches(names: str) -> tuple[Tensor, Tensor]:
    """Pixels float64 [16 n, 12] and grids [n, 3] as Qwen3-VL takes them: 4 x 4 patches an image, merged to 2 x 2."""
    drawn = {name: torch.randn(16, 12, generator=torch.Generator().manual_seed(ord(name))) for name in names}
    return torch.cat([drawn[name] for name in names]).double(), torch.tensor([[1, 4, 4]] * len(names))


def distinct(batch: Batch, names: str, patches: int = PATCHES, prefix: int = 0) -> int:
    """The distinct prefixes of (id, column, pixels), by listing them all; tokens of a ``prefix`` see all of it."""
    left, paths = iter(names), set()
    mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
    for ids, kept in zip(batch.input_ids.tolist(), mask.tolist(), strict=True):
        path, image, patch = [], "", 0
        for column, token in enumerate(ids):
            if token == IMAGE:
                image, patch = (next(left), 0) if patch % patches == 0 else (image, patch)
                patch += 1
            if kept[column]:
                path.append((token, column, f"{image}{patch}" if token == IMAGE else ""))
        paths.update((end, *path[: max(end, prefix)]) for end in range(1, len(path) + 1))
    return len(paths)


class TinyVLM(nn.Module):
    """Patches, one attention over an image's own patches, a projection, and a language model of one block.

    Args:
        mixed: Subtracts the mean over all images, so that each vector is a function of all of them.
        listed: Takes the images apart and joins them again, as LLaVA does.
        zero: Starts the projection at zero, as Gemma 3 does: vectors of all images are equal.
    """

    def __init__(self, *, mixed: bool = False, listed: bool = False, zero: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text = TinyLM(PADDED["sdpa_padding"], layers=1, width=16)
        self.patch = nn.Conv2d(3, 16, SIDE // 2, SIDE // 2)
        self.first = nn.Parameter(torch.randn(1, 1, 16))
        self.norm, self.mix, self.project = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.mixed, self.listed = mixed, listed
        if zero:
            nn.init.zeros_(self.project.weight)

    def see(self, pixels: Tensor) -> Tensor:
        """[n, 3, 8, 8] -> [n, patches, 16]."""
        x = self.patch(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), 1, 16), x], 1)
        q, k, v = self.mix(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        x = (x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))[:, 1:]
        x = x - x.mean(0) if self.mixed else x
        x = self.project(x)
        return torch.cat(list(x), 0) if self.listed else x

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor, pixels: Tensor | None = None) -> Tensor:
        model = self.text
        x = model.embed(ids)
        if pixels is not None:
            vectors = self.see(pixels) if pixels.dim() == 4 else pixels
            x = x.masked_scatter((ids == IMAGE).unsqueeze(-1).expand_as(x), vectors)
        x = x + model.place(torch.arange(ids.shape[1]))
        logits = model.head(model.norm(model.blocks[0](x, mask)))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def llava() -> nn.Module:
    """LLaVA of transformers over CLIP and Llama of one layer each, in float64 throughout."""
    vision = CLIPVisionConfig(num_hidden_layers=2, projection_dim=16, **_PIXELS, **_SIZES)
    text = config_of("llama", num_hidden_layers=1, vocab_size=64, **_SIZES)
    return double_of(LlavaForConditionalGeneration, LlavaConfig(vision_config=vision, text_config=text, **_IDS))


def gemma3() -> nn.Module:
    """Gemma 3 of transformers over SigLIP, in float64 throughout; a second layer shows what image tokens see."""
    vision = SiglipVisionConfig(num_hidden_layers=1, **_PIXELS, **_SIZES)
    kinds = ["sliding_attention", "full_attention"]
    text = config_of("gemma3_text", num_hidden_layers=2, layer_types=kinds, vocab_size=64, **_SIZES)
    config = Gemma3Config(vision_config=vision, text_config=text, mm_tokens_per_image=PATCHES, **_IDS)
    model = double_of(Gemma3ForConditionalGeneration, config)
    nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # zeros would show no image
    return model


def qwen3_vl() -> nn.Module:
    """Qwen3-VL of transformers, in float64 throughout; features of the tower go into the first layer again."""
    tower = {"depth": 1, "num_heads": 2, "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 1}
    tower |= {"out_hidden_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    tower |= {"hidden_size": 16, "intermediate_size": 16}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "mrope_interleaved": True, "rope_theta": 1e4}
    text = {**_SIZES, "num_key_value_heads": 1, "num_hidden_layers": 2, "head_dim": 8, "rope_parameters": rope}
    ids = {**_IDS, "video_token_id": 61, "vision_start_token_id": 58, "vision_end_token_id": 59}
    config = Qwen3VLConfig(text_config={**text, "vocab_size": 64}, vision_config=tower, **ids)
    return double_of(Qwen3VLForConditionalGeneration, config)


def double_of(model_class: Any, config: Any) -> nn.Module:
    """Build a model of transformers with its own tower, in float64 throughout."""
    module = lifted(model_class.__module__)
    original = getattr(module, "AutoModel", None)  # some build their parts by name, from the same file
    module.AutoModel = _Lifted  # type: ignore[attr-defined]
    try:
        return double_from(getattr(module, model_class.__name__), config)
    finally:
        module.AutoModel = original  # type: ignore[attr-defined]


class _Lifted:
    """``AutoModel``, of classes that compute in float64."""

    @staticmethod
    def from_config(config: Any) -> nn.Module:
        original = AutoModel._model_mapping[type(config)]
        return getattr(lifted(original.__module__), original.__name__)._from_config(config, dtype=torch.float64)
