"""The expected first update of every recipe, exactly: all outcomes of small processes (enumeration.py).

docs/algorithms.md says in a table what each recipe expects. Here its words are written out by hand, in plain
numbers and with the closed form of the softmax's gradient, and compared with what the code does and with ∇J.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as File
from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms.by_hand import recipe
from tests.algorithms.enumeration import (
    LONGEST,
    PROCESSES,
    WIDTH,
    Path,
    Process,
    expected_step,
    group,
    grown,
    rows_of,
    step,
    trajectory,
    weighted,
)
from torch import Tensor

from silva.algorithms import ALGORITHMS
from silva.types import Group, Sample

pytestmark = pytest.mark.slow

PAGE = File(__file__).parents[2] / "docs/algorithms.md"
EXACT = {"rtol": 0.0, "atol": 1e-10}


@dataclass(frozen=True)
class Line:
    """A recipe in the table."""

    name: str
    advantage: str
    scale: str
    divisor: str
    plus: tuple[str, ...]
    factor: str
    condition: str

    def __str__(self) -> str:
        return self.name


def _table() -> list[Line]:
    part = PAGE.read_text().split("## Which recipes are unbiased")[1].split("\n## ")[0].replace("\\|", "¦")
    found = []
    for row in part.splitlines():
        cells = [cell.strip().replace("¦", "|") for cell in row.strip("|").split("|")]
        if row.startswith("| `"):
            names, advantage, scale, divisor, plus, *rest = cells
            terms = tuple(filter(None, plus.split(", ")))
            found += [Line(n.strip("` "), advantage, scale, divisor, terms, *rest) for n in names.split(",")]
    return found


TABLE = _table()


def test_every_recipe_has_a_line() -> None:
    assert sorted(line.name for line in TABLE) == sorted(ALGORITHMS)


# The words of the table, for the episodes of a group that have a result.


@dataclass(frozen=True)
class Scored:
    """Of each episode the path, its reward R, raw r and shaped s; the process has the rest."""

    process: Process
    paths: Sequence[Path]
    R: Sequence[float]

    @property
    def r(self) -> list[float]:
        return [path.raw for path in self.paths]

    @property
    def lengths(self) -> list[int]:
        return [len(path.picks) for path in self.paths]

    def each(self, values: Sequence[float]) -> list[list[float]]:
        """The same for every token of an episode."""
        return [[value] * length for value, length in zip(values, self.lengths, strict=True)]

    def to_go(self, gamma: float) -> list[list[float]]:
        """G - V of every token."""
        found = []
        for path in self.paths:
            earned = [r + s for r, s in zip(path.rewards, path.shaped, strict=True)]
            ahead = [
                sum(gamma ** (j - k) * earned[j] for j in range(k, len(earned))) for k in range(len(earned))
            ]
            values = self.process.values[[pick // WIDTH for pick in path.picks]].tolist()
            found.append([ahead[turn] - v for turn, v in zip(path.turns, values, strict=True)])
        return found

    def of_tokens(self, table: Tensor) -> list[list[float]]:
        return [table.flatten()[list(path.picks)].tolist() for path in self.paths]


def flatten(rows: Sequence[Sequence[float]]) -> list[float]:
    return [x for row in rows for x in row]


def less(rows: Sequence[Sequence[float]], mean: float) -> list[list[float]]:
    return [[x - mean for x in row] for row in rows]


def centred(values: Sequence[float]) -> list[float]:
    return [value - statistics.fmean(values) for value in values]


def by_tokens(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    return less(rows, statistics.fmean(flatten(rows)))


def uncertain(b: Scored) -> list[list[float]]:
    entropies = [b.process.entropies[[pick // WIDTH for pick in path.picks]].tolist() for path in b.paths]
    every, means = flatten(entropies), centred(b.R)
    std = math.sqrt((statistics.variance(every) if len(every) > 1 else 0.0) + 1e-8)
    z = [[(h - statistics.fmean(every)) / std for h in row] for row in entropies]
    return [[a * (1 + 0.2 * x) for x in row] for a, row in zip(means, z, strict=True)]


def others(values: Sequence[float]) -> list[float]:
    n, total = len(values), sum(values)
    return [value - (total - value) / (n - 1) if n > 1 else 0.0 for value in values]


ADVANTAGES: dict[str, Callable[[Scored], list[list[float]]]] = {
    "1": lambda b: b.each([1.0] * len(b.R)),
    "R": lambda b: b.each(b.R),
    "r": lambda b: b.each(b.r),
    "R - mean": lambda b: b.each(centred(b.R)),
    "r - mean": lambda b: b.each(centred(b.r)),
    "R - mean of the others": lambda b: b.each(others(b.R)),
    "R - mean over tokens": lambda b: by_tokens(b.each(b.R)),
    "(R - mean) (1 + 0.2 z(H))": uncertain,
    "G - V - mean over tokens": lambda b: by_tokens(b.to_go(1.0)),
    "G' - V - mean over tokens": lambda b: by_tokens(b.to_go(0.95)),
    "log π_ref - log π of the token": lambda b: [
        [x - y for x, y in zip(*rows, strict=True)]
        for rows in zip(b.of_tokens(b.process.reference), b.of_tokens(b.process.logprobs), strict=True)
    ],
}


def std(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def inverse(value: float) -> float:
    return 1 / value if value else 0.0


# (group, its advantages) -> by what all of these are multiplied
SCALES: dict[str, Callable[[Scored, list[list[float]]], float]] = {
    "1": lambda b, a: 1.0,
    "1 / (std + 1e-4)": lambda b, a: 1 / (std(b.R) + 1e-4),
    "1 / std over tokens": lambda b, a: 1 / math.sqrt(std(flatten(a)) ** 2 + 1e-8),
    "1 / mean of |r|": lambda b, a: inverse(statistics.fmean(map(abs, b.r))),
    "1 / Σ |r|": lambda b, a: inverse(sum(map(abs, b.r))),
}
# (group, tokens of the episode) -> by what a token's gradient is divided
DIVISORS: dict[str, Callable[[Scored, int], float]] = {
    "n": lambda b, own: len(b.R),
    "n L": lambda b, own: len(b.R) * LONGEST,
    "n ℓ": lambda b, own: len(b.R) * own,
    "N": lambda b, own: sum(b.lengths),
}


def by_hand(line: Line, made: Any, b: Scored) -> np.ndarray:
    """[nodes, 3]: the update on one group."""
    advantages = ADVANTAGES[line.advantage](b)
    scale = SCALES[line.scale](b, advantages)
    shaped = centred([R - r for R, r in zip(b.R, b.r, strict=True)])
    policy, total = b.process.policy, np.zeros(b.process.policy.shape)
    of_kl = {"k1": lambda gap: 1 + gap, "k3": lambda gap: gap}[made.kl_estimator]
    gaps = b.of_tokens(b.process.logprobs - b.process.reference) if "KL" in line.plus else None
    for i, path in enumerate(b.paths):
        divisor = DIVISORS[line.divisor](b, len(path.picks))
        for t, pick in enumerate(path.picks):
            node, token = divmod(pick, WIDTH)
            factor = scale * advantages[i][t]
            if "s - mean" in line.plus:
                factor += shaped[i]
            if gaps:
                factor -= made.kl_coef * of_kl(gaps[i][t])
            total[node, token] += factor / divisor
            total[node] -= factor / divisor * policy[node]
            if "H" in line.plus:
                total[node] += made.entropy_coef / divisor * b.process.of_entropy[node]
    return total


def scored(process: Process, paths: Sequence[Path], made: Any) -> Scored | None:
    """None if the group is left out."""
    kept = [path for path in paths if not path.failed]
    equal = len({path.raw for path in kept}) <= 1
    if not kept or (made.drop_zero_variance and equal):
        return None
    cut = [made.overlong_buffer and 3 in Counter(path.turns).values() for path in kept]  # all of its room
    return Scored(process, kept, [path.total - bool(long) for path, long in zip(kept, cut, strict=True)])


@pytest.mark.parametrize("line", TABLE, ids=str)
def test_the_expected_update_is_what_the_table_says(line: Line) -> None:
    made = recipe(line.name)
    for process in PROCESSES:
        expected = np.zeros(process.policy.shape)
        for chance, paths in process.outcomes:
            if (b := scored(process, paths, made)) is not None:
                expected += chance * by_hand(line, made, b)
        found = expected_step(made, process)
        torch.testing.assert_close(found, torch.from_numpy(expected), **EXACT, msg=str(process))


# What that is of ∇J.


def spread(line: Line, n: int, p: float, tokens: int) -> float:
    """f: over the successes K, E[w K (n - K)] / (n^2 p (1 - p)), or E[w K] / (n p) without a mean."""
    total = 0.0
    for K in range(n + 1):
        paths = [Path((0,) * tokens, (0,) * tokens, (float(i < K),), (0.0,)) for i in range(n)]
        b = Scored(PROCESSES[0], paths, [path.raw for path in paths])
        w = SCALES[line.scale](b, ADVANTAGES[line.advantage](b))
        weight = w * K / (n * p) if line.advantage == "r" else w * K * (n - K) / (n * n * p * (1 - p))
        total += math.comb(n, K) * p**K * (1 - p) ** (n - K) * weight
    return total


def of_success(line: Line, process: Process, n: int) -> float:
    p = sum(c * path.raw for c, path in zip(process.chances, process.paths, strict=True))
    return spread(line, n, p, length(process)) / length(process)


def length(process: Process) -> int:
    return len(process.paths[0].picks)


# (line, process, episodes that give a result) -> what the table says that the update is of ∇J
FACTORS: dict[str, Callable[[Line, Process, int], float]] = {
    "1": lambda line, process, n: 1.0,
    "(n - 1) / (n L)": lambda line, process, n: (n - 1) / (n * LONGEST),
    "(n - 1) / (n ℓ)": lambda line, process, n: (n - 1) / (n * length(process)),
    "1 / ℓ": lambda line, process, n: 1 / length(process),
    "f / ℓ": of_success,
}


def is_multiple(found: Tensor, gradient: Tensor) -> bool:
    factor = (found * gradient).sum() / gradient.square().sum()
    return torch.allclose(found, factor * gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize("line", TABLE, ids=str)
def test_the_table_says_which_multiple_of_the_policy_gradient_it_is(line: Line) -> None:
    """Without the filter, which is looked at below, and without the KL."""
    made = recipe(line.name, drop_zero_variance=False, kl_coef=0.0)
    classes = {
        "always": PROCESSES,
        "lengths are equal": [p for p in PROCESSES if p.name.startswith("even")],
        "lengths are equal, R is 0 or 1": [p for p in PROCESSES if p.name.startswith("even")],
        "never": [],
    }
    inside, outside = classes[line.condition], [p for p in PROCESSES if p not in classes[line.condition]]
    for process in inside:
        lost = sum(c for c, path in zip(process.chances, process.paths, strict=True) if path.failed)
        factor = 0.0
        for n in range(2, process.size + 1):  # that give a result; a lone one has nothing to be compared with
            having = math.comb(process.size, n) * (1 - lost) ** n * lost ** (process.size - n)
            factor += having * FACTORS[line.factor](line, process, n)
        expected = factor * process.policy_gradient()
        torch.testing.assert_close(expected_step(made, process), expected, **EXACT, msg=str(process))
    other = (is_multiple(expected_step(made, process), process.policy_gradient()) for process in outside)
    assert not outside or not all(other), "the table claims too little"


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_the_factors_that_have_a_closed_form(n: int, p: float) -> None:
    lines = {line.name: line for line in TABLE}
    assert spread(lines["max_rl"], n, p, 2) == pytest.approx((1 - (1 - p) ** (n - 1)) / p, rel=1e-12)
    assert spread(lines["act_prm"], n, p, 2) == pytest.approx((1 - (1 - p) ** n) / (n * p), rel=1e-12)


def test_a_critic_says_what_it_likes() -> None:
    made = recipe("ppo", whiten=None)
    for process in (p for p in PROCESSES if p.name.startswith("even")):
        expected = process.policy_gradient() / len(process.paths[0].picks)
        torch.testing.assert_close(expected_step(made, process), expected, **EXACT)


def test_imitating_oneself_teaches_nothing_if_lengths_are_equal() -> None:
    for process in (p for p in PROCESSES if p.name.startswith("even")):
        found = expected_step(recipe("cross_entropy"), process)
        torch.testing.assert_close(found, torch.zeros_like(found), **EXACT)


def test_later_turns_are_shrunk_by_the_chance_that_nobody_else_came_so_far() -> None:
    made = recipe("rloo", credit="turn", drop_zero_variance=False)
    whole = [p for p in PROCESSES if not any(path.failed for path in p.paths)]
    assert max(len(path.rewards) for process in whole for path in process.paths) == 3
    for process in whole:
        factors = torch.zeros(len(process.logits), dtype=torch.float64)
        for path in process.paths:
            for pick, turn in zip(path.picks, path.turns, strict=True):
                reached = sum(
                    c
                    for c, other in zip(process.chances, process.paths, strict=True)
                    if len(other.rewards) > turn
                )
                factors[pick // WIDTH] = 1 - (1 - reached) ** (process.size - 1)
        expected = factors[:, None] * process.policy_gradient()
        torch.testing.assert_close(expected_step(made, process), expected, **EXACT, msg=str(process))


def test_groups_that_are_left_out_weigh_on_the_others() -> None:
    """Updates of two groups, in all their outcomes."""
    for process in (p for p in PROCESSES if p.name.startswith("even") and p.size == 2):
        pairs = [(a * b, [one, two]) for a, one in process.outcomes for b, two in process.outcomes]
        q = sum(chance for chance, paths in process.outcomes if len({path.raw for path in paths}) > 1)
        expected = process.policy_gradient() * (1 - (1 - q) ** 2) / q
        torch.testing.assert_close(expected_step(recipe("rloo"), process, pairs), expected, **EXACT)


@pytest.mark.parametrize("tree_credit", ["soft", "hard"])
def test_turns_that_leaves_share_are_shrunk_by_the_share_of_other_trees(tree_credit: str) -> None:
    """Two roots, each with one branch after its first turn: 2 of the 3 others are of the other tree."""
    process = next(p for p in PROCESSES if p.name == "even1")
    assert all(len(path.rewards) == 2 for path in process.paths)
    trees = []
    for one in process.paths:
        for two in process.paths:
            if one.picks[0] == two.picks[0]:
                first = process.logprobs.flatten()[one.picks[0]].exp().item()
                p, q = (process.chances[process.paths.index(path)] for path in (one, two))
                trees.append((p * q / first, (one, two)))
    made = recipe("rloo", drop_zero_variance=False, tree_credit=tree_credit)
    found = torch.zeros_like(process.logits)
    for p, left in trees:
        for q, right in trees:
            leaves = []
            for name, pair in (("a", left), ("b", right)):
                root, branch = (trajectory(process, path, f"g/{name}{i}") for i, path in enumerate(pair))
                leaves += [root, replace(branch, turns=(root.turns[0], *branch.turns[1:]))]
            forest = Group("g", group(process, [], "g").task, tuple(leaves))
            found += p * q * step(made, process, [weighted(made, rows_of(made, process, [forest]))])
    factors = torch.ones(len(process.logits), 1, dtype=torch.float64)
    factors[0] = 2 / 3
    torch.testing.assert_close(found, factors * process.policy_gradient(), **EXACT)


# One batch, cut and ordered in any way.


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_update_does_not_depend_on_its_cut_nor_its_order_nor_on_failures(name: str) -> None:
    made, rng = recipe(name), random.Random(3)
    for process in (grown(seed, tokens=3, size=3) for seed in (2, 5, 6)):
        chosen = [
            [rng.choice([p for p in process.paths if not p.failed]) for _ in range(3)] for _ in range(4)
        ]

        def rows(groups: Sequence[Sequence[Path]], process: Process = process) -> list[Sample]:
            played = [group(process, paths, f"g{i}") for i, paths in enumerate(groups)]
            return weighted(made, rows_of(made, process, played))

        whole = rows(chosen)
        found = step(made, process, [whole])
        for count in (1, 2, 5, len(whole)):
            order = rng.sample(range(len(whole)), len(whole))
            parts = [[whole[i] for i in part] for part in np.array_split(order, max(count, 1))]
            torch.testing.assert_close(step(made, process, parts), found, rtol=0, atol=1e-14)
        shuffled = rows([rng.sample(paths, len(paths)) for paths in chosen])
        torch.testing.assert_close(step(made, process, [shuffled]), found, rtol=0, atol=1e-14)
        broken = [[*paths, replace(rng.choice(paths), failed=True)] for paths in chosen]
        assert torch.equal(step(made, process, [rows(broken)]), found)
