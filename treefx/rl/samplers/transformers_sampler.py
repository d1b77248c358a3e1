"""Sample from a transformers model, with the keys and values of all prefixes cached.

Every distinct prefix token is fed to the model once: branches of one fork read the same keys and values, prefixes with
a common beginning share it, and branches that draw the same tokens stay one row of the batch until they differ. The
model runs in batches of such rows, unchanged and outside of `torch.compile`.
"""

import inspect
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from treefx.arguments import check_whole
from treefx.errors import InputError, UnsupportedError
from treefx.rl.rollouts.protocol import Completion
from treefx.rl.samplers.draw import Drawing, draw, uniforms
from treefx.rl.samplers.prefix_cache import PrefixCache

__all__ = ["TransformersSampler"]

_KEEPING = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}
"""transformers' cache layers of keys and values per token, and of none (layers that read another one's)."""


class TransformersSampler:
    """Implement `Generate` for `rollout` with a cache of keys and values.

    The cache lives inside a with-block, in which the weights must not change.

    Args:
        model: a causal LM of transformers, or a wrapper with its `forward` (PEFT). Layers must keep keys and values
            per token; recurrent ones do not.
        max_new_tokens: most tokens of a completion.
        stop: token ids that end a completion; they are its last token.
        temperature: logits are divided by it; train with the same one. 0 takes the most probable token.
        top_k: draw from the k most probable tokens only.
        top_p: draw from the fewest most probable tokens that have this probability together. Log-probabilities are
            those before `top_k` and `top_p`.
        max_rows: most completions that are sampled together; all of a wave when None.
        check: compare the log-probabilities of the first completion with a plain forward of its row.

    Attributes:
        fed_tokens: tokens the model was fed, without those of the check.

    Raises:
        UnsupportedError: the model is no decoder with keys and values per token; or, when called, the check finds that
            it computes something else from kept keys and values.
        InputError: an argument is out of range; when called, it is not in a with-block, weights changed in it, or a
            prefix is empty.

    Example:
        >>> with TransformersSampler(model, max_new_tokens=64, stop=[tokenizer.eos_token_id]) as sampler:
        ...     rollouts = rollout(sampler, environment, tasks, PortoolTree(trajectories=8))
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_new_tokens: int,
        stop: Sequence[int] = (),
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        max_rows: int | None = None,
        check: bool = True,
    ) -> None:
        check_whole(max_new_tokens, "max_new_tokens", least=1)
        if max_rows is not None:
            check_whole(max_rows, "max_rows", least=1, or_none="any number")
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        _refuse_unfit(model)
        self.model, self.max_new_tokens, self.max_rows = model, max_new_tokens, max_rows
        self.stop = frozenset(int(token) for token in stop)
        self.drawing = Drawing(temperature=temperature, top_k=top_k, top_p=top_p)
        self.fed_tokens = 0
        self._device = next(model.parameters()).device
        self._parameters = _forward_parameters(model)
        self._to_check = check
        self._cache: PrefixCache | None = None
        self._training: list[tuple[nn.Module, bool]] = []
        self._weights: list[tuple[int, int]] = []

    def __enter__(self) -> "TransformersSampler":
        self._cache = PrefixCache()
        self._training = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        self._weights = self._fingerprint()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cache = None
        for module, training in self._training:
            module.training = training

    def __call__(self, prefixes: Sequence[list[int]], seeds: Sequence[int], /) -> list[Completion]:
        """Sample one completion after each prefix; see `Generate`."""
        cache = self._open_cache()
        if not all(prefixes):
            raise InputError("a prefix has no tokens: nothing predicts the first one; begin with one of your own")
        completions: list[Completion] = []
        size = self.max_rows or max(len(prefixes), 1)
        # Not inference mode: buffers that the model makes now are used by the training step too.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for start in range(0, len(prefixes), size):
                part = prefixes[start : start + size]
                paths = self._prefill(cache, [tuple(prefix) for prefix in part])
                numbers = uniforms(seeds[start : start + size], self.max_new_tokens)
                completions += self._decode(cache, paths, numbers)
            if self._to_check and completions:
                self._check(prefixes[0], completions[0])
                self._to_check = False
        return completions

    def _prefill(self, cache: PrefixCache, prefixes: list[tuple[int, ...]]) -> list[list[int]]:
        """Compute missing prefixes, from common beginnings on; return the slots of every prefix."""
        distinct = list(dict.fromkeys(prefixes))
        while pieces := cache.missing_pieces(distinct):
            paths, chunks = map(list, zip(*pieces, strict=True))
            if len(set(map(len, chunks))) > 1:
                # Logits are of one column for all: of chunks of unequal length, the last tokens come on their own.
                longer = [(path, chunk[:-1]) for path, chunk in pieces if len(chunk) > 1]
                _Rows(self, cache, [path for path, _ in longer]).feed([body for _, body in longer])
                paths = [[*path, *cache.extend(path, chunk[:-1])] for path, chunk in pieces]
                chunks = [chunk[-1:] for chunk in chunks]
            rows = _Rows(self, cache, paths)
            logits = rows.feed(chunks)
            cache.logits.update(zip((path[-1] for path in rows.paths), logits, strict=True))
        found = {prefix: cache.find(prefix) for prefix in distinct}
        return [found[prefix] for prefix in prefixes]

    def _decode(self, cache: PrefixCache, paths: list[list[int]], numbers: Tensor) -> list[Completion]:
        """Sample after each path; members of one row have drawn the same tokens until now."""
        tokens: list[list[int]] = [[] for _ in paths]
        logprobs: list[list[float]] = [[] for _ in paths]
        starts = {path[-1]: path for path in paths}
        logits = torch.stack([cache.logits[end] for end in starts])
        place = {end: row for row, end in enumerate(starts)}
        row_of = {member: place[path[-1]] for member, path in enumerate(paths)}
        rows: _Rows | None = None
        for step in range(self.max_new_tokens):
            members = list(row_of)
            drawn, logp = draw(logits[list(row_of.values())], numbers[members, step], self.drawing)
            for member, token, value in zip(members, drawn.tolist(), logp.tolist(), strict=True):
                tokens[member].append(token)
                logprobs[member].append(value)
            going = [member for member in members if tokens[member][-1] not in self.stop]
            if not going or step == self.max_new_tokens - 1:
                break
            branch_of = {member: (row_of[member], tokens[member][-1]) for member in going}
            branches = list(dict.fromkeys(branch_of.values()))
            number = {branch: row for row, branch in enumerate(branches)}
            row_of = {member: number[branch] for member, branch in branch_of.items()}
            source = [row for row, _ in branches]
            if rows is None:
                begun = list(starts.values())
                rows = _Rows(self, cache, [begun[row] for row in source])
            else:
                rows.select(source)
            logits = rows.feed([[token] for _, token in branches])
        return [Completion(*pair) for pair in zip(tokens, logprobs, strict=True)]

    def _forward(self, past: Any, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Run the model on `ids` [B, width] after `past`; return logits [B, V] of the last column."""
        self.fed_tokens += int(mask[:, -ids.shape[1] :].sum())
        given = {"attention_mask": mask.to(self._device, torch.int64), "position_ids": positions.to(self._device)}
        optional = {name: value for name, value in given.items() if name in self._parameters}
        return self._last_logits(1, ids, past_key_values=past, use_cache=True, **optional)[:, 0]

    def _last_logits(self, columns: int, ids: Tensor, **given: Any) -> Tensor:
        """Return logits [B, columns, V] of the last columns.

        Other logits are not computed if the model can skip them.
        """
        if "logits_to_keep" in self._parameters:
            given["logits_to_keep"] = columns
        logits: Tensor = self.model(input_ids=ids, **given).logits
        return logits[:, -columns:]

    def _open_cache(self) -> PrefixCache:
        if self._cache is None:
            raise InputError(
                "keys and values are kept inside a with-block: `with TransformersSampler(model, ...) as sampler:`"
            )
        if self._fingerprint() != self._weights:
            raise InputError(
                "the model's weights changed inside the sampler's with-block, so the keys and values it keeps are of "
                "another model; leave the block before a training step"
            )
        return self._cache

    def _fingerprint(self) -> list[tuple[int, int]]:
        local = (getattr(weight, "_local_tensor", weight) for weight in self.model.parameters())  # of a DTensor
        return [(weight.data_ptr(), weight._version) for weight in local]

    def _check(self, prefix: list[int], completion: Completion) -> None:
        row = torch.tensor([[*prefix, *completion.tokens]], device=self._device)
        logits = self._last_logits(len(completion.tokens) + 1, row, use_cache=False)[0, :-1]
        logprobs = torch.log_softmax(logits.double() / (self.drawing.temperature or 1.0), -1)
        expected = logprobs.gather(1, row[0, len(prefix) :, None]).squeeze(1).cpu()
        error = float((expected - torch.tensor(completion.logprobs, dtype=torch.float64)).abs().mean())
        if not error <= torch.finfo(logits.dtype).eps ** 0.5:
            raise UnsupportedError(
                f"{type(self.model).__name__} computes other log-probabilities from kept keys and values than from "
                f"whole rows (mean difference {error:.2g}): it cannot be sampled so. Use another `generate`, "
                "model.generate for example"
            )


class _Rows:
    """A batch of distinct prefixes that is fed on: keys and values, padded on the left."""

    def __init__(self, sampler: TransformersSampler, cache: PrefixCache, paths: Sequence[Sequence[int]]) -> None:
        from transformers import DynamicCache

        self.sampler, self.cache = sampler, cache
        self.paths = [list(path) for path in paths]
        self.device = sampler._device
        # Without the model's config all layers keep everything; windows are in the masks.
        self.past: Any = DynamicCache()
        longest = max(map(len, self.paths))
        missing = longest - torch.tensor([len(path) for path in self.paths])
        self.mask = torch.arange(longest) >= missing[:, None]
        if longest:
            slots = torch.tensor([[0] * (longest - len(path)) + path for path in self.paths], device=self.device)
            for layer in cache.layers:
                self.past.update(*cache.read(layer, slots), layer)

    def select(self, rows: list[int]) -> None:
        """Go on with these rows: some may be left out, some come several times."""
        if rows != list(range(len(self.paths))):
            self.paths = [list(self.paths[row]) for row in rows]
            self.mask = self.mask[rows]
            self.past.batch_select_indices(torch.tensor(rows, device=self.device))

    def feed(self, chunks: Sequence[Sequence[int]]) -> Tensor:
        """Feed each row its tokens and keep their keys and values.

        Returns:
            [B, V]: logits at the last token of each, if all chunks are as long. Otherwise they mean nothing, and rows
            cannot be fed again.
        """
        lengths = [len(chunk) for chunk in chunks]
        width = max(lengths)
        ids = torch.tensor([[*chunk, *[chunk[-1]] * (width - len(chunk))] for chunk in chunks], device=self.device)
        real = torch.arange(width) < torch.tensor(lengths)[:, None]
        self.mask = torch.cat([self.mask, real], 1)
        # Padding repeats the last position: there may be none behind it.
        column = torch.arange(width).minimum(torch.tensor(lengths)[:, None] - 1)
        positions = column + torch.tensor([len(path) for path in self.paths])[:, None]
        logits = self.sampler._forward(self.past, ids, self.mask, positions)
        for path, chunk in zip(self.paths, chunks, strict=True):
            path += self.cache.extend(path, chunk)
        self._keep(real)
        return logits

    def _keep(self, real: Tensor) -> None:
        """Write the keys and values of the last columns, [B, width], where they are real tokens."""
        width = real.shape[1]
        fed = [path[len(path) - count :] for path, count in zip(self.paths, real.sum(1).tolist(), strict=True)]
        slots = torch.tensor([slot for row in fed for slot in row], device=self.device)
        for number, layer in enumerate(self.past.layers):
            if layer.is_initialized and layer.get_seq_length():  # not so in layers that read another one's
                keys, values = (x[:, :, -width:].transpose(1, 2)[real.to(x.device)] for x in (layer.keys, layer.values))
                self.cache.write(number, slots, keys, values)


def _refuse_unfit(model: nn.Module) -> None:
    try:
        from transformers import DynamicCache, PretrainedConfig
    except ImportError as error:
        raise InputError("TransformersSampler needs transformers: pip install 'treefx[examples]'") from error
    config: Any = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        raise InputError(f"expected a causal LM of transformers, got {type(model).__name__} without its config")
    kinds = {type(layer).__name__ for layer in DynamicCache(config=config).layers}
    # Chunks are counted in columns, which padding on the left shifts.
    chunked = {"chunked_attention"} & set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    unfit = sorted((kinds - _KEEPING) | chunked)
    if not unfit and getattr(model, "_is_stateful", False):  # recurrent_gemma of transformers 5.17 names no such layer
        unfit = ["a recurrent state"]
    if getattr(config, "is_encoder_decoder", False) or unfit:
        what = ", ".join(unfit) or "an encoder"
        raise UnsupportedError(
            f"{type(model).__name__} has {what}: only decoders whose layers keep keys and values per token can be "
            "branched. Use another `generate`, model.generate for example"
        )


def _forward_parameters(model: Any) -> set[str]:
    """List the arguments of the model's forward; for a wrapper (PEFT), of the inner model."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return set(inspect.signature(inner.forward).parameters)
