"""Run a vision tower in front of the graph that it stands in.

Dynamo traces some towers into the graph of their model, for a fixed number of images. In front of the graph a tower
runs once per distinct image (``towers``), whatever their number is.

Before::

    features = tower(pixels);  loss = model(ids, features)

After, with the tower compiled by itself::

    loss = model(ids, features)   # an input

While Dynamo traces, ``treefx::tower`` stands for the tower. It is never run: ``towers_first`` makes inputs of its
results.
"""

from __future__ import annotations

import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables.tensor import TensorVariable

from treefx.kernels.cuda_graphs import NOT_CAPTURED
from treefx.kernels.memory import Bounded
from treefx.passes.trace.heads import copy_graph
from treefx.runtime.whole.distinct_images import has_hooks
from treefx.torch_patches.compiling import keeping_no_casts

__all__ = ["Tower", "stand_in", "towers_first"]

_ALL = "all"
_PER_IMAGE = "pooler_output"
"""The field that is a tensor, or a list, of one entry per image; lists in other fields have one per layer."""
_Kept = str | tuple[int, ...]
"""What of a field is given: all of it, or some entries of a list by layer."""
_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_Field = int | None | list[int | None] | tuple[int | None, ...]
"""The place of a tensor, or those of a list; None for None."""


@dataclass(frozen=True)
class _Modes:
    """Hold the modes under which a part of a graph runs: gradients, and autocast of a device."""

    grad: bool
    device: str
    autocast: torch.dtype | None

    @classmethod
    def now(cls, device: str) -> _Modes:
        on = torch.is_autocast_enabled(device)
        return cls(torch.is_grad_enabled(), device, torch.get_autocast_dtype(device) if on else None)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function under these modes."""
        autocast = torch.autocast(self.device, dtype=self.autocast, enabled=self.autocast is not None)
        with torch.set_grad_enabled(self.grad), autocast:
            return function(*args)


@dataclass(frozen=True)
class Tower:
    """Describe a call of a model's function that runs its tower.

    Attributes:
        model: It holds the tower; a weak reference.
        original: The function of transformers that is called.
        compiled: Compiles a function.
        distinct: Makes a function of images run on the distinct ones, and restore its results for all.
        names: Of the arguments, None for a positional one.
        values: Of the arguments; a tensor is None.
        places: Of the tensors among the arguments.
        fields: By field of the results, the places of its tensors among all of them.
        results: What these are like, fake tensors.
        modes: Under which it runs.
    """

    model: weakref.ref[nn.Module]
    original: Callable[..., Any]
    compiled: _Decorator
    distinct: _Decorator
    names: tuple[str | None, ...]
    values: tuple[Any, ...]
    places: tuple[int, ...]
    fields: Mapping[str, _Field]
    results: Sequence[Tensor]
    modes: _Modes

    def giving(self, taken: Sequence[int]) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        """Return a function of the tensors among the arguments that gives some tensors of the results.

        It computes no other: weights that no loss reads have no gradient, as in eager mode, instead of zeros.
        """
        kept = {name: found for name, of in self.fields.items() if (found := _kept(name, of, taken)) is not None}
        compiled = self.compiled(_function_of(self.original, kept))

        def some(model: Any, *args: Any, **kwargs: Any) -> SimpleNamespace:
            parts = zip(kept.items(), compiled(model, *args, **kwargs), strict=True)
            return SimpleNamespace(**{name: _filled(self.fields[name], of, part) for (name, of), part in parts})

        run = self.distinct(some)

        def give(given: Sequence[Tensor]) -> list[Tensor]:
            result = self.modes.run(_call, run, self.model(), self.names, self.values, self.places, given)
            found = dict(pair for name in kept for pair in _placed(self.fields[name], getattr(result, name)))
            return [found[i] for i in taken]

        return give


def _kept(name: str, places: _Field, taken: Sequence[int]) -> _Kept | None:
    """Return what of a field is taken; None for nothing."""
    if places is None or isinstance(places, int):
        return _ALL if places in taken else None
    used = tuple(i for i, place in enumerate(places) if place in taken)
    return _ALL if used and name == _PER_IMAGE else used or None


def _function_of(original: Callable[..., Any], kept: Mapping[str, _Kept]) -> Callable[..., Any]:
    """Return a function that gives parts of another one's results."""

    def features(model: Any, *args: Any, **kwargs: Any) -> list[Any]:
        result = original(model, *args, **kwargs)
        return [result[name] if of == _ALL else [result[name][i] for i in of] for name, of in kept.items()]

    code = features.__code__.replace()  # Dynamo counts compilations by code
    _IN_FRONT.add(code)
    return FunctionType(code, features.__globals__, features.__name__, None, features.__closure__)


def _filled(places: _Field, of: _Kept, part: Any) -> Any:
    """Return a field with None for entries that are not given."""
    if of == _ALL:
        return part
    assert isinstance(places, list | tuple) and isinstance(of, tuple)
    given = dict(zip(of, part, strict=True))
    return [given.get(i) for i in range(len(places))]


def _placed(places: _Field, x: Any) -> Iterator[tuple[int, Tensor]]:
    """Yield the tensors of a field after their places."""
    for place, item in [(places, x)] if isinstance(places, int) else zip(places or (), x, strict=True):
        if place is not None and item is not None:
            yield place, item


def _call(
    run: Callable[..., Any],
    model: Any,
    names: Sequence[str | None],
    values: Sequence[Any],
    places: Sequence[int],
    given: Iterable[Any],
) -> Any:
    filled = {**dict(enumerate(values)), **dict(zip(places, given, strict=True))}
    args = [filled[i] for i, name in enumerate(names) if name is None]
    return run(model, *args, **{name: filled[i] for i, name in enumerate(names) if name is not None})


_TOWERS: Bounded[str, Tower] = Bounded(1024)
_IN_FRONT: set[CodeType] = set()
"""The code of functions that run a tower in front of a graph; all have equal code."""
_keys = itertools.count()


@torch.library.custom_op("treefx::tower", mutates_args=(), tags=NOT_CAPTURED)
def tower(key: str, given: Sequence[Tensor]) -> list[Tensor]:
    """Stand for a tower in Dynamo's graph; its results become inputs of the graph before anything runs."""
    raise AssertionError("treefx::tower is taken out of its graph by treefx's backend, and no other runs it")


@tower.register_fake
def _tower_fake(key: str, given: Sequence[Tensor]) -> list[Tensor]:
    return [given[0].new_empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in _TOWERS[key].results]


# While Dynamo traces --------------------------------------------------------------------------------------------------


def stand_in(
    original: Callable[..., Any],
    compiled: _Decorator,
    distinct: _Decorator,
    tx: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[Any, list[Any], dict[str, Any]] | None:
    """Return a call of ``treefx::tower`` in place of a model's function.

    None where it has one image, reads more than inputs of the graph, or gives something else than tensors in fields.

    Args:
        original: The function as transformers has it.
        compiled: Compiles a function.
        distinct: Makes a function like it run once per distinct image.
        tx: Dynamo's translator.
        args, kwargs: Of the call, the model first, as Dynamo knows them.
    """
    if tx.f_code in _IN_FRONT:
        return None
    model, *given = [x.realize() for x in (*args, *kwargs.values())]
    module, source = getattr(model, "value", None), model.source
    places = [i for i, x in enumerate(given) if isinstance(x, TensorVariable)]
    tensors = [given[i] for i in places]
    if not isinstance(module, nn.Module) or source is None or not places or not all(map(_is_untouched, tensors)):
        return None
    others = [x for x in given if not isinstance(x, TensorVariable)]
    if has_hooks(module) or not all(x.is_python_constant() for x in others):
        return None
    names = (*[None] * (len(args) - 1), *kwargs)
    values = tuple(None if isinstance(x, TensorVariable) else x.as_python_constant() for x in given)
    examples = [x.proxy.node.meta["example_value"] for x in tensors]
    modes = _Modes.now(examples[0].device.type)
    found = modes.run(_fake_results, tx, lambda: _call(original, module, names, values, places, examples))
    if found is None:
        return None
    install_guard(source.make_guard(GuardBuilder.ID_MATCH))  # another model has another tower
    form, fields, results = found
    key, make = f"tower {next(_keys)}", _maker(form)
    _TOWERS[key] = Tower(
        weakref.ref(module), original, compiled, distinct, names, values, tuple(places), fields, results, modes
    )

    def features(*given: Tensor) -> Any:
        found = torch.ops.treefx.tower(key, given)
        return make({name: _at(found, places) for name, places in fields.items()})

    return features, tensors, {}


def _maker(form: type) -> Callable[[Mapping[str, Any]], Any]:
    """Return what makes a class of fields: a function of its module, by whose name Dynamo knows the class."""
    code = f"lambda fields: {form.__qualname__}(**fields)"
    made: Callable[[Mapping[str, Any]], Any] = eval(code, vars(sys.modules[form.__module__]))
    return made


def _at(tensors: Sequence[Tensor], places: _Field) -> Any:
    """Return what a field holds."""
    if places is None:
        return None
    if isinstance(places, int):
        return tensors[places]
    if isinstance(places, list):
        return [_at(tensors, place) for place in places]
    return tuple([_at(tensors, place) for place in places])


def _is_untouched(x: TensorVariable) -> bool:
    """Whether a tensor is an input of the graph that nothing has read yet, of several images."""
    node = x.proxy.node
    example = node.meta.get("example_value")
    if node.op != "placeholder" or node.users or not isinstance(example, Tensor) or example.requires_grad:
        return False
    tracer: Any = x.proxy.tracer
    return tracer.parent is None and bool(example.shape) and example.shape[0] != 1


def _fake_results(tx: Any, call: Callable[[], Any]) -> tuple[type, Mapping[str, _Field], Sequence[Tensor]] | None:
    """Return the class, fields and tensors of results, of a call on tensors without values."""
    mode = tx.fake_mode
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True  # its parameters
    try:
        with mode, keeping_no_casts():
            result = call()
    except RestartAnalysis:  # hooks were hung on its modules
        raise
    except Exception:  # it reads values on the host, and cuts the graph
        return None
    finally:
        mode.allow_non_fake_inputs = before
    form = type(result)
    if not isinstance(result, Mapping) or vars(sys.modules[form.__module__]).get(form.__qualname__) is not form:
        return None
    fields, tensors = _flat(result)
    return None if fields is None else (form, fields, tensors)


def _flat(result: Mapping[str, Any]) -> tuple[Mapping[str, _Field] | None, list[Tensor]]:
    """Return the places of each field's tensors, and all tensors; None for fields that hold something else."""
    tensors: list[Tensor] = []
    fields: dict[str, _Field] = {}
    for name, x in result.items():
        listed = isinstance(x, list | tuple)
        places: list[int | None] = []
        for item in x if listed else [x]:
            if item is not None and not isinstance(item, Tensor):
                return None, []
            places.append(None if item is None else len(tensors))
            tensors += [] if item is None else [item]
        fields[name] = type(x)(places) if listed else places[0]
    return fields, tensors


# In the backend -------------------------------------------------------------------------------------------------------

_Run = tuple[Callable[[Sequence[Tensor]], list[Tensor]], list[int]]
"""What gives the results of a tower that the graph takes, and the inputs that it reads."""


def towers_first(
    gm: fx.GraphModule, roles: list[str]
) -> tuple[fx.GraphModule, list[str], Callable[[Sequence[Any]], list[Any]] | None]:
    """Make inputs of what towers give.

    Args:
        gm: Dynamo's graph, never changed.
        roles: Role of each placeholder.

    Returns:
        The graph, or a copy with more inputs, which are last; its roles; and what runs the towers: inputs of Dynamo's
        graph -> results. None without towers.
    """
    if not gm.graph.find_nodes(op="call_function", target=torch.ops.treefx.tower):
        return gm, roles, None
    gm = copy_graph(gm)
    inputs = gm.graph.find_nodes(op="placeholder")
    last, runs, count = inputs[-1], list[_Run](), 0
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.treefx.tower):
        key, given = node.args
        taken = sorted({user.args[1] for user in node.users if user.users})
        runs.append((_TOWERS[key].giving(taken), [inputs.index(x) for x in given]))
        count += len(taken)
        for i in taken:
            with gm.graph.inserting_after(last):
                last = gm.graph.placeholder(f"of_{node.name}_{i}")
            readers = [user for user in node.users if user.args[1] == i]
            last.meta.update(readers[0].meta)
            for reader in readers:
                reader.replace_all_uses_with(last)
        for reader in list(node.users):
            assert reader.target is operator.getitem
            gm.graph.erase_node(reader)
        gm.graph.erase_node(node)
    gm.graph.lint()
    gm.recompile()

    def run(args: Sequence[Any]) -> list[Any]:
        return [x for give, at in runs for x in give([args[i] for i in at])]

    return gm, roles + ["variable"] * count, run
