"""Check that a warp-specialised kernel never overwrites live buffers, in its TTGIR.

The warps that load wait until a buffer is empty, and copy into it; the copy completes its *full* barrier. The warps
that multiply wait for that, read, and arrive at the *empty* barrier. Kernels in Gluon say where; in others it is the
choice of a pass of Triton's. So here every group of warps is run through on paper, its loops twice: a buffer may be
read only between the wait for it and its release, and products that are still under way count as readers. What a group
stores itself is read by products after a fence only. What several groups store for each other is read after a barrier
at which all of them arrive, and no product of it is under way when a group arrives there again.

What cannot be followed is reported, not passed over.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["races", "unmet_releases", "unmet_stores"]

_LOCATION = re.compile(r' loc\((?:"[^"]*"[^()]*(?:\([^()]*\))?|[^()]*)\)')
_VALUE = re.compile(r"%[\w$.-]+")
_GROUP = re.compile(r"(default|partition\d+)\b")
_OPERATION = re.compile(r"(?:(?P<results>%[^=]+) = )?(?P<name>[a-z_]+\.\w+)\b(?P<rest>.*)")
_ALIASES = ("ttg.memdesc_index", "ttg.memdesc_reshape", "ttg.memdesc_trans", "ttg.memdesc_subslice")
_COPY = "ttng.async_tma_copy_global_to_local"
_STORE, _PRODUCT = "ttg.local_store", "ttng.warp_group_dot"
_WAIT, _ARRIVE, _SETTLE = "ttng.wait_barrier", "ttng.arrive_barrier", "ttng.warp_group_dot_wait"
_NO_READERS = (_COPY, _WAIT, _ARRIVE, _SETTLE, "ttg.warp_specialize", *_ALIASES)
_FOLLOWED = ("the kernel", "tt.func", "scf.for", "default", "partition")


@dataclass(frozen=True)
class _Operation:
    """Hold one operation with its buffers and barriers, by the values that allocated them."""

    name: str
    memory: tuple[str, ...]
    text: str


@dataclass
class _Block:
    """Hold operations in order; ``kind`` is the block's operation, or a group of warps."""

    kind: str
    body: list["_Operation | _Block"] = field(default_factory=list)

    def steps(self) -> Iterator[_Operation]:
        """Run through the block: loops twice, and no other group of warps."""
        for item in self.body:
            if isinstance(item, _Operation):
                yield item
            elif not _GROUP.match(item.kind):
                for _ in range(2 if item.kind == "scf.for" else 1):
                    yield from item.steps()


@dataclass
class _Buffer:
    """Describe a buffer that copies fill: its descriptor and its barriers.

    ``copies`` counts them, in loops twice: a buffer filled once need not be empty.
    """

    source: str
    full: str
    empty: set[str]
    copies: int = 0


def races(ttgir: str) -> list[str]:
    """Return the hazards of a warp-specialised kernel, in words; empty if there are none.

    Args:
        ttgir: the kernel's TTGIR, as ``compiled.asm["ttgir"]``.
    """
    groups, found = _read(ttgir)
    buffers: dict[str, _Buffer] = {}
    for group in groups:
        _find_buffers(group, buffers)
    if not buffers:
        return [*found, "no buffer was found that one group of warps fills for another"]
    again = [one for one in buffers.values() if one.copies > 1]
    found += [f"{one.source} is copied without a wait for an empty buffer" for one in again if not one.empty]
    shared = _exchanged(groups)
    for group in groups:
        problems = *_run_through(group, buffers), *_unfenced(group), *_unmet(group, shared)
        found += [f"{group.kind}: {problem}" for problem in problems]
    return list(dict.fromkeys(found))


def unmet_releases(ptx: str) -> list[str]:
    """Return the releases in PTX that precede the last read of their group, in words.

    One thread arrives for all. So between the last product, or the last load from shared memory, and the arrival every
    thread must have waited for its part of the product (``wgmma.wait_group``) and met the others (``bar.sync``). A wait
    that leaves as many products under way as there were is none; which one it is that may be left is said in the TTGIR.
    """
    found, under_way, apart, left = [], False, False, 0
    for number, line in enumerate(ptx.splitlines(), 1):
        wait = re.search(r"wgmma\.wait_group\S*\s+(\d+);", line)
        if "wgmma.mma_async" in line:
            under_way = apart = True
        elif "wgmma.commit_group" in line:
            left += 1
        elif wait is not None:
            under_way = under_way and left <= int(wait[1])
            left = min(left, int(wait[1]))
        elif re.search(r"\b(ld\.shared|ldmatrix)", line):
            apart = True
        elif re.search(r"\bbar(rier)?\.sync", line):
            apart = under_way
        elif "mbarrier.arrive.shared" in line and (under_way or apart):
            missing = "its product is complete" if under_way else "all warps of the group met"
            found.append(f"line {number} of the PTX releases a buffer before {missing}")
    return found


def unmet_stores(ptx: str) -> list[str]:
    """Return the products in PTX before which a group has not met since its stores.

    Every thread makes its own stores seen by products (``fence.proxy.async``), and then all meet (``bar.sync``).
    """
    found, stored, apart = [], False, False
    for number, line in enumerate(ptx.splitlines(), 1):
        if re.search(r"\b(st\.shared|stmatrix)", line):
            stored = True
        elif "fence.proxy.async" in line:
            stored, apart = False, apart or stored
        elif re.search(r"\bbar(rier)?\.sync", line):
            apart = False
        elif "wgmma.mma_async" in line and apart:
            found.append(f"line {number} of the PTX multiplies what not all warps of the group may have stored")
            apart = False
    return found


def _read(ttgir: str) -> tuple[list[_Block], list[str]]:
    """Return what every group of warps does, and what cannot be followed."""
    groups, problems, handed = [_Block("the kernel")], [], list[str]()
    blocks, scopes = [groups[0]], [dict[str, str]()]
    for line in (_LOCATION.sub("", line).strip() for line in ttgir.splitlines()):
        group, kind = _GROUP.match(line), blocks[-1].kind
        if line.startswith("}") and len(blocks) > 1:
            blocks.pop()
            scopes.pop()
        operation = None if group else _operation(line, scopes[-1])
        if operation is not None:
            kind = operation.name
            blocks[-1].body.append(operation)
            if kind == "ttg.warp_specialize":
                handed = [scopes[-1].get(value, "") for value in _VALUE.findall(line)]
            problems += _unknown(operation, blocks[-1].kind)
        if line.endswith("{"):
            blocks.append(_Block(group[0] if group else kind))
            blocks[-2].body.append(blocks[-1])
            isolated = group is not None and group[0] != "default"
            given = dict(zip(_VALUE.findall(line), handed, strict=False)) if isolated else scopes[-1]
            scopes.append({name: memory for name, memory in given.items() if memory})
            groups += [blocks[-1]] if group else []
    return groups, problems


def _operation(line: str, scope: dict[str, str]) -> _Operation | None:
    """Read one line; ``scope`` learns which buffers its results are."""
    parts = _OPERATION.match(line)
    if parts is None:
        return None
    name, results = parts["name"], _VALUE.findall(parts["results"] or "")
    memory = tuple(scope[value] for value in _VALUE.findall(parts["rest"]) if value in scope)
    for result in results:
        scope.pop(result, None)
    if name == "ttg.local_alloc":
        scope[results[0]] = results[0]
    elif name in _ALIASES and memory:
        scope[results[0]] = memory[0]
    return _Operation(name, memory, line)


def _unknown(operation: _Operation, block: str) -> list[str]:
    """Return why an operation cannot be followed."""
    if operation.name == "scf.for" and "memdesc" in operation.text:
        return ["a buffer goes from one turn of a loop to the next, which cannot be followed"]
    if operation.name in (_COPY, _WAIT, _ARRIVE) and not block.startswith(_FOLLOWED):
        return [f"{operation.name} stands inside {block}, which cannot be followed"]
    return []


def _find_buffers(group: _Block, buffers: dict[str, _Buffer]) -> None:
    """Add the buffers that a group copies into; waits since the last copy are for them."""
    waits, since = set[str](), False
    for step in group.steps():
        if step.name == _WAIT:
            waits = {*([] if since else waits), *step.memory}
            since = False
        elif step.name == _COPY:
            target, full = step.memory
            known = buffers.setdefault(target, _Buffer(_VALUE.findall(step.text)[0], full, set()))
            known.empty |= waits
            known.copies += 1
            since = True


def _run_through(group: _Block, buffers: dict[str, _Buffer]) -> Iterator[str]:
    """Run one group of warps, and yield its accesses to buffers that are not full or in use."""
    held = set[str]()
    under_way = list[set[str]]()
    for step in group.steps():
        if step.name == _WAIT:
            filled = {root for root, buffer in buffers.items() if buffer.full in step.memory}
            yield from (f"{buffers[root].source} is waited for again before it is released" for root in filled & held)
            held |= filled
        elif step.name == _SETTLE:
            left = re.search(r"pendings = (\d+)", step.text)
            under_way = under_way[max(0, len(under_way) - int(left[1])) :] if left else []
        elif step.name == _ARRIVE:
            emptied = {root for root, buffer in buffers.items() if buffer.empty & set(step.memory)}
            still = emptied.intersection(*[set().union(*under_way)])
            yield from (f"{buffers[root].source} is released while a product of it is under way" for root in still)
            held -= emptied
        elif step.name not in _NO_READERS:
            read = buffers.keys() & set(step.memory)
            yield from (f"{buffers[root].source} is read by {step.name} when not held" for root in sorted(read - held))
            if "isAsync = true" in step.text:
                under_way.append(set(step.memory))


def _unfenced(group: _Block) -> Iterator[str]:
    """Yield what a group of warps stores and multiplies without a fence between."""
    stored = set[str]()
    for step in group.steps():
        if step.name == _STORE:
            stored |= set(step.memory)
        elif step.name == "ttng.fence_async_shared":
            stored.clear()
        elif step.name == _PRODUCT:
            read = sorted(stored.intersection(step.memory))
            yield from (f"{root} is stored and read by {step.name} without a fence" for root in read)


def _exchanged(groups: list[_Block]) -> set[str]:
    """Return the buffers into which several groups of warps store."""
    stored = [{root for step in group.steps() if step.name == _STORE for root in step.memory} for group in groups]
    return {root for number, some in enumerate(stored) for root in some.intersection(*[set().union(*stored[:number])])}


def _unmet(group: _Block, shared: set[str]) -> Iterator[str]:
    """Yield what a group of warps reads of buffers that others store into, or leaves under way, without a meeting."""
    given, arrived, met = set[str](), dict[str, set[str]](), set[str]()
    under_way = list[set[str]]()
    for step in group.steps():
        memory = set(step.memory)
        if step.name == _STORE:
            given |= memory & shared
            met -= memory
        elif step.name == _ARRIVE and given:
            still = given.intersection(*[set().union(*under_way)])
            yield from (f"{root} may be stored into while a product of it is under way" for root in sorted(still))
            arrived |= dict.fromkeys(memory, given)
            given = set()
        elif step.name == _WAIT:
            met |= set().union(*(roots for barrier, roots in arrived.items() if barrier in memory))
        elif step.name == _SETTLE:
            left = re.search(r"pendings = (\d+)", step.text)
            under_way = under_way[max(0, len(under_way) - int(left[1])) :] if left else []
        elif step.name == _PRODUCT:
            read = sorted(memory & shared - met)
            yield from (f"{root} is read before all groups have stored" for root in read)
            if "isAsync = true" in step.text:
                under_way.append(memory)
