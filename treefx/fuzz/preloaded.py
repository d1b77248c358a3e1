"""What worker processes share: everything that takes long to import and starts no threads."""

import torch._dynamo
import torch._functorch.aot_autograd
import torch.fx.experimental.symbolic_shapes

import treefx.fuzz.truth
import treefx.inspector
import treefx.runtime  # noqa: F401
