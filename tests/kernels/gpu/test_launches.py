"""Cost of a layer without its products: launches of kernels, waits of the host, its own time.

The device is a stand-in: its tensors lie on the CPU, and every operator that would launch a kernel there is counted.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton")

from tests.kernels.gpu.test_triton_host import LAUNCHED, compiled  # noqa: F401 - a fixture
from treefx.kernels import memory
from treefx.kernels.common import Inputs
from treefx.kernels.gpu.replays import Recorder as StepRecorder
from treefx.kernels.gpu.replays import note, replayed
from treefx.kernels.gpu.triton_tree import attention
from treefx.kernels.gpu.triton_tree.arguments import RowValues
from treefx.kernels.gpu.triton_tree.launch import Attention
from treefx.kernels.score import Score, make_score
from treefx.kernels.tiles import tree_blocks
from treefx.kernels.tiles.tree_blocks import forget_blocks
from treefx.tools.kernels.stand_in import on_device

WITHOUT_KERNEL = {
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "new_empty", "permute", "select",
    "slice", "split", "split_with_sizes", "t", "transpose", "unsqueeze", "view", "_unsafe_view", "_reshape_alias",
    "new_empty_strided", "unbind", "squeeze", "lift_fresh",
}  # fmt: skip
WAITS = {"_local_scalar_dense", "nonzero", "equal", "item", "masked_select", "unique", "repeat_interleave"}
SCORE = make_score(scale=0.125)


class Recorder(TorchDispatchMode):
    """Counts what a device would launch, what the host would wait for, and the memory that is there after every step.

    Lists that are made on the host are free.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()
        self.waited: Counter[str] = Counter()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.history: list[set[int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        (self.waited if name in WAITS else self.launched)[name] += name not in WITHOUT_KERNEL
        given = {storage._cdata for storage in storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in storages(result):
            if storage._cdata not in given:
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.history.append({key for key, (storage, _) in self.made.items() if not storage.expired()})
        return result

    def peak(self, results: Any) -> int:
        """Return the most bytes held at once, without earlier ones and the results."""
        returned = {storage._cdata for storage in storages(results)}
        return max(sum(self.made[key][1] for key in held - returned) for held in self.history)


def storages(values: Any) -> list[Any]:
    return [x.untyped_storage() for x in tree_leaves(values) if isinstance(x, Tensor)]


@pytest.fixture
def poisoned_memory() -> None:
    """Memory as users have it: other tests fill empty memory, a launch each."""


@pytest.fixture
def device(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # noqa: F811
    """Tensors count as a device's, but for those that stand for what was sent."""

    def unseen_on_host(name: str, first: Callable[[Any], Tensor]) -> None:
        function = getattr(tree_blocks, name)

        def run(*args: Any) -> Any:
            here = any(first(args[0]) is one.host for one in memory._sent)
            with _disable_current_modes() if here else nullcontext():
                return function(*args)

        monkeypatch.setattr(tree_blocks, name, run)

    unseen_on_host("build_blocks", lambda keys: keys.high)
    unseen_on_host("_mean_length", lambda ends: ends)
    sent = tree_blocks.send_together
    monkeypatch.setattr(tree_blocks, "send_together", lambda *args: _unseen(sent, *args))
    with on_device():
        yield


def _unseen(function: Callable[..., Any], *args: Any) -> Any:
    with _disable_current_modes():
        return function(*args)


def forest(tokens: int, sent: bool) -> Tensor:
    """A prefix with four branches, which the host knows or does not."""
    host = torch.full((tokens,), tokens, dtype=torch.int32)
    for branch in range(4):
        first = tokens // 2 + branch * tokens // 8
        host[first:] = first + tokens // 8
    ends = host.clone()
    if sent:
        memory.remember(host, ends)
    return ends


def layer(inputs: Inputs, score: Score) -> tuple[Recorder, Recorder]:
    """Run forward and backward of one layer."""
    with Recorder() as forward:
        out, lse = attention.forward(inputs, score)
    grad = torch.zeros_like(out)
    with Recorder() as backward:
        attention.backward(grad, inputs, out, lse, score, [False] * len(inputs.buffers))
    for recorder in (forward, backward):
        recorder.launched = +recorder.launched
    return forward, backward


def run(
    ends: Tensor, deterministic: bool = False, score: Score = SCORE, buffers: Sequence[Tensor] = ()
) -> list[tuple[int, int, int]]:
    """Launches of the forward, of the backward, and waits of the host, of three layers."""
    found = []
    for _ in range(3):
        LAUNCHED.clear()
        q, k, v = (torch.zeros(1, len(ends), h, 64, dtype=torch.bfloat16).transpose(1, 2) for h in (8, 2, 2))
        forward, backward = layer(Inputs(q, k, v, ends, buffers, deterministic=deterministic), score)
        kernels = LAUNCHED.index("prologue")
        launched = forward.launched.total() + kernels, backward.launched.total() + len(LAUNCHED) - kernels
        found.append((*launched, forward.waited.total() + backward.waited.total()))
    return found


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("path", ["", "plain"])
def test_launches_and_waits_of_a_new_forest(
    deterministic: bool, path: str, device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREEFX_KERNEL_PATH", path)
    run(forest(1024, sent=True), deterministic=deterministic)  # which also compares the forms of the kernels
    first, *others = run(forest(1040, sent=True), deterministic=deterministic)
    once = path == "plain" and not deterministic
    passes = ["backward_keys", "sum_parts", "backward_queries"], ["backward_once", "sum_parts", "finish_queries"]
    wanted = ["prologue", *passes[once], *["repair_backward_queries"] * once]
    if path == "plain":
        assert first == (1, 4 + once, 0), "the forward; prologue, dk and dv with their sums, and dq"
        assert LAUNCHED == ["forward", *wanted]
    else:
        assert first == (2, 6, 0), "the same, and a repair behind the forward, dk and dv, and dq"
        wanted.insert(2, "repair_backward_keys")
        assert LAUNCHED == ["forward", "repair_forward", *wanted, "repair_backward_queries"]
    assert others == [first, first]


KINDS: dict[str, tuple[Score, int]] = {
    "a product": (SCORE, 8),
    "no group": (SCORE, 2),
    "window": (make_score(scale=0.125, window=50, depth=0), 8),
    "alibi": (make_score(scale=0.125, depth=0, alibi=1), 8),
    "booleans": (Score(SCORE.value, ("load", 2, ("k",))), 8),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_layer_works_nothing_out(
    kind: str, deterministic: bool, device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It launches what the first has launched, in the same order; a layer that is laid out otherwise works it out."""
    score, heads = KINDS[kind]
    ends = forest(1040, sent=True)

    def step(width: int = 64) -> list[str]:
        q, k, v = (torch.zeros(1, len(ends), h, width, dtype=torch.bfloat16).transpose(1, 2) for h in (heads, 2, 2))
        inputs = Inputs(q, k, v, ends, [depth, slopes.clone(), flags], deterministic=deterministic)
        LAUNCHED.clear()
        out, lse = attention.forward(inputs, score)
        attention.backward(torch.zeros_like(out), inputs, out, lse, score, [False, False])
        return LAUNCHED.copy()

    depth, slopes, flags = torch.arange(1040), torch.ones(heads), torch.ones(1040, dtype=torch.bool)
    memory.remember(flags.clone(), flags)
    step()  # also compares the forms of the kernels
    forget_blocks()
    first = step()
    monkeypatch.setattr(attention, "attention_of", lambda *_: pytest.fail("it is worked out again"))
    assert step() == first and len(first) >= 3
    with pytest.raises(pytest.fail.Exception, match="worked out again"):
        step(width=128)


def test_what_comes_from_elsewhere_is_not_repeated() -> None:
    """Only what a caller gives, a step makes or a forest has; the memory of freed tensors is none of these."""

    def double(q: Tensor, out: Tensor) -> None:
        out.copy_(2 * q)

    def steps(read: Callable[[], Tensor], written: str = "Out") -> tuple[StepRecorder, Tensor]:
        recorder = StepRecorder({"q": given})
        with recorder.recording():
            for _ in range(2):  # the first of them is gone then
                out = torch.empty(3)
                double(given, out)
                note(double, {"Q": read(), written: out})
        return recorder, out

    given = torch.ones(3)
    recorder, out = steps(lambda: given)
    replay = recorder.replay([out])
    assert replay is not None and replay.run({"q": 3 * given})[0].tolist() == [6.0] * 3
    assert [step.frees for step in replay.steps] == [("made 0",), ()]
    assert recorder.replay([out.clone()]) is None, "a result that no step has made"
    for other in (lambda: given.view(3), lambda: given.clone()):
        recorder, out = steps(other)
        assert recorder.replay([out]) is None
    recorder, out = steps(lambda: given, written="Scores")
    assert recorder.replay([out]) is None
    recorder = StepRecorder({"out": given})
    with recorder.recording():
        double(given, made := torch.empty(3))
        note(double, {"Out": given.clone(), "GradQ": made})
    assert recorder.replay([made]) is None, "an output is read, and is not the one that was given"


def test_values_of_equal_numbers_have_their_own_types(device: None) -> None:
    """A forest's, which layers share: of 4 they are int32, and of 4.0 float32."""
    ends, depth, found = forest(64, sent=True), torch.arange(64), []
    for number in (4, 4.0):
        score = Score(("mul", ("dot",), ("const", 0.125)), ("lt", ("load", 0, ("q",)), ("const", 9)))
        inputs = Inputs(*(torch.zeros(1, 2, 64, 16),) * 3, ends, [depth])
        expr = ("add", ("load", 0, ("q",)), ("const", number))
        values = RowValues(expr, inputs.q.shape, 0, inputs.q.device, 1, 0, 64)
        found.append(Attention(inputs, score, "gluon").of_forest(values).dtype)
    assert found == [torch.int32, torch.float32]


@pytest.mark.parametrize("kind", ["window", "alibi"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_a_score_reads_of_the_forest_is_made_once(kind: str, deterministic: bool, device: None) -> None:
    """Of depths nothing is launched after the first layer; of slopes, which a step may change, one kernel at most."""
    score, _ = KINDS[kind]
    depth, slopes = torch.arange(1040), torch.ones(8)
    memory.remember(depth.clone(), depth)
    first, *others = run(forest(1040, sent=True), deterministic, score, [depth, slopes])
    assert first > others[0] == others[1] and all(waits == 0 for *_, waits in others)
    if kind == "window":
        assert others[0] == (2, 5, 0), "as without a window; here no list is cut"
    else:
        assert others[0] == (3, 6, 0), "a kernel more forward than a product; backward the prologue makes them"
        assert run(forest(1040, sent=True), deterministic, score, [torch.arange(1040), slopes])[1:] == others


def test_only_what_nobody_sent_is_watched(device: None) -> None:
    """Of a forest that was sent with depths that were not, the depths: one comparison."""
    score, _ = KINDS["window"]
    _, *others = run(forest(1040, sent=True), True, score, [torch.arange(1040)])
    assert others == [(5, 8, 0)] * 2
    _, *others = run(forest(1040, sent=False), True, score, [torch.arange(1040)])
    assert others == [(8, 11, 0)] * 2


def test_threads_write_down_what_is_theirs(device: None) -> None:
    """Two at once, of one kind and one forest: the autograd engine has a thread for every device."""
    ends, both = forest(64, sent=True), Barrier(2)

    def double(q: Tensor, out: Tensor) -> None:
        both.wait(10)  # the other one is in the middle of it too
        torch.mul(q, 2, out=out)

    def launch(given: Tensor, recorder: StepRecorder) -> list[Tensor]:
        with recorder.recording():
            for _ in range(2):
                q, given = given, torch.empty_like(given)
                double(q, given)
                note(double, {"Q": q, "Out": given})
            return [given]

    def run_twice(number: int) -> list[float]:
        layers = [torch.full((3,), float(number + layer)) for layer in (0, 10)]
        return [float(replayed(("kind",), (ends,), {"q": q}, partial(launch, q))[0][0]) for q in layers]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run_twice, (1, 2))) == [[4.0, 44.0], [8.0, 48.0]]


def test_a_forest_that_nobody_sent_is_read_and_watched(device: None) -> None:
    run(forest(1024, sent=True))
    first, *others = run(forest(1040, sent=False))
    assert first[2] >= 3, "lists are made on the device, the host waits for their lengths"
    assert all(launched > 2 and waited == 0 for launched, _, waited in others), "its content is compared"


def test_what_was_written_over_is_no_longer_known(device: None) -> None:
    ends = forest(512, sent=True)
    assert memory.host_copies([ends]) is not None
    ends[-1] = 512
    assert memory.host_copies([ends]) is None


def test_another_forest_in_the_same_memory_is_another(device: None) -> None:
    """The host's copy goes with the vector it stands for, and stands for no other that comes to lie there."""
    place = torch.empty(1024, dtype=torch.int32)
    first, second = (torch.frombuffer(place.numpy(), dtype=torch.int32) for _ in range(2))
    memory.remember(torch.full((1024,), 1024, dtype=torch.int32), first)
    assert first.data_ptr() == second.data_ptr() and first._version == second._version
    assert memory.host_copies([first]) is not None and memory.host_copies([second]) is None
    del first
    other = torch.zeros(4)
    memory.remember(torch.zeros(4), other)
    assert not any(one.moved.is_gone() for one in memory._sent), "freed tensors are dropped"


def test_nothing_is_kept_of_what_a_condition_reads(device: None) -> None:
    """Depths may lie in the memory of a captured graph, which is given away again for the next step."""
    window = make_score(scale=0.125, window=50, depth=0)
    q, k, v = (torch.zeros(1, 512, h, 64, dtype=torch.bfloat16).transpose(1, 2) for h in (8, 2, 2))
    ends, depth = forest(512, sent=True), torch.arange(512)
    attention.forward(Inputs(q, k, v, ends, [depth]), window)
    kept = StorageWeakRef(depth.untyped_storage())
    made = sum(isinstance(entry.value, tree_blocks.TreeBlocks) for entry in tree_blocks._recent)
    del depth
    assert made and kept.expired()
    attention.forward(Inputs(q, k, v, ends, [torch.arange(512) // 2]), window)
    kept_now = Counter(type(entry.value).__name__ for entry in tree_blocks._recent if len(entry.given) > 1)
    assert kept_now == {"TreeBlocks": 1, "Replay": 1, "Tensor": 2}, "freed tensors find nothing any more"


def test_many_forests_are_known_at_once(device: None) -> None:
    """Those of all parts above the one that runs: their backwards come later."""
    several = [forest(256, sent=True) for _ in range(50)]
    assert all(memory.host_copies([ends]) is not None for ends in several)
    count = len(memory._sent)
    del several
    forest(256, sent=True)
    assert count >= 50 and len(memory._sent) <= 2
