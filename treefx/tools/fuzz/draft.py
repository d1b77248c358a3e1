"""Draft a program: it starts plain, features change it, ``finish`` makes it fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from treefx.tools.fuzz.families.attention import has_scores, has_weights
from treefx.tools.fuzz.families.batches import PADDINGS, draw_batch
from treefx.tools.fuzz.families.losses import LOSSES
from treefx.tools.fuzz.families.scores import SCORES
from treefx.tools.fuzz.program import Attention, Batch, Call, Piece, Program, Sizes
from treefx.tools.fuzz.script import inputs_of, is_native, is_random

__all__ = ["Draft"]

_INNERS = ("eager", "aot_eager", "inductor")
_ODDS = (65, 34, 1)


@dataclass
class Draft:
    """The parts of a program, to be changed."""

    sizes: Sizes = field(default_factory=Sizes)
    embeddings: list[str] = field(default_factory=lambda: ["embedding"])
    layers: list[Piece | Attention] = field(default_factory=list)
    head: str = "linear"
    loss: str = "cross entropy"
    output: str = "loss and logits"
    labels: str = "padding ignored"
    modes: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=lambda: ["train"])
    inner: str = ""
    """"" draws it."""
    shapes: bool = False
    """Whether the batches are of several sizes."""

    @classmethod
    def plain(cls, rng: Random) -> Draft:
        """Draw one or two causal attentions, mostly padded, a loss, and one or two steps."""
        draft = cls()
        conditions = ("causal", "padding") if rng.random() < 0.7 else ("causal",)
        draft.layers = [Attention(conditions) for _ in range(rng.choice((1, 1, 1, 2)))]
        if rng.random() < 0.4:
            draft.embeddings.append("columns")
        if rng.random() < 0.3:
            draft.layers.append(Piece("gelu layer"))
        if rng.random() < 0.3:
            draft.calls = rng.choice((["train", "train"], ["no_grad", "train"], ["train and step", "evaluate"]))
        return draft

    def attentions(self) -> list[int]:
        """Where the layers are attentions; one is added where none is."""
        if not any(isinstance(layer, Attention) for layer in self.layers):
            self.layers.append(Attention(("causal", "padding")))
        return [place for place, layer in enumerate(self.layers) if isinstance(layer, Attention)]

    def set_conditions(self, place: int, names: Sequence[str]) -> None:
        """Let the attention there have these conditions."""
        self.layers[place] = replace(self._attention(place), conditions=tuple(dict.fromkeys(names)))

    def respell(self, place: int, spelling: str, written: str, fill: str) -> None:
        """Let the attention there be spelled so."""
        self.layers[place] = replace(self._attention(place), spelling=spelling, written=written, fill=fill)

    def add_terms(self, rng: Random, names: Sequence[str]) -> None:
        """Add terms to one attention."""
        place = rng.choice(self.attentions())
        layer = self._attention(place)
        self.layers[place] = replace(layer, terms=tuple(dict.fromkeys((*layer.terms, *names))))

    def _attention(self, place: int) -> Attention:
        layer = self.layers[place]
        assert isinstance(layer, Attention)
        return layer

    def finish(self, rng: Random, seed: int, family: str, inner: str) -> Program:
        """The program: batches drawn, and what does not fit together changed."""
        layers = tuple(_fitting(layer) for layer in self.layers)
        if self.output == "loss and attention" and not any(
            isinstance(layer, Attention) and has_weights(layer) for layer in layers
        ):
            self.output = "loss and logits"
        if self.output == "logits" and LOSSES[self.loss].is_random:
            self.loss = "cross entropy"
        batches = self._batches(rng)
        program = Program(
            seed=seed,
            family=family,
            inner=self.inner or inner or rng.choices(_INNERS, _ODDS)[0],
            sizes=self.sizes,
            embeddings=tuple(dict.fromkeys(self.embeddings)),
            layers=layers,
            head=self.head,
            loss=self.loss,
            output=self.output,
            labels=self.labels,
            inputs=rng.randrange(12),
            modes=tuple(dict.fromkeys(self.modes)),
            batches=batches,
            calls=tuple(Call(name, self._batch_of(place, len(batches), rng)) for place, name in enumerate(self.calls)),
        )
        program = _without_missing(program)
        return _repeatable(program) if is_random(program) else program

    def _batches(self, rng: Random) -> tuple[Batch, ...]:
        """One batch or two of the same shape, or three of several."""
        padding = rng.choice((*PADDINGS, "right", "right", "one row right"))
        shape = self._shape(rng)
        shapes = [shape, self._shape(rng), self._shape(rng)] if self.shapes else [shape] * rng.choice((1, 1, 2))
        return tuple(draw_batch(rng, *shape, self.sizes.vocabulary, padding) for shape in shapes)

    def _shape(self, rng: Random) -> tuple[int, int]:
        """Draw rows and columns: in every fifth batch sizes of the model, seldom one."""
        rows, columns = rng.randint(2, 5), rng.randint(4, 12)
        kind = rng.random()
        if kind < 0.2:
            width, heads = self.sizes.width, self.sizes.heads
            return rng.choice(((width, width), (heads, columns), (columns, columns), (rows, width), (4, 4)))
        if kind < 0.24:
            return rng.choice(((1, columns), (rows, 2), (rows, 1)))
        return rows, columns

    def _batch_of(self, place: int, count: int, rng: Random) -> int:
        """Every shape has its turn; of one shape any batch has."""
        return place % count if self.shapes else rng.randrange(count)


def _repeatable(program: Program) -> Program:
    """Make a program's draws repeatable: no inductor numbers, no two threads at once."""
    calls = tuple(replace(call, name="a thread") if call.name == "two threads" else call for call in program.calls)
    return replace(program, inner="aot_eager" if program.inner == "inductor" else program.inner, calls=calls)


def _fitting(layer: Piece | Attention) -> Piece | Attention:
    """Terms need scores as a value; is_causal takes no other condition."""
    if not isinstance(layer, Attention):
        return layer
    if not has_scores(layer) and any(name in SCORES for name in layer.terms):
        layer = replace(layer, spelling="matmul")
    hiding = [name for name in layer.conditions if not name.startswith("or ")]
    if layer.spelling == "sdpa is_causal" and layer.conditions != ("causal",):
        layer = replace(layer, spelling="sdpa")
    if layer.fill != "-inf" and layer.written == "bool" and not has_scores(layer):
        layer = replace(layer, fill="-inf")
    return layer if hiding else replace(layer, conditions=("causal", *layer.conditions))


def _without_missing(program: Program) -> Program:
    """Calls change only buffers there are, and forests bring positions but no other input."""
    if is_native(program) and set(inputs_of(program)) - {"positions"}:
        program = replace(program, calls=(Call("train"),))
    buffers = {
        "mask buffer": any("causal by a buffer" in getattr(layer, "conditions", ()) for layer in program.layers),
        "buffer": Piece("changing temperature") in program.layers,
    }
    calls = [
        call
        for call in program.calls
        if all(there or not call.name.startswith(name) for name, there in buffers.items())
    ]
    return replace(program, calls=tuple(calls) or (Call("train"),))
