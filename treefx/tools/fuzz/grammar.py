"""Draw programs from a seed: a plain step with a family's feature and some others.

A family aims at one part of the product; "mixed" draws several features at once. The same seed, number and families
give the same program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

from treefx.errors import InputError
from treefx.tools.fuzz.draft import Draft
from treefx.tools.fuzz.families.around import COUNTERS, CUTS, READ_THE_MASK
from treefx.tools.fuzz.families.attention import SPELLINGS, WRITTEN, condition_part
from treefx.tools.fuzz.families.autograd import AUTOGRAD
from treefx.tools.fuzz.families.calls import CALLS
from treefx.tools.fuzz.families.converted import CONVERTED
from treefx.tools.fuzz.families.embeddings import CONDITIONING, EMBEDDINGS, POSITIONS
from treefx.tools.fuzz.families.layers import EXPERTS, MIXERS, NORMS, NUMBERED, POINTWISE, ROWS
from treefx.tools.fuzz.families.losses import CALLER_LOSSES, HEADS, LABELS, LOSSES
from treefx.tools.fuzz.families.masks import CONDITIONS, FILLS, OPENINGS
from treefx.tools.fuzz.families.scores import QUERIES, SCORES
from treefx.tools.fuzz.families.situations import FAULTS, HOOKED, INPLACE, INVALID, NONFINITE, WEIGHTED
from treefx.tools.fuzz.program import Attention, Piece, Program, Sizes

__all__ = ["FAMILIES", "choose_families", "generate"]

Feature = Callable[[Draft, Random], None]


def generate(seed: int, number: int, families: Sequence[str] = (), inner: str = "") -> Program:
    """Program ``number`` of the search with this seed.

    Args:
        seed: Of the search.
        number: Counted from 0.
        families: To draw from; none for all.
        inner: The inner compiler; "" draws it.
    """
    rng = Random(f"{seed}/{number}")
    family = rng.choice(list(families) or list(FAMILIES))
    draft = Draft.plain(rng)
    _FEATURES[family](draft, rng)
    while rng.random() < 0.3:
        _FEATURES[rng.choice(_SEASONING)](draft, rng)
    return draft.finish(rng, number, family, inner)


def choose_families(names: Sequence[str]) -> tuple[str, ...]:
    """The families of these names, or all.

    Raises:
        InputError: There is no such family.
    """
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        raise InputError(f"treefx fuzz has the families {', '.join(FAMILIES)}; got {', '.join(unknown)}")
    return tuple(dict.fromkeys(names)) or tuple(FAMILIES)


# What a family draws ------------------------------------------------------------------------------------------------


def _spelling(draft: Draft, rng: Random) -> None:
    for place in draft.attentions():
        draft.respell(place, rng.choice(SPELLINGS), rng.choice(WRITTEN), rng.choice(list(FILLS)))
    if rng.random() < 0.4:
        draft.add_terms(rng, [rng.choice(list(QUERIES))])
    if rng.random() < 0.4:
        draft.sizes = Sizes(8, 4, rng.choice((1, 2)))


def _masks(draft: Draft, rng: Random) -> None:
    for place in draft.attentions():
        names = rng.sample(list(CONDITIONS), rng.choice((1, 1, 2, 2, 3)))
        base = [] if rng.random() < 0.1 else ["causal"]
        padding = ["padding"] if rng.random() < 0.5 else []
        if rng.random() < 0.2:
            names.append("or " + rng.choice(list(OPENINGS)))
        draft.set_conditions(place, [*base, *padding, *names])
        if rng.random() < 0.5:
            draft.respell(place, rng.choice(("sdpa", "matmul", "einsum")), rng.choice(WRITTEN), rng.choice(list(FILLS)))


def _layers_differ(draft: Draft, rng: Random) -> None:
    """Two attentions whose masks on keys differ."""
    keys = ("padding", "padding by token", "a token hidden", "gate of the key", "type of the key", "")
    choices = [rng.choice(keys), rng.choice(keys)]
    draft.layers = [Attention(tuple(filter(None, ("causal", name)))) for name in choices]
    if rng.random() < 0.5:
        _spelling(draft, rng)


def _scores(draft: Draft, rng: Random) -> None:
    for place in draft.attentions():
        spelling = "matmul" if rng.random() < 0.7 else rng.choice(SPELLINGS[3:])
        draft.respell(place, spelling, rng.choice(WRITTEN), rng.choice(list(FILLS)))
    draft.add_terms(rng, rng.sample(list(SCORES), rng.choice((1, 1, 2))))


def _layer(*catalogues: Mapping[str, object]) -> Feature:
    names = [name for catalogue in catalogues for name in catalogue]

    def feature(draft: Draft, rng: Random) -> None:
        for _ in range(rng.choice((1, 1, 2))):
            place = rng.choice(
                (rng.randint(0, len(draft.layers)), len(draft.layers))
            )  # what stands before it is packed
            draft.layers.insert(place, Piece(rng.choice(names)))
        if rng.random() < 0.1:
            draft.layers = [layer for layer in draft.layers if isinstance(layer, Piece)]

    return feature


def _embeddings(draft: Draft, rng: Random) -> None:
    draft.embeddings[0] = rng.choice(list(EMBEDDINGS))
    if rng.random() < 0.5:
        draft.embeddings.append(rng.choice(list(POSITIONS)))


def _inputs(draft: Draft, rng: Random) -> None:
    draft.embeddings += rng.sample(list(CONDITIONING), rng.choice((1, 1, 2)))


def _losses(draft: Draft, rng: Random) -> None:
    draft.loss = rng.choice(list(LOSSES))
    draft.labels = rng.choice(list(LABELS))
    if rng.random() < 0.4:
        draft.head = rng.choice(list(HEADS))
    if rng.random() < 0.3 and draft.loss in CALLER_LOSSES:
        draft.output = "logits"


def _outputs(draft: Draft, rng: Random) -> None:
    draft.output = rng.choice(("logits", "loss and logits", "loss and hidden states", "loss and attention"))
    if draft.output == "loss and attention":
        for place in draft.attentions():
            draft.respell(place, rng.choice(("matmul", "einsum")), rng.choice(WRITTEN), "-1e9")
    draft.calls = [rng.choice(_READS) for _ in range(rng.choice((1, 2, 3)))]
    if draft.output == "logits":
        draft.loss = rng.choice(CALLER_LOSSES)


def _random(draft: Draft, rng: Random) -> None:
    kind = rng.randrange(4)
    if kind == 0:
        draft.loss = rng.choice([name for name, part in LOSSES.items() if part.is_random])
    elif kind == 1:
        names = [name for name in CONDITIONS if condition_part(name).is_random]
        draft.set_conditions(rng.choice(draft.attentions()), ["causal", rng.choice(names)])
    elif kind == 2:
        draft.embeddings.append(rng.choice([name for name, part in CONDITIONING.items() if part.is_random]))
    else:
        names = [name for name, part in {**POINTWISE, **EXPERTS}.items() if part.is_random]
        draft.layers.append(Piece(rng.choice(names)))
    draft.calls = ["train"] * rng.choice((1, 2, 3))


def _buffers(draft: Draft, rng: Random) -> None:
    if rng.random() < 0.6:
        for place in draft.attentions():
            draft.set_conditions(place, ["causal by a buffer", *rng.choice(([], ["padding"]))])
        changes = [name for name in CALLS if name.startswith("mask buffer")]
    else:
        names = ("changing temperature", "step counter", "step counter without gradient", "running statistics")
        draft.layers.append(Piece(rng.choice(names)))
        changes = [name for name in CALLS if name.startswith("buffer")]
        draft.layers.append(Piece("changing temperature"))
    draft.calls = ["train", rng.choice(changes), "train", *rng.choice(([], [rng.choice(changes), "train"]))]


def _calls(draft: Draft, rng: Random) -> None:
    names = [name for name in CALLS if not name.startswith(("mask buffer", "buffer", "forest", "plan", "nothing"))]
    draft.calls = [rng.choice(names) for _ in range(rng.choice((2, 2, 3, 4)))]
    if rng.random() < 0.7:
        draft.calls.append("train")


def _shapes(draft: Draft, rng: Random) -> None:
    draft.shapes = True
    if len(draft.calls) < 2:
        draft.calls = ["train"] * rng.choice((2, 3, 3, 4, 5))


def _modes(draft: Draft, rng: Random) -> None:
    alternatives = (
        ("checkpoint", "reentrant checkpoint"),
        ("float32", "autocast"),
        ("dynamic",),
        ("eval",),
        ("default sharing",),
    )
    draft.modes += [rng.choice(names) for names in rng.sample(alternatives, rng.choice((1, 1, 2)))]
    if rng.random() < 0.4:  # "dynamic" makes inputs of them, also of calls that share too little to run packed
        draft.layers.append(Piece(rng.choice(list(NUMBERED))))
        draft.modes += [mode for mode in ("dynamic", "default sharing") if rng.random() < 0.6]
    alone = "nothing shared"
    draft.calls = rng.choice((["train"], ["train", "train"], ["train", "narrower batch"], [alone, "train"], [alone]))


def _threads(draft: Draft, rng: Random) -> None:
    draft.calls = rng.choice((["two threads"], ["train", "a thread"], ["a thread", "train"], ["two threads", "train"]))


def _native(draft: Draft, rng: Random) -> None:
    if rng.random() < 0.5:
        draft.embeddings.append("columns given")
    else:
        draft.add_terms(rng, ["rotary with given positions"])
    for place in draft.attentions():
        names = rng.sample(_OF_POSITIONS, rng.choice((0, 0, 1)))
        draft.set_conditions(place, ["causal", *names])
    draft.output, draft.loss = "logits", "cross entropy"
    draft.calls = rng.choice((["forest"], ["train", "forest"], ["forest", "forest"], ["forest", "train"]))


def _planned(draft: Draft, rng: Random) -> None:
    _native(draft, rng)
    draft.calls = rng.choice((["plan"], ["plan in parts"], ["plan in parts"]))
    draft.inner = "aot_eager"  # profiles read the graphs that it leaves


def _mixed(draft: Draft, rng: Random) -> None:
    for name in rng.sample(_SEASONING, rng.choice((2, 3, 4))):
        _FEATURES[name](draft, rng)


def _inplace(draft: Draft, rng: Random) -> None:
    draft.calls = [rng.choice(list(INPLACE)) for _ in range(rng.choice((1, 1, 2)))]
    draft.modes += ["dynamic"] if rng.random() < 0.5 else []
    draft.inner = "aot_eager"  # its gradients are those of what AOTAutograd makes of the inputs


def _invalid(draft: Draft, rng: Random) -> None:
    draft.loss = rng.choice([name for name, part in LOSSES.items() if not part.is_random])
    draft.labels = rng.choice(list(LABELS))
    draft.output = rng.choice(("loss", "loss", "loss and logits"))
    name = rng.choice([*INVALID, *[_PADDED] * 4])
    draft.calls = rng.choice(([], ["train"])) + [name] + rng.choice(([], ["train"]))
    if name == _PADDED and rng.random() < 0.7:  # padding that no loss reads is left out
        draft.loss, draft.labels, draft.output = "cross entropy", "padding ignored", "loss"
        for place in draft.attentions():
            draft.set_conditions(place, ["causal", "padding"])
    draft.inner = rng.choice(("eager", "aot_eager"))  # inductor's own checks end the process


def _counters(draft: Draft, rng: Random) -> None:
    if rng.random() < 0.2:
        _native(draft, rng)
        names = [name for name in COUNTERS if name not in READ_THE_MASK]
        draft.layers.append(Piece(rng.choice(names)))
        draft.calls = ["forest"]
        return
    draft.layers.insert(rng.randint(0, len(draft.layers)), Piece(rng.choice(list(COUNTERS))))
    draft.output = rng.choice(("loss", "loss", "loss and logits"))
    draft.calls = rng.choice((["train"], ["train", "train"], ["no_grad", "train"]))


def _nonfinite(draft: Draft, rng: Random) -> None:
    draft.output = rng.choice(("logits", "loss and logits"))
    draft.calls = [rng.choice(list(NONFINITE)) for _ in range(rng.choice((1, 2)))] + rng.choice(([], ["train"]))


def _weighted(draft: Draft, rng: Random) -> None:
    _native(draft, rng)
    draft.calls = rng.choice(([], ["train"])) + [rng.choice(list(WEIGHTED))]


def _hooked(draft: Draft, rng: Random) -> None:
    _planned(draft, rng)
    draft.calls = [rng.choice(list(HOOKED))]


def _converted(draft: Draft, rng: Random) -> None:
    plain = [name for name in CONVERTED if ", nn.Linear," in name]
    draft.calls = [rng.choice(plain if rng.random() < 0.4 else list(CONVERTED))]


def _cuts(draft: Draft, rng: Random) -> None:
    draft.layers.insert(rng.choice((0, 0, len(draft.layers))), Piece(rng.choice(list(CUTS))))
    draft.modes += ["dynamic"] if rng.random() < 0.5 else []
    draft.shapes = rng.random() < 0.5
    draft.calls = rng.choice((["train"], ["train", "train"]))
    draft.inner = "aot_eager"


def _faults(draft: Draft, rng: Random) -> None:
    name = rng.choice(list(FAULTS))
    if "plan" in name:
        _planned(draft, rng)
        draft.calls = [name, "plan in parts"]
    else:
        draft.calls = rng.choice(([], ["train"])) + [name, rng.choice(("train", "train and step", "accumulate"))]


_PADDED = "id beyond the vocabulary in padding"
_OF_POSITIONS = ["window", "dilated", "not the same token", "same class of tokens", "per head"]
_READS = [name for name in CALLS if name.startswith(("train", "in-place", "numpy", "dlpack", "no_grad", "inference"))]

_FEATURES: dict[str, Feature] = {
    "attention": _spelling,
    "masks": _masks,
    "layers": _layers_differ,
    "scores": _scores,
    "mixers": _layer(MIXERS),
    "rows": _layer(ROWS),
    "experts": _layer(EXPERTS),
    "tokens": _layer(NORMS, POINTWISE),
    "autograd": _layer(AUTOGRAD),
    "embeddings": _embeddings,
    "inputs": _inputs,
    "losses": _losses,
    "outputs": _outputs,
    "random": _random,
    "buffers": _buffers,
    "calls": _calls,
    "shapes": _shapes,
    "modes": _modes,
    "threads": _threads,
    "native": _native,
    "planned": _planned,
    "mixed": _mixed,
    "inplace": _inplace,
    "invalid": _invalid,
    "counters": _counters,
    "nonfinite": _nonfinite,
    "weights": _weighted,
    "hooks": _hooked,
    "converted": _converted,
    "cuts": _cuts,
    "faults": _faults,
}
FAMILIES = {
    "attention": "spellings of attention, fills, grouped heads, rotary positions",
    "masks": "conditions on keys: padding, windows, documents, masks of the caller, what looks ahead",
    "layers": "two layers with different masks on keys",
    "scores": "biases, caps, temperatures, sinks, other normalisations",
    "mixers": "what mixes columns: sums, scans, convolutions, transforms",
    "rows": "what mixes rows",
    "experts": "routers, capacities, balance losses",
    "tokens": "norms, functions of a token, writes in place, counters",
    "autograd": "autograd functions and hooks",
    "embeddings": "tables that count, pad, bound or share; positions",
    "inputs": "types, gates, numbers and vectors per row, inputs that require gradients",
    "losses": "losses, heads, labels",
    "outputs": "what the caller reads, and when",
    "random": "dropout, noise, masks and labels drawn in forward",
    "buffers": "masks and factors in buffers that change",
    "calls": "sequences: other grad modes, loads, copies, accumulation, retained graphs",
    "shapes": "batches of several sizes",
    "modes": "checkpointing, float32, autocast, dynamic shapes, eval",
    "threads": "calls from threads",
    "native": "forests under treefx.use",
    "planned": "forests in parts",
    "mixed": "several of these at once",
    "inplace": "functions of hidden states that change them in place, fixed and symbolic sizes",
    "invalid": "inputs that eager refuses: labels, ids, shapes, types",
    "counters": "statistics of tokens that reach a buffer alone, also of forests",
    "nonfinite": "a token whose embedding is NaN or infinite",
    "weights": "forests with weights of zero and forbidden tokens, and without a compiler",
    "hooks": "what acts on gradients while a plan runs, and a loss that is no sum over its parts",
    "converted": "treefx.convert: values kept, counted or hooked inside, packed rows, caches, ids out of range",
    "cuts": "models that Dynamo cuts: pictures, deep features, numbers printed",
    "faults": "errors and interrupts in the middle of a call, and the calls after them",
}
"""Families by name, with what they aim at. The first 22, named, draw the programs of seeds from before the others."""
_SEASONING = [
    *("attention", "masks", "losses", "outputs", "calls", "shapes") * 2,
    *("layers", "scores", "tokens", "autograd", "embeddings", "inputs", "mixers", "experts"),
]
"""What other families get now and then; what takes whole graphs to rows is rare."""
