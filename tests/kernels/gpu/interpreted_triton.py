"""The generated kernels in Triton's interpreter against the dense reference in float64.

Not collected by itself: test_triton_interpreter.py runs it in a process with TRITON_INTERPRET=1.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.gpu.interpreted_cases import (
    BRANCH_AT_27,
    BRANCH_AT_57,
    DEPTH_Q,
    SCALED,
    SCORES,
    SMALL,
    as_type,
    assert_equal,
    check,
    computed,
    const,
    draw,
    expected,
    forest,
    other_numbers,
)
from tests.kernels.interface_cases import CASES, EVERYTHING, differs_from_float64
from tests.kernels.interface_cases import Case as InterfaceCase
from tests.strategies import Rows, row_batches
from treefx.errors import InputError, UnsupportedError
from treefx.kernels import reference
from treefx.kernels.common import Inputs, relative_error
from treefx.kernels.gpu import dispatch as cuda
from treefx.kernels.gpu.triton_tree import attention, paths
from treefx.kernels.gpu.triton_tree.configs import Config
from treefx.kernels.gpu.triton_tree.launch import Attention, Launch
from treefx.kernels.ops import attend
from treefx.kernels.score import Score
from treefx.kernels.tiles import key_programs, tree_blocks

OF_INTERFACE = [
    *(case for case in CASES if case.dtype == torch.float32),
    *(case for case in CASES if case.dtype == torch.float16 and case.options == EVERYTHING),
    *(case for case in CASES if case.dtype in (torch.bfloat16, torch.float64) and case.options in ((), EVERYTHING)),
]
"""All in float32; in half precision with all arguments; of refused ones, with none and with all."""


@settings(max_examples=12)
@given(row_batches(), st.sampled_from(sorted(SCORES)), st.booleans(), st.sampled_from([(1, 1), (4, 2), (7, 1)]))
def test_random_forests(rows: Rows, name: str, sinks: bool, heads: tuple[int, int]) -> None:
    check(draw(*forest(rows), heads=heads, sinks=sinks), SCORES[name])


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    check(draw(*SMALL, batch=2, sinks=name in ("plain", "softcap")), SCORES[name])


@pytest.mark.parametrize("name", ["plain", "window"])
def test_branch_inside_a_tile(name: str) -> None:
    check(draw(*BRANCH_AT_57, heads=(2, 1)), SCORES[name])


@pytest.mark.parametrize("widths", [(80, 80), (192, 128), (72, 100), (8, 8)])
def test_head_widths(widths: tuple[int, int]) -> None:
    check(draw(*SMALL, heads=(2, 1), widths=widths), SCORES["softcap"])


@pytest.mark.parametrize(
    ("heads", "name", "path"),
    [((7, 1), "window", "plain"), ((7, 1), "alibi", "plain"), ((4, 2), "softcap", "plain"), ((4, 2), "alibi", "once")],
)
def test_layers_after_the_first(heads: tuple[int, int], name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They launch what the first one has launched: their own numbers count, and those of their own slopes and sinks."""
    if path == "once":
        monkeypatch.setattr(paths, "ONE_PASS_KEYS", 0)
        torch.use_deterministic_algorithms(False)
    else:
        monkeypatch.setenv("TREEFX_KERNEL_PATH", path)
    worked_out: list[str] = []
    whole = attention.attention_of
    monkeypatch.setattr(attention, "attention_of", lambda *given: (worked_out.append(name), whole(*given))[1])
    monkeypatch.setattr(tree_blocks, "_recent", [])
    first = draw(*SMALL, heads=heads, batch=2, sinks=name == "softcap")
    for layer in range(2):
        check(other_numbers(first, layer), SCORES[name])
    assert len(worked_out) == 2, "once forward, once backward"
    check(draw(*forest([[*range(len(SMALL[0]))]]), heads=heads, batch=2, sinks=name == "softcap"), SCORES[name])
    assert len(worked_out) == 4, "another forest of as many tokens"


def test_one_tensor_in_two_places_is_not_taken_for_two() -> None:
    """Keys that are the values in one layer are none in the next; nor do rows lie as those of the layer before."""
    case = draw(*SMALL)

    def of(keys: Tensor, values: Tensor) -> Any:
        wide = replace(case.wide, k=keys, v=values)
        narrow = as_type(wide, torch.float32)
        return replace(case, wide=wide, narrow=replace(narrow, v=narrow.k) if keys is values else narrow)

    k, v = case.wide.k, case.wide.v
    check(of(v, v), SCORES["plain"])
    check(of(k, v), SCORES["plain"])
    check(of(k.transpose(2, 3).contiguous().transpose(2, 3), v), SCORES["plain"])
    check(of(k.transpose(1, 2).contiguous().transpose(1, 2), v), SCORES["plain"])


@pytest.mark.parametrize(
    ("heads", "name"),
    [
        *(((2 * group, 2), "window") for group in (1, 3, 7, 16)),
        *(((2 * group, 2), "alibi") for group in (5, 8)),
        ((24, 1), "window"),
        ((71, 1), "alibi"),
    ],
)
def test_groups(heads: tuple[int, int], name: str) -> None:
    """Groups that are no power of two, that take several tiles, and tiles that begin in the middle of a token."""
    check(draw(*SMALL, heads=heads), SCORES[name])


def test_half_precision() -> None:
    check(draw(*BRANCH_AT_57, heads=(2, 1), widths=(64, 64), sinks=True, dtype=torch.float16), SCORES["softcap"], 2e-3)


def test_forced_paths_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEFX_KERNEL_PATH", "gluon")
    with pytest.raises(UnsupportedError, match="must meet an attention.*interpreter runs no Gluon"):
        computed(draw(*SMALL), SCORES["plain"])
    for unknown in ("fast", "warp"):
        monkeypatch.setenv("TREEFX_KERNEL_PATH", unknown)
        with pytest.raises(InputError, match=f"one of plain, gluon, gluon_once, or unset, got '{unknown}'"):
            computed(draw(*SMALL), SCORES["plain"])


@pytest.mark.parametrize("config", [Config(16, 16, 4, 1), Config(32, 64, 4, 1), Config(128, 32, 4, 1)])
def test_tile_sizes(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_interpreted_config", lambda problem: config)
    check(draw(*(BRANCH_AT_27 if config.block_m == 16 else BRANCH_AT_57), sinks=True), SCORES["window"])


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_rows_that_do_not_exist_have_no_slope() -> None:
    """The last tile is filled with rows of zeros, where the slope of this score is infinite."""
    squared = Score(("log", ("mul", ("dot",), ("dot",))))
    check(draw(*forest([[*range(150)]]), heads=(7, 1)), squared)


@pytest.mark.parametrize("heads", [(2, 1), (6, 2)])
def test_long_lists_are_cut_into_parts(heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Here every list of more than one tile is cut; the last block of keys is ragged, and the parts are uneven."""
    monkeypatch.setattr(attention, "_interpreted_config", lambda problem: Config(16, 16, 4, 1))
    monkeypatch.setattr(key_programs, "_SHORTEST", 1)
    monkeypatch.setattr(key_programs, "_EVEN", 1 << 20)
    monkeypatch.setattr(tree_blocks, "_recent", [])
    summed: list[int] = []
    run = Launch.run

    def watched(launch: Launch) -> None:
        summed.append(launch.grid[0]) if launch.kernel.__name__ == "sum_parts" else None
        run(launch)

    monkeypatch.setattr(Launch, "run", watched)
    tree = forest([[*range(30)], [*range(20), *range(50, 63)]])
    case = draw(*tree, heads=heads, widths=(24, 16), batch=2)
    first = computed(case, SCORES["softcap"])
    tree_blocks.forget_blocks()  # or the second time would repeat the launches of the first
    second = computed(case, SCORES["softcap"])
    assert len(summed) == 2 and min(summed) > 1, "one launch for dk and dv"
    assert_equal(first, expected(case, SCORES["softcap"]))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_one_token_leaves() -> None:
    check(draw(*forest([[0, 1, 2, leaf] for leaf in range(150)]), heads=(2, 1)), SCORES["window"])


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing_are_zero(sinks: bool) -> None:
    """By the condition, and by minus infinity in the score itself."""
    blind = ("lt", DEPTH_Q, const(2))
    for score in (
        Score(SCALED, ("not", blind)),
        Score(("where", blind, const(-torch.inf), SCALED)),
        Score(("add", SCALED, ("load", 1, ("head",), ("q",), ("k",)))),
    ):
        case = draw(*SMALL, sinks=sinks)
        for inputs in (case.wide, case.narrow):
            inputs.buffers[1][:, :3] = -torch.inf
        got = computed(case, score)
        assert not any(tensor.isnan().any() for tensor in got)
        assert_equal(got, expected(case, score))


def test_lowest_number_masks_softly() -> None:
    """A row of nothing but the lowest number weighs its keys alike, as the same model does on its own.

    Such rows are padding with unused outputs: their gradients are exact for a gradient of zero, else finite.
    """
    case = draw(*SMALL)
    lowest = torch.finfo(torch.float32).min
    for inputs in (case.wide, case.narrow):
        inputs.buffers[1][:, 2:6] = lowest
        inputs.buffers[1][:, :, 3:5] = lowest
    assert all(tensor.isfinite().all() for tensor in computed(case, SCORES["bias"]))
    case.grad[:, :, 2:6] = 0.0
    (out, _, *grads), (wanted_out, _, *wanted) = computed(case, SCORES["bias"]), expected(case, SCORES["bias"])
    assert_equal([out, *grads], [wanted_out, *wanted])


def test_bitwise_the_same_every_time() -> None:
    case = draw(*BRANCH_AT_57, sinks=True)
    for first, second in zip(computed(case, SCORES["bias"]), computed(case, SCORES["bias"]), strict=True):
        assert torch.equal(first, second) or first.isinf().any()


@pytest.mark.parametrize("layout", ["heads outside", "heads inside", "features apart"])
def test_memory_layouts(layout: str) -> None:
    case = draw(*SMALL, heads=(2, 1))
    moved: Callable[[Tensor], Tensor] = {
        "heads outside": lambda x: x.contiguous(),
        "heads inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "features apart": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    }[layout]
    narrow = case.narrow
    case.narrow = replace(narrow, q=moved(narrow.q), k=moved(narrow.k), v=moved(narrow.v))
    check(case, SCORES["plain"])


def test_a_wrong_mask_is_noticed() -> None:
    case = draw(*SMALL)
    case.narrow = replace(case.narrow, subtree_end=torch.full_like(case.narrow.subtree_end, len(SMALL[0])))
    with pytest.raises(AssertionError):
        check(case, SCORES["plain"])


@pytest.fixture
def fresh_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_problems", {})


@pytest.mark.usefixtures("fresh_verdicts")
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # of Triton 3.6's interpreter
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("outside", [0, 20])
def test_right_kernels_are_chosen_without_a_word(outside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_CHECKED_TOKENS", 9)
    monkeypatch.setattr(cuda.flex, "forward", None)
    case = draw(*SMALL, batch=2, sinks=True, outside=outside)
    state = torch.get_rng_state()
    out, lse = cuda.forward(case.narrow, SCORES["window"])
    assert torch.equal(torch.get_rng_state(), state)
    *grads, rest = cuda.backward(case.grad.float(), case.narrow, out, lse, SCORES["window"], case.wanted_grads)
    assert_equal([out, lse, *grads, *rest], expected(case, SCORES["window"]))
    assert list(cuda._problems.values()) == [None]


@pytest.mark.usefixtures("fresh_verdicts")
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # of Triton 3.6's interpreter
@pytest.mark.filterwarnings("error")
def test_inference_mode_is_no_reason_for_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.flex, "forward", None)
    with torch.inference_mode():
        case = draw(*SMALL, sinks=True, outside=5)
        assert_equal(
            list(cuda.forward(case.narrow, SCORES["bias"])), list(reference.forward(case.wide, SCORES["bias"]))
        )


@pytest.mark.usefixtures("fresh_verdicts")
@pytest.mark.filterwarnings("error:treefx")
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_first_batch_that_is_not_finite_is_no_reason_for_flex(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels spread it to a tile, the reference to all rows."""
    monkeypatch.setattr(cuda.flex, "forward", None)
    case = draw(*SMALL, outside=20)
    assert case.narrow.boundary is not None
    case.narrow.v[0, 0, 9, 1] = case.narrow.k[0, 1, 0, 0] = case.narrow.boundary.v[0, 0, 3, 2] = number
    out, _ = cuda.forward(case.narrow, SCORES["plain"])
    assert list(cuda._problems.values()) == [None] and not out.isfinite().all()


@pytest.mark.usefixtures("fresh_verdicts")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("damage", ["wrong output", "wrong gradient", "NaN", "a crash", "no derivative"])
def test_what_is_wrong_is_left_to_flex_with_one_warning(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    score = Score(("floordiv", ("dot",), const(2.0))) if damage == "no derivative" else SCORES["window"]
    right_forward, right_backward = attention.forward, attention.backward

    def forward(inputs: Inputs, score: Score, *, path: str | None = None) -> tuple[Tensor, Tensor]:
        if damage == "a crash":
            raise RuntimeError("PassManager::run failed")
        out, lse = right_forward(inputs, score, path=path)
        return (out * 1.1, lse) if damage == "wrong output" else (out, lse)

    def backward(*arguments: Any, path: str | None = None) -> Any:
        dq, dk, dv, rest = right_backward(*arguments, path=path)
        factor = {"wrong gradient": 0.9, "NaN": torch.nan}.get(damage, 1.0)
        return dq, dk, dv * factor, rest

    monkeypatch.setattr(attention, "forward", forward)
    monkeypatch.setattr(attention, "backward", backward)
    case = draw(*SMALL)
    with pytest.warns(RuntimeWarning, match="FlexAttention runs this attention") as caught:
        results = [cuda.forward(case.narrow, score) for _ in range(2)]
    assert sum("FlexAttention runs" in str(warning.message) for warning in caught) == 1
    for result in results:
        assert_equal(list(result), list(reference.forward(case.wide, score)))


def test_first_use_compares_the_two_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device does, with the plain kernels in Gluon's place: it is taken over only if it agrees."""
    monkeypatch.setattr(paths, "_verdicts", {})
    monkeypatch.setattr(paths, "interpreted", lambda: False)
    monkeypatch.setattr(paths, "gluon_refusal", lambda attention, tensors: None)
    case = draw(*SMALL)
    runner = Attention(case.narrow, SCORES["window"], choose=attention._interpreted_config)
    taken: list[str] = []

    def run(chosen: Attention, tensors: Sequence[Tensor], *, factor: float = 1.0) -> list[Tensor]:
        taken.append(chosen.path)
        out, lse = attention.forward_from(replace(chosen, path="plain"), chosen.sources())
        return [out, lse * (factor if chosen.path == "gluon" else 1.0)]

    for _ in range(2):
        paths.checked("forward", runner, [], run)
    wanted = ["plain", "gluon", "gluon", "gluon", "gluon"]
    assert taken == wanted, "both on the first tokens, one on all of them, then what was called"
    for factor in (1.5, float("nan")):
        taken.clear()
        with pytest.warns(RuntimeWarning, match="Gluon .* is switched off") as caught:
            for _ in range(2):
                paths.checked(f"wrong by {factor}", runner, [], partial(run, factor=factor))
        assert sum("is switched off" in str(warning.message) for warning in caught) == 1
        assert taken == ["plain", "gluon", "plain", "plain"]


@pytest.mark.parametrize("outside", [0, 9])
@pytest.mark.parametrize("name", ["plain", "window"])
def test_the_plain_form_on_the_whole_forest(name: str, outside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What AMD's devices do at first use; the queries of which none is compared see nothing in the backward."""
    case = draw(*forest([[*range(90)], [*range(60), 90, 91], [*range(30), 92]]), outside=outside, sinks=bool(outside))
    errors = attention.plain_errors(case.narrow, SCORES[name])
    assert len(errors) >= 5 + 2 * bool(outside) and max(errors.values()) < 1e-5, errors
    right = attention.backward_from

    def wrong(*given: Any) -> Any:
        dq, pairs, delta = right(*given)
        return dq, [(dk, dv * 1.1) for dk, dv in pairs], delta

    monkeypatch.setattr(attention, "backward_from", wrong)
    found = attention.plain_errors(case.narrow, SCORES[name])
    assert found["dv of all tokens"] > 0.05, found


def test_the_check_sees_one_wrong_row_of_many() -> None:
    """Of 2,000: all rows together would be off by 1.6 %, less than the tolerance."""
    wanted = torch.randn(1, 4, 2000, 32, generator=torch.Generator().manual_seed(0))
    got = wanted + 1e-3 * wanted.roll(1, 0)
    assert paths.largest_error(got, wanted) <= paths._TOLERANCE
    got[0, 2, 1234] *= -1.0
    assert paths.largest_error(got, wanted) > 5 * paths._TOLERANCE
    assert relative_error(got, wanted) < 0.03


def test_longer_lists_are_checked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_verdicts", {})
    monkeypatch.setattr(paths, "interpreted", lambda: False)
    monkeypatch.setattr(paths, "gluon_refusal", lambda attention, tensors: None)
    monkeypatch.setattr(paths, "_CHECKED_TOKENS", 100)
    lengths: list[int] = []

    def run(chosen: Attention, tensors: Sequence[Tensor]) -> list[Tensor]:
        lengths.append(chosen.inputs.q.shape[2])
        return list(attention.forward_from(replace(chosen, path="plain"), chosen.sources()))

    for tokens in (20, 30, 90, 120, 300):
        case = draw(*forest([[*range(tokens)]]))
        runner = Attention(case.narrow, SCORES["plain"], choose=attention._interpreted_config)
        paths.checked("forward", runner, [], run)
    assert lengths == [*[20] * 4, 30, *[90] * 4, 120, 100, 100, 300, 300], "with the lists of 300, not of the first 100"


def test_scores_without_a_derivative_are_refused() -> None:
    q = torch.zeros(1, 1, 3, 8)
    with pytest.raises(UnsupportedError, match="differentiable operations.*'floordiv'"):
        attend(q, q, q, SMALL[0][:3], Score(("floordiv", ("dot",), const(2.0))), impl="triton")


@pytest.mark.parametrize("case", OF_INTERFACE, ids=str)
def test_the_whole_interface(case: InterfaceCase) -> None:
    """Right in the types that the interpreter computes right; the others, and float64, are refused by name."""
    found = differs_from_float64(case, "triton")
    if case.dtype in (torch.float32, torch.float16) or case.tokens == 0:
        assert found is None, found
    else:
        text = "interpreter, whose products" if case.dtype == torch.bfloat16 else "use impl='reference'"
        assert isinstance(found, UnsupportedError) and text in str(found)
