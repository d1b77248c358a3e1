"""Catalogue: what models do to their own backward pass: autograd functions, hooks."""

from treefx.tools.fuzz.families.parts import Part

__all__ = ["AUTOGRAD"]


def _function(name: str, backward: str, forward: str = "x * 1.0", saves: bool = False) -> Part:
    keep, load = ("ctx.save_for_backward(x); ", "x, = ctx.saved_tensors; ") if saves else ("", "")
    text = (
        f"class {name}(torch.autograd.Function):\n"
        "    @staticmethod\n"
        f"    def forward(ctx, x): {keep}return {forward}\n"
        "    @staticmethod\n"
        f"    def backward(ctx, g): {load}return {backward}\n"
    )
    return Part(f"x = {name}.apply(x)", top=text)


AUTOGRAD = {
    "function that scales": _function("Scale", "0.5 * g"),
    "function that negates": _function("Reverse", "-g"),
    "function with a saved value": _function("Gate", "g * (1 - x.tanh() ** 2)", "x.tanh()", saves=True),
    "function that rounds straight through": _function("Round", "g", "(x * 4).round() / 4"),
    "function that masks by a saved value": _function("Rectify", "torch.where(x > 0, g, 0.1 * g)", "x.relu()", True),
    "function that clips": _function("Clip", "g.clamp(-1e-3, 1e-3)"),
    "function that adds": _function("Push", "g + 1e-3"),
    "function that saturates": _function("Saturate", "(g * 100).tanh() / 100"),
    "function that takes the sign": _function("Sign", "g.sign() * 1e-3"),
    "function that masks small gradients": _function("Cut", "torch.where(g.abs() > 1e-3, g, 0 * g)"),
    "function that clips by norm": _function("Limit", "g / (1 + g.norm(dim=-1, keepdim=True))"),
    "function that clips by the norm of all": _function("Bound", "g / (1 + g.norm())"),
    "function that mixes columns backwards": _function("Mix", "g.cumsum(1)"),
    "function that drops a row": _function("Skip", "torch.cat([0 * g[:1], g[1:]])"),
    "function that squares": _function("Square", "g * g"),
    "hook that scales": Part("if x.requires_grad: x.register_hook(lambda g: 0.5 * g)"),
    "hook that clips": Part("if x.requires_grad: x.register_hook(lambda g: g.clamp(-1e-3, 1e-3))"),
}
