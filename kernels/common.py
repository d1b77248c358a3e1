"""Share inputs, dtypes and memory layouts between the operator's implementations."""

import math
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from treefx.reason_codes import with_code

__all__ = [
    "Boundary",
    "Inputs",
    "accumulation_dtype",
    "are_finite",
    "are_right",
    "autograd_enabled",
    "empty_heads_inside",
    "empty_outputs",
    "heads_inside",
    "make_indices",
    "own_dtypes",
    "owned",
    "random_gradient",
    "relative_error",
    "sink_gradient",
]

_SUM_DTYPES = {torch.float16: torch.float32}
"""Where the sum of finite numbers easily leaves the range of their type."""
_SOFT_MASK = -1e30
"""A log-sum-exp below it: the row saw nothing but masking constants, so its gradients mean nothing."""


@dataclass(frozen=True)
class Boundary:
    """Hold keys of tokens above the packed ones; query i sees key j iff lo[j] <= i < hi[j].

    Attributes:
        k: keys ``[B, Hkv, P, D]``.
        v: values ``[B, Hkv, P, Dv]``.
        lo: first own token that sees each key, int32 ``[P]``.
        hi: one past the last, int32 ``[P]``; not above ``lo`` where none does.
    """

    k: Tensor
    v: Tensor
    lo: Tensor
    hi: Tensor

    def is_seen(self) -> bool:
        """Return whether any own query sees any of them; waits for a device."""
        return bool((self.hi > self.lo).any())


@dataclass(frozen=True)
class Inputs:
    """The tensor inputs of ``treefx::tree_attention``.

    Attributes:
        q: queries ``[B, H, N, D]``.
        k: keys ``[B, Hkv, N, D]``; H is a multiple of Hkv.
        v: values ``[B, Hkv, N, Dv]``.
        subtree_end: exclusive end of each token's subtree in packed order, int32 ``[N]``.
        buffers: the tensors that the score expression loads.
        sinks: one extra logit per query head ``[H]``, or ``None``.
        boundary: keys from outside, or ``None``. In a score's indices they come first: key j of the boundary is token
            j, own token i is token P + i, and buffers along the tokens hold P + N entries.
        deterministic: whether results must be the same bits every time, where an implementation leaves that open.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    subtree_end: Tensor
    buffers: Sequence[Tensor] = ()
    sinks: Tensor | None = None
    boundary: Boundary | None = None
    deterministic: bool = False

    @property
    def outside(self) -> int:
        """Number of the boundary's keys P; 0 without one."""
        return 0 if self.boundary is None else self.boundary.k.shape[2]

    @property
    def keys(self) -> Tensor:
        """All keys, those of the boundary first, ``[B, Hkv, P + N, D]``."""
        return self.k if self.boundary is None else torch.cat([self.boundary.k, self.k], dim=2)

    @property
    def values(self) -> Tensor:
        """All values, those of the boundary first, ``[B, Hkv, P + N, Dv]``."""
        return self.v if self.boundary is None else torch.cat([self.boundary.v, self.v], dim=2)

    def first_tokens(self, tokens: int, outside: int = 2048) -> "Inputs":
        """Return the first tokens of the batch's first element, a forest, with first outside keys.

        Implementations are compared on them. So numbers that are not finite are zeros there, of which a comparison
        would say nothing; and keys from outside that only other tokens see are seen by all of these.
        """
        q, k, v = (_finite(x[:1, :, :tokens]) for x in (self.q, self.k, self.v))
        boundary = self.boundary
        if boundary is not None:
            keys, values = (_finite(x[:1, :, :outside]) for x in (boundary.k, boundary.v))
            first = Boundary(keys, values, boundary.lo[:outside], boundary.hi[:outside].clamp(max=tokens))
            if boundary.is_seen() and not first.is_seen():
                first = replace(first, lo=torch.zeros_like(first.lo), hi=torch.full_like(first.hi, q.shape[2]))
            boundary = first
        ends = self.subtree_end[:tokens].clamp(max=tokens)
        return replace(self, q=q, k=k, v=v, subtree_end=ends, boundary=boundary)

    def with_finite_numbers(self) -> "Inputs":
        """Return the same with zeros where queries, keys or values are not finite; itself if all are."""
        boundary = self.boundary
        given = [self.q, self.k, self.v, *([] if boundary is None else [boundary.k, boundary.v])]
        q, k, v, *outside = found = [_finite(x) for x in given]
        if all(map(operator.is_, found, given)):
            return self
        return replace(self, q=q, k=k, v=v, boundary=boundary and replace(boundary, k=outside[0], v=outside[1]))

    def first_heads(self, key_heads: int) -> "Inputs":
        """Return the batch's first element with its first key heads, and the query heads of their groups."""
        heads = self.q.shape[1] // self.k.shape[1] * key_heads
        k, v = (x[:1, :key_heads] for x in (self.k, self.v))
        boundary = self.boundary
        if boundary is not None:
            boundary = replace(boundary, k=boundary.k[:1, :key_heads], v=boundary.v[:1, :key_heads])
        sinks = None if self.sinks is None else self.sinks[:heads]
        return replace(self, q=self.q[:1, :heads], k=k, v=v, sinks=sinks, boundary=boundary)

    def seen_from(self) -> tuple[Tensor, ...]:
        """Return ``lo`` and ``hi`` of the boundary; nothing without one."""
        return () if self.boundary is None else (self.boundary.lo, self.boundary.hi)

    def with_all_keys(self) -> "Inputs":
        """Return the same with all keys and values, the boundary's first, as own ones."""
        return self if self.boundary is None else replace(self, k=self.keys, v=self.values)

    def intervals(self) -> tuple[Tensor, Tensor]:
        """Return the tokens (as a score counts them) that see each key, ``[P + N]`` each."""
        first = torch.arange(self.q.shape[2], device=self.q.device)
        if self.boundary is None:
            return first, self.subtree_end
        starts, ends = torch.cat([self.boundary.lo, first]), torch.cat([self.boundary.hi, self.subtree_end])
        return starts + self.outside, ends + self.outside

    def as_leaves(self, dtype: torch.dtype, buffer_grads: Sequence[bool]) -> "Inputs":
        """Return copies in ``dtype`` that require grad, with marked buffers; needs autograd on."""

        def leaf(tensor: Tensor) -> Tensor:
            return tensor.detach().to(dtype).requires_grad_()

        marked = zip(self.buffers, buffer_grads, strict=True)
        boundary = self.boundary
        return replace(
            self,
            q=leaf(self.q),
            k=leaf(self.k),
            v=leaf(self.v),
            buffers=[leaf(buffer) if wanted else buffer for buffer, wanted in marked],
            sinks=None if self.sinks is None else leaf(self.sinks),
            boundary=boundary and replace(boundary, k=leaf(boundary.k), v=leaf(boundary.v)),
        )

    def detached(self) -> "Inputs":
        """Return the same tensors outside the autograd graph."""
        return replace(
            self,
            q=self.q.detach(),
            k=self.k.detach(),
            v=self.v.detach(),
            buffers=[buffer.detach() for buffer in self.buffers],
            sinks=None if self.sinks is None else self.sinks.detach(),
        )

    def differentiable(self, buffer_grads: Sequence[bool]) -> list[Tensor]:
        """Return q, k, v, the boundary's k and v, sinks, and marked buffers, as far as given."""
        marked = [buffer for buffer, wanted in zip(self.buffers, buffer_grads, strict=True) if wanted]
        outside = [] if self.boundary is None else [self.boundary.k, self.boundary.v]
        return [self.q, self.k, self.v, *outside, *([] if self.sinks is None else [self.sinks]), *marked]

    def indices(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return indices of q ``[Q, 1]``, k ``[1, P + N]``, head ``[H, 1, 1]``, batch.

        The batch's are ``[B, 1, 1, 1]``.
        """
        return make_indices(self.q.shape, self.outside, self.q.device, start, stop)


def _finite(tensor: Tensor) -> Tensor:
    """Return the tensor as it lies, unless a number of it is not finite."""
    return tensor if bool(tensor.isfinite().all()) else tensor.nan_to_num(0.0, 0.0, 0.0)


def make_indices(
    shape: Sequence[int], outside: int, device: torch.device, start: int, stop: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return :meth:`Inputs.indices` of queries ``[B, H, N, D]`` and so many keys from outside."""
    batch, heads, tokens, _ = shape
    return (
        torch.arange(start + outside, stop + outside, device=device)[:, None],
        torch.arange(tokens + outside, device=device)[None, :],
        torch.arange(heads, device=device)[:, None, None],
        torch.arange(batch, device=device)[:, None, None, None],
    )


def own_dtypes(device: str) -> AbstractContextManager[object]:
    """Keep autocast out: dtypes are settled outside."""
    enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if enabled else nullcontext()


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """Return float64 for float64, float32 for everything else."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def empty_heads_inside(tensor: Tensor, head_dim: int | torch.SymInt) -> Tensor:
    """Return an empty ``[B, H, N, head_dim]`` that lies in memory as ``[B, N, H, head_dim]``.

    Models continue with ``out.transpose(1, 2).reshape(B, N, H * head_dim)``, which is then a view.
    """
    batch, heads, tokens, _ = tensor.shape
    return tensor.new_empty((batch, tokens, heads, head_dim)).transpose(1, 2)


def empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the empty output ``[B, H, N, Dv]`` and log-sum-exp ``[B, H, N]`` of an attention."""
    return empty_heads_inside(q, v.shape[-1]), q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q))


def heads_inside(tensor: Tensor) -> Tensor:
    """Return a ``[B, H, N, D]`` result laid out as by :func:`empty_heads_inside`.

    It is copied only if needed.
    """
    swapped = tensor.transpose(1, 2)
    whole = owned(swapped)
    return tensor if whole is swapped else whole.transpose(1, 2)


def owned(tensor: Tensor) -> Tensor:
    """Return a dense result that owns its memory; copied only if needed.

    Two results of an operator must not share memory, and compiled code counts on its alignment.
    """
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def sink_gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks, ``[H]``.

    ``d loss / d sinks[h] = -sum_(b, n) exp(sink_h - lse) * (grad_out . out)``.
    """
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)
    weight = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
    return (-(weight * delta).sum(dim=(0, 2))).to(sinks.dtype)


def random_gradient(grad: Tensor, lse: Tensor) -> Tensor:
    """Return fixed normal numbers as a gradient, to compare implementations.

    The gradient at hand may show nothing: of a prompt without loss it is zero in the last layer, and of a loss that was
    scaled too far it is not finite. Rows that saw nothing but masking constants get zeros.

    Args:
        grad: ``[B, H, N, Dv]``; the numbers lie as it does.
        lse: ``[B, H, N]``.
    """
    generator = torch.Generator(grad.device).manual_seed(0)  # not the program's own random numbers
    numbers = torch.empty_like(grad).normal_(generator=generator)
    return numbers.masked_fill_((lse < _SOFT_MASK)[..., None], 0.0)


def are_right(errors: Callable[[], Sequence[float]], close: float, instead: str, code: str) -> bool:
    """Return whether kernels run and have small errors; warn where they do not, of what runs instead.

    Args:
        errors: Runs the kernels; relative errors of their results.
        close: The largest error that counts as right.
        instead: The beginning of the warning.
        code: Of the warning.

    Raises:
        torch.OutOfMemoryError: Too little memory is free, which says nothing of the kernels.
    """
    with torch.inference_mode(False), torch.no_grad():
        try:
            found = errors()
            right = all(error <= close for error in found)  # NaN is wrong too
            reason = "" if right else f"its results differ by {max(found):.1e}"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of any kind: the compiler's, the launch's
            reason = f"{type(error).__name__}: {str(error)[:200]}"
    if reason:
        warnings.warn(with_code(f"{instead}: {reason}", code), RuntimeWarning, stacklevel=2)
    return not reason


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Return the relative norm of the difference; NaN where only one tensor is finite."""
    finite = torch.isfinite(wanted)
    if not torch.equal(torch.isfinite(got), finite):
        return float("nan")
    wide = torch.promote_types(wanted.dtype, torch.float32)
    first, second = (torch.where(finite, tensor, 0).to(wide) for tensor in (got, wanted))
    return float((first - second).norm() / second.norm().clamp(min=1e-6))


@contextmanager
def autograd_enabled() -> Iterator[None]:
    """Let autograd record inside the body of a custom op, where dispatch disables it."""
    key = torch._C.DispatchKey
    with (
        torch._C._SetExcludeDispatchKeyGuard(key.AutogradFunctionality, False),
        torch._C._SetExcludeDispatchKeyGuard(key.ADInplaceOrView, False),
        torch.enable_grad(),
    ):
        yield


def are_finite(*tensors: Tensor) -> bool:
    """Return whether every number is finite; waits for a device.

    A sum is the cheapest reduction that keeps NaN and infinity. One that overflows by itself reads as not finite, which
    costs time and changes nothing.
    """
    for x in tensors:
        if not math.isfinite(x.sum(dtype=_SUM_DTYPES.get(x.dtype)).item()):
            return False
    return True
