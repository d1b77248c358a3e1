"""Cache compiled cases for all sizes or one, shared by graphs with equal computation.

Dynamo recaptures a model when a size changes, and may then use the new graph for batches that the old one was compiled
for. The two become equal graphs as soon as their sizes are filled in or named; so the cache is keyed by the
computation, and a repeated batch compiles nothing, through any graph.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.utils import checkpoint

from treefx.errors import TreefxError, UnsupportedError
from treefx.inputs.sizes import BatchSizes, tensor_key
from treefx.kernels.memory import lasting
from treefx.passes.analysis import Analysis, Rewritten, Variant
from treefx.passes.pipeline import compile_variant, rewrite
from treefx.passes.runner import Pass
from treefx.passes.trace.fingerprint import fingerprint
from treefx.runtime.padding import Grid, Padding
from treefx.runtime.reason import Cause, Reason
from treefx.runtime.segments import find_starts
from treefx.torch_patches.compiling import compiling
from treefx.torch_patches.kept_graphs import keep_graphs

__all__ = [
    "COMPARED_BYTES",
    "Executable",
    "KnownShapes",
    "LATER",
    "NotNow",
    "Outgrown",
    "OutputUse",
    "PASSING",
    "Proof",
    "Refusal",
    "Retries",
    "Shape",
    "Unfit",
    "bits",
    "forget_shapes",
    "layout_of",
    "process_state",
    "proof_of",
    "share_shape",
    "version_of",
]

COMPARED_BYTES = 1 << 24
"""The largest tensor to be copied and compared: half a millisecond to four on a CPU."""


class Proof:
    """The buffers that a proof read, as they were.

    Args:
        args: The tensors of the call that it was made in.
        read: Positions of the tensors with values that entered it.
    """

    def __init__(self, args: Sequence[Any] = (), read: Iterable[int] = ()) -> None:
        self._seen: dict[int, _Seen] = {i: _see(args[i]) for i in read}

    def holds(self, args: Sequence[Any]) -> bool:
        """Whether the same could be proved with these."""
        for i, seen in self._seen.items():
            if not seen.is_in(args[i]):
                return False
        return True


class _Seen(Protocol):
    def is_in(self, x: Tensor) -> bool:
        """Whether a tensor has the value that was seen."""


class _Content:
    """A value, by content."""

    def __init__(self, x: Tensor) -> None:
        self._kind = (x.shape, x.dtype, x.device)
        self._bits = bits(x).clone()

    def is_in(self, x: Tensor) -> bool:
        return (x.shape, x.dtype, x.device) == self._kind and torch.equal(bits(x), self._bits)


class _Place:
    """A value, by where it lies and how often that was written to."""

    def __init__(self, x: Tensor) -> None:
        self._version = version_of(x)
        self._storage = x.untyped_storage()  # held, so that no other tensor gets its address

    def is_in(self, x: Tensor) -> bool:
        return version_of(x) == self._version


_contents: weakref.WeakSet[_Content] = weakref.WeakSet()


def _see(x: Tensor) -> _Seen:
    """Layers and models with equal buffers share one copy."""
    if x.numel() * x.element_size() > COMPARED_BYTES:
        return _Place(x)
    known = next((content for content in list(_contents) if content.is_in(x)), None)
    if known is None:
        with lasting():
            known = _Content(x)
        _contents.add(known)
    return known


def bits(x: Tensor) -> Tensor:
    """Return the bytes of a tensor, eight at a time where they allow it.

    Equal bits, not equal numbers (NaN, -0.0).
    """
    with torch.no_grad():
        flat = x.detach().contiguous().view(-1)
        whole = flat.numel() * flat.element_size() % 8 == 0
        return flat.view(torch.int64 if whole and flat.storage_offset() == 0 else torch.uint8)


def version_of(x: Tensor) -> tuple[int, int | None]:
    """Return a tensor's address and version; None as version under inference mode."""
    return x.data_ptr(), None if x.is_inference() else x._version


def process_state() -> tuple[Any, ...]:
    """Return a key: code compiled under one state never runs under another.

    Dynamo guards all of it, but it does not see every call: reading a lazy output runs the graph again, and
    gradients may be off then. Autocast is no part of it, because its casts are in the traced graph; nor is inference
    mode, in which nothing is compiled.
    """
    return (
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_default_dtype(),
        torch.backends.cuda.matmul.fp32_precision,
    )


PASSING: tuple[type[Exception], ...] = (MemoryError, OSError, torch.OutOfMemoryError)
"""Errors of the machine at one moment, not of a graph: another call may not have them."""
LATER = "a later call tries again"
"""How the reasons of such failures end."""
_LONGEST = 10
"""Doublings of the number of calls between two tries."""


class NotNow(UnsupportedError):
    """Raised when an analysis or compilation failed for a reason that may pass.

    A later call tries again.
    """


class Retries:
    """Space out retries of one thing: the next call, then after 1, 3, 7, ... others."""

    def __init__(self) -> None:
        self._failures, self._waiting, self._reason = 0, 0, ""

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Try something.

        Args:
            what: The failed action, for the message.

        Raises:
            NotNow: it failed for a reason that may pass, now or a few calls ago.
        """
        if self._waiting:
            self._waiting -= 1
            raise NotNow(self._reason)
        try:
            yield
        except PASSING as error:
            self._waiting = 2 ** min(self._failures, _LONGEST) - 1
            self._failures += 1
            first_line = next(iter(str(error).splitlines()), "")
            self._reason = f"{what}: {type(error).__name__}: {first_line}; {LATER}"
            raise NotNow(self._reason) from error
        self._failures = 0


class OutputUse:
    """Record which packed outputs of a graph its callers have read and differentiated.

    Args:
        lazy: Whether that is to be learned; all of them, from the first call on, where it is not.
    """

    def __init__(self, *, lazy: bool = True) -> None:
        self._lazy = lazy
        self.read: set[int] = set()
        self.differentiated: set[int] = set()
        self.settled = False
        """Whether a call has run."""

    def settle(self, analysis: Analysis, *, hands_on: bool = False) -> None:
        """Mark all outputs as used where use is not learned.

        That is: without a loss, where a second run would have other effects, and where a checkpoint compares one with
        the first: reading in between must not change its saved tensors. What a graph hands on to those behind it is
        differentiated, but maybe not read anywhere else.
        """
        used = set(analysis.packed_outputs)
        unnoted = torch.is_inference_mode_enabled() and not analysis.returns_loss  # graphs behind do not know these
        if _in_checkpoint() or unnoted or not self.settled and self._are_always_used(analysis, hands_on):
            self.read |= used
        if self.read >= used or not self.settled and hands_on:
            self.differentiated |= used
        self.settled = True

    def _are_always_used(self, analysis: Analysis, hands_on: bool) -> bool:
        return not self._lazy or not (analysis.returns_loss or hands_on) or analysis.has_side_effects

    def detached(self, analysis: Analysis) -> frozenset[int]:
        """The outputs that leave lazily."""
        return frozenset(analysis.packed_outputs) - self.differentiated


def _in_checkpoint() -> bool:
    """Return whether a non-reentrant checkpoint runs the model.

    That is ``torch.utils.checkpoint(use_reentrant=False)``, for the first time or again.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__name__


_ASKING = 16
"""How many shapes without a place are remembered for each one that has one."""


class Executable:
    """A compiled variant, good for the numbers of tokens that its conditions admit.

    Attributes:
        rewritten: The rewritten graph.
        graphs: Its stages for the inspector: "rewritten", and "forward" and "backward" as the inner compiler got them.
        seconds: Seconds of each pass that rewrote or compiled it.
    """

    def __init__(self, analysis: Analysis, variant: Variant, args: Sequence[Tensor], passes: Sequence[Pass]) -> None:
        before = dict(analysis.seconds)
        self.rewritten: Rewritten = rewrite(analysis, variant, args, passes)
        self.graphs: dict[str, fx.GraphModule] = {"rewritten": self.rewritten.gm}
        self._compiled = compile_variant(analysis, self.rewritten, self.graphs.__setitem__, passes)
        self._keeps_graphs = False
        self.seconds = {
            name: seconds - before.get(name, 0.0)
            for name, seconds in analysis.seconds.items()
            if seconds != before.get(name)
        }

    def run(self, *args: Any) -> Sequence[Any]:
        """Run on tensors, the metadata of the batch, the number of tokens and sizes of the batch."""
        results: Sequence[Any] = self._compiled(*args)
        self._keeps_graphs = self._keeps_graphs or keep_graphs(results)
        return results


class Shape:
    """Hold an analysis, and the code compiled from it.

    Args:
        analysis: Analysis of a graph with known token axes.
        args: The tensors it was made with; the values of some buffers among them may have entered a proof.
        outputs: Callers' use of the graph's outputs.
        key: Equal for graphs and tensors that compiled code cannot tell apart.
    """

    def __init__(self, analysis: Analysis, args: Sequence[Tensor], outputs: OutputUse, key: tuple[Any, ...]) -> None:
        self.analysis, self.outputs, self.key = analysis, outputs, key
        self.padding = Padding(analysis)
        self.proof = proof_of(analysis, args)
        self._executables: dict[tuple[Any, ...], list[Executable]] = {}
        self._retries = Retries()

    def admits(self, args: Sequence[Tensor]) -> bool:
        """Whether all that the analysis asked of sizes and segments holds for a call."""
        batch = self.analysis.batch
        holds = batch is None or batch.holds(batch.values(args))
        if not holds or not self.analysis.segmented:
            return holds
        return find_starts(self.analysis, self.grid(self.analysis.known.with_parts(args), on_host=True)) is not None

    def serves(self, args: Sequence[Tensor], sizes: Sequence[int]) -> bool:
        """Return whether code of the analysis may run this many tokens.

        All its graphs were made for one hint.
        """
        batch = self.analysis.batch
        return batch is None or batch.count is None or batch.admits(*sizes, given=batch.values(args))

    def grid(self, args: Sequence[Tensor], *, on_host: bool = False) -> Grid:
        """The tensors of a call, with the parts of masks, as ``padding`` is asked of them."""
        return Grid(self.analysis, args, on_host=on_host, resolved=self.padding.resolved)

    @property
    def rewrites(self) -> list[Rewritten]:
        """Return the rewritten graphs, in no particular order."""
        return [item.rewritten for found in list(self._executables.values()) for item in found]

    def executable(
        self,
        variant: Variant,
        args: Sequence[Tensor],
        sizes: Sequence[int],
        passes: Sequence[Pass],
        compiled: Callable[[Executable], None],
    ) -> Executable:
        """Return the executable of a variant for a number of tokens (and sizes of a cut).

        ``compiled`` is called with a new one.
        """
        known = self._executables.setdefault((variant, *process_state()), [])
        batch = self.analysis.batch
        values = {} if batch is None else batch.values(args)
        found = _admitting(known, sizes, values)
        if found is None:
            with compiling, lasting():
                found = _admitting(known, sizes, values)
                if found is None and not self.serves(args, sizes):
                    raise Outgrown(sizes)
                if found is None:
                    found = self._make(variant, args, passes)
                    known.append(found)
                    compiled(found)
        return found

    def _make(self, variant: Variant, args: Sequence[Tensor], passes: Sequence[Pass]) -> Executable:
        try:
            with self._retries.attempt("the graph could not be compiled"):
                return Executable(self.analysis, variant, args, passes)
        except TreefxError:
            raise
        except Exception as error:
            if self.analysis.batch is None:
                raise
            raise Unfit(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}") from error


class Unfit(Exception):
    """A graph cannot be compiled with rows and columns as symbols; the message says why."""


class Outgrown(Exception):
    """Raised when compiled code guarded a token count that a call violates.

    The call needs another analysis.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        self.sizes = sizes


def _admitting(known: Sequence[Executable], sizes: Sequence[int], values: Mapping[Any, int]) -> Executable | None:
    for item in list(known):
        if item.rewritten.count.admits(*sizes, given=values):
            return item
    return None


@dataclass(frozen=True)
class Refusal:
    """Hold why a shape does not run packed, and the proof."""

    reason: Reason
    proof: Proof = field(default_factory=Proof)
    unless: BatchSizes | None = None
    """Conditions under which it does not hold; without, it holds for all calls of its key."""
    within: BatchSizes | None = None
    """Conditions under which alone it holds: those of a second analysis, untested for other sizes."""

    def admits(self, args: Sequence[Tensor]) -> bool:
        """Whether it holds for a call of its key."""
        if self.within is not None and not self.within.holds(self.within.values(args)):
            return False
        return self.unless is None or not self.unless.holds(self.unless.values(args))


class KnownShapes:
    """Cache shapes and refusals of one graph, each as long as its proof holds.

    Where there are as many shapes as may be, a further one is refused when it comes for the first time (of shapes that
    never come again none would pay for its compilation), and takes the place of the one that was used the longest time
    ago when it comes again. Where all of as many shapes were refused, a further one is refused for the last reason when
    it comes for the first time, and analysed when it comes again. Refusals are kept for `_ASKING` times as many shapes.

    Args:
        limit: How many shapes there may be, and how many of one key.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: OrderedDict[tuple[Any, ...], list[Shape | Refusal]] = OrderedDict()
        """The key used last is the last."""
        self._seen: dict[tuple[Any, ...], None] = {}

    @property
    def shapes(self) -> list[Shape]:
        """Those that run packed."""
        return [item for known in list(self._known.values()) for item in known if isinstance(item, Shape)]

    def find(self, key: tuple[Any, ...], args: Sequence[Tensor], sizes: Sequence[int] = ()) -> Shape | Refusal | None:
        """Look up a key for these tensors, and for a number of tokens if one is given."""
        known = self._known.get(key, ())
        for item in list(known):
            if not item.admits(args) or not item.proof.holds(args):
                continue
            if not sizes or isinstance(item, Shape) and item.serves(args, sizes):
                with suppress(KeyError):  # another thread has just made room
                    self._known.move_to_end(key)
                return item
        return None

    def refuse(self, shape: Shape, reason: Reason) -> None:
        """Forget a shape that turned out not to serve, and why."""
        for key, known in list(self._known.items()):
            self._known[key] = [Refusal(reason, item.proof) if item is shape else item for item in known]

    def add(
        self,
        key: tuple[Any, ...],
        args: Sequence[Tensor],
        find: Callable[[], list[Shape | Refusal]],
        *,
        always: bool = False,
    ) -> Shape | Refusal:
        """Analyse a key: return all candidates, best first, the last for any other call.

        ``always`` analyses a shape however many were refused.
        """
        known = self._known.get(key, [])
        if len(known) >= self._limit:
            text = f"more than {self._limit} values of buffers for one shape of inputs (option max_shapes)"
            return Refusal(Reason(Cause.MANY_BUFFERS, text))
        if not known and len(self.shapes) >= self._limit:
            if not self._returns(key):
                text = f"more than {self._limit} shapes of inputs (option max_shapes)"
                return Refusal(Reason(Cause.MANY_SHAPES, text))
            self._make_room()
        refused = None if known or always else self._refused_so_far()
        if refused is not None and not self._returns(key):
            return Refusal(refused)
        found = find()
        self._known[key] = [*known, *found]
        while len(self._known) > _ASKING * self._limit:
            self._known.popitem(last=False)
        return next((item for item in found if item.admits(args)), found[-1])

    def _refused_so_far(self) -> Reason | None:
        """Why the last shape was refused, where as many as there may be were, and none was not."""
        if len(self._known) < self._limit or self.shapes:
            return None
        newest = self._known[next(reversed(self._known))][-1]
        return newest.reason if isinstance(newest, Refusal) else None

    def _returns(self, key: tuple[Any, ...]) -> bool:
        """Whether a key without a place has asked for one before, not too long ago."""
        if key in self._seen:
            del self._seen[key]
            return True
        self._seen[key] = None
        if len(self._seen) > _ASKING * self._limit:
            del self._seen[next(iter(self._seen))]
        return False

    def _make_room(self) -> None:
        oldest = next(key for key, known in list(self._known.items()) if any(isinstance(item, Shape) for item in known))
        del self._known[oldest]


def layout_of(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes, and strides as far as compiled code goes by them."""
    return tuple(x.shape), tuple(stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)


def proof_of(analysis: Analysis, args: Sequence[Tensor]) -> Proof:
    """Return the values of these tensors that an analysis has read."""
    return Proof(args, () if analysis.constants is None else analysis.constants.read)


_shapes: weakref.WeakSet[Shape] = weakref.WeakSet()


def share_shape(
    analysis: Analysis, args: Sequence[Tensor], sizes: Sequence[int], outputs: OutputUse, *settings: object
) -> Shape:
    """The shape that another graph has for this analysis and these tensors, or a new one.

    Args:
        analysis: A new analysis.
        args: The tensors of the call.
        sizes: Sizes it has to accept, if a number of tokens (and sizes of a cut) is known.
        outputs: For a new shape.
        settings: Further inputs of compilation: options, facts proved from the inputs.
    """
    keys = map(tensor_key, args) if analysis.batch is None else analysis.batch.keys(args)
    key = (fingerprint(analysis.gm), tuple(analysis.roles), analysis.segmented, *keys, *process_state(), *settings)
    for shape in list(_shapes):
        serves = not sizes or shape.serves(args, sizes)
        if serves and shape.key == key and shape.admits(args) and shape.proof.holds(args):
            return shape
    made = Shape(analysis, args, outputs, key)
    _shapes.add(made)
    return made


def forget_shapes() -> None:
    """Drop all shared compiled code; called by ``torch.compiler.reset``."""
    _shapes.clear()
