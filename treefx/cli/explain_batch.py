"""Load the model and the batch of ``treefx explain`` from its arguments."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from treefx.cli.checks import check_input
from treefx.cli.scripts import Place, load_place, parse_place
from treefx.errors import InputError

__all__ = ["Given", "parse_given"]

_SIZES = re.compile(r"(\d+)x(\d+)\+(\d+)")


class Given(NamedTuple):
    """The arguments of the command, checked."""

    model: str
    place: Place | None
    """Of the model, where a script has it."""
    sizes: tuple[int, int, int] | None
    """Rows, shared tokens and further tokens of a batch of random tokens."""
    batch: Place | Path | None
    """A name of a script, or a file of rows."""

    def load(self, tell: Callable[[str], None]) -> tuple[Any, Any]:
        """The model, and the arguments of its call: a dict, or token ids.

        Raises:
            InputError: One of them cannot be made.
        """
        loaded: dict[Path, ModuleType] = {}
        tell(f"making {self.model}")
        batch: Any = None if self.batch is None else self._read(self.batch, loaded)
        if self.place is not None:
            model = _made(load_place(self.place, loaded))
        else:
            from treefx.tools.bench.zoo.single import build_model

            model = build_model(self.model, self._columns(batch))
        if self.sizes is not None:
            batch = _draw(model, self.sizes)
        return model, batch if isinstance(self.batch, Place) else _accepted(model, batch)

    def _read(self, batch: Place | Path, loaded: dict[Path, ModuleType]) -> Any:
        if isinstance(batch, Path):
            return _read_rows(batch)
        value = _made(load_place(batch, loaded))
        return value.model_inputs() if hasattr(value, "model_inputs") else value

    def _columns(self, batch: Any) -> int:
        """Length of a row, for a model that is made for it."""
        if self.sizes is not None:
            return self.sizes[1] + self.sizes[2]
        ids: Any = batch.get("input_ids") if isinstance(batch, Mapping) else batch
        if getattr(ids, "ndim", 0) != 2:
            raise InputError(f"expected --batch to be token ids [B, T] or a dict with 'input_ids', got {ids!r:.80}")
        columns: int = ids.shape[1]
        return columns


def _draw(model: Any, sizes: tuple[int, int, int]) -> Any:
    """Rows of random tokens, which every embedding of the model has."""
    from torch import nn

    from treefx.tools.bench.job.synthetic import shared_prefix_batch
    from treefx.tools.bench.zoo.models import VOCABULARY

    modules = model.modules() if isinstance(model, nn.Module) else ()
    known = [module.num_embeddings for module in modules if isinstance(module, nn.Embedding)]
    return shared_prefix_batch(*sizes, min([*known, max(VOCABULARY, sizes[0])])).model_inputs()


def parse_given(model: str, batch: str) -> Given:
    """Check both arguments before any work.

    Raises:
        InputError: A file does not exist, or a text has none of the known forms.
    """
    place, sizes = parse_place("MODEL", model), _SIZES.fullmatch(batch)
    if sizes is not None:
        rows, shared, own = (int(item) for item in sizes.groups())
        if not rows or not own:
            raise InputError(f"expected --batch with at least one row and one token of its end, got {batch!r}")
        return Given(model, place, (rows, shared, own), None)
    other = parse_place("--batch", batch)
    if other is not None:
        return Given(model, place, None, other)
    if not batch.endswith(".json"):
        raise InputError(
            "expected --batch to be ROWSxSHARED+OWN such as 4x24+8, a .json file with rows of token ids, or "
            f"script.py:batch; got {batch!r}"
        )
    check_input(Path(batch))
    return Given(model, place, None, Path(batch))


def _made(found: Any) -> Any:
    """A module as it stands, and the result of a function without arguments."""
    from torch import nn

    if isinstance(found, nn.Module) or not callable(found):
        return found
    required = [item for item in inspect.signature(found).parameters.values() if item.default is item.empty]
    return found if required else found()


def _read_rows(path: Path) -> dict[str, Any]:
    """Rows of token ids, padded on the right, every token labelled."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--batch {path}: expected a JSON list of rows of token ids: {error}") from error
    if not (isinstance(value, list) and value and all(map(_is_row, value))):
        raise InputError(
            f"--batch {path}: expected a JSON list of rows with at least one token id (an integer) each, such as "
            f"[[1, 2, 3], [1, 2, 4, 5]]; got {value!r:.80}"
        )
    rows = [torch.tensor(row) for row in value]
    ids = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


def _is_row(row: Any) -> bool:
    return isinstance(row, list) and bool(row) and all(type(item) is int for item in row)


def _accepted(model: Any, batch: Mapping[str, Any]) -> Any:
    """Select the arguments of a batch that a model takes by name.

    Without an ``input_ids`` argument, the token ids alone.
    """
    parameters = inspect.signature(getattr(model, "forward", model)).parameters
    if any(item.kind is item.VAR_KEYWORD for item in parameters.values()):
        return batch
    found = {name: value for name, value in batch.items() if name in parameters}
    return found if "input_ids" in found else batch["input_ids"]
