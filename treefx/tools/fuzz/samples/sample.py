"""Describe a program over PyTorch's samples: operator or module, call, compilation."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FAMILY", "FORMS", "INPUTS", "INPUTS_IN_PLACE", "Sample", "describe_sample", "sample_script"]

FAMILY = "torch"
"""The name of the family in ``treefx fuzz``."""
FORMS = ("function", "in place", "out", "training", "evaluation")
"""How an operator is called (the first three), and the mode that a module is in."""
INPUTS = ("leaf", "made", "view", "no_grad", "inference")
"""What the inputs of a call are: leaves, results of another operator, strided views of such results, leaves under
``no_grad``, or tensors of ``inference_mode``."""
INPUTS_IN_PLACE = ("made", "view", "no_grad", "inference")
"""The same for operators that change their input: PyTorch forbids that for leaves with gradients."""


@dataclass(frozen=True)
class Sample:
    """Call one operator or module on several samples through one compiled function.

    Attributes:
        seed: The number of the program in its search.
        name: Of the operator with its variant, or of the module.
        form: One of ``FORMS``.
        dtype: The name of the dtype of the samples.
        inputs: One of ``INPUTS``.
        dynamic: Whether sizes are symbols from the first call on.
        inner: The inner compiler.
    """

    seed: int
    name: str
    form: str
    dtype: str
    inputs: str
    dynamic: bool
    inner: str
    family: str = FAMILY


def describe_sample(sample: Sample) -> str:
    """The program in one line."""
    sizes = "dynamic" if sample.dynamic else "static"
    return f"{sample.name} ({sample.form}, {sample.dtype}, {sample.inputs} inputs, {sizes}); inner {sample.inner}"


def sample_script(sample: Sample, note: str) -> str:
    """A Python file that runs the program again and prints what became of it."""
    return (
        f'"""{note}"""\n'
        "from treefx.tools.fuzz.samples.sample import Sample\n"
        "from treefx.tools.fuzz.samples.verdict import judge_sample\n\n"
        f"print(judge_sample({sample!r}))\n"
    )
