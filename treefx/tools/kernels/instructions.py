"""Count a kernel loop's instructions per tile, in its machine code."""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

__all__ = ["disassembled", "instructions_of_loops", "names_in_loops"]

_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?(?P<name>[A-Z][\w.]*)(?P<rest>[^;]*);")
_PRODUCT = re.compile(r"\w*MMA\b")


def disassembled(cubin: bytes) -> str:
    """Return the machine code of a kernel as text, by the disassembler that comes with Triton."""
    from triton.backends.nvidia import __file__ as folder

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(Path(folder).parent / "bin" / "nvdisasm"), "-c", str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def instructions_of_loops(sass: str) -> tuple[int, ...]:
    """Return the instructions of every innermost loop with products, in the order of the code.

    A loop reaches from the target of a branch to the branch that jumps back to it. What the assembler moved out of line
    (the repeated waits) does not count, nor do fillers.
    """
    return tuple(counts.total() for counts in names_in_loops(sass))


def names_in_loops(sass: str) -> tuple[Counter[str], ...]:
    """Return how often each instruction, such as ``HGMMA``, stands in those loops."""
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    names: list[str] = []
    for line in sass.splitlines():
        label = re.match(r"\s*(\.L_\w+):", line)
        if label:
            labels[label[1]] = len(names)
        instruction = _INSTRUCTION.search(line)
        if instruction is None or instruction["name"] == "NOP":
            continue
        if instruction["name"].startswith("BRA") and (target := re.search(r"\.L_\w+", instruction["rest"])):
            jumps.append((len(names), target[0]))
        names.append(instruction["name"].partition(".")[0])
    spans = {(labels[name], place + 1) for place, name in jumps if labels.get(name, len(names)) <= place}
    loops = [span for span in sorted(spans) if any(map(_PRODUCT.match, names[slice(*span)]))]
    return tuple(Counter(names[slice(*one)]) for one in loops if not any(_hides(one, other) for other in loops))


def _hides(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether a span holds another loop, or jumps back from out of line."""
    holds = one != other and one[0] <= other[0] and other[1] <= one[1]
    return holds or other[0] < one[0] < other[1] < one[1]
