"""Small decision processes, all their outcomes, and the exact expectation of an update over them.

A process is a tree. At a node the policy picks one of two or three tokens; then its reply goes on, or it ends
and the world shows tokens of its own, as tools do, or the episode ends. The policy is a table of logits.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silva.algorithms import compose
from silva.algorithms.aggregation import normalise
from silva.config.sections import EpisodeLimits
from silva.rollouts.samples import to_samples
from silva.trainer.loss_inputs import weighted_loss
from silva.trainer.policy import TokenLogprobs, trained
from silva.types import Group, Sample, Segment, Signals, Task, Trajectory, Turn

LIMITS = EpisodeLimits(max_turns=3, max_turn_tokens=3)
LONGEST = 9  # tokens of an episode under these limits
WIDTH = 3  # tokens of a node; token t of node s has the id 3 s + t
TOOL = 999  # a token that the world shows


@dataclass(frozen=True)
class Path:
    """One way through a process: what an episode may become.

    Attributes:
        picks: ids of the sampled tokens.
        turns: the number of each one's turn.
        rewards, shaped: of each turn.
        luck: probability of what the world does.
        failed: the world gave no result.
    """

    picks: tuple[int, ...] = ()
    turns: tuple[int, ...] = ()
    rewards: tuple[float, ...] = ()
    shaped: tuple[float, ...] = ()
    luck: float = 1.0
    failed: bool = False

    @property
    def raw(self) -> float:
        return sum(self.rewards)

    @property
    def total(self) -> float:
        return self.raw + sum(self.shaped)


@dataclass(frozen=True, eq=False)
class Process:
    """A tree, with what a policy, a reference and a critic make of its nodes.

    Attributes:
        logits, reference: [nodes, 3]; the reference's are log-probabilities.
        values: [nodes], the critic's.
        size: of a group.
    """

    name: str
    paths: tuple[Path, ...]
    logits: Tensor
    reference: Tensor
    values: Tensor
    size: int

    def __str__(self) -> str:
        return self.name

    @cached_property
    def logprobs(self) -> Tensor:
        return self.logits.log_softmax(1)

    @cached_property
    def policy(self) -> np.ndarray:
        return self.logprobs.exp().numpy()

    @cached_property
    def entropies(self) -> Tensor:
        return -(self.logprobs.exp() * self.logprobs).nan_to_num().sum(1)

    @cached_property
    def of_entropy(self) -> np.ndarray:
        """[nodes, 3]: the gradient of each node's entropy, -p (log p + H)."""
        return -(self.logprobs.exp() * (self.logprobs + self.entropies[:, None])).nan_to_num().numpy()

    @cached_property
    def chances(self) -> list[float]:
        return [probability(path, self.logprobs).item() for path in self.paths]

    @cached_property
    def outcomes(self) -> list[tuple[float, tuple[Path, ...]]]:
        """Every group that can be drawn, in one order, with its probability."""
        found = []
        for drawn in combinations_with_replacement(range(len(self.paths)), self.size):
            orders = math.factorial(self.size)
            for count in Counter(drawn).values():
                orders //= math.factorial(count)
            chance = orders * math.prod(self.chances[i] for i in drawn)
            found.append((chance, tuple(self.paths[i] for i in drawn)))
        return found

    @cached_property
    def batches(self) -> tuple[list[float], list[list[Group]]]:
        """The outcomes as updates of one group each."""
        return _batches(self, [(chance, [paths]) for chance, paths in self.outcomes])

    def policy_gradient(self, value: Callable[[Path], float] = lambda path: path.total) -> Tensor:
        """[nodes, 3]: of the expected value of episodes that do not fail, differentiated as a whole."""
        logits = self.logits.clone().requires_grad_()
        table = logits.log_softmax(1)
        chances = [(probability(path, table), path) for path in self.paths if not path.failed]
        expected = torch.stack([p * value(path) for p, path in chances]).sum()
        (gradient,) = torch.autograd.grad(expected / torch.stack([p for p, _ in chances]).sum(), logits)
        return gradient


def probability(path: Path, table: Tensor) -> Tensor:
    """Of a path under log-probabilities [nodes, 3]."""
    return path.luck * table.flatten()[list(path.picks)].sum().exp()


def grown(
    seed: int, *, tokens: int = 2, size: int = 2, even: bool = False, least: int = 3, most: int = 6
) -> Process:
    """A random process of `least` to `most` paths.

    Args:
        tokens: that the policy chooses from.
        even: every path has two tokens and a reward of 0 or 1 at its end, and none fails.
    """
    rng = random.Random(seed)
    while True:
        paths: list[Path] = []
        nodes = _branch(rng, paths, Path(), 0, tokens, even)
        if least <= len(paths) <= most and len({p.raw for p in paths if not p.failed}) > 1:
            break
    generator = torch.Generator().manual_seed(seed)
    logits, other = torch.randn(2, nodes, WIDTH, generator=generator, dtype=torch.float64)
    logits[:, tokens:] = other[:, tokens:] = -math.inf
    values = torch.randn(nodes, generator=generator, dtype=torch.float64)
    name = f"{'even' if even else 'any'}{seed}"
    return Process(name, tuple(paths), logits, other.log_softmax(1), values, size)


def _branch(rng: random.Random, paths: list[Path], path: Path, node: int, tokens: int, even: bool) -> int:
    """Adds the paths that go on from here; the number of the next node."""
    here, node, turn = node, node + 1, len(path.rewards)
    for token in range(tokens):
        picks, turns = (*path.picks, WIDTH * here + token), (*path.turns, turn)
        if even:
            kind = rng.choice(["turn", "on"]) if len(picks) < 2 else "end"
            reward, shaped = (rng.choice([0.0, 1.0]) if kind == "end" else 0.0), 0.0
        else:
            kind = rng.choice(["end", "end", "turn", "on"]) if len(picks) < 3 else "end"
            reward, shaped = rng.choice([0.0, 1.0, 0.5, -1.0]), rng.choice([0.0, 0.0, -0.25])
        if kind == "on":
            node = _branch(rng, paths, Path(picks, turns, path.rewards, path.shaped), node, tokens, even)
            continue
        after = Path(picks, turns, (*path.rewards, reward), (*path.shaped, shaped))
        if kind == "turn":
            node = _branch(rng, paths, after, node, tokens, even)
        elif even or rng.random() < 0.8:
            paths.append(after)
        else:  # the world breaks now and then after this token
            ends = after.picks, after.turns, after.rewards, after.shaped
            paths += [Path(*ends, luck=0.7), Path(*ends, luck=0.3, failed=True)]
    return node


PROCESSES = [
    *(grown(seed, tokens=2 + seed % 2, size=2 + (seed % 10 == 0)) for seed in range(20)),
    *(grown(seed, size=2 + seed % 2, even=True) for seed in range(8)),
    *(grown(seed, tokens=3, least=7, most=8) for seed in (20, 21)),
]


# The public path: records to rows, advantages, weights and a loss.


def trajectory(process: Process, path: Path, id: str) -> Trajectory:
    table, turns = process.logprobs.flatten(), []
    for k, (reward, shaped) in enumerate(zip(path.rewards, path.shaped, strict=True)):
        said = [pick for pick, turn in zip(path.picks, path.turns, strict=True) if turn == k]
        policy = Segment(
            "policy", tuple(said), logprobs=tuple(table[said].tolist()), versions=(0,) * len(said),
            entropies=tuple(process.entropies[[pick // WIDTH for pick in said]].tolist()),
        )  # fmt: skip
        shown = Segment("environment", (TOOL,) * (1 + k))
        turns.append(
            Turn(
                f"{id}/{k}",
                (shown, policy),
                rewards={"score": reward},
                shaped={"format": shaped},
                fresh=not k,
            )
        )
    return Trajectory(
        id, tuple(turns), "error" if path.failed else "terminated",
        rewards={"score": path.raw}, shaped={"format": sum(path.shaped)},
        failure="redo" if path.failed else None, error="the tool is gone" if path.failed else None,
    )  # fmt: skip


def group(process: Process, paths: Iterable[Path], key: str) -> Group:
    played = tuple(trajectory(process, path, f"{key}/{i}") for i, path in enumerate(paths))
    return Group(key, Task(key, "tree", 0, {}), played)


def rows_of(recipe: Any, process: Process, groups: Sequence[Group]) -> list[Sample]:
    """The rows of what an update trains of these groups, with advantages."""
    groups = [compose.with_penalties(recipe, each, LIMITS) for each in groups]
    groups = [each for each in groups if compose.drop_reason(recipe, each) is None]
    reasons = compose.compare(recipe, groups)
    groups = [each for each, reason in zip(groups, reasons, strict=True) if reason is None]
    samples = [s.replace(loss_weights=s.loss_weights.astype(np.float64)) for s in to_samples(groups)]

    tables = {
        "reference_logprobs": process.reference.flatten(),
        "values": process.values.repeat_interleave(WIDTH),
    }
    signals = {name: tuple(_on_trained(sample, tables[name]) for sample in samples) for name in recipe.needs}
    return compose.with_advantages(recipe, samples, groups, Signals(**signals), {})


def weighted(recipe: Any, rows: Sequence[Sample]) -> list[Sample]:
    """Rows of one update, normalised."""
    count = len({row.trajectory for row in rows})
    constant = float(max(1, count) * LONGEST) if recipe.aggregation == "constant" else None
    return normalise(rows, recipe.aggregation, constant=constant)


def step(recipe: Any, process: Process, micro_batches: Iterable[Sequence[Sample]]) -> Tensor:
    """[nodes, 3]: minus the gradient of the loss of an update that was cut into micro-batches."""
    logits, spec = process.logits.clone().requires_grad_(), recipe.loss_spec()
    total = torch.zeros_like(logits)
    for rows in micro_batches:
        if not rows:
            continue
        table = logits.log_softmax(1)
        ids = torch.from_numpy(np.concatenate([row.tokens[trained(row)] for row in rows]))
        counts = [int(trained(row).sum()) for row in rows]
        numbers = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts))
        entropies = -(table.exp() * table.masked_fill(table.isinf(), 0.0)).sum(1)
        found = TokenLogprobs(table.flatten()[ids], entropies[ids // WIDTH], numbers)
        references = [_on_trained(row, process.reference.flatten()) for row in rows]
        loss, _ = weighted_loss(found, rows, references, spec, 0, False)
        total -= torch.autograd.grad(loss, logits)[0]
    return total


def _on_trained(sample: Sample, table: Tensor) -> np.ndarray:
    found = np.full(len(sample), np.nan)
    mine = trained(sample)
    found[mine] = table[torch.from_numpy(sample.tokens[mine])].numpy()
    return found


def expected_step(
    recipe: Any, process: Process, outcomes: Sequence[tuple[float, Sequence[Sequence[Path]]]] | None = None
) -> Tensor:
    """[nodes, 3]: the expectation of `step` over all outcomes, each the groups of one update."""
    chances, batches = process.batches if outcomes is None else _batches(process, outcomes)
    rows: list[Sample] = []
    for chance, own in zip(chances, _apart(recipe, process, batches), strict=True):
        rows += [row.replace(loss_weights=chance * row.loss_weights) for row in weighted(recipe, own)]
    return step(recipe, process, [rows])


def _batches(
    process: Process, outcomes: Sequence[tuple[float, Sequence[Sequence[Path]]]]
) -> tuple[list[float], list[list[Group]]]:
    groups = [
        [group(process, paths, f"{number}.{i}") for i, paths in enumerate(batch)]
        for number, (_, batch) in enumerate(outcomes)
    ]
    return [chance for chance, _ in outcomes], groups


def _apart(recipe: Any, process: Process, batches: Sequence[Sequence[Group]]) -> Iterator[list[Sample]]:
    """The rows of each batch; of all batches at once where groups do not see each other."""
    alone = recipe.advantage_over == "group" and not (
        recipe.whiten or recipe.entropy_advantage or recipe.variance_filter
    )
    if not alone:
        yield from (rows_of(recipe, process, batch) for batch in batches)
        return
    found: dict[str, list[Sample]] = {}
    for row in rows_of(recipe, process, [each for batch in batches for each in batch]):
        found.setdefault(row.group.partition(".")[0], []).append(row)
    yield from (found.get(str(number), []) for number in range(len(batches)))
