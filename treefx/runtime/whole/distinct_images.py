"""Run a vision tower once per distinct image.

Rollouts of one prompt hold copies of its images. A tower computes each image by itself::

    vectors[i] = f(pixels[i]; w)        before:  f on A, B, A, A        after:  f on A, B;  vectors of A, B, A, A

so the gradient of w is a sum over distinct images, of the gradients of all copies. The law holds if no image depends on
another and no random numbers are drawn. Code shows neither, so the first call proves both on two images:

- the derivative of one's vectors by the other's pixels is zero in every element;
- the vectors stay the same where the other's pixels change, or the image is alone. This shows paths without a
  derivative.

Other modes of modules (``train``) are proved again. Towers without this proof run on all images.

A result that lists the vectors of each image may have fields of another form, as one of all images in one sequence.
Models read the list alone; reading another field is refused. Pixels [n, parts, 3, H, W] give each image several tiles,
or each row several images (``image_parts``), and padding among them that a tower may drop: sizes then do not show which
entry a part belongs to, and the list is the only form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from treefx.errors import UnsupportedError
from treefx.passes.labels.facts import Axis, Dims, Factor
from treefx.runtime.token_bits import OF_TOKENS
from treefx.torch_patches.compiling import keeping_no_casts

__all__ = [
    "OF_IMAGES",
    "Distinct",
    "ImagesRun",
    "Unrestored",
    "fields_of",
    "find_distinct",
    "has_hooks",
    "images_run",
    "is_separate",
    "note_run",
    "patches_of",
    "random_states",
    "undo",
]

_LIBRARY = "transformers."
_DIMS, _IN_PARTS = range(2, 6), 5
"""Of arguments with one image or patch per entry; with five dimensions, an entry has several tiles or frames."""
OF_IMAGES: Dims = (*OF_TOKENS, (Factor(Axis.PLAIN, -1),))
"""The dimensions of images [n, 1, ...], each a row of one token."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class ImagesRun:
    """Count the images of a model's last call.

    Attributes:
        given: In the batch.
        run: Images that went through the tower.
    """

    given: int
    run: int


@dataclass(frozen=True)
class Distinct:
    """Select the first copy of each image, and restore all copies.

    Attributes:
        first: The place of each distinct image.
        copy_of: For each image, which of ``first`` it equals.
        patches: The number of patches of each image, where these stand one after another in one dimension.
        in_parts: Whether an image has several tiles, of which a tower may drop some.
    """

    first: tuple[int, ...]
    copy_of: tuple[int, ...]
    patches: tuple[int, ...] | None = None
    in_parts: bool = False

    def of(self, chosen: Sequence[int]) -> Distinct:
        """Describe a batch of some images, each taken for another one."""
        places = tuple(range(len(chosen)))
        return replace(
            self, first=places, copy_of=places, patches=self.patches and tuple(self.patches[i] for i in chosen)
        )

    def select(self, x: Any) -> Any:
        """Return an argument for the distinct images alone."""
        return select(x, self.first, self)

    def restore(self, result: Any) -> bool:
        """Give all copies their part of a tower's result, in place.

        Returns:
            False if a field of the result has another form; then nothing has changed.
        """
        fields = {name: x for name, x in fields_of(result).items() if x is not None}
        images: Any = fields.get("pooler_output")
        sizes = [[1] * len(self.first)]
        if self.patches is not None:
            sizes.append([self.patches[i] for i in self.first])
        if _are_tensors(images):
            sizes.append([len(x) for x in images])
        try:
            listed = self._listed(images) if self.in_parts or _are_tensors(images) else None
            restored = {name: self._field(name, x, sizes, listed) for name, x in fields.items() if x is not images}
            restored["pooler_output"] = self._restored(images, sizes) if listed is None else listed
        except _UnknownForm:
            return False
        for name, x in restored.items():
            setattr(result, name, x)
        return True

    def _field(self, name: str, x: Any, sizes: Sequence[list[int]], listed: Any) -> Any:
        """Return a field of all copies, or where the list of images is all that is known, what refuses to be read."""
        try:
            return Unrestored(name) if self.in_parts else self._restored(x, sizes)
        except _UnknownForm:
            if listed is None:
                raise
            return Unrestored(name)

    def _listed(self, images: Any) -> Any:
        """Return a list of one entry per image, no two of them aliases."""
        if not _are_tensors(images) or len(images) != len(self.first):
            raise _UnknownForm
        seen = [self.copy_of.index(i) < place for place, i in enumerate(self.copy_of)]
        copies = zip(self.copy_of, seen, strict=True)
        return type(images)([images[i].clone() if is_seen else images[i] for i, is_seen in copies])

    def _restored(self, x: Any, sizes: Sequence[list[int]]) -> Any:
        """Return a field with all copies; ``sizes`` are the possible lengths of each image's part.

        A list has one entry per layer, and each of them is a tensor of all images or a list of one per image.
        """
        if isinstance(x, Tensor):
            fitting = {tuple(item) for item in sizes if x.dim() and sum(item) == len(x)}
            if len(fitting) != 1:
                raise _UnknownForm
            parts = torch.split(x, [*fitting.pop()])
            return torch.cat([parts[i] for i in self.copy_of])
        if not isinstance(x, list | tuple):
            raise _UnknownForm
        return type(x)([self._of_layer(item, sizes) for item in x])

    def _of_layer(self, x: Any, sizes: Sequence[list[int]]) -> Any:
        if x is None:
            return None
        return self._listed(x) if _are_tensors(x) else self._restored(x, sizes)


class _UnknownForm(Exception):
    """A field of a tower's result has no part per image."""


class Unrestored:
    """Stand for a field whose entries are not known by image, and refuse to be read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise self._error()

    def __getitem__(self, index: Any) -> Any:
        raise self._error()

    def __len__(self) -> int:
        raise self._error()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls))._error()

    def _error(self) -> UnsupportedError:
        return UnsupportedError(
            f"field {self._name!r} of a vision tower's result cannot be expanded to all images, because the tower ran "
            "once per distinct image; read pooler_output, or call the tower outside of the compiled model"
        )


def select(x: Any, chosen: Sequence[int], images: Distinct) -> Any:
    """Return a tensor [n, ...], or one of all patches, for the chosen images alone."""
    if not isinstance(x, Tensor):
        return x
    if len(x) == len(images.copy_of):
        return x[torch.tensor(chosen, device=x.device)]
    assert images.patches is not None
    parts = torch.split(x, [*images.patches])
    return torch.cat([parts[i] for i in chosen])


def patches_of(given: Iterable[Tensor]) -> Tensor | None:
    """Return int64 [n], the patches of each image by their grids [n, 3]; None without grids."""
    grids = [x for x in given if x.dim() == 2 and x.shape[1] == 3 and not x.is_floating_point()]
    return grids[0].prod(-1) if grids else None


def find_distinct(given: Sequence[Tensor], number: Callable[[Sequence[Tensor], int], Tensor | None]) -> Distinct | None:
    """Find equal images among the arguments of a tower.

    Args:
        given: All tensors among the arguments, one entry per image or one per patch.
        number: Numbers images; equal bits have equal numbers.

    Returns:
        The distinct images. None if the arguments have another form.
    """
    if not given or any(x.dim() not in _DIMS or x.requires_grad for x in given):
        return None
    patches = patches_of(given)
    count = len(given[0]) if patches is None else len(patches)
    numbers = number(given, count)
    if numbers is None:
        return None
    places: dict[int, int] = {}
    copy_of = tuple(places.setdefault(image, len(places)) for image in numbers.tolist())
    first = tuple(copy_of.index(i) for i in range(len(places)))
    in_parts = any(x.dim() == _IN_PARTS for x in given)
    return Distinct(first, copy_of, None if patches is None else tuple(patches.tolist()), in_parts)


# The proof ------------------------------------------------------------------------------------------------------------

_verdicts: WeakKeyDictionary[nn.Module, tuple[Any, bool]] = WeakKeyDictionary()
"""By model, the modes of its modules and whether its tower computes each image by itself."""


def is_separate(
    model: nn.Module, original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], found: Distinct
) -> bool:
    """Return whether a tower computes each image by itself, without random numbers.

    Hooks other than transformers' see each image, and those of sharded models wait for other ranks: with these, nothing
    is proved.
    """
    if has_hooks(model):
        return False
    modes = tuple(module.training for module in model.modules())
    known = _verdicts.get(model)
    if known is not None and known[0] == modes:
        return known[1]
    if torch.is_inference_mode_enabled():
        return False
    verdict = _prove(model, original, args, kwargs, found)
    if verdict is not None:
        _verdicts[model] = modes, verdict
    return verdict is True


def has_hooks(model: nn.Module) -> bool:
    """Return whether others than transformers wait for the calls of a model's modules."""
    hooks = [hook for module in model.modules() for name in _HOOKS for hook in getattr(module, name).values()]
    return any(not str(getattr(hook, "__module__", "")).startswith(_LIBRARY) for hook in hooks)


def _prove(
    model: nn.Module, original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], found: Distinct
) -> bool | None:
    """Run two images; None if their values show nothing (a projection that is zero)."""
    pair = _pair((*args, *kwargs.values()), found)
    if pair is None:
        return None
    both = found.of(pair)
    run = functools.partial(_features, model, original, args, kwargs, found)
    buffers = [(x, x.detach().clone()) for x in model.buffers()]
    devices = sorted({x.device.index or 0 for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_cuda})
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices), keeping_no_casts():
            before = random_states(devices)
            images, pixels = run(pair, lambda x: x.clone().requires_grad_())
            grads = [_gradients(images[i], pixels, both) for i in (0, 1)]
            with torch.no_grad():
                first = [run(pair, lambda x: _without(x, 1, both))[0][0], run(pair[:1], lambda x: x)[0][0]]
                if both.in_parts:
                    first.append(run(pair, lambda x: _without(x, 1, both, blank=True))[0][0])
                second = [run(pair, lambda x: _without(x, 0, both))[0][1], run(pair[1:], lambda x: x)[0][0]]
            drawn = any(not torch.equal(x, y) for x, y in zip(before, random_states(devices), strict=True))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return False
    finally:
        changed = undo(buffers)
    equal = all(_are_close(images[i].detach(), x) for i, others in enumerate((first, second)) for x in others)
    if drawn or changed or not equal or any(x.ne(0).any() for i in (0, 1) for x in grads[i][1 - i]):
        return False
    return True if all(x.ne(0).any() for i in (0, 1) for x in grads[i][i]) else None


def _pair(values: Sequence[Any], found: Distinct) -> tuple[int, int] | None:
    """Return two images with other numbers than zero, different ones if there are any; None without.

    An entry of zeros alone is padding: a row without an image.
    """
    pixels = [x for x in values if _is_pixels(x)]
    shown = [i for i in found.first if any(bool(select(x, (i,), found).any()) for x in pixels)]
    copies = (i for i, of in enumerate(found.copy_of) if i not in found.first and found.first[of] in shown)
    first, second, *_ = *shown, *copies, None, None
    return None if first is None or second is None else (first, second)


def _features(
    model: nn.Module,
    original: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    found: Distinct,
    chosen: Sequence[int],
    change: Callable[[Tensor], Tensor],
) -> tuple[Sequence[Tensor], list[Tensor]]:
    """Run chosen images with changed pixels; return the vectors of each, and the pixels.

    Raises:
        ValueError: The tower's result has a form that cannot be restored.
    """
    values = [select(x, chosen, found) for x in (*args, *kwargs.values())]
    values = [change(x.detach()) if _is_pixels(x) else x for x in values]
    result = original(model, *values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))
    if not found.of(chosen).restore(result):
        raise ValueError("the result has another form")
    return result.pooler_output, [x for x in values if _is_pixels(x)]


def _is_pixels(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _gradients(image: Tensor, pixels: Sequence[Tensor], both: Distinct) -> list[list[Tensor]]:
    """Return the derivatives of an image's vectors by the pixels of both images."""
    weights = torch.arange(1, image.numel() + 1, device=image.device).cos().reshape(image.shape)
    grads = torch.autograd.grad((image * weights).sum(), pixels, retain_graph=True)
    return [[_part(x, i, both) for x in grads] for i in (0, 1)]


def _part(x: Tensor, i: int, both: Distinct) -> Tensor:
    """The part of one of two images, a view."""
    return torch.split(x, [1, 1] if len(x) == 2 else [*(both.patches or ())])[i]


def _without(x: Tensor, i: int, both: Distinct, *, blank: bool = False) -> Tensor:
    """Pixels with other numbers in place of one image, or with zeros, which a tower may take for padding."""
    x = x.clone()
    part = _part(x, i, both)
    part.copy_(torch.zeros_like(part) if blank else part.flip(-1) * 0.5 + 0.25)
    return x


def _are_close(x: Tensor, y: Tensor) -> bool:
    """Whether vectors are equal but for the order of sums."""
    return bool((x - y).abs().max() <= 64 * torch.finfo(x.dtype).eps * x.abs().max())


def random_states(devices: Sequence[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def undo(buffers: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Restore buffers that the proof changed; return whether there are any.

    By their values, since batch norm changes no version.
    """
    changed = [(x, old) for x, old in buffers if not torch.equal(x, old)]
    with torch.no_grad():
        for x, old in changed:
            x.copy_(old)
    return bool(changed)


def fields_of(result: Any) -> Mapping[str, Any]:
    return result if isinstance(result, Mapping) else vars(result)


def _are_tensors(x: Any) -> bool:
    return isinstance(x, list | tuple) and all(isinstance(item, Tensor) and item.dim() for item in x)


# Figures --------------------------------------------------------------------------------------------------------------

_runs: WeakKeyDictionary[nn.Module, ImagesRun] = WeakKeyDictionary()
"""The last call of each model's tower."""


def note_run(model: nn.Module, given: int, run: int) -> None:
    """Note how many images were given to a model's tower, and how many of them ran."""
    _runs[model] = ImagesRun(given, run)


def images_run(parameters: Iterable[Tensor]) -> ImagesRun | None:
    """Return the images of the last call of a model that holds one of these parameters."""
    wanted = {id(x) for x in parameters}
    return next((run for model, run in _runs.items() if any(id(x) in wanted for x in model.parameters())), None)
