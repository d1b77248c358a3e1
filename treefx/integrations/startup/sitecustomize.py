"""Hook the trainers that this process imports; Python runs this under ``treefx run``.

Nothing but the standard library is imported here, and treefx only once the process has imported a trainer itself. A
``sitecustomize`` that would have run without this one runs after it.
"""

import importlib
import json
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_WANTED: dict[str, Any] = json.loads(os.environ.get("TREEFX_RUN", "{}"))


def _sharing() -> dict[str, Any]:
    """Return the options that a conversion takes; it compiles nothing."""
    return {name: value for name, value in _WANTED.get("options", {}).items() if name == "min_sharing"}


def _compile_with_treefx(module: ModuleType) -> None:
    seam = importlib.import_module("treefx.integrations.accelerate")
    seam.compile_with(_WANTED.get("options"), by_default=True)


def _remember_batches(module: ModuleType) -> None:
    importlib.import_module("treefx.integrations.moved_batches").watch_data_loaders(module)


def _log_and_group(module: ModuleType) -> None:
    seam = importlib.import_module("treefx.integrations.transformers")
    seam.log_sharing_of_all(module.Trainer)
    if _WANTED.get("keep_groups"):
        seam.keep_groups_of_all(module.Trainer)


def _keep_groups(module: ModuleType) -> None:
    seam = importlib.import_module("treefx.integrations.trl")
    names = ("GRPOTrainer", "RLOOTrainer", "DistillationTrainer")
    for trainer in (getattr(module, name) for name in names if hasattr(module, name)):
        seam.keep_groups(trainer)


def _trace_checkpoints(module: ModuleType) -> None:
    importlib.import_module("treefx.integrations.llama_factory").trace_checkpoints(module)


def _convert_engines(module: ModuleType) -> None:
    importlib.import_module("treefx.integrations.verl").convert_engines(module.FSDPEngine, **_sharing())


def _convert_megatron_engines(module: ModuleType) -> None:
    importlib.import_module("treefx.integrations.verl").convert_megatron_engines(module.MegatronEngine, **_sharing())


def _pack_ids_on_all_stages(module: ModuleType) -> None:
    importlib.import_module("treefx.integrations.verl").pack_ids_on_all_stages(module)


def _group_micro_batches(module: ModuleType) -> None:
    importlib.import_module("treefx.integrations.verl").group_micro_batches(module)


def _group_ranks(module: ModuleType) -> None:
    trainers = getattr(module, "PPOTrainer", None) or module.RayPPOTrainer
    importlib.import_module("treefx.integrations.verl").group_ranks(trainers)


Hooks = dict[str, Callable[[ModuleType], None]]
"""Module name -> hook that runs right after its import."""

VERL_HOOKS: Hooks = {
    "verl.utils.seqlen_balancing": _group_micro_batches,
    "verl.workers.engine.fsdp.transformer_impl": _convert_engines,
    "verl.workers.engine.megatron.transformer_impl": _convert_megatron_engines,
    "verl.models.mcore.util": _pack_ids_on_all_stages,
    "verl.trainer.ppo.ray_trainer": _group_ranks,
    "verl.trainer.ppo.v1.trainer_base": _group_ranks,
}


def _read_trees(module: ModuleType) -> None:
    importlib.import_module("treefx.integrations.torchtitan.attention").read_trees(module)


def _compile_blocks(module: ModuleType) -> None:
    importlib.import_module("treefx.integrations.torchtitan.training").compile_blocks(module)


def _convert_trainers(module: ModuleType) -> None:
    seam = importlib.import_module("treefx.integrations.torchtitan.training")
    seam.convert_trainers(module, by_default=True, options=_WANTED.get("options"))


def _convert_policies(module: ModuleType) -> None:
    seam = importlib.import_module("treefx.integrations.torchtitan.training")
    seam.convert_policies(module, by_default=True, options=_WANTED.get("options"))


def _compile_whole(module: ModuleType) -> None:
    importlib.import_module("treefx.integrations.torchtune").compile_whole(module, _WANTED.get("options"))


def _convert_wrappers(module: ModuleType) -> None:
    importlib.import_module("treefx.integrations.skyrl").convert_wrappers(module.HFModelWrapper, **_sharing())


def _convert_megatron_workers(module: ModuleType) -> None:
    importlib.import_module("treefx.integrations.skyrl").convert_megatron_workers(module.MegatronWorker, **_sharing())


def _convert_actors(module: ModuleType) -> None:
    importlib.import_module("treefx.integrations.openrlhf").convert_actors(module.Actor, **_sharing())


def _attend_along_trees(module: ModuleType) -> None:
    importlib.import_module("treefx.integrations.async_grpo").attend_along_trees(module)


def _check_models(module: ModuleType) -> None:
    importlib.import_module("treefx.integrations.async_grpo").check_models(module)


_HOOKS: Hooks = {
    "accelerate.data_loader": _remember_batches,
    "accelerate.utils.dataclasses": _compile_with_treefx,
    "transformers.trainer": _log_and_group,
    "llamafactory.model.model_utils.checkpointing": _trace_checkpoints,
    "openrlhf.models.actor": _convert_actors,
    "skyrl.backends.skyrl_train.workers.megatron.megatron_worker": _convert_megatron_workers,
    "skyrl.backends.skyrl_train.workers.model_wrapper": _convert_wrappers,
    "torchtitan.models.common.attention": _read_trees,
    "torchtitan.distributed.compile": _compile_blocks,
    "torchtitan.experiments.rl.actors.trainer": _convert_policies,
    "torchtitan.trainer": _convert_trainers,
    "torchtune.training._compile": _compile_whole,
    "trl.experimental.async_grpo.async_grpo_trainer": _check_models,
    "trl.experimental.async_grpo.packing": _attend_along_trees,
    "trl.trainer.grpo_trainer": _keep_groups,
    "trl.trainer.rloo_trainer": _keep_groups,
    "trl.trainer.distillation_trainer": _keep_groups,
    **VERL_HOOKS,
}


def _report_at_end(module: ModuleType | None = None) -> None:
    importlib.import_module("treefx.integrations.run_end").report_at_end(_WANTED.get("report"))


def _observing() -> Any:
    _report_at_end()
    return importlib.import_module("treefx.integrations.observing")


_REPORTING_HOOKS: Hooks = {"treefx.backend": _report_at_end, "treefx.runtime.converted.hooks": _report_at_end}


def _observe_prepared(module: ModuleType) -> None:
    _observing().observe_prepared(module.Accelerator)


def _observe_trainers(module: ModuleType) -> None:
    _observing().observe_trainers(module.Trainer)


def _observe_engines(module: ModuleType) -> None:
    _observing().observe_engines(module.FSDPEngine)


def _observe_loops(module: ModuleType) -> None:
    """Find the models of optimizers that step, once each.

    treefx is imported at the first step of the process.
    """

    def observe_models(optimizer: Any, *_: Any) -> None:
        if optimizer not in seen:
            seen.add(optimizer)
            _observing().observe_models_of(optimizer)

    seen: weakref.WeakSet[Any] = weakref.WeakSet()
    module.register_optimizer_step_post_hook(observe_models)


_OBSERVING_HOOKS: Hooks = {
    "accelerate.accelerator": _observe_prepared,
    "transformers.trainer": _observe_trainers,
    "verl.workers.engine.fsdp.transformer_impl": _observe_engines,
    "torch.optim.optimizer": _observe_loops,
}


class _HookedLoader(Loader):
    """Loads a module as its own loader does, then calls the hook, and steps aside."""

    def __init__(self, loader: Any, hook: Callable[[ModuleType], None]) -> None:
        self._loader, self._hook = loader, hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """By the module's own loader."""
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        """By the module's own loader, with the hook after it."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._hook(module)


class _HookingFinder(MetaPathFinder):
    """Finds the modules with a hook, through all finders but itself."""

    def __init__(self, hooks: Hooks) -> None:
        self.treefx_hooks = hooks

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """None for all other modules."""
        hook = self.treefx_hooks.get(fullname)
        others = (finder for finder in sys.meta_path if finder is not self) if hook else ()
        spec = next((spec for finder in others if (spec := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None and hook is not None:
            spec.loader = _HookedLoader(spec.loader, hook)
        return spec


def hook_imports(hooks: Hooks) -> None:
    """Hook modules that are imported from now on, each once."""
    known = {name for finder in sys.meta_path for name in getattr(finder, "treefx_hooks", ())}
    sys.meta_path.insert(0, _HookingFinder({name: hook for name, hook in hooks.items() if name not in known}))


def _run_the_next() -> None:
    """Run the ``sitecustomize`` that this one hides, as if it had been found."""
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or os.curdir) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    hook_imports(_OBSERVING_HOOKS if _WANTED.get("observe") else _HOOKS)
    hook_imports(_REPORTING_HOOKS if _WANTED.get("report") else {})
    _run_the_next()
