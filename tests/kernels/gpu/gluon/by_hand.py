"""Run the source of a Gluon kernel without a device, in float64.

Every group of warps is a thread. One at a time runs, until a barrier stops it or it waits for products. A race that
fails on a device by chance always fails here. The target of a copy holds NaN until a group waits for its barrier and
no other group can go on. A product reads its operands from shared memory as late as the wait for it, after other
groups have gone on; or, in a second mode, at once. Barriers count arrivals and bytes, as those of the device do.
"""

import inspect
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.kernels.gpu.gluon.memory_by_hand import Barrier, Barriers, Box, Pointer, Shared, value
from treefx.kernels.gpu.triton_tree import device, row_kernels
from treefx.kernels.gpu.triton_tree.small_launches import Launch

__all__ = ["ORDERS", "Program", "run_by_hand"]

ORDERS = [(2, 0, 1), (0, 1, 2), (1, 2, 0)]
"""Orders in which the loading group of warps goes on first, last, or between the others."""

_STUCK = 60.0
"""Seconds that a thread waits for its turn before the test gives up."""
BYTES = {1: 4, 2: 2}
"""Bytes of an element, by the rank of its box: vectors have 32 bits, matrices 16."""


class Product:
    """Hold a product under way; its result exists only after a wait."""

    def __init__(self, left: Any, right: Shared, before: Any) -> None:
        self.left, self.right, self.before, self.result = left, right, before, None

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("a product is used that is under way")

    def finish(self) -> None:
        left = self.left.data if isinstance(self.left, Shared) else self.left
        before = self.before
        if isinstance(before, Product):
            assert before.result is not None, "products finish in order"
            before = before.result
        self.result = value(left @ self.right.data + (0 if before is None else before))


class Turns:
    """Let one group of warps run at a time: the first, in an order, without a stop."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order, self.turn = order, threading.Condition()
        self.stops: dict[int, tuple[Barrier, int] | None] = {number: None for number in order}
        self.running, self.failure = order[0], None  # type: tuple[int | None, BaseException | None]
        self.own = threading.local()

    def run(self, groups: Sequence[Callable[[], object]]) -> None:
        threads = [threading.Thread(target=self.one, args=item, daemon=True) for item in enumerate(groups)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_STUCK)
        if self.failure is not None:
            raise self.failure

    def one(self, number: int, group: Callable[[], object]) -> None:
        self.own.number, self.own.products = number, []
        with self.turn:
            try:
                self.until_own(number)
                group()
                assert not self.own.products, "products are under way at the end"
            except BaseException as reason:  # it is raised where the kernel was called
                self.failure = self.failure or reason
            self.stops.pop(number)
            try:
                self.next()
            except AssertionError as reason:  # of a barrier that others wait for
                self.failure = self.failure or reason
                self.turn.notify_all()

    def wait(self, barrier: Barrier, phase: int) -> None:
        number = self.own.number
        self.stops[number] = barrier, phase
        self.next()
        self.until_own(number)
        self.stops[number] = None

    def let_others(self) -> None:
        """Let the other groups go on first, until all of them stop."""
        number = self.own.number
        other = self.ready(besides=number)
        if other is not None:
            self.running = other
            self.turn.notify_all()
            self.until_own(number)

    def next(self) -> None:
        self.running = self.ready()
        if self.running is None:
            for stop in self.stops.values():
                if stop is not None:
                    stop[0].settle(late=True)
            self.running = self.ready()
        if self.running is None and self.stops and self.failure is None:
            self.failure = RuntimeError(f"groups {sorted(self.stops)} wait for ever")
        self.turn.notify_all()

    def ready(self, besides: int | None = None) -> int | None:
        """Return the first group, in the order, without a stop."""
        for number in self.order:
            if number in self.stops and number != besides:
                stop = self.stops[number]
                if stop is None or stop[0].passed(stop[1]):
                    return number
        return None

    def until_own(self, number: int) -> None:
        found = self.turn.wait_for(lambda: self.running == number or self.failure is not None, _STUCK)
        if self.failure is not None or not found:
            raise self.failure or RuntimeError("no turn came")


class Program:
    """Define the names of Gluon for one program of a launch."""

    def __init__(
        self, place: tuple[int, int], grid: tuple[int, int], order: Sequence[int], *, early: bool = False
    ) -> None:
        self.place, self.grid, self.turns, self.early = place, grid, Turns(order), early
        self.language = SimpleNamespace(**{name[3:]: getattr(self, name) for name in dir(self) if name[:3] == "tl_"})
        for name in ("exp", "exp2", "log2", "sqrt", "abs", "floor", "sigmoid", "where", "maximum", "minimum"):
            setattr(self.language, name, _of_numbers(getattr(torch, name)))
        layouts = ("SliceLayout", "NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout")
        vars(self.language).update({name: lambda *_: None for name in layouts})
        self.language.NVMMASharedLayout = _SharedLayout
        self.language.convert_layout = lambda data, layout: data
        numbers = {"float32": torch.float64, "int32": torch.int64, "int64": torch.int64, "uint32": "uint32"}
        vars(self.language).update({"constexpr": lambda number: number, "static_range": range, **numbers})
        vars(self.language).update({"reshape": torch.reshape, "permute": torch.permute})
        sums = {"max": torch.amax, "min": torch.amin, "sum": torch.sum, "num_programs": grid.__getitem__}
        vars(self.language).update({**sums, "debug_barrier": lambda: None, "PropagateNan": SimpleNamespace(ALL=True)})
        self.barriers = SimpleNamespace(
            **{name[8:]: getattr(self, name) for name in dir(self) if name[:8] == "barrier_"}
        )
        self.copies = SimpleNamespace(make_tensor_descriptor=Box, async_copy_global_to_shared=self.copy)

    def names(self) -> dict[str, Any]:
        return {
            "tl": self.language,
            "gluon": SimpleNamespace(jit=_undecorated),
            "triton": SimpleNamespace(
                jit=_undecorated,
                constexpr_function=_undecorated,
                next_power_of_2=lambda number: 1 << (number - 1).bit_length(),
            ),
            "mbarrier": self.barriers,
            "tma": self.copies,
            "fence_async_shared": Shared.fence,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.settle,
            "INTERPRETED": True,
        }

    def tl_program_id(self, axis: int) -> Any:
        return value(self.place[axis])

    def tl_arange(self, start: int, stop: int, layout: Any = None) -> Any:
        return value(torch.arange(start, stop))

    def tl_full(self, shape: Any, number: float, dtype: Any, layout: Any) -> Any:
        return value(torch.full(shape, number, dtype=dtype))

    def tl_multiple_of(self, numbers: Any, factor: int) -> Any:
        assert not (numbers % factor).any()
        return numbers

    def tl_zeros(self, shape: Any, dtype: Any, layout: Any = None) -> Any:
        return value(torch.zeros(shape, dtype=dtype))

    def tl_load(self, pointer: Pointer, mask: Any = True, other: Any = 0) -> Any:
        mask, address = torch.broadcast_tensors(torch.as_tensor(mask), torch.as_tensor(pointer.offset))
        found = pointer.memory()[torch.where(mask, address, 0)]
        return value(torch.where(mask, found, torch.full_like(found, other)))

    def tl_store(self, pointer: Pointer, data: Any, mask: Any) -> None:
        mask, address, data = torch.broadcast_tensors(mask, pointer.offset, data)
        pointer.memory()[address[mask]] = data[mask].to(pointer.tensor.dtype)

    def tl_inline_asm_elementwise(self, text: str, constraints: str, given: Any, **options: Any) -> None:
        """Add four numbers of each thread at once to memory; each row belongs to one thread."""
        pointer, numbers = given
        count = options["pack"]
        assert numbers.shape[1] == count and constraints.split(",").count("f") == count
        adds = re.findall(r"add\.v4\.f32 \[\$(\d+)\+(\d+)\], \{\$(\d+), \$(\d+), \$(\d+), \$(\d+)\}", text)
        for address, offset, *operands in (map(int, found) for found in adds):
            first = pointer.offset[:, address - count] + offset // 4
            assert not (first % 4).any(), "16 bytes are aligned"
            for part, operand in enumerate(operands):
                added = numbers[:, operand - 2 * count].to(pointer.tensor.dtype)
                pointer.memory().index_put_((first + part,), added, accumulate=True)

    def tl_device_assert(self, condition: Any, message: str) -> None:
        assert torch.as_tensor(condition).all(), message

    def tl_allocate_shared_memory(self, dtype: Any, shape: Sequence[int], layout: Any) -> Any:
        if isinstance(layout, Barriers):
            return Barriers(shape[0]) if len(shape) > 1 else Barrier()
        fresh = torch.full(shape, -(10**6), dtype=torch.int64)
        return Shared(torch.full(shape, torch.nan, dtype=dtype) if dtype.is_floating_point else fresh, layout)

    def tl_warp_specialize(self, groups: Any, warps: Any, registers: Any) -> None:
        assert len(warps) == len(registers) == len(groups) - 1
        self.turns.run([lambda function=function, given=given: function(*given) for function, given in groups])

    def barrier_MBarrierLayout(self) -> Barriers:
        return Barriers(0)

    def barrier_init(self, barrier: Barrier, count: int) -> None:
        barrier.count = count

    def barrier_expect(self, barrier: Barrier, bytes_: int) -> None:
        barrier.bytes += bytes_
        barrier.arrived += 1
        barrier.settle()

    def barrier_arrive(self, barrier: Barrier, count: int, pred: Any = True) -> None:
        if pred:
            barrier.arrived += count
            barrier.settle()

    def barrier_wait(self, barrier: Barrier, phase: Any, pred: Any = True) -> None:
        if pred:
            self.turns.wait(barrier, int(phase))

    def copy(self, box: Box, corner: Sequence[Any], barrier: Barrier, room: Shared) -> None:
        block = box.read(corner).to(room.dtype)
        assert room.data.shape == block.shape
        if block.is_floating_point():
            room.data.fill_(torch.nan)
        barrier.copies.append(lambda: room.data.copy_(block))
        barrier.bytes -= block.numel() * BYTES[block.ndim]
        barrier.settle()

    def multiply(self, left: Any, right: Shared, before: Any, *, use_acc: bool = True, is_async: bool) -> Product:
        product = Product(left, right, before if use_acc else None)
        self.turns.own.products.append(product)
        if self.early:
            product.finish()
        return product

    def settle(self, left: int, deps: Sequence[Product]) -> Any:
        products = self.turns.own.products
        self.turns.let_others()
        while len(products) > left:
            product = products.pop(0)
            if not self.early:
                product.finish()
        assert all(product.result is not None for product in deps), "a product is used that is under way"
        return deps[0].result if len(deps) == 1 else tuple(product.result for product in deps)


class _SharedLayout:
    def __init__(self, *_: Any) -> None:
        pass

    @staticmethod
    def get_default_for(shape: Any, dtype: Any) -> None:
        return None


def _undecorated(function: Any = None, **options: Any) -> Any:
    return function if function is not None else lambda function: function


def _of_numbers(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Wrap a function of torch so that it also takes numbers, in the dtype of its tensors."""

    def made(*given: Any, propagate_nan: bool = True) -> Any:
        numbers = [torch.as_tensor(one, dtype=torch.float64 if isinstance(one, float) else None) for one in given]
        if function is torch.maximum or function is torch.minimum:
            numbers = [one.to(torch.result_type(*numbers)) for one in numbers]
        return value(function(*numbers))

    return made


def _without_imports(source: str) -> str:
    return re.sub(r"^(import|from) (\(\n[^)]*\)|[^\n(]*(\([^)]*\))?)", "", source, flags=re.MULTILINE)


def run_by_hand(
    launch: Launch,
    *,
    order: Sequence[int] = (2, 0, 1),
    text: str | None = None,
    repairs: bool = False,
    early: bool = False,
) -> None:
    """Run a launch of a Gluon kernel, or of one without products, and the following launches.

    Args:
        launch: the launch, of tensors in float64 on the CPU.
        order: the groups of warps, if it has some, by priority; group 2 loads.
        text: replacement of the kernel's own source.
        repairs: True to recompute results that are not finite; that would hide mistakes.
        early: True if products read their operands at once, not at the wait.
    """
    source = text or Path(str(sys.modules[launch.kernel.fn.__module__].__file__)).read_text(encoding="utf-8")
    functions, of_rows = _without_imports(source), _without_imports(inspect.getsource(row_kernels))
    helpers = inspect.getsource(device).partition("@triton.jit")
    for place in ((first, second) for second in range(launch.grid[1]) for first in range(launch.grid[0])):
        names = Program(place, launch.grid, order, early=early).names()
        exec("".join(helpers[1:]), names)
        exec(of_rows, names)
        names["lay_rows"] = names["prologue"]  # as kernels of values call it
        exec(functions, names)
        addresses = {n: Pointer(x, x.storage_offset()) for n, x in launch.arguments.items() if isinstance(x, Tensor)}
        names[launch.kernel.__name__](**{**launch.arguments, **addresses})
    for following in launch.after:
        if repairs or not following.kernel.__name__.startswith("repair"):
            run_by_hand(following)
