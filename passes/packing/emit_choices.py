"""Emit scores of a choice among keys once per distinct token: [N, .., T].

Keys are the columns of its representative row.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from treefx.errors import UnsupportedError
from treefx.kernels import own_products as _own_products  # noqa: F401  (registers the operator)
from treefx.passes.labels.facts import Fact, fact_of
from treefx.passes.labels.laws.matmul import OwnKeys
from treefx.passes.packing.emitters import Packer, emits
from treefx.passes.packing.layout import Metadata
from treefx.passes.packing.repeats import Collapser


@emits(OwnKeys)
def _own_keys(packer: Packer, node: fx.Node, fact: Fact) -> Tensor:
    """q[n] . k[c] for each column c of the row of n: [N, heads, D] x [N, D, T]."""
    if packer.native:
        raise UnsupportedError(
            "each query chooses among the keys of its row, but under treefx.use(forest) token ids are packed; call the "
            "model on a padded batch without treefx.use"
        )
    queries, keys = node.args[:2]
    assert isinstance(keys, fx.Node)
    dims = fact_of(keys).dims
    assert dims is not None
    single = Collapser(packer, dims[0][1]).make(keys)
    features = (packer.packed(keys) if single is None else single)[0]  # [D, N]: repeated, so all are the first
    own = packer.once("own_keys", None, lambda: own_keys(packer.metadata))
    product: Tensor = torch.ops.treefx.own_products.default(packer.packed(queries), features.t(), own)
    return product


def own_keys(metadata: Metadata) -> Tensor:
    """Return the tokens in the columns of each token's row, [N, T].

    For masked padding that does not run, the token itself.
    """
    keys = metadata.token_of[metadata.row]
    itself = torch.arange(metadata.tokens, device=keys.device)[:, None]
    return torch.where(keys < 0, itself, keys)
