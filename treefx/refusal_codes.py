"""List the stable codes of refusals and of warnings about slower forms, from ``TFX201``.

Each part of treefx that refuses has one code: the message says what was refused, its entry in the troubleshooting page
the common cause of such refusals. Codes of reasons for running on rows stand in ``treefx.reason_codes``.
"""

from treefx.reason_codes import ReasonCode

__all__ = ["BATCH_ORDER", "FLEX", "HEAD_FORM", "OTHER_BACKEND", "PLAIN_FORM", "REFUSALS", "TRAINER", "code_of_module"]

FLEX = "TFX301"
"""FlexAttention runs instead of a generated kernel."""
PLAIN_FORM = "TFX302"
"""A faster form of a kernel is switched off."""
HEAD_FORM = "TFX303"
"""Operators of PyTorch compute LM head and loss."""
OTHER_BACKEND = "TFX311"
"""A trainer compiles with another backend."""
BATCH_ORDER = "TFX312"
"""A trainer keeps its own order of rows."""
TRAINER = "TFX207"
"""A trainer's setting under which nothing is shared."""

REFUSALS: tuple[ReasonCode, ...] = (
    ReasonCode(
        "TFX201", "forest that the model cannot run on",
        "under treefx.use(forest) every operator has to run on the packed row: there are no rows to fall back to",
        "call the model on a padded batch without treefx.use, or change what the message names",
    ),
    ReasonCode(
        "TFX202", "output that is read too late or changed",
        "an output that is computed when it is first read needs the weights and inputs of its call as they were",
        "read the output before the optimizer's step, clone it before changing it, or set the option "
        "lazy_outputs=False",
    ),
    ReasonCode(
        "TFX203", "forest that cannot be cut",
        "keys, values, and what causal convolutions and known recurrences along the tree read, cross the cuts between "
        "parts and between ranks; other states do not",
        "run the uncut forest (treefx.use), or change what the message names",
    ),
    ReasonCode(
        "TFX204", "loss that reads whole rows",
        "a part of a forest holds some edges of a row, and this loss reads all of them together",
        "give treefx.forward_backward a loss that is a sum over edges, or run the uncut forest",
    ),
    ReasonCode(
        "TFX205", "memory or cost that cannot be measured",
        "a plan needs bytes and seconds that this device or this model does not give",
        "measure with the source that the message names, or give treefx.plan a CostModel",
    ),
    ReasonCode(
        "TFX206", "form that the kernels do not have",
        "no kernel computes this score, shape, device or derivative",
        "take impl='auto' or impl='reference', or change what the message names",
    ),
    ReasonCode(
        TRAINER, "setting of a trainer",
        "the trainer runs the model in a way in which rows of one step never meet",
        "change the setting that the message names",
    ),
    ReasonCode(
        "TFX208", "model or server that cannot be sampled",
        "a tree is sampled from kept keys and values, or from ids and log-probabilities that a server returns",
        "sample with another `generate`, or change what the message names",
    ),
    ReasonCode(
        "TFX209", "measurement that cannot run here",
        "a tool needs a device, a compiler or a library that is not there", "install what the message names",
    ),
    ReasonCode(
        "TFX210", "second derivative",
        "compiled graphs, outputs that are read lazily and treefx's own functions have a first derivative only; what a "
        "custom autograd.Function saved is a constant to torch.compile, so its second derivative would be wrong",
        "run the model uncompiled and unconverted for that, or write the function as plain operators",
    ),
    ReasonCode(
        "TFX211", "field of a vision tower's result",
        "the tower ran once per distinct image, and this field does not show which part belongs to which image",
        "read pooler_output, or call the tower outside of the compiled model",
    ),
    ReasonCode(
        FLEX, "FlexAttention instead of a generated kernel",
        "the generated kernel does not compile or has no form for this attention; results are the same",
        "nothing is wrong, it is slower; update Triton, or change what the message names",
    ),
    ReasonCode(
        PLAIN_FORM, "plain form of a kernel",
        "the faster form of a kernel does not compile or gave another result than the plain one on a small example",
        "nothing is wrong, it is slower; update Triton, or report the message",
    ),
    ReasonCode(
        HEAD_FORM, "LM head and loss by PyTorch's operators",
        "the Triton kernel of LM head and loss does not compile or gave another result on a small example",
        "nothing is wrong, it is slower; update Triton, or report the message",
    ),
    ReasonCode(
        OTHER_BACKEND, "trainer that compiles with another backend",
        "the program names a backend, or compiles parts that get no token ids, so treefx never sees the model",
        'name treefx as the backend, or compile the whole model with model.compile(backend="treefx")',
    ),
    ReasonCode(
        BATCH_ORDER, "trainer that keeps its order of rows",
        "rows that share prefixes lie in different calls, because the trainer makes batches by itself",
        "use treefx.data.TreeBatchSampler, or the keep_groups of your trainer's integration",
    ),
)  # fmt: skip
"""Every code, in order."""

_MODULES = {
    "treefx.forests": "TFX201",
    "treefx.integrations": TRAINER,
    "treefx.kernels": "TFX206",
    "treefx.losses": "TFX204",
    "treefx.passes": "TFX201",
    "treefx.passes.cuts": "TFX203",
    "treefx.passes.trace.trace": "TFX210",
    "treefx.planning": "TFX203",
    "treefx.planning.cost": "TFX205",
    "treefx.rl": "TFX208",
    "treefx.runtime": "TFX201",
    "treefx.runtime.analyses": "TFX007",
    "treefx.runtime.converted": "TFX008",
    "treefx.runtime.converted.packed_rows": "TFX202",
    "treefx.runtime.lazy": "TFX202",
    "treefx.runtime.ways.second_derivatives": "TFX210",
    "treefx.runtime.whole.distinct_images": "TFX211",
    "treefx.tools": "TFX209",
}
"""By the module that refuses; the longest name that fits counts."""


def code_of_module(name: str) -> str:
    """The code of refusals of a module of treefx; "" for any other module."""
    while name and name not in _MODULES:
        name = name.rpartition(".")[0]
    return _MODULES.get(name, "")
