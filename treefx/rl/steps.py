"""Build the tree of steps behind a group of trajectories, with shared steps and siblings.

A step is one decision of the policy: its sampled tokens and the environment's answer. Two
trajectories share a step if they went on from the same sample, which equal tokens alone do not prove: two samples of
one fork may say the same and are still two steps.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.kernels.memory import lasting_property

__all__ = ["StepTree"]

Numbering = Tensor | Sequence[int]


@dataclass(frozen=True, eq=False, repr=False)
class StepTree:
    """Hold steps and the trajectories through them.

    S: steps. K: trajectories, which are the rows of a forest.

    Build it with `from_paths`, `from_forest`, or take `Rollouts.steps`. The prompts are no steps: the first steps of
    all trajectories of one prompt are siblings.

    Attributes:
        parent: int64 [S], the step before; -1 for those that follow the prompt. A parent stands before its children.
        leaf: int64 [K], each trajectory's last step.
        group: int64 [K], the prompt a trajectory answers. Advantages compare trajectories of one prompt.
        tree: int64 [K], the tree it was sampled in: one prompt may have several (Tree-GRPO's initial chains).
        span: int64 [S, 2], tokens [start, stop) of the step on every row through it; None where tokens are unknown.
        row_lengths: int64 [K], tokens of every row; None where unknown.

    Raises:
        InputError: no step or trajectory, shapes or numbers that do not fit, or a step on no trajectory.
    """

    parent: Tensor
    leaf: Tensor
    group: Tensor
    tree: Tensor
    span: Tensor | None = None
    row_lengths: Tensor | None = None

    def __post_init__(self) -> None:
        steps, rows = len(self.parent), len(self.leaf)
        if not steps or not rows:
            raise InputError(f"a tree of steps needs a step and a trajectory, got {steps} and {rows}")
        if any(x.shape != (rows,) for x in (self.group, self.tree)):
            raise InputError(
                f"group and tree must be one number per trajectory, [{rows}], got {list(self.group.shape)} and "
                f"{list(self.tree.shape)}"
            )
        if bool((self.parent >= torch.arange(steps)).any() or (self.parent < -1).any()):
            raise InputError("parent must be -1 or a step of a smaller number: number the steps from the prompt down")
        if bool((self.leaf < 0).any() or (self.leaf >= steps).any()):
            raise InputError(f"leaf must be steps in [0, {steps}), got {self.leaf.tolist()}")
        if len(torch.unique(self.entry_step)) < steps:
            missing = sorted(set(range(steps)) - set(self.entry_step.tolist()))
            raise InputError(
                f"every step must be on a trajectory, but none goes through step {missing[0]}; leave it out"
            )
        self._check_owner(self.entry_step, self.group[self.entry_row], "step", "group")
        self._check_owner(self.tree, self.group, "tree", "group")

    @classmethod
    def from_paths(
        cls,
        paths: Sequence[Sequence[Hashable]],
        groups: Numbering | None = None,
        trees: Numbering | None = None,
    ) -> "StepTree":
        """Build the tree from the names of every trajectory's steps.

        Args:
            paths: per trajectory the names of its steps, at least one. Two trajectories share their steps as far as
                their names agree from the first on (and their prompts do); a name may return elsewhere in the tree.
            groups: [K], the prompt of each trajectory; all the same when None.
            trees: [K], the tree of each trajectory; one tree per prompt when None.

        Raises:
            InputError: no trajectory, one without steps, or numbers that do not fit.

        Example:
            >>> StepTree.from_paths([["look up", "answer"], ["look up", "guess"], ["guess"]]).parent
            tensor([-1,  0,  0, -1])
        """
        group = _read_numbering(groups, len(paths), "groups")
        number: dict[Hashable, int] = {}
        parent: list[int] = []
        leaf: list[int] = []
        for row, path in enumerate(paths):
            if not len(path):
                raise InputError(f"trajectory {row} has no steps: every trajectory needs at least one; leave it out")
            at = -1
            for name in path:
                # The prompt identifies first steps; the step before identifies every other step.
                key = (int(group[row]) if at < 0 else None, at, name)
                if key not in number:
                    number[key] = len(parent)
                    parent.append(at)
                at = number[key]
            leaf.append(at)
        tree = group if trees is None else _read_numbering(trees, len(paths), "trees")
        return cls(torch.tensor(parent, dtype=torch.int64), torch.tensor(leaf, dtype=torch.int64), group, tree)

    @classmethod
    def from_forest(
        cls,
        forest: Forest,
        spans: Sequence[Sequence[tuple[int, int]]] | None = None,
        groups: Numbering | None = None,
        trees: Numbering | None = None,
    ) -> "StepTree":
        """Read the steps off a forest; rows share a step where they share all of its tokens.

        Args:
            forest: its rows are the trajectories.
            spans: per row its steps, (start, stop) in the row's tokens, ascending. When None, every node of the forest
                is a step, so a step ends where rows part; the prompt is one too, and changes no advantage.
            groups: [K], the prompt of each row. May be left out of a forest of one tree only.
            trees: [K], the tree each row was sampled in; one per prompt when None.

        Raises:
            InputError: groups are missing, numbers or spans do not fit the rows.
        """
        roots = int((forest.parent < 0).sum())
        if groups is None and roots > 1:
            raise InputError(
                f"the forest has {roots} trees: say which rows answer the same prompt, one number per row: "
                "StepTree.from_forest(forest, groups=[...])"
            )
        spans = _node_spans(forest) if spans is None else spans
        if len(spans) != len(forest):
            raise InputError(f"spans must have one entry per row, {len(forest)}, got {len(spans)}")
        lengths = forest.row_lengths.cpu()
        for row, (of_row, length) in enumerate(zip(spans, lengths.tolist(), strict=True)):
            _check_spans(of_row, length, row)
        token_of = [tokens.tolist() for tokens in forest.token_of]
        # A packed token stands for its whole prefix, so the last one and the start tell a step.
        paths = [[(a, of[b - 1]) for a, b in span] for span, of in zip(spans, token_of, strict=True)]
        plain = cls.from_paths(paths, groups, trees)
        span = torch.zeros(len(plain), 2, dtype=torch.int64)
        span[plain.entry_step] = torch.tensor([list(pair) for of_row in spans for pair in of_row])
        return cls(plain.parent, plain.leaf, plain.group, plain.tree, span, lengths)

    def __len__(self) -> int:
        """Number S of steps."""
        return len(self.parent)

    def __repr__(self) -> str:
        trees, groups = len(torch.unique(self.tree)), len(torch.unique(self.group))
        return f"StepTree({len(self)} steps, {len(self.leaf)} trajectories in {trees} trees of {groups} prompts)"

    @lasting_property
    def paths(self) -> list[Tensor]:
        """Per trajectory, int64 [T_k]: its steps, first to last."""
        parent, found = self.parent.tolist(), []
        for step in self.leaf.tolist():
            path = []
            while step >= 0:
                path.append(step)
                step = parent[step]
            found.append(torch.tensor(path[::-1], dtype=torch.int64))
        return found

    @lasting_property
    def path_lengths(self) -> Tensor:
        """Return int64 [K]: the number T_k of each trajectory's steps."""
        return torch.tensor([len(path) for path in self.paths])

    @lasting_property
    def entry_step(self) -> Tensor:
        """Return int64 [entries]: the steps of all trajectories end to end.

        An entry is one (step, trajectory) pair.
        """
        return torch.cat(self.paths)

    @lasting_property
    def entry_row(self) -> Tensor:
        """Return int64 [entries]: the trajectory of each entry."""
        return torch.repeat_interleave(self.path_lengths)

    @lasting_property
    def position(self) -> Tensor:
        """Return int64 [S]: the number t of each step on its trajectories, from 1."""
        place = torch.cat([torch.arange(1, len(path) + 1) for path in self.paths])
        return torch.zeros(len(self), dtype=torch.int64).index_copy(0, self.entry_step, place)

    @lasting_property
    def fork(self) -> Tensor:
        """Return int64 [S]: the same number for siblings, the steps after one step or prompt."""
        prompt = torch.zeros(len(self), dtype=torch.int64)
        prompt[self.entry_step] = torch.unique(self.group, return_inverse=True)[1][self.entry_row]
        return torch.where(self.parent < 0, len(self) + prompt, self.parent)

    def to_tokens(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Spread values per step over the steps' tokens: the form in which losses take advantages.

        Args:
            values: per trajectory, [T_k].

        Returns:
            Per row, float64 [length]: its step's value at every token of a step (observations included: the forest's
            weights leave them out), 0 elsewhere.

        Raises:
            InputError: the tree knows no tokens, or `values` do not fit.
        """
        if self.span is None or self.row_lengths is None:
            raise InputError("this tree knows no tokens; build it with StepTree.from_forest, or take Rollouts.steps")
        if [tuple(v.shape) for v in values] != [(length,) for length in self.path_lengths.tolist()]:
            got = [list(v.shape) for v in values]
            raise InputError(
                f"expected one number per step of every trajectory, {self.path_lengths.tolist()}, got {got}"
            )
        rows = []
        for of_row, path, length in zip(values, self.paths, self.row_lengths.tolist(), strict=True):
            row = torch.zeros(length, dtype=torch.float64)
            for value, (start, stop) in zip(of_row, self.span[path].tolist(), strict=True):
                row[start:stop] = value
            rows.append(row)
        return rows

    def _check_owner(self, item: Tensor, owner: Tensor, name: str, owner_name: str) -> None:
        """Refuse an item (of each trajectory or entry) that belongs to two owners."""
        pairs = torch.unique(torch.stack([item, owner], 1), dim=0)
        twice = (pairs[1:, 0] == pairs[:-1, 0]).nonzero()
        if len(twice):
            at = int(pairs[twice[0, 0], 0])
            raise InputError(f"{name} {at} has trajectories of several {owner_name}s; number them apart")


def _read_numbering(values: Numbering | None, count: int, name: str) -> Tensor:
    """int64 [count]; zeros when None."""
    if values is None:
        return torch.zeros(count, dtype=torch.int64)
    read = torch.as_tensor(values)
    if read.shape != (count,) or read.is_floating_point() or read.dtype == torch.bool:
        raise InputError(f"{name} must be one integer per trajectory, [{count}], got {read.dtype} {list(read.shape)}")
    return read.detach().to("cpu", torch.int64)


def _node_spans(forest: Forest) -> list[list[tuple[int, int]]]:
    """Per row the nodes of the forest it runs through."""
    start = forest.nodes.start
    node_of = torch.bucketize(forest.flat_token_of, start, right=True).cpu()
    spans = []
    for nodes in torch.split(node_of, forest.row_lengths.tolist()):
        stops = torch.unique_consecutive(nodes, return_counts=True)[1].cumsum(0).tolist()
        spans.append(list(zip([0, *stops[:-1]], stops, strict=True)))
    return spans


def _check_spans(spans: Sequence[tuple[int, int]], length: int, row: int) -> None:
    bounds = [bound for pair in spans for bound in pair]
    ascending = all(a < b for a, b in spans) and bounds == sorted(bounds)
    if not bounds or not ascending or bounds[0] < 0 or bounds[-1] > length:
        raise InputError(
            f"spans of row {row} must be (start, stop) with start < stop, ascending, within its {length} tokens, "
            f"got {list(spans)}"
        )
