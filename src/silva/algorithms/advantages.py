"""Advantages: how much better a trajectory did than what it is compared with.

    assign ──> whiten_samples ──> clip_samples        each step takes rows and returns rows
      │
      └── or credit.assign_turns, credit.assign_gae: credit that differs within a trajectory

The functions in `ADVANTAGES` are pure: `Scores` of B trajectories to advantages [B], in the dtype of the
rewards. A group of one has nothing to be compared with: its advantage is 0 (but for `raw`, `share` and
`running`).
GRPO is `mean_std`, RLOO `leave_one_out`, OPO `length_weighted`, MaxRL `max_rl`, RAE `running`, REINFORCE++
`raw` or (its baseline form) `mean` and then `whiten_samples`, RAGEN's asymmetric clip `mean_std` and then
`clip_samples(samples, -1, 3)`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from silva.errors import ConfigError, RecordError
from silva.types import Group, Sample, Trajectory


@dataclass(frozen=True, eq=False)
class Scores:
    """What a baseline sees of B trajectories, or of B turns.

    Args:
        rewards: [B] raw plus shaped: what training sees.
        groups: [B] ids (any integers) of what is compared with each other.
        lengths: [B] trained tokens; needed by `length_weighted`.
        baselines: [B] running baseline of the group so far, the same within a group; 0 where left out.
        raw: [B] the raw part of the rewards, which `max_rl` and `share` divide by; None if they are all raw.
    """

    rewards: Tensor
    groups: Tensor
    lengths: Tensor | None = None
    baselines: Tensor | None = None
    raw: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("groups", "lengths", "baselines", "raw"):
            value = getattr(self, name)
            if value is not None and (self.rewards.ndim != 1 or value.shape != self.rewards.shape):
                raise RecordError(
                    f"{name} must align with rewards: got {tuple(value.shape)} for "
                    f"{tuple(self.rewards.shape)}, expected [B] each"
                )

    def group_sum(self, values: Tensor) -> Tensor:
        """Sum over the group that each stands in: [B] -> [B]."""
        _, group_B = torch.unique(self.groups, return_inverse=True)
        return torch.zeros_like(values).index_add(0, group_B, values)[group_B]

    def group_mean(self) -> Tensor:
        """Mean reward of the group that each stands in: [B]."""
        return self.group_sum(self.rewards) / self.counts()

    def split(self) -> tuple[Tensor, Tensor]:
        """[B] raw rewards, and [B] shaped ones minus their mean over the group."""
        raw_B = self.rewards if self.raw is None else self.raw
        shaped_B = self.rewards - raw_B
        return raw_B, shaped_B - self.group_sum(shaped_B) / self.counts()

    def counts(self) -> Tensor:
        """Size of the group that each stands in: [B]."""
        return self.group_sum(torch.ones_like(self.rewards))


def raw(scores: Scores) -> Tensor:
    """A = r: no baseline. [B]."""
    return scores.rewards.clone()


def mean(scores: Scores) -> Tensor:
    """A = r - mean of the group (Dr. GRPO, arXiv:2503.20783). [B]."""
    return scores.rewards - scores.group_mean()


def mean_std(scores: Scores, *, eps: float = 1e-4) -> Tensor:
    """A = (r - mean) / (std + eps) of the group (GRPO, arXiv:2402.03300, section 4.1.2). [B].

    The paper leaves open which std; this is the unbiased one (divided by n - 1) with eps = 1e-4, as in
    TRL (others use 1e-6, which matters only where the std is as small).
    """
    centred_B = mean(scores)
    variance_B = scores.group_sum(centred_B.square()) / (scores.counts() - 1).clamp(min=1)
    return centred_B / (variance_B.sqrt() + eps)


def leave_one_out(scores: Scores) -> Tensor:
    """A = r - mean of the *others* of the group = n / (n - 1) * (r - mean) (RLOO, arXiv:2402.14740). [B].

    Unbiased, as the baseline does not depend on the trajectory itself.
    """
    count_B = scores.counts()
    others_B = scores.group_sum(scores.rewards) - scores.rewards
    alone = torch.zeros_like(scores.rewards)
    return torch.where(count_B > 1, scores.rewards - others_B / (count_B - 1).clamp(min=1), alone)


def length_weighted(scores: Scores) -> Tensor:
    """A = r - sum(l r) / sum(l) of the group, l = trained tokens (OPO, arXiv:2505.23585). [B].

    The baseline of least variance where a trajectory's squared gradient grows with its length.

    Raises:
        RecordError: scores without lengths.
    """
    if scores.lengths is None:
        raise RecordError("length_weighted advantages: got no lengths, expected [B] trained tokens")
    lengths_B = scores.lengths.to(scores.rewards.dtype)
    # A group without a trained token has no baseline, and nobody to use it.
    total_B = scores.group_sum(lengths_B).clamp(min=1)
    return scores.rewards - scores.group_sum(lengths_B * scores.rewards) / total_B


def max_rl(scores: Scores) -> Tensor:
    """A = (r - mean) / mean of |r| + s - mean of s, r raw and s shaped (MaxRL, arXiv:2602.02710). [B].

    For rewards of 0 and 1: the gradient of a truncated log-likelihood of success, so that a task that
    succeeds with probability p weighs about 1 / p. Penalties are not in the denominator: they could
    bring it close to 0. If all raw rewards are 0, the first part is 0. The paper has no negative rewards;
    |r| keeps the sign of their advantages, and this bound for a group of n:

        |A| <= n - 1 + largest s - smallest s
    """
    raw_B, shaped_B = scores.split()
    size_B = scores.group_sum(raw_B.abs())
    centred_B = scores.counts() * raw_B - scores.group_sum(raw_B)
    return torch.where(size_B > 0, centred_B / size_B, torch.zeros_like(size_B)) + shaped_B


def share(scores: Scores) -> Tensor:
    """A = r / sum of |r| + s - mean of s, r raw and s shaped (Act-PRM's EM: posterior weights). [B].

    For raw rewards of 0 or more, such as p(action | thought): the gradient is that of the expected
    log-likelihood under the posterior over the group. As in `max_rl`, only raw rewards are in the
    denominator; if all of them are 0, the first part is 0. |A| <= 1 + largest s - smallest s.
    """
    raw_B, shaped_B = scores.split()
    size_B = scores.group_sum(raw_B.abs())
    return torch.where(size_B > 0, raw_B / size_B, torch.zeros_like(size_B)) + shaped_B


def running(scores: Scores, *, decay: float = 0.95) -> Tensor:
    """A = r - b, then b <- decay b + (1 - decay) r, in the order of B (RAE, SPIRAL, arXiv:2506.24119). [B].

    Each is compared with the baseline before its own reward enters it, so the baseline is unbiased. It
    works where the mean of a group says nothing, as in a zero-sum game.
    """
    return scores.rewards - _running(scores, decay)[0]


ADVANTAGES: dict[str, Callable[[Scores], Tensor]] = {
    "mean": mean,
    "mean_std": mean_std,
    "leave_one_out": leave_one_out,
    "length_weighted": length_weighted,
    "max_rl": max_rl,
    "share": share,
    "running": running,
    "raw": raw,
}
# What is compared with each other (RAGEN's state, inductive and batch): index of the group, group -> key.
OVER: dict[str, Callable[[int, Group], Hashable]] = {
    "group": lambda index, group: index,
    "environment": lambda index, group: group.task.environment,
    "batch": lambda index, group: None,
}
# How often a trained token counts, by the trained tokens of its trajectory.
WHITEN_OVER: dict[str, Callable[[int], float]] = {
    "tokens": lambda own: 1.0,
    "trajectories": lambda own: 1.0 / own,
}


def assign(
    samples: Sequence[Sample],
    groups: Sequence[Group],
    kind: str,
    *,
    over: str = "group",
    baselines: Mapping[str, float] | None = None,
) -> list[Sample]:
    """Gives every token of a sample the advantage of its trajectory.

    The reward is `Trajectory.shaped_reward`, its raw part `raw_reward`. Trajectories that failed enter no
    baseline, and their samples are left out of the result: they are not trained.

    Args:
        samples: rows of trajectories in `groups`; a trajectory may have none, one or several.
        groups: every group that the samples come from, whole.
        kind: a name in `ADVANTAGES`.
        over: a name in `OVER`, what a baseline is taken over; `running` always takes the environment.
        baselines: for `running`, by environment, 0 where missing; `running_baselines` gives the next ones.

    Returns:
        The samples of scored trajectories in their order, with `advantages` [T] float32.

    Raises:
        ConfigError: unknown kind or over.
        RecordError: a trajectory id stands twice, a sample's trajectory is in no group, or a reward is
            not finite.
    """
    check_kind(kind, over)
    kept = scored_samples(samples, groups)
    key = OVER["environment" if kind == "running" else over]
    scored = [(i, group, t) for i, group in enumerate(groups) for t in group.scored]
    lengths, so_far = trained_tokens(kept), baselines or {}
    scores = Scores(
        rewards=as_float64(finite_reward(t) for _, _, t in scored),
        groups=as_ids([key(i, group) for i, group, _ in scored]),
        lengths=as_float64(lengths[t.id] for _, _, t in scored),
        baselines=as_float64(so_far.get(group.task.environment, 0.0) for _, group, _ in scored),
        raw=as_float64(t.raw_reward for _, _, t in scored),
    )
    advantages = {t.id: a for (_, _, t), a in zip(scored, ADVANTAGES[kind](scores).tolist(), strict=True)}
    return [s.replace(advantages=np.full(len(s), advantages[s.trajectory], dtype=np.float32)) for s in kept]


def running_baselines(
    groups: Sequence[Group], baselines: Mapping[str, float], *, decay: float = 0.95
) -> dict[str, float]:
    """The baselines of `running` after the groups' scored trajectories, in their order.

    Args:
        groups: as given to `assign`.
        baselines: before them, by environment; 0 where missing.

    Returns:
        All of `baselines`, those of the groups' environments moved on.

    Raises:
        RecordError: a reward is not finite.
    """
    scored = [(group.task.environment, t) for group in groups for t in group.scored]
    scores = Scores(
        rewards=as_float64(finite_reward(t) for _, t in scored),
        groups=as_ids([environment for environment, _ in scored]),
        baselines=as_float64(baselines.get(environment, 0.0) for environment, _ in scored),
    )
    after = _running(scores, decay)[1].tolist()
    return {**baselines, **{environment: b for (environment, _), b in zip(scored, after, strict=True)}}


def whiten(values: Tensor, weights: Tensor, *, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(variance + eps), both over the values as often as their weights say.

    With weights of 1 on trained tokens: the batch normalisation of REINFORCE++ (arXiv:2501.03262). The
    variance is unbiased: divided by the sum of the weights - 1.

    Args:
        values: [N].
        weights: [N], 0 for what must not count, at least 1 in sum.

    Returns:
        [N]; what does not count is shifted and scaled with the others.
    """
    total = weights.sum().clamp(min=1)
    centred_N = values - (weights * values).sum() / total
    variance = (weights * centred_N.square()).sum() / (total - 1).clamp(min=1)
    return centred_N / (variance + eps).sqrt()


def whiten_samples(samples: Sequence[Sample], over: str = "tokens") -> list[Sample]:
    """The samples with advantages of mean 0 and std 1 over all their trained tokens.

    Args:
        samples: all of a batch, with advantages.
        over: a name in `WHITEN_OVER`: whether each token counts the same, or each trajectory.

    Raises:
        ConfigError: unknown over.
        RecordError: a sample without advantages.
    """
    if over not in WHITEN_OVER:
        raise ConfigError(f"unknown whitening: got over {over!r}, expected one of {', '.join(WHITEN_OVER)}")
    lengths = trained_tokens(samples)
    weights = [(s.loss_weights > 0) * WHITEN_OVER[over](lengths[s.trajectory] or 1) for s in samples]
    return map_advantages(samples, lambda advantages_N: whiten(advantages_N, _joined(weights)))


def clip_samples(samples: Sequence[Sample], low: float, high: float) -> list[Sample]:
    """The samples with advantages between `low` and `high`.

    Raises:
        RecordError: a sample without advantages.
    """
    return map_advantages(samples, lambda advantages_N: advantages_N.clamp(low, high))


def map_advantages(samples: Sequence[Sample], function: Callable[[Tensor], Tensor]) -> list[Sample]:
    """The samples with `function`, [N] float64 to [N], applied to the advantages of all their tokens, joined.

    Raises:
        RecordError: a sample without advantages.
    """
    if not samples:
        return []
    rows = [advantages_of(s) for s in samples]
    changed = function(_joined(rows)).numpy().astype(np.float32)
    parts = np.split(changed, np.cumsum([len(row) for row in rows])[:-1])
    return [s.replace(advantages=part) for s, part in zip(samples, parts, strict=True)]


def advantages_of(sample: Sample) -> np.ndarray:
    """[T].

    Raises:
        RecordError: it has none.
    """
    if sample.advantages is None:
        raise RecordError(f"advantages of a sample of {sample.trajectory}: got none, expected {len(sample)}")
    return sample.advantages


def scored_samples(samples: Sequence[Sample], groups: Sequence[Group]) -> list[Sample]:
    """The samples whose trajectory has a result that may be used, in their order.

    Raises:
        RecordError: a trajectory id stands twice, or a sample's trajectory is in no group.
    """
    everyone = Counter(t.id for group in groups for t in group.trajectories)
    if twice := sorted(name for name, count in everyone.items() if count > 1):
        raise RecordError(f"advantages: trajectory ids must be unique over groups: got {twice[0]!r} twice")
    for sample in samples:
        if sample.trajectory not in everyone:
            raise RecordError(
                f"advantages: trajectory {sample.trajectory!r} of a sample (group {sample.group!r}): "
                f"got none of that id, expected it in one of {len(groups)} groups"
            )
    scored = {t.id for group in groups for t in group.scored}
    return [sample for sample in samples if sample.trajectory in scored]


def check_kind(kind: str, over: str) -> None:
    """Raises ConfigError for a kind or an over that does not exist."""
    if kind not in ADVANTAGES:
        raise ConfigError(f"unknown advantage: got {kind!r}, expected one of {', '.join(ADVANTAGES)}")
    if over not in OVER:
        raise ConfigError(f"advantage {kind}: got over {over!r}, expected one of {', '.join(OVER)}")


def trained_tokens(samples: Iterable[Sample]) -> Counter[str]:
    """How many tokens of each trajectory carry loss."""
    counts: Counter[str] = Counter()
    for sample in samples:
        counts[sample.trajectory] += int(np.count_nonzero(sample.loss_weights > 0))
    return counts


def finite_reward(trajectory: Trajectory) -> float:
    """What training sees of its rewards.

    Raises:
        RecordError: that is not finite.
    """
    reward = trajectory.shaped_reward
    if not math.isfinite(reward):
        raise RecordError(f"reward of trajectory {trajectory.id}: got {reward}, expected a finite number")
    return reward


def as_float64(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def as_ids(keys: Sequence[Hashable]) -> Tensor:
    """[B] int64, equal where the keys are."""
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([numbers[key] for key in keys], dtype=torch.int64)


def _running(scores: Scores, decay: float) -> tuple[Tensor, Tensor]:
    """[B] the baseline before each reward entered it, and [B] after."""
    starts = [0.0] * len(scores.rewards) if scores.baselines is None else scores.baselines.tolist()
    baselines: dict[int, float] = {}
    before, after = [], []
    for reward, group, start in zip(scores.rewards.tolist(), scores.groups.tolist(), starts, strict=True):
        before.append(baselines.get(group, start))
        baselines[group] = decay * before[-1] + (1 - decay) * reward
        after.append(baselines[group])
    return scores.rewards.new_tensor(before), scores.rewards.new_tensor(after)


def _joined(rows: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(rows).astype(np.float64))
