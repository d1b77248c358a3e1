"""Note which image each vector of a vision tower comes from, for later graphs.

Most towers read the sizes of images on the host, which cuts the model in two. All return their features from
``get_image_features`` or ``get_video_features`` of a model, one entry per image. Equal pixels give features that are
one function of the parameters, if the order of the images does not matter and no random numbers are drawn. A tower in
front of the cut runs once per distinct image (``distinct_images``); one that cuts nothing is taken out of the graph
(``tower_first``).
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.convert_frame import skip_code  # type: ignore[attr-defined]
from torch._dynamo.exc import RestartAnalysis

from treefx.runtime.origins import note_vectors
from treefx.runtime.token_bits import number_tokens
from treefx.runtime.whole.distinct_images import OF_IMAGES, Distinct, find_distinct, is_separate, note_run, patches_of
from treefx.runtime.whole.image_parts import DistinctParts, are_parts_separate, find_parts
from treefx.runtime.whole.tower_first import stand_in
from treefx.torch_patches.patch import is_treefx

__all__ = ["is_in_tower", "tower_instead"]

_NAMES = ("get_image_features", "get_video_features")
_LIBRARY = "transformers.models."


def tower_instead(function: Any, tx: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any], dict[str, Any]] | None:
    """Return a call in place of a model's function that runs its tower in front of the graph; None for other calls.

    From Dynamo's first call of the function on, its results are noted where it cuts the graph.
    """
    name, module = getattr(function, "__name__", None), str(getattr(function, "__module__", ""))
    if name not in _NAMES or not module.startswith(_LIBRARY):
        return None
    owner = getattr(sys.modules[module], function.__qualname__.rpartition(".")[0], None)
    if not isinstance(owner, type):
        return None
    if not hasattr(vars(owner)[name], "__treefx_notes__"):
        setattr(owner, name, _noting(vars(owner)[name]))
        raise RestartAnalysis(restart_reason="the tower's function was replaced")  # guards name the function's parts
    original = vars(owner)[name].__wrapped__
    if function not in (original, vars(owner)[name]):  # one that a decorator calls
        return None
    compiler = tx.output.compiler_fn
    compiled = torch._dynamo.optimize(compiler, dynamic=getattr(compiler, "dynamic", None))

    def distinct(run: Callable[..., Any]) -> Callable[..., Any]:
        def features(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return _run_distinct(model, original, run, args, kwargs, is_compiled=True)

        return features

    return stand_in(original, compiled, distinct, tx, args, kwargs)


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def features(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # within a graph, where the analysis sees the tower
            return original(self, *args, **kwargs)
        is_compiled = _is_compiled(get_eval_frame_callback())
        return _run_distinct(self, original, original, args, kwargs, is_compiled=is_compiled)

    features.__treefx_notes__ = True  # type: ignore[attr-defined]
    skip_code(features.__code__)  # type: ignore[attr-defined]  # run as it stands, the original is compiled by itself
    return features


def _run_distinct(
    model: nn.Module,
    original: Callable[..., Any],
    run: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    is_compiled: bool,
) -> Any:
    """Run a tower on the distinct images; ``run`` is the original function, or gives some fields of its results."""
    call = _begin(model, original, args, kwargs, is_compiled)
    result = run(model, *call.args, **call.kwargs)
    if not _end(call, result):
        result = run(model, *args, **kwargs)
        _end(_with_all(call), result)
    return result


skip_code(_run_distinct.__code__)


def is_in_tower() -> bool:
    """Return whether a tower runs in this thread: its graphs have vectors of images, not of tokens."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _run_distinct.__code__:
        frame = frame.f_back
    return frame is not None


def _is_compiled(callback: Any) -> bool:
    """Return whether treefx compiles the frame that calls, by Dynamo's callback for frames."""
    while callback is not None and not is_treefx(callback):
        backend = getattr(callback, "_torchdynamo_orig_backend", None)
        callback = getattr(callback, "_torchdynamo_orig_callable", None) if backend is None else backend
    return callback is not None


@dataclass
class _Call:
    """A call of a tower.

    Attributes:
        model: It holds the tower.
        values: All arguments, of all images.
        args, kwargs: Those of the distinct images, with which the tower runs.
        distinct: Which images run; None for all of them.
        count: The number of images, or of rows of images; None if it is unknown.
        in_parts: Whether each of them has several parts.
        states: The states of random numbers before the call.
    """

    model: nn.Module
    values: Sequence[Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    distinct: Distinct | DistinctParts | None = None
    count: int | None = None
    in_parts: bool = False
    states: Sequence[Tensor] = ()

    @property
    def given(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return [x for x in self.values if isinstance(x, Tensor)]


@torch._dynamo.disable  # type: ignore[untyped-decorator]  # Dynamo would trace it for nothing
def _begin(
    model: nn.Module, original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], is_compiled: bool
) -> _Call:
    """Select the distinct images, where the tower computes each by itself; uncompiled models run all."""
    call = _Call(model, [*args, *kwargs.values()], args, kwargs)
    found = find_distinct(call.given, _number_images) if is_compiled else None
    if found is not None:
        call.count, call.in_parts = len(found.copy_of), found.in_parts
        call.distinct = chosen = _choose(call, original, found)
        given = chosen.count if isinstance(chosen, DistinctParts) else call.count
        note_run(model, given, given if chosen is None else len(chosen.first))
        if chosen is not None:
            call.args = [chosen.select(x) for x in args]
            call.kwargs = {name: chosen.select(x) for name, x in kwargs.items()}
    call.states = _random_states(call.given)
    return call


def _choose(call: _Call, original: Callable[..., Any], found: Distinct) -> Distinct | DistinctParts | None:
    """Return what runs in place of all images: the distinct ones, or the distinct rows of images."""
    if any(_is_per_image(x, len(found.copy_of)) for x in call.values):
        return None
    parts = find_parts(call.model, call.values) if found.in_parts else None
    if parts is not None and are_parts_separate(call.model, original, call.args, call.kwargs, parts):
        return parts
    repeats = len(found.first) < len(found.copy_of)
    return found if repeats and is_separate(call.model, original, call.args, call.kwargs, found) else None


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def _with_all(call: _Call) -> _Call:
    """Return a call that ran on all images."""
    if call.count is not None:
        note_run(call.model, call.count, call.count)
    return replace(call, distinct=None)


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def _end(call: _Call, result: Any) -> bool:
    """Restore all images of a result, and note which of its vectors are equal.

    Returns:
        False if the result has a form that cannot be restored.
    """
    if call.distinct is not None and not call.distinct.restore(result):
        return False
    drawn = any(not torch.equal(x, y) for x, y in zip(call.states, _random_states(call.given), strict=True))
    images: Any = getattr(result, "pooler_output", None)
    one_each = not call.in_parts and isinstance(images, Tensor) and images.dim() > 2 and len(images) == call.count
    if (_is_list(images) or one_each) and not drawn and not any(_is_per_image(x, len(images)) for x in call.values):
        if isinstance(call.distinct, DistinctParts):
            for x, numbers in zip(images, call.distinct.numbers(images[0].device), strict=True):
                note_vectors(x, functools.partial(_itself, numbers))
        elif one_each:
            note_vectors(images, functools.partial(_Numbers(call.given, [1] * len(images)), 0, len(images)))
        else:
            _note(call.given, images, getattr(result, "deepstack_features", None) or ())
    return True


def _itself(numbers: Tensor) -> Tensor:
    return numbers


def _random_states(given: Sequence[Tensor]) -> list[Tensor]:
    devices = {x.device for x in given if x.device.type == "cuda"}
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def _is_per_image(x: Any, count: int) -> bool:
    """Return whether an argument may differ by image in a way that bits do not show."""
    if isinstance(x, Tensor):
        return x.requires_grad  # each image then has a separate gradient
    return isinstance(x, Sized) and not isinstance(x, str) and (isinstance(x, Mapping) or len(x) == count)


def _note(given: Sequence[Tensor], images: Sequence[Tensor], deep: Sequence[Any]) -> None:
    """Note equal vectors, of each image and, for later layers, of all images in order."""
    counts = [len(x) for x in images]
    find = _Numbers(given, counts)
    for found in [images, *[[x] if isinstance(x, Tensor) else x for x in deep]]:
        if _is_list(found) and sum(map(len, found)) == sum(counts):
            ends = itertools.accumulate(map(len, found))
            for x, end in zip(found, ends, strict=True):
                note_vectors(x, functools.partial(find, end - len(x), end))


def _is_list(found: Any) -> bool:
    """Whether it is a list of vectors [n, D]."""
    return isinstance(found, list | tuple) and all(isinstance(x, Tensor) and x.dim() == 2 for x in found)


class _Numbers:
    """Numbers of the vectors of images, found when they are asked for and then kept.

    Args:
        given: Arguments of a tower.
        counts: How many vectors each image gave.
    """

    def __init__(self, given: Sequence[Tensor], counts: Sequence[int]) -> None:
        self._given, self._counts = given, counts
        self._versions = [_version(x) for x in given]
        self._numbers: Tensor | None = None

    def __call__(self, start: int, end: int) -> Tensor | None:
        """Return the numbers of vectors from ``start`` to ``end``; None if they are unknown."""
        if self._numbers is None:
            self._numbers = self._find()
            self._given = ()
        return None if self._numbers is None else self._numbers[start:end]

    def _find(self) -> Tensor | None:
        if self._versions != [_version(x) for x in self._given]:
            return None
        images = _number_images(self._given, len(self._counts))
        if images is None:
            return None
        each = torch.tensor(self._counts, device=images.device)
        within = torch.arange(sum(self._counts), device=images.device) - (each.cumsum(0) - each).repeat_interleave(each)
        return images.repeat_interleave(each) * max(self._counts) + within


def _number_images(given: Sequence[Tensor], count: int) -> Tensor | None:
    """Return int64 [count], equal for images with equal bits of all arguments.

    None if that is unknown.
    """
    patches = patches_of(x for x in given if len(x.shape) and len(x) == count)
    numbers = []
    for x in given:
        if len(x.shape) and len(x) == count:
            numbers.append(number_tokens(x.detach().reshape(count, 1, x[:1].numel()), OF_IMAGES))
        elif patches is not None and x.dim() > 1 and len(x) == int(patches.sum()):
            of_patches = number_tokens(x.detach().reshape(len(x), 1, x[:1].numel()), OF_IMAGES)[:, 0]
            parts = torch.split(of_patches, patches.tolist())
            numbers.append(torch.nn.utils.rnn.pad_sequence([*parts], batch_first=True, padding_value=-1))
        else:
            return None
    image: Tensor = torch.unique(torch.cat(numbers, 1), dim=0, return_inverse=True)[1]
    return image


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version
