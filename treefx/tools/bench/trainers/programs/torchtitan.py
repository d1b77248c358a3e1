"""Train with torchtitan on the CPU: ``torchrun -m ...programs.torchtitan MODEL CHATS``.

Its own ``train.main``, with this module as ``--module``, which has the configuration ``tiny``: the debug model of Llama
3 with as many blocks as MODEL has, selective checkpointing, FSDP, two micro-batches to a step. torchtitan 0.3.0 has no
setting for a CPU, so it is told of a device (`_stand_in`), and the attention is its ScaledDotProductAttention: of the
two that it offers for language models, FlexAttention has no backward on the CPU, and VarlenAttention has kernels for
CUDA alone. It knows no documents, so each has a separate row, in their order, padded on the right.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def _stand_in() -> None:
    """Let a CPU be the accelerator: its kind, its name, and its unmeasured memory."""
    device: Any = torch.cpu
    torch._utils._get_available_device_type = lambda: "cpu"
    device.current_device = lambda: 0
    device.get_device_name = lambda _=None: "CPU"
    device.get_device_properties = lambda _=None: SimpleNamespace(total_memory=1 << 30, name="CPU")
    device.memory_stats = lambda _=None: {}
    device.reset_peak_memory_stats = device.empty_cache = lambda: None
    if not hasattr(torch.distributed, "set_timeout"):  # its name up to PyTorch 2.13
        setattr(torch.distributed, "set_timeout", torch.distributed.distributed_c10d._set_pg_timeout)


_stand_in()  # before torchtitan looks for one

from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import HuggingFaceTokenizer  # noqa: E402
from torchtitan.config import DebugConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed.activation_checkpoint import SelectiveAC  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.train import main  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from treefx.tools.bench.trainers.programs.chats import read_documents  # noqa: E402
from treefx.tools.bench.trainers.programs.log import write_log  # noqa: E402

__all__ = ["Log", "Rows", "tiny"]

Documents = list[tuple[list[int], list[int]]]

_ROWS = 4
_MODEL, _CHATS = "TREEFX_TITAN_MODEL", "TREEFX_TITAN_CHATS"
"""torchtitan imports this module again, by its name."""


class Rows(BaseDataLoader):  # type: ignore[misc]
    """Documents in their order, a row each."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        documents: Annotated[Callable[[], Documents], tyro.conf.Suppress]

    def __init__(self, config: Any, *, seq_len: int, local_batch_size: int, **others: Any) -> None:
        self._documents, self._columns, self._rows = config.documents(), seq_len, local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield ``({"input": ids, "positions": positions}, labels)``, [rows, columns] each."""
        positions = torch.arange(self._columns).expand(self._rows, -1)
        for start in range(0, len(self._documents) - self._rows + 1, self._rows):
            batch = self._documents[start : start + self._rows]
            ids = self._padded([ids[:-1] for ids, _ in batch], 0)
            labels = self._padded([labels[1:] for _, labels in batch], -100)
            yield {"input": ids, "positions": positions}, labels

    def _padded(self, rows: list[list[int]], fill: int) -> Tensor:
        widest = torch.full((self._columns,), fill)
        return pad_sequence([widest, *map(torch.tensor, rows)], batch_first=True, padding_value=fill)[1:]

    def state_dict(self) -> dict[str, Any]:
        """Of no use: nothing is resumed."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The same."""


class Log(MetricsProcessor):  # type: ignore[misc]
    """torchtitan's, which also writes the log as transformers' trainer does."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Any, *, dump_folder: str, **others: Any) -> None:
        super().__init__(config, dump_folder=dump_folder, **others)
        self._folder, self._entries = Path(dump_folder), list[dict[str, Any]]()

    def log(
        self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """One step."""
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        self._entries.append({"loss": global_avg_loss, "grad_norm": grad_norm, **(extra_metrics or {})})
        write_log(self._folder, self._entries)


def _documents() -> Documents:
    tokenizer: Any = HuggingFaceTokenizer.Config().build(tokenizer_path=os.environ[_MODEL])

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_bos=False, add_eos=False))

    return read_documents(Path(os.environ[_CHATS]), tokenizer.apply_chat_template, encode)


def _spec() -> Any:
    """The model: torchtitan's debug model with another inner attention."""
    spec: Any = model_registry("debugmodel")
    sizes = json.loads((Path(os.environ[_MODEL]) / "config.json").read_text(encoding="utf-8"))
    spec.model.layers = spec.model.layers[: sizes["num_hidden_layers"]]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def tiny() -> Any:
    """The configuration."""
    documents, spec = _documents(), _spec()
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)),
        hf_assets_path=os.environ[_MODEL],
        model_spec=spec,
        optimizer=default_adamw(lr=1e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
        training=TrainingConfig(
            local_batch_size=_ROWS, global_batch_size=2 * _ROWS, mixed_precision_param="float32",
            seq_len=max(len(ids) for ids, _ in documents), steps=len(documents) // (2 * _ROWS),
            disable_cuda_graphs=True,
        ),
        dataloader=Rows.Config(documents=_documents),
        metrics=Log.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=SelectiveAC.Config(),
        debug=DebugConfig(seed=7, enable_structured_logging=False),
    )  # fmt: skip


if __name__ == "__main__":
    os.environ[_MODEL], os.environ[_CHATS] = sys.argv.pop(1), sys.argv.pop(1)
    main()
