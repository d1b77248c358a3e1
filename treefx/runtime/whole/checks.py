"""Trace one operator in place of transformers' checks of tensors, without a graph break.

All its vision-language models check between the embeddings and the first layer whether there are as many tokens of
images as vectors. The check reads a tensor on the host, which cuts the graph there, token ids on the near side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._dynamo.variables.tensor import TensorVariable

__all__ = ["check_instead"]

_MODULE, _NAME = "transformers.utils.import_utils", "torch_compilable_check"


def check_instead(function: Any, tx: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any], dict[str, Any]] | None:
    """Return an assertion that does not synchronize, in place of the check of a tensor.

    None for any other function or call.
    """
    if (getattr(function, "__module__", None), getattr(function, "__name__", None)) != (_MODULE, _NAME):
        return None
    condition = args[0] if args else kwargs.get("cond")
    condition = None if condition is None else condition.realize()
    return (_assert_all, [condition], {}) if isinstance(condition, TensorVariable) else None


def _assert_all(condition: Tensor) -> None:
    """Assert that a condition holds everywhere.

    The message cannot name numbers on the device; transformers leaves it out of traced checks too.
    """
    torch._assert_async(
        condition.all(),
        "a check of transformers (torch_compilable_check) does not hold: expected as many tokens of images, videos or "
        "audio in input_ids as the features given with them; call the model uncompiled for the numbers",
    )
