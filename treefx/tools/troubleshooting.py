"""The troubleshooting page: an entry per code, made from the tables of codes.

``python -m treefx.tools.troubleshooting`` (``make docs``) writes ``docs/troubleshooting.md``, and
``treefx doctor --code TFX012`` prints one entry.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from treefx.errors import InputError
from treefx.reason_codes import TABLE, TROUBLESHOOTING, ReasonCode, marked
from treefx.refusal_codes import REFUSALS

__all__ = ["EXAMPLES", "entry_of", "page"]

_SECTIONS = {
    "TFX0": ("Calls that run on rows", "The results are exact; the call computes shared tokens once per row."),
    "TFX1": (
        "Operators that run on rows",
        "The results are exact; the named operator, and what reads it, runs once per row. The rest stays packed.",
    ),
    "TFX2": ("Refusals", "An error of type `treefx.UnsupportedError`: there is no exact way to go on."),
    "TFX3": ("Slower forms and trainers", "The results are exact; something faster is not used."),
}
_HEAD = f"""# Troubleshooting

Each warning, refusal and entry of a report ends in a code such as `{marked("TFX104")}`.
A code keeps its meaning for good. `treefx doctor --code TFX104` prints its entry in the terminal.
`report.why("file.py:120")` says which codes a line has, and `treefx explain` names them before anything runs.

This page is made from `treefx/reason_codes.py` and `treefx/refusal_codes.py` by `make docs`.
"""

EXAMPLES = {
    "TFX001": "no input [B, T] of the graph is looked up in an embedding",
    "TFX002": "the graph has no attention or recurrence, so that running it on distinct tokens would not pay",
    "TFX003": "Dynamo could not capture LM.forward as one graph (graph break at model.py:52 `print(x.item())`)",
    "TFX004": "the call continues from a cache of its rows, as generation does: nothing is analysed",
    "TFX005": "the call gives an attention_mask that is not [B, T]",
    "TFX006": "the graph could not be traced: NotImplementedError: an autograd.Function changes an input in place",
    "TFX007": "the model changes a parameter in its forward: weight",
    "TFX008": "the model has a recurrence along the tokens",
    "TFX009": "sizes have to be known: aten.view.default: a view to [24, 16] crosses labelled axes",
    "TFX010": "the model makes a cache (config.use_cache=True), and the sequences of a packed row see each other",
    "TFX011": "more than 8 shapes of inputs (option max_shapes)",
    "TFX012": "more than 8 values of buffers for one shape of inputs (option max_shapes)",
    "TFX013": "OSError: [Errno 28] No space left on device",
    "TFX014": "a position that sees no key is read by the loss: its label is not -100",
    "TFX015": "a forward pre-hook was registered behind that of treefx.convert; the next call shares again",
    "TFX016": "ordinary: shares less than min_sharing=1.15",
    "TFX017": "Dynamo compiled the model for 8 kinds of calls, which is its recompile_limit",
    "TFX101": "aten.fft_fft.default: has no token-wise law",
    "TFX102": "aten.native_dropout.default: draws random numbers for every row",
    "TFX103": "scaled_dot_product_attention: dropout in attention draws for every row",
    "TFX104": "aten.cumsum.default: mixes positions along the token axis",
    "TFX105": "aten.einsum.default: contracts over the tokens",
    "TFX106": "aten.add.Tensor: a broadcast pairs tokens with tokens",
    "TFX107": "aten.view.default: a view to a dimension of 96 crosses labelled axes",
    "TFX108": "aten.index.Tensor: indexes tokens with data",
    "TFX109": "aten.native_batch_norm.default: a statistic of the batch would count every shared token once",
    "TFX110": "aten.add_.Tensor: changes a buffer of the model",
    "TFX111": "Square: is an autograd.Function whose backward is not linear in the gradient",
    "TFX112": "aten.add.Tensor: meets an input that requires grad",
    "TFX113": "aten.mul.Tensor: meets a value given per row",
    "TFX114": "aten.add.Tensor: reads a value computed per row",
    "TFX115": "aten.mean.dim: reads a statistic of attention scores",
    "TFX116": "aten.mul.Tensor: meets a value that varies along the row axis",
    "TFX120": "scaled_dot_product_attention: attention that is not proved causal",
    "TFX121": "scaled_dot_product_attention: the mask is built by aten.sort.default",
    "TFX122": "reads a mask [4, 1, 9, 9] given by the caller, which in this call is not causal",
    "TFX123": "reads a mask from a column that depends on the number of columns",
    "TFX124": "aten._softmax.default: a softmax over another axis than the keys",
    "TFX125": "an attention sink that differs from token to token",
    "TFX126": "pairs several key heads with more query heads, without enable_gqa",
    "TFX127": "cu_seq_lens of keys that are not those of the queries",
    "TFX130": "aten.cat.default: puts learned values before or behind the tokens (prompt or prefix tuning)",
    "TFX131": "aten.nll_loss_forward.default: a weighted loss, or targets made of hidden states",
    "TFX132": "aten._grouped_mm.default: a grouped product whose groups are not those of the sorted slots",
    "TFX133": "the mask is made of numbers that differ each time they are computed: aten.rand.default",
    "TFX134": "is a library's recurrence that has no form along a tree, so the library's function runs on rows",
    "TFX135": "aten.topk.default: chooses among keys that are not proved to be of the past",
    "TFX136": "aten.mean.dim: reads other rows of the batch",
    "TFX150": "aten.arange.default: computed in full from the inputs alone",
    "TFX151": "aten.gather.default: the loss picks one entry per row and position",
    "TFX201": "under treefx.use(forest) every operator must be token-wise, but aten.cumsum.default reads whole rows",
    "TFX202": "an output that is computed when it is read keeps its shape and memory, got aten.resize_.default",
    "TFX203": "a forest can be cut where tokens meet in attention, a convolution or a known recurrence",
    "TFX204": "kto reads whole rows, but was called on 5 of 9 edges; call treefx.backward with additive=False",
    "TFX205": "memory can be measured on CPU and CUDA devices, got mps and source=None",
    "TFX206": "impl='cpu' must get tensors on the CPU, got cuda:0: use impl='auto'",
    "TFX207": "treefx expects whole rows, got ulysses_sequence_parallel_size=2",
    "TFX208": "LM has a state of another kind: only decoders that keep keys and values per token can be branched",
    "TFX209": "this measurement needs a CUDA device",
    "TFX210": "a second derivative (create_graph=True) through an autograd.Function in a compiled model",
    "TFX211": "field 'hidden_states' of a vision tower's result cannot be expanded to all images",
    "TFX301": "treefx: FlexAttention runs this attention instead of a generated kernel: sm_75 is not supported",
    "TFX302": "treefx: the Gluon forward kernel is switched off for this attention, the plain one runs instead",
    "TFX303": "treefx: PyTorch's operators compute LM head and loss instead of a Triton kernel, slower",
    "TFX311": "this program compiles with the backend it names, inductor, not with treefx",
    "TFX312": "rows keep their order: DPOTrainer puts them into batches by itself",
}
"""A message of each code, shortened."""


def page() -> str:
    """The whole page as Markdown."""
    return "\n".join(_lines())


def entry_of(code: str) -> str:
    """One entry as text.

    Raises:
        InputError: There is no such code.
    """
    wanted = code.strip().upper()
    row = next((row for row in _rows() if row.code == wanted), None)
    if row is None:
        known = ", ".join(row.code for row in _rows())
        raise InputError(f"a code should be one of {known}, got {code!r}")
    section, note = _SECTIONS[row.code[:4]]
    way = row.way_out or "nothing is lost"
    return (
        f"{row.code}: {row.title}\n{section}. {note}\n\nCause: {row.why}.\nWay out: {way}.\n"
        f"Example: {EXAMPLES[row.code]} {marked(row.code)}"
    )


def _rows() -> tuple[ReasonCode, ...]:
    return (*TABLE, *REFUSALS)


def _lines() -> Iterator[str]:
    yield _HEAD
    section = ""
    for row in _rows():
        if row.code[:4] != section:
            section = row.code[:4]
            title, note = _SECTIONS[section]
            yield f"## {title}\n\n{note}\n"
        # The anchor stands for itself: those that renderers make of headings differ.
        yield f'<a id="{row.code.lower()}"></a>\n\n### {row.code}: {row.title}\n'
        yield f"**Cause.** {_sentence(row.why)}\n"
        yield f"**Way out.** {_sentence(row.way_out) if row.way_out else 'Nothing is lost.'}\n"
        yield f"**Example.**\n\n```text\n{EXAMPLES[row.code]} {marked(row.code)}\n```\n"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text[0].isalpha() else f"{text}."


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else TROUBLESHOOTING)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(), encoding="utf-8")
