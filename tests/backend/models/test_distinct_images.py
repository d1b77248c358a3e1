"""A tower runs once per distinct image, if each image is computed by itself."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.oracle import FLOAT64
from treefx.errors import UnsupportedError
from treefx.runtime import origins
from treefx.runtime.whole import image_parts, towers
from treefx.runtime.whole.distinct_images import ImagesRun, images_run

CASES = ("aaaa", "abca", "abacabab", "ab")
"""Names of the images: one for all rows, one per row, two per row of which one is shared, no copy."""


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take each call for one of a compiled model."""
    monkeypatch.setattr(towers, "_is_compiled", lambda callback: True)


def draw(names: str, count: int = 4) -> Tensor:
    """float64 [n, count, 3], equal for equal names."""
    drawn = {name: torch.randn(count, 3, generator=torch.Generator().manual_seed(ord(name))) for name in names}
    return torch.stack([drawn[name] for name in names]).double()


class Tower(nn.Module):
    """Two features of each patch, with attention among the patches of an image.

    Args:
        mix: Changes the features [n, patches, 4] of all images at once.
    """

    def __init__(self, mix: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.project, self.mix, self.seen = nn.Linear(3, 4), nn.Linear(4, 4), mix, 0

    def get_image_features(self, pixels: Tensor) -> Any:
        self.seen += len(pixels)
        x = self.embed(pixels)
        x = self.mix(x + F.scaled_dot_product_attention(x, x, x))
        return SimpleNamespace(pooler_output=self.project(x), last_hidden_state=x, attentions=None)


class Listed(Tower):
    """As a list of [patches, 4], with features for later layers, of all images in one dimension and as lists."""

    def get_image_features(self, pixels: Tensor) -> Any:
        x = super().get_image_features(pixels).pooler_output
        deep = [x.flatten(0, 1) * 2, tuple(x * 3)]
        return SimpleNamespace(pooler_output=tuple(x), deepstack_features=deep, last_hidden_state=x.flatten(0, 1))


class Patches(Tower):
    """From the patches of all images in one dimension, of which each image has its own number."""

    def get_image_features(self, pixels: Tensor, grid: Tensor) -> Any:  # type: ignore[override]
        parts = pixels.split(grid.prod(-1).tolist())
        self.seen += len(parts)
        hidden = [self.embed(x) for x in parts]
        hidden = [x + F.scaled_dot_product_attention(x[None], x[None], x[None])[0] for x in hidden]
        images = [self.project(x)[::2] for x in hidden]  # two patches make a vector
        return SimpleNamespace(pooler_output=images, last_hidden_state=torch.cat(hidden))


def given(tower: Tower, names: str) -> tuple[Tensor, ...]:
    """Images of names after "m" are larger where patches stand in one dimension."""
    if not isinstance(tower, Patches):
        return (draw(names),)
    grids = {name: [1, 2, 3] if name > "m" else [1, 2, 2] for name in names}
    patches = [draw(name, 6 if name > "m" else 4)[0] for name in names]
    return torch.cat(patches), torch.tensor([grids[name] for name in names])


def flat(result: Any) -> list[Tensor]:
    """All tensors of a result."""
    fields = [x for x in vars(result).values() if x is not None]
    parts = [item for x in fields for item in ([x] if isinstance(x, Tensor) else x)]
    return [item for x in parts for item in ([x] if isinstance(x, Tensor) else x)]


def run(see: Callable[..., Any], tower: Tower, names: str) -> tuple[list[Tensor], list[Tensor]]:
    """Results, and the gradients of all parameters where each copy has its own weights in the loss."""
    tower.zero_grad()
    tower.seen = 0
    found = flat(see(tower, *given(tower, names)))
    loss = sum((x * torch.arange(x.numel()).double().cos().reshape(x.shape)).sum() for x in found)
    assert isinstance(loss, Tensor)
    loss.backward()
    return found, [x.grad.clone() for x in tower.parameters() if x.grad is not None]


def check(tower: Tower, names: str) -> int:
    """Compare with all images; how many images were run behind the proof."""
    plain, grads = run(type(tower).get_image_features, tower, names)
    see = towers._noting(type(tower).get_image_features)
    run(see, tower, names)
    shared, shared_grads = run(see, tower, names)
    for right, left in zip([*plain, *grads], [*shared, *shared_grads], strict=True):
        assert right.shape == left.shape
        torch.testing.assert_close(left, right, rtol=FLOAT64, atol=FLOAT64)
    return tower.seen


@pytest.mark.parametrize("kind", [Tower, Listed, Patches])
def test_cases(kind: type[Tower]) -> None:
    """Features of all images, and gradients that are sums over copies."""
    tower = kind().double()
    for names in (*CASES, *(["axbx"] if kind is Patches else [])):
        assert check(tower, names) == len({*names}), names


@pytest.mark.parametrize("kind", [Tower, Listed])
def test_by_size_alone_is_wrong(kind: type[Tower], monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of equal sizes taken for equal."""
    monkeypatch.setattr(towers, "_number_images", lambda given, count: torch.zeros(count, dtype=torch.int64))
    check(kind().double(), "aaaa")
    with pytest.raises(AssertionError, match="not close"):
        check(kind().double(), "abca")


class Running(nn.BatchNorm1d):
    """Statistics over all images, kept in buffers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x - x.mean(0),
        lambda x: x.cumsum(0),
        lambda x: x + x.detach().flip(0),
        lambda x: x / len(x),
        Running(4),
    ],
    ids=["mean", "sum of those before", "without a gradient", "their number", "statistics"],
)
def test_images_that_are_mixed(mix: Any) -> None:
    tower = Tower(mix).double()
    assert check(tower, "abca") == 4


def test_statistics_are_those_of_the_call() -> None:
    """The proof leaves buffers as they were."""
    norm = Running(4)
    tower = Tower(norm).double()
    see = towers._noting(Tower.get_image_features)
    plain, shared = norm, Running(4).double()
    run(Tower.get_image_features, tower, "abca")
    tower.mix = shared
    run(see, tower, "abca")
    for right, left in zip(plain.buffers(), shared.buffers(), strict=True):
        assert torch.equal(right, left)


def test_random_numbers() -> None:
    """Equal images draw their own; the numbers are those of the model without treefx. In eval mode nothing is drawn."""
    tower = Tower(nn.Dropout(0.5)).double()
    see = towers._noting(Tower.get_image_features)
    found = []
    for function in (Tower.get_image_features, see):
        torch.manual_seed(1)
        found.append(run(function, tower, "abca")[0][0])
    assert torch.equal(*found) and tower.seen > 4 - 1
    assert check(tower.eval(), "abca") == 3


def test_hooks_see_every_image() -> None:
    tower, seen = Tower().double(), []
    tower.embed.register_forward_hook(lambda module, args, result: seen.append(len(result)))
    assert check(tower, "aaaa") == 4 and {*seen} == {4}


def test_a_projection_of_zeros_proves_nothing() -> None:
    """Derivatives are all zero; the proof is made when they no longer are."""
    tower = Tower(lambda x: x - x.mean(0)).double()
    separate = Tower().double()
    for item in (tower, separate):
        nn.init.zeros_(item.project.weight)
        assert check(item, "abca") >= 4
        nn.init.ones_(item.project.weight)
    assert check(tower, "abca") == 4 and check(separate, "abca") == 3


def test_features_in_one_tensor_are_noted() -> None:
    """One number per image, for graphs that take the vectors of all images as one tensor."""
    see = towers._noting(Tower.get_image_features)
    found = see(Tower().double(), draw("abca")).pooler_output
    first, second, third, last = origins.numbers_of_vectors([found]).tolist()
    assert first == last and len({first, second, third}) == 3


def test_a_result_of_unknown_form_is_that_of_all_images() -> None:
    """One entry for all images together has no part per image."""

    class Summed(Tower):
        def get_image_features(self, pixels: Tensor) -> Any:
            result = super().get_image_features(pixels)
            return SimpleNamespace(**vars(result), total=result.pooler_output.sum((0, 1)))

    assert check(Summed().double(), "abca") == 4


class Rows(Tower):
    """Vectors of the images [B, n, 1, patches, 3] of rows, without those that are zeros: padding."""

    def get_image_features(self, pixels: Tensor) -> Any:
        real = pixels.flatten(2).ne(0).any(-1)
        self.seen += int(real.sum())
        x = self.project(self.embed(pixels[real].flatten(1, 2)))
        return SimpleNamespace(pooler_output=self.pooled(x, real.sum(1).tolist()), last_hidden_state=x)

    def pooled(self, x: Tensor, counts: list[int]) -> Any:
        return [part.flatten(0, 1) for part in x.split(counts)]


class Joined(Rows):
    def pooled(self, x: Tensor, counts: list[int]) -> Any:
        return x


class PerImage(Rows):
    def pooled(self, x: Tensor, counts: list[int]) -> Any:
        return [*x]


ONE, TWO, NONE = torch.cat([draw("a"), torch.zeros(1, 4, 3).double()]), draw("ab"), torch.zeros(2, 4, 3).double()
ROWS = [[ONE[:1], ONE[:1] * 2, ONE[:1]], [NONE, TWO, NONE, TWO], [ONE, ONE * 2, ONE], [TWO, TWO]]
"""Batches of rows; the first one has no padding."""


@pytest.mark.parametrize("kind", [Rows, Joined, PerImage])
def test_rows_of_images(kind: type[Rows]) -> None:
    """Equal rows run once if the result lists rows; padding may make as many images as there are rows otherwise."""
    see, tower = towers._noting(kind.get_image_features), kind().double()
    for rows in ROWS:
        pixels = torch.stack(rows).unsqueeze(2)
        found = []
        for function in (kind.get_image_features, see, see):
            tower.zero_grad()
            tower.seen = 0
            images = function(tower, pixels).pooler_output
            x = images if isinstance(images, Tensor) else torch.cat(images)
            (x * torch.arange(x.numel()).double().cos().reshape(x.shape)).sum().backward()
            found.append([x, *[p.grad.clone() for p in tower.parameters() if p.grad is not None]])
        for right, _, left in zip(*found, strict=True):
            torch.testing.assert_close(left, right, rtol=FLOAT64, atol=FLOAT64)
        assert tower.seen == (2 if kind is Rows else int(pixels.flatten(2).ne(0).any(-1).sum()))


class Placed(Rows):
    """Adds a vector to each image by its place in its row, which starts at zero."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.full((3, 4), start))

    def pooled(self, x: Tensor, counts: list[int]) -> Any:
        places = torch.cat([torch.arange(count) for count in counts])
        return super().pooled(x + self.place[places][:, None], counts)


class PlacedDifferently(Placed):
    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.place)


class Centred(Rows):
    """Subtracts the mean over a row's images."""

    def pooled(self, x: Tensor, counts: list[int]) -> Any:
        return [(part - part.mean(0)).flatten(0, 1) for part in x.split(counts)]


class Counted(Rows):
    """Divides by the number of a row's images."""

    def pooled(self, x: Tensor, counts: list[int]) -> Any:
        return [part.flatten(0, 1) / len(part) for part in x.split(counts)]


class Framed(Rows):
    """Puts a learned vector behind the images of each row, as LLaVA-NeXT does behind tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.newline = nn.Parameter(torch.ones(1, 4))

    def pooled(self, x: Tensor, counts: list[int]) -> Any:
        return [torch.cat([part, self.newline]) for part in super().pooled(x, counts)]


def rows_of(*rows: str) -> Tensor:
    """Pixels [B, 3, 1, 4, 3] of images by name, "." for padding."""
    drawn = [[draw(name)[0] if name != "." else torch.zeros(4, 3).double() for name in row] for row in rows]
    return torch.stack([torch.stack(row) for row in drawn]).unsqueeze(2)


def differences(tower: Rows, pixels: Tensor) -> list[float]:
    """Of the vectors and gradients of a tower's second call of this kind, to those of all images."""
    see = towers._noting(type(tower).get_image_features)
    see(tower, pixels)
    found = []
    for function in (type(tower).get_image_features, see):
        tower.zero_grad()
        tower.seen = 0
        x = torch.cat(function(tower, pixels).pooler_output)
        weights = torch.arange(x.numel()).double().cos().reshape(x.shape)
        (x * weights).sum().backward()
        found.append([x.detach(), *[p.grad.clone() for p in tower.parameters() if p.grad is not None]])
    return [float((x - y).abs().max()) for x, y in zip(*found, strict=True)]


SEVERAL = rows_of("ab.", "ac.", ".ba", "a..", "abc", "...")
"""Nine images, three of them distinct; no two rows are equal."""


def test_images_of_rows() -> None:
    """Rows are put together again from the distinct images; later calls may have a single one."""
    tower = Rows().double()
    assert max(differences(tower, SEVERAL)) < FLOAT64 and tower.seen == 3
    assert images_run(tower.parameters()) == ImagesRun(10, 3)
    assert max(differences(tower, rows_of("a..", "aa."))) < FLOAT64 and tower.seen == 1


def test_images_of_rows_are_noted() -> None:
    """Equal images have equal numbers in all rows, wherever they stand."""
    images = towers._noting(Rows.get_image_features)(Rows().double(), SEVERAL).pooler_output
    numbers = [found[0].tolist() for x in images if (origin := origins.origin_of(x)) and (found := origin.find())]
    a, b, c = ([*range(4 * i, 4 * i + 4)] for i in range(3))
    assert numbers == [a + b, a + c, b + a, a, a + b + c, []]


@pytest.mark.parametrize("kind", [Placed, PlacedDifferently, Centred, Counted, Framed])
def test_images_of_rows_that_are_not_separate(kind: type[Rows]) -> None:
    """Only equal rows run once, and only their vectors are equal."""
    tower = kind().double()
    pixels = torch.cat([SEVERAL[:5], SEVERAL[:1]])
    assert max(differences(tower, pixels)) < FLOAT64 and tower.seen == 10
    images = towers._noting(kind.get_image_features)(tower, pixels).pooler_output
    found = [origin.find() for x in images if (origin := origins.origin_of(x)) is not None]
    numbers = [set(item[0].tolist()) for item in found if item is not None]
    assert numbers[0] == numbers[5] and not any(numbers[0] & other for other in numbers[1:5])


def test_values_alone_prove_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding of places that is zero gives equal vectors, and another gradient at each place."""
    monkeypatch.setattr(image_parts, "_PLACES", image_parts._PLACES[:1])
    assert max(differences(Placed().double(), SEVERAL)) > 1e-3


class OneSequence(Listed):
    """With all images in one sequence in another field, as Pixtral has them."""

    def get_image_features(self, pixels: Tensor) -> Any:
        images = super().get_image_features(pixels).pooler_output
        return SimpleNamespace(pooler_output=images, last_hidden_state=torch.cat(images)[None])


@pytest.mark.parametrize("kind", [Rows, OneSequence])
def test_a_field_of_unknown_images_is_refused(kind: type[Tower]) -> None:
    """Equal rows or images ran once."""
    tower = kind().double()
    pixels = draw("abab") if kind is OneSequence else torch.stack(ROWS[1]).unsqueeze(2)
    see = towers._noting(kind.get_image_features)
    see(tower, pixels)
    tower.seen = 0
    result = see(tower, pixels)
    assert tower.seen == 2
    torch.testing.assert_close(result.pooler_output, kind.get_image_features(tower, pixels).pooler_output)
    for read in (len, torch.sum, lambda x: x[0], lambda x: x.shape):
        with pytest.raises(UnsupportedError, match="last_hidden_state"):
            read(result.last_hidden_state)


def test_an_uncompiled_model_runs_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class of a compiled model may have other objects."""
    monkeypatch.undo()
    assert check(Tower().double(), "aaaa") == 4
