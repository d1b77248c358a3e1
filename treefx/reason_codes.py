"""List the stable codes of reasons for running on rows: ``TFX`` and three digits.

A code names one kind of reason for good: the text of a message may change, its code does not, and a code that is no
longer given is never used for another reason. ``TFX001`` to ``TFX099`` are reasons of a whole call, ``TFX101`` and up
reasons of one operator. The troubleshooting page is made from this table.

Reasons of calls have a member of ``treefx.runtime.reason.Cause``; those of operators are texts of the analysis, which
rows of the table recognise by how they begin.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

__all__ = [
    "LITTLE_SHARING",
    "LOSS_PICKS",
    "ROWS_BY_INPUTS",
    "TABLE",
    "TROUBLESHOOTING",
    "UNCOMPILED",
    "ReasonCode",
    "code_of_cause",
    "code_of_operator",
    "code_of_text",
    "find",
    "link_to",
    "marked",
    "with_code",
]


@dataclass(frozen=True)
class ReasonCode:
    """One kind of reason.

    Attributes:
        code: ``TFX`` and three digits, never reused.
        title: What keeps something on rows, in a few words.
        why: Why that cannot run once per distinct token.
        way_out: What to change; "" where nothing is lost.
        cause: Name of the member of ``Cause``, of a reason for a whole call.
        texts: Patterns of the beginnings of the analysis' texts, of a reason for one operator.
    """

    code: str
    title: str
    why: str
    way_out: str = ""
    cause: str | None = None
    texts: tuple[str, ...] = ()


def _call(code: str, cause: str, title: str, why: str, way_out: str = "") -> ReasonCode:
    return ReasonCode(code, title, why, way_out, cause)


def _operator(code: str, title: str, why: str, way_out: str, *texts: str) -> ReasonCode:
    return ReasonCode(code, title, why, way_out, None, texts)


TROUBLESHOOTING = "docs/troubleshooting.md"
"""The page that has an entry per code; messages link to it."""
LITTLE_SHARING = "TFX016"
"""The rows of a call share less than ``min_sharing``: a choice, not an obstacle."""
UNCOMPILED = "TFX017"
"""Dynamo gave a function up."""
ROWS_BY_INPUTS = "TFX150"
"""Computed in full from the inputs alone."""
LOSS_PICKS = "TFX151"
"""The loss reads packed values by rows."""

TABLE: tuple[ReasonCode, ...] = (
    _call(
        "TFX001", "NO_TOKENS", "no token ids",
        "no input [B, T] of the graph is looked up in an embedding, so nothing says which positions are the same token",
        "give the model input_ids [B, T] in the same graph as its blocks; ids [T] need a dimension of rows (ids[None])",
    ),
    _call(
        "TFX002", "NO_ATTENTION", "no attention",
        "the graph has token ids and neither attention nor recurrence, so that running it packed would not pay",
        "nothing is lost if the graph is small; else look for a graph break behind the embedding",
    ),
    _call(
        "TFX003", "GRAPH_BREAK", "graph break",
        "Dynamo cut the model at a line that it cannot trace, and the graph behind the cut gets no token ids",
        "move the named line out of the model, or use treefx.convert(model)",
    ),
    _call(
        "TFX004", "CACHE", "cache in use",
        "the call continues from keys and values of earlier tokens, as generation does",
        "pass use_cache=False and no past_key_values while training",
    ),
    _call(
        "TFX005", "INPUT", "input of another form",
        "an input is no plain tensor [B, T], or one of which nothing is known on distinct tokens",
        "give padded rows input_ids [B, T], attention_mask [B, T], or one packed row with position_ids",
    ),
    _call(
        "TFX006", "TRACE", "graph that cannot be traced",
        "an operator or a dtype of the graph cannot be traced without its values",
        "change the operator that the message names",
    ),
    _call(
        "TFX007", "OPERATOR", "operators keep everything on rows",
        "an operator without a token-wise law stands in front of everything that could run packed",
        "change the operator that the message names, or take on_unsupported='expand'",
    ),
    _call(
        "TFX008", "UNPROVED", "model that is not proved",
        "treefx.convert found no proof that the model computes on a tree what it computes on rows",
        "change what the message names (set dropout to 0, say)",
    ),
    _call(
        "TFX009", "SIZES", "sizes that have to be numbers",
        "rows and columns have to be numbers for a part of the graph, or code of the model decides by them",
        "pad batches to a few lengths (pad_to_multiple_of)",
    ),
    _call(
        "TFX010", "SEGMENTS", "sequences of a packed row that are not kept apart",
        "masks keep the sequences of a packed row apart, but not in this call",
        "give each sequence one run of a separate number, with positions that count up by one",
    ),
    _call(
        "TFX011", "MANY_SHAPES", "more shapes than are kept",
        "one graph keeps max_shapes shapes compiled, and this one comes for the first time",
        "pad batches to a few lengths, or raise the option max_shapes",
    ),
    _call(
        "TFX012", "MANY_BUFFERS", "more values of buffers than are kept",
        "a buffer that enters a proof has had more values than max_shapes",
        "keep the buffer constant, or raise the option max_shapes",
    ),
    _call(
        "TFX013", "LATER", "memory or files that failed",
        "tracing or compiling failed for lack of memory or files; a later call tries again",
        "free memory or disk space",
    ),
    _call(
        "TFX014", "VALUES", "values of this call",
        "what a position reads in this call is not defined on a tree: it sees no key, or its scores are too large",
        "fill masks with -inf or torch.finfo(dtype).min, and give positions without keys the label -100",
    ),
    _call(
        "TFX015", "HOOKS", "hooks in another order",
        "a forward hook in front of that of treefx.convert would get the packed row",
        "register hooks before treefx.convert(model)",
    ),
    ReasonCode(
        LITTLE_SHARING, "too little sharing",
        "the rows of the call share less than min_sharing: building the tree would cost more than it saves",
        "put rows that share prefixes into one call (treefx.data.TreeBatchSampler, or the keep_groups of your trainer)",
    ),
    ReasonCode(
        UNCOMPILED, "function that Dynamo gave up",
        "Dynamo compiled recompile_limit kinds of calls and runs further kinds uncompiled",
        "TORCH_LOGS=recompiles shows how calls differ; raise torch._dynamo.config.recompile_limit where they must",
    ),
    _operator(
        "TFX101", "operator without a law",
        "nothing is proved of how this operator maps tokens to tokens",
        "write it with operators of PyTorch's own, or give it a law (docs/tutorials/add-a-law.md)",
        "has no token-wise law",
    ),
    _operator(
        "TFX102", "random numbers for every row",
        "each row draws its own numbers, so that equal tokens get different values",
        "set dropout to 0 (model.eval() turns it off), or draw outside of the model",
        "draws random numbers for every row",
    ),
    _operator(
        "TFX103", "dropout in attention",
        "each row draws its own attention dropout", "set attention_dropout to 0",
        "dropout in attention draws",
    ),
    _operator(
        "TFX104", "mixes positions along the tokens",
        "the operator reads several positions of a row: it runs on rows, and all behind it too unless it is proved "
        "causal (contracted in stats['expansions'])",
        "nothing is lost behind a contracted operator; else read earlier tokens alone, by attention, a causal "
        "convolution or F.pad(x, (0, 0, 1, 0))[:, :-1], or apply it to the rows outside of the model",
        "mixes positions along", "flattens tokens", "meets attention weights along",
    ),
    _operator(
        "TFX105", "contracts over the tokens",
        "a product sums over the positions of a row",
        "write sums over earlier tokens as F.scaled_dot_product_attention(..., is_causal=True) or a causal convolution",
        "contracts over the tokens", "multiplies tokens with", "adds to an attention output inside",
    ),
    _operator(
        "TFX106", "pairs different tokens",
        "the operator combines tokens of different places", "let each token meet itself, or earlier ones in attention",
        "pairs different tokens", "a batched product pairs", "a product over tokens that is not",
        "a broadcast pairs tokens", "a broadcast aligns",
    ),
    _operator(
        "TFX107", "shape that crosses the token axes",
        "a view, copy or squeeze joins or splits rows and tokens in an order that a packed row does not have",
        "keep [B, T] as leading dimensions of the value, both larger than one",
        "a view ", "copies to another shape", "squeezes a row or token", "expands a row or token",
        "writes a value without token axes",
    ),
    _operator(
        "TFX108", "index or mask made of data",
        "which positions are read or written depends on values of the batch",
        "use torch.where with a mask [B, T] and keep all positions, or select behind the model",
        "indexes tokens", "indexes other tokens", "keeps as many entries", "writes tokens at indices",
        "writes at indices", "sorts over the tokens", "a histogram of", "gathers ", "selects along", "scatters ",
        "looks tokens up", "puts values between tokens",
    ),
    _operator(
        "TFX109", "statistic of the batch",
        "a statistic over all tokens of the batch counts a shared token once per row, its packed form once",
        "normalise over features (LayerNorm, RMSNorm), or put the layer into eval mode",
        "a statistic of the batch", "divides gradients by how often",
    ),
    _operator(
        "TFX110", "write in place",
        "the operator changes a buffer or table of the model by what the batch holds",
        "return the value and write it behind the model, or leave the statistic out while training",
        "changes a buffer of the model", "rescales rows of the table", "changes it in place",
    ),
    _operator(
        "TFX111", "autograd.Function",
        "the forward or backward of a custom autograd.Function is not proved to be token-wise and linear",
        "write the function as plain operators, or its backward as a linear function of the gradient",
        "is an autograd.Function",
    ),
    _operator(
        "TFX112", "input that requires grad",
        "the gradient of such an input is another one in every row", "detach the input, or make it a parameter",
        "meets an input that requires grad",
    ),
    _operator(
        "TFX113", "value given per row",
        "labels, advantages and other values of the caller belong to rows: packed values are read by rows there",
        "give the value as an input [B, T] in front of the first attention, or let only the loss read it",
        "meets a value given per row",
    ),
    _operator(
        "TFX114", "follows another operator on rows",
        "an operand was computed per row already", "mend the operator in front of it",
        "meets a value computed per row", "reads a value computed per row",
    ),
    _operator(
        "TFX115", "attention scores for the caller",
        "scores and probabilities have a row per query, padding or not",
        "call the model without output_attentions",
        "gives attention scores to the caller", "reads a statistic of attention scores", "widens attention scores",
        "multiplies attention scores",
    ),
    _operator(
        "TFX116", "value that varies along rows",
        "an operand without tokens differs from row to row", "give it as [B, T]", "meets a value that varies along",
    ),
    _operator(
        "TFX120", "attention that is not proved causal",
        "a token may see its future, or the proof needs values that are not known",
        "pass is_causal=True, or build the mask in the model from positions",
        "attention that is not proved",
    ),
    _operator(
        "TFX121", "mask that cannot be read",
        "the mask is made by operators that have no form as an expression of query and key",
        "build the mask from positions, ids or attention_mask [B, T] by comparisons, torch.where and &",
        "the mask is built by", "a score passes through", "the mask depends on whole rows", "the mask differs from row",
        "the mask reads", "attention that differs from row",
    ),
    _operator(
        "TFX122", "mask [B, 1, T, T] given by the caller",
        "in this call the values of the mask are not causal up to hidden keys, a window or documents",
        "give attention_mask [B, T], or build the mask in the model",
        "reads a mask \\[",
    ),
    _operator(
        "TFX123", "mask that depends on the number of columns",
        "the mask changes with the length of the padded batch", "build it from positions",
        "reads a mask or bias that depends", "reads a mask from a column",
    ),
    _operator(
        "TFX124", "attention that is no softmax over keys",
        "weights are made or changed by something else than a softmax over the keys", "use a softmax over the keys",
        "attention probabilities pass", "subtracts attention probabilities", "adds attention probabilities",
        "attention weights", "a softmax over another axis", "a product with attention probabilities",
        "a number added to the sum", "something added to the sum", "an exponential added to the sum",
    ),
    _operator(
        "TFX125", "other sinks than one per head",
        "logits next to the keys differ from token to token, or are several per head", "use one sink per query head",
        "takes logits next to", "an attention sink that differs",
    ),
    _operator(
        "TFX126", "heads or axes in another order",
        "query, key and value are not [B, heads, T, width] of the same heads",
        "call F.scaled_dot_product_attention with [B, heads, T, width], and enable_gqa for fewer key heads",
        "pairs several key heads", "a score with several products", "heads change places", "query and key axes change",
        "attends with values", "attention expects", "attention with tokens in",
    ),
    _operator(
        "TFX127", "packed sequences whose ends are not known",
        "cu_seq_lens or a window count tokens in a way that the analysis cannot follow",
        "give position_ids that restart at each sequence",
        "a window over kept tokens", "cu_seq_lens", "a mask that is no input",
    ),
    _operator(
        "TFX130", "learned values before or behind the tokens",
        "prompt and prefix tuning lengthen every row", "train another kind of adapter (LoRA)",
        "puts learned values",
    ),
    _operator(
        "TFX131", "loss of another form",
        "the loss does not pick one entry per token from packed values",
        "use cross_entropy or gather over the last dimension, without class weights that differ from row to row",
        "a weighted loss", "classes in the middle", "a gather within the packed values", "scores targets made",
        "a loss over other dimensions",
    ),
    _operator(
        "TFX132", "experts of another form",
        "slots of experts are not those of the sort before them",
        "let each expert see all slots that its router gives it, in the order of one sort",
        "a grouped product", "scales groups by values",
    ),
    _operator(
        "TFX133", "mask of numbers that change",
        "the mask would be another one each time it is computed", "make the mask of inputs and constants",
        "the mask is made of numbers",
    ),
    _operator(
        "TFX134", "recurrence of a library",
        "a library's kernel hands states from column to column, and treefx has no form of it along a tree",
        "nothing is lost around it; the gated delta rule and Mamba 2 have such a form, given token-wise values",
        "is a library's recurrence", "a recurrence of values", "a recurrence expects", "holds a recurrence",
        "a convolution (of|with)", "starts over at each",
    ),
    _operator(
        "TFX135", "choice among keys",
        "a query chooses keys (top-k) by scores that are not proved to be its prefix's alone",
        "mask the scores of later keys and of padding with -inf before topk, along the last dimension",
        "chooses (among|keys)",
    ),
    _operator(
        "TFX136", "reads other rows of the batch",
        "a value depends on which other rows are in the batch, and a shared token would count once",
        "remove it, or normalise over features instead of the batch", "reads other rows of the batch",
    ),
    ReasonCode(
        ROWS_BY_INPUTS, "function of the inputs alone",
        "positions, masks and labels are computed in full: they hold no feature of the model",
    ),
    ReasonCode(
        LOSS_PICKS, "loss that picks entries",
        "labels belong to rows: the loss picks one entry per row and position from packed logits, exactly and cheaply",
    ),
)  # fmt: skip
"""Every code, in order."""

_BY_CODE = {item.code: item for item in TABLE}
_BY_CAUSE = {item.cause: item.code for item in TABLE if item.cause is not None}
_PATTERNS = [(re.compile(text), item.code) for item in TABLE for text in item.texts]
_OTHER, _STATISTIC = "TFX101", "TFX109"


def find(code: str) -> ReasonCode:
    """The row of a code.

    Raises:
        KeyError: There is no such code.
    """
    return _BY_CODE[code]


def link_to(code: str) -> str:
    """The entry of a code in the troubleshooting page."""
    return f"{TROUBLESHOOTING}#{code.lower()}"


def marked(code: str) -> str:
    """Return a code with the link to its entry: ``[TFX012, docs/troubleshooting.md#tfx012]``."""
    return f"[{code}, {link_to(code)}]"


def with_code(text: str, code: str) -> str:
    """A message that ends in its code, unless it has none or names an entry already."""
    return f"{text} {marked(code)}" if code and TROUBLESHOOTING not in text else text


def code_of_cause(name: str) -> str:
    """The code of a member of ``Cause``, by name."""
    return _BY_CAUSE[name]


def code_of_operator(op: str, reason: str) -> str:
    """Return the code of an operator that runs on rows, from its name and the reason."""
    code = code_of_text(reason)
    return _STATISTIC if code == _OTHER and "batch_norm" in op else code


@lru_cache(maxsize=256)
def code_of_text(reason: str) -> str:
    """Return the code of a reason that the analysis gave for an operator."""
    return next((code for pattern, code in _PATTERNS if pattern.match(reason)), _OTHER)
