"""Catalogue actions of the caller: steps, reads, grad modes, changes, threads.

A text reads the model ``m``, its callable ``f``, the function ``compile`` that makes it, the optimizer ``opt``, the
list ``batches`` and the dict ``seen`` of compared values; {k} is the number of the call, {b} that of its batch.
"""

from __future__ import annotations

from treefx.tools.fuzz.families.parts import Part

__all__ = ["CALLS", "HELPERS", "NATIVE"]

HELPERS = '''
def collect(seen, step, loss, m, b):
    """What a training step leaves behind."""
    seen[f"{step} loss"] = loss.detach().clone()
    seen.update({f"{step} gradient of {n}": p.grad.clone() for n, p in m.named_parameters() if p.grad is not None})
    given = {n: x.grad for n, x in b.items() if x.requires_grad and x.grad is not None}
    seen.update({f"{step} gradient of input {n}": grad.clone() for n, grad in given.items()})
    seen.update({f"{step} buffer {n}": x.clone() for n, x in m.named_buffers()})
'''

_CLEAR = "b = batches[{b}]\nopt.zero_grad()\nfor x in b.values(): x.grad = None\n"
_FORWARD = "torch.manual_seed({k})\nout = f(**b)\nloss = criterion(out, b)\n"
_STEP = _CLEAR + _FORWARD
_COLLECT = "collect(seen, '{k}', loss, m, b)\n"
_READ = "seen['{k} read'] = out[-1].detach().clone()\n"
_TRAIN = _STEP + "loss.backward()\n" + _COLLECT
_QUIET = "b = batches[{b}]\ntorch.manual_seed({k})\n"
_OUT = "for n, x in enumerate(out): seen[f'{k} output {n}'] = x.detach().clone()\n"

_WITH_GRADIENT = "ps = [p for p in m.parameters() if p.requires_grad]\n"
_BUFFER = "new = torch.ones(64, 64, dtype=torch.bool).tril().triu(-2)\n"
_OPEN = "new = torch.ones(64, 64, dtype=torch.bool)\n"

CALLS = {
    "train": Part(_TRAIN),
    "train and step": Part(_TRAIN + "opt.step()\n"),
    "train, read before backward": Part(_STEP + _READ + "loss.backward()\n" + _COLLECT),
    "train, read without gradient": Part(
        _STEP + "with torch.no_grad(): seen['{k} read'] = out[-1] * 1\nloss.backward()\n" + _COLLECT
    ),
    "train, read after backward": Part(_TRAIN + _READ),
    "train, read after step": Part(_TRAIN + "opt.step()\n" + _READ),
    "train, read after the batch is reused": Part(
        _TRAIN + "kept = b['ids'].clone()\nb['ids'].fill_(1)\n" + _READ + "b['ids'].copy_(kept)\n"
    ),
    "train, read after another call": Part(_TRAIN + "f(**batches[-1])\n" + _READ),
    "train on what is returned too": Part(  # words: quoted
        _STEP + "loss = loss + 0.1 * out[-1].square().mean()\nloss.backward()\n" + _COLLECT
    ),
    "train on the argmax too": Part(
        _STEP + "loss = loss * (out[-1].detach().argmax(-1) == 1).double().mean().add(1)\nloss.backward()\n" + _COLLECT
    ),
    "nothing shared": Part(
        "kept = batches[{b}]['ids'].clone()\nbatches[{b}]['ids'][:, 0] = torch.arange(len(kept)) % V\n"
        + _TRAIN
        + "b['ids'].copy_(kept)\n"
    ),
    "train with a scaled loss": Part(_STEP + "loss = loss * 0.5\nloss.backward()\n" + _COLLECT),
    "accumulate": Part("b = batches[{b}]\n" + _FORWARD + "loss.backward()\n" + _COLLECT),
    "backward twice": Part(_STEP + "loss.backward(retain_graph=True)\nloss.backward()\n" + _COLLECT),
    "graph retained": Part(_STEP + "loss.backward(retain_graph=True)\n" + _COLLECT),
    "autograd.grad": Part(
        _STEP + _WITH_GRADIENT + "grads = torch.autograd.grad(loss, ps, allow_unused=True)\n"
        "seen.update({f'{k} gradient {n}': g for n, g in enumerate(grads) if g is not None})\n"
        "seen['{k} loss'] = loss.detach()\n"
    ),
    "gradient of a gradient": Part(
        _STEP + _WITH_GRADIENT + "grads = torch.autograd.grad(loss, ps, create_graph=True, allow_unused=True)\n"
        "loss = sum(g.square().sum() for g in grads if g is not None)\nloss.backward()\n" + _COLLECT
    ),
    "two forwards, one backward": Part(
        _CLEAR + "torch.manual_seed({k})\nout, other = f(**b), f(**batches[-1])\n"
        "loss = criterion(out, b) + criterion(other, batches[-1])\nloss.backward()\n" + _COLLECT
    ),
    "two forwards, backwards in reverse": Part(
        _CLEAR + "torch.manual_seed({k})\nout, other = f(**b), f(**batches[-1])\n"
        "loss = criterion(out, b)\ncriterion(other, batches[-1]).backward()\nloss.backward()\n" + _COLLECT
    ),
    "no_grad": Part(_QUIET + "with torch.no_grad(): out = f(**b)\n" + _OUT),
    "inference_mode": Part(
        _QUIET + "with torch.inference_mode(): out = f(**{n: x.detach() for n, x in b.items()})\n" + _OUT
    ),
    "evaluate": Part(_QUIET + "m.eval()\nwith torch.no_grad(): out = f(**b)\n" + _OUT + "m.train()\n"),
    "evaluate with gradient": Part(_QUIET + "m.eval()\nout = f(**b)\n" + _OUT + "m.train()\n"),
    "narrower batch": Part(
        "width = max(2, batches[{b}]['ids'].shape[1] - 2)\n"
        "b = narrow(batches[{b}], width)\nopt.zero_grad()\n" + _FORWARD + "loss.backward()\n" + _COLLECT,
        top="def narrow(b, width):\n"
        "    T = b['ids'].shape[1]\n"
        "    cut = {n: x.detach().clone() for n, x in b.items()}\n"
        "    for n, x in cut.items():\n"
        "        for dim, size in enumerate(x.shape):\n"
        "            along = dim < 2 if n == 'teacher' else dim or n == 'mask2'\n"
        "            if size == T and along: cut[n] = cut[n].narrow(dim, 0, width)\n"
        "    return {n: x.contiguous().requires_grad_(b[n].requires_grad) for n, x in cut.items()}\n",
    ),
    "ids changed in place": Part("batches[{b}]['ids'].copy_(batches[{b}]['ids'].flip(0))\n"),
    "mask changed in place": Part("batches[{b}]['am'][0, :1] = 0\n"),
    "labels changed in place": Part("batches[{b}]['labels'][-1].fill_(-100)\n"),
    "mask buffer copied": Part(_BUFFER + "with torch.no_grad(): m.tri.copy_(new)\n"),
    "mask buffer changed through data": Part(_BUFFER + "m.tri.data.copy_(new)\n"),
    "mask buffer assigned": Part(_BUFFER + "m.tri = new\n"),
    "mask buffer opened": Part(_OPEN + "with torch.no_grad(): m.tri.copy_(new)\n"),
    "mask buffer opened through data": Part(_OPEN + "m.tri.data.copy_(new)\n"),
    "mask buffer opened by assignment": Part(_OPEN + "m.tri = new\n"),
    "mask buffer loaded": Part(_OPEN + "m.load_state_dict({**m.state_dict(), 'tri': new})\n"),
    "buffer changed": Part("with torch.no_grad(): m.heat.mul_(1.5)\n"),
    "buffer changed through data": Part("m.heat.data.mul_(1.5)\n"),
    "buffer assigned": Part("m.heat = m.heat * 1.5\n"),
    "weights loaded": Part(
        "m.load_state_dict({n: 0.7 * x if x.is_floating_point() else x for n, x in m.state_dict().items()})\n"
    ),
    "weights changed": Part("with torch.no_grad():\n    for p in m.parameters(): p.mul_(0.9)\n"),
    "weights changed through data": Part("for p in m.parameters(): p.data.mul_(0.9)\n"),
    "weights frozen": Part("m.embed.requires_grad_(False)\n"),
    "weights thawed": Part("m.requires_grad_(True)\n"),
    "weights replaced": Part(
        "m.embed.weight = nn.Parameter(0.5 * m.embed.weight.detach())\nopt = torch.optim.SGD(m.parameters(), 0.1)\n"
    ),
    "another model": Part(
        "m = build(1 + {k}, dtype)\nf, opt = compile(m), torch.optim.SGD(m.parameters(), 0.1)\n" + _TRAIN
    ),
    "a copy of the model": Part(
        "m = copy.deepcopy(m)\nf, opt = compile(m), torch.optim.SGD(m.parameters(), 0.1)\n" + _TRAIN
    ),
    "compiled again": Part("f = compile(m)\n" + _TRAIN),
    "two threads": Part(
        "ms = [build(5, dtype), build(6, dtype)]\nfs = [compile(x) for x in ms]\n"
        "def work(n): return criterion(fs[n](**batches[{b}]), batches[{b}]).backward()\n"
        "with ThreadPoolExecutor(2) as pool: list(pool.map(work, range(2)))\n"
        "for n, x in enumerate(ms): collect(seen, '{k} thread %d' % n, torch.zeros(()), x, {})\n"
    ),
    "a thread": Part(
        "def work(): return criterion(f(**batches[{b}]), batches[{b}])\n"
        "opt.zero_grad()\nwith ThreadPoolExecutor(1) as pool: loss = pool.submit(work).result()\n"
        "loss.backward()\ncollect(seen, '{k}', loss, m, {})\n"
    ),
    "in-place on what is returned": Part(  # words: quoted
        _STEP + "loss.backward()\n" + _COLLECT + "seen['{k} read'] = out[-1].detach().mul_(2).clone()\n"
    ),
    "dlpack": Part(_TRAIN + "seen['{k} dlpack'] = torch.from_dlpack(out[-1].detach()).clone()\n"),
    "numpy": Part(_TRAIN + "seen['{k} numpy'] = torch.from_numpy(out[-1].detach().numpy().copy())\n"),
    "weights saved and loaded": Part(
        "file = io.BytesIO()\ntorch.save(m.state_dict(), file)\nfile.seek(0)\nm.load_state_dict(torch.load(file))\n"
    ),
    "forest": Part(_CLEAR + "loss = native(m, f, rows_of(b))\nloss.backward()\ncollect(seen, '{k}', loss, m, {})\n"),
    "plan": Part(_CLEAR + "loss = planned(m, f, compile, rows_of(b), False)\ncollect(seen, '{k}', loss, m, {})\n"),
    "plan in parts": Part(
        _CLEAR + "loss = planned(m, f, compile, rows_of(b), True)\ncollect(seen, '{k}', loss, m, {})\n"
    ),
}

NATIVE = '''
def rows_of(b):
    return [ids[am.bool()].tolist() for ids, am in zip(b["ids"], b["am"]) if int(am.sum()) > 1]


def alone(m, rows):
    """The loss of every row by itself, all of them reading the same buffers: together they are one call."""
    losses, buffers = [], {}
    for row in rows:
        buffers = {name: x.clone() for name, x in m.named_buffers()}
        ids, places = torch.tensor(row)[None], torch.arange(len(row))[None]
        given = {"ids": ids, "am": None, "labels": None, "positions": places}
        x = torch.func.functional_call(m, buffers, (), given)[0]
        losses.append(F.cross_entropy(x[0, :-1], ids[0, 1:], reduction="sum"))
    with torch.no_grad():
        for name, x in buffers.items(): m.get_buffer(name).copy_(x)
    return sum(losses)


def native(m, f, rows):
    if f is m:
        return alone(m, rows)
    forest = treefx.Forest.from_sequences(rows)
    with treefx.use(forest):
        given = forest.model_inputs()
        out = f(ids=given["input_ids"], am=None, labels=None, positions=given["position_ids"])
    return treefx.losses.sft(treefx.edge_logprobs(out[0], forest), forest)


Output = namedtuple("Output", "logits")


class Planned(nn.Module):
    """A model by the names that treefx.backward calls it with."""
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, position_ids):
        return Output(self.model(ids=input_ids, am=None, labels=None, positions=position_ids)[0])


def planned(m, f, compile, rows, cut, criterion=treefx.losses.sft):
    """The loss of a plan, its gradients in place; ``cut``: under the lowest limit that is found to fit."""
    if f is m:
        loss = alone(m, rows)
        loss.backward()
        return loss
    forest, f = treefx.Forest.from_sequences(rows), compile(Planned(m))
    profile = treefx.profile(f, forest, model_kwargs={}, lengths=(4, 8))
    plan = treefx.plan(forest, profile, 2**40)
    for share in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95) if cut else ():
        try:
            plan = treefx.plan(forest, profile, share * plan.peak_bytes)
            break
        except treefx.MemoryLimitError:
            continue
    return treefx.backward(f, plan, criterion, model_kwargs={})
'''
