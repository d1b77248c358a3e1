"""Observe unchanged trainers: ``treefx run --observe``.

Models that a trainer prepares get the hook of ``treefx.observe``, the figures of its steps go to its own loggers, and
its settings that decide which rows come in one call are named in the table. A loop that uses none of these trainers is
found by its optimizer: from its second step on it is observed. Written for accelerate 1.15, transformers 5.23 and verl
0.9.1.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from treefx.inspection.observation.observed import account
from treefx.integrations.metrics import metrics_of_step
from treefx.integrations.run_end import whatever_happens
from treefx.runtime.observed.hooks import observe
from treefx.runtime.observed.observer import Observer, Settings, observers

__all__ = ["observe_engines", "observe_models_of", "observe_prepared", "observe_trainers"]

_SETTINGS_OF_BATCH = ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu")


def observe_prepared(accelerators: Any) -> None:
    """Observe the models that an accelerator prepares for training.

    Args:
        accelerators: the class ``accelerate.Accelerator``.
    """
    prepare = accelerators.prepare_model

    @functools.wraps(prepare)
    def prepare_model(
        self: Any, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        prepared = prepare(self, model, device_placement, evaluation_mode)
        return prepared if evaluation_mode else observe(prepared)

    accelerators.prepare_model = prepare_model


def observe_trainers(trainers: Any) -> None:
    """Log the sharing of steps among the metrics of a class of trainers; name their settings.

    Args:
        trainers: the class ``transformers.Trainer``.
    """
    log, train = trainers.log, trainers.train

    @functools.wraps(log)
    def with_sharing(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        if "loss" in logs:
            logs = logs | _metrics(self.model.parameters())
        return log(self, logs, *args, **kwargs)

    @functools.wraps(train)
    def train_observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            found = train(self, *args, **kwargs)
        finally:
            known = observers(self.model.parameters())
            for observer in known:
                observer.settings = _settings_of_trainer(self)
        for observer in known:  # the model may be gone when the process ends
            with whatever_happens(observer.name):
                account(observer)
        return found

    trainers.log, trainers.train = with_sharing, train_observed


def _settings_of_trainer(trainer: Any) -> Settings:
    arguments = trainer.args
    rows, accumulated = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    batch = f"per_device_train_batch_size={rows} (with gradient_accumulation_steps={accumulated})"
    order = f"train_sampling_strategy={getattr(arguments, 'train_sampling_strategy', 'random')!r}"
    name = type(trainer).__name__
    samples = hasattr(trainer, "_buffered_inputs")
    if samples:
        order = f"the shuffling of {name}'s sampled rows over micro-batches"
    seam = "trl" if type(trainer).__module__.startswith("trl.") else "transformers"
    return Settings(name, batch, order, f"treefx.integrations.{seam}.keep_groups(trainer)", samples)


def observe_engines(engines: Any) -> None:
    """Observe the models of verl's engines, and give their figures among the metrics.

    Args:
        engines: ``verl.workers.engine.fsdp.transformer_impl.FSDPEngine``, or a class made of it.
    """
    build, run = engines._build_module, engines.forward_backward_batch

    @functools.wraps(build)
    def build_module(self: Any) -> Any:
        return observe(build(self))

    @functools.wraps(run)
    def forward_backward_batch(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        output = run(self, data, loss_function, forward_only=forward_only)
        if not forward_only:
            for observer in observers(self.module.parameters()):
                observer.settings = _settings_of_engine(data)
            output["metrics"].update({name: [x] for name, x in _metrics(self.module.parameters()).items()})
        return output

    engines._build_module, engines.forward_backward_batch = build_module, forward_backward_batch


def _settings_of_engine(data: Any) -> Settings:
    given = {name: x for name in _SETTINGS_OF_BATCH if (x := _plain(data, name)) is not None}
    kind = "dynamic batches" if given.get("use_dynamic_bsz") else "micro-batches"
    batch = f"{kind} of verl" + (f" ({', '.join(f'{name}={x}' for name, x in given.items())})" if given else "")
    order = f"verl's balancing of {kind} by length (rearrange_micro_batches)"
    way_out = "treefx run -- COMMAND, or treefx.integrations.verl.group_micro_batches"
    return Settings("verl", batch, order, way_out, samples=True)


def _plain(data: Any, name: str) -> Any:
    """A setting among the tensors of a batch."""
    value = data.get(name, None) if isinstance(data, Mapping) or hasattr(data, "get") else None
    return getattr(value, "data", value) if not isinstance(value, Tensor) else None


def _metrics(parameters: Iterable[Tensor]) -> dict[str, float]:
    steps = (observer.last_step for observer in observers(parameters))
    return next((metrics_of_step(step) for step in steps if step is not None), {})


def observe_models_of(optimizer: Optimizer) -> list[Observer]:
    """Observe the outermost modules with the parameters of an optimizer.

    Models that are observed already are skipped.

    Returns:
        The observers they had before.
    """
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    known = observers(parameter for group in optimizer.param_groups for parameter in group["params"])
    if known:
        return known
    modules: list[nn.Module] = [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    for module in modules:
        if id(module) not in inner and any(id(parameter) in wanted for parameter in module.parameters()):
            observe(module)
    return []
