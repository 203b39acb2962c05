"""Credit that differs within a trajectory: by turn, by token with a critic, by branch, by entropy.

    assign_turns   a turn's discounted return against the turns of the same number
    assign_gae     a token's advantage from a critic's values; one level, or turns over tokens
    TREE_CREDIT    then, where trajectories share turns: what a shared turn gets
    scale_by_entropy   then, tokens where the policy was uncertain count more

A trajectory that a rewritten context spread over several rows is one sequence of trained tokens here. What is
computed for it is in gae.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from silva.algorithms.advantages import ADVANTAGES, OVER, Scores
from silva.algorithms.assign import (
    advantages_of,
    as_float64,
    as_ids,
    check_kind,
    finite_reward,
    map_advantages,
    scored_samples,
    whiten,
)
from silva.algorithms.gae import bi_level_gae, discounted_returns, gae, token_rewards
from silva.errors import CapabilityError, ConfigError, RecordError
from silva.types import Group, Sample, Trajectory


def assign_turns(
    samples: Sequence[Sample], groups: Sequence[Group], kind: str, *, gamma: float, over: str = "group"
) -> list[Sample]:
    """Gives every token the advantage of its turn: its discounted return against turns of the same number.

    Args:
        samples: rows of trajectories in `groups`, with their turn spans.
        groups: every group that the samples come from, whole.
        kind: a name in `ADVANTAGES` but `running`.
        gamma: discount per turn.
        over: a name in `OVER`: the k-th turns of a group, of an environment or of all are compared.

    Returns:
        The samples of scored trajectories in their order, with `advantages` [T] float64.

    Raises:
        ConfigError: unknown kind or over, or `running`, which knows whole trajectories only.
        RecordError: as `advantages.assign`, or a sample whose turns are not those of its trajectory.
    """
    check_kind(kind, over)
    if kind == "running":
        raise ConfigError("advantage running: got credit by turn, expected credit by trajectory")
    kept = scored_samples(samples, groups)
    keys: list[Hashable] = []
    turns: list[tuple[str, str]] = []
    returns: list[float] = []
    raw: list[float] = []
    for i, group in enumerate(groups):
        for t in group.scored:
            keys += [(OVER[over](i, group), k) for k in range(len(t.turns))]
            turns += [(t.id, turn.id) for turn in t.turns]
            returns += discounted_returns(turn_rewards(t), gamma).tolist()
            raw += discounted_returns(turn_rewards(t, shaped=False), gamma).tolist()
    numbers = {turn: b for b, turn in enumerate(turns)}
    rows = [_turns_of(sample, numbers) for sample in kept]
    trained = [row[sample.loss_weights > 0] for sample, row in zip(kept, rows, strict=True)]
    lengths = np.bincount(np.concatenate([np.zeros(0, np.int64), *trained]), minlength=len(turns))
    scores = Scores(as_float64(returns), as_ids(keys), as_float64(lengths.tolist()), raw=as_float64(raw))
    advantages_B = ADVANTAGES[kind].function(scores).numpy()
    return [sample.replace(advantages=advantages_B[row]) for sample, row in zip(kept, rows, strict=True)]


def assign_gae(
    samples: Sequence[Sample],
    groups: Sequence[Group],
    *,
    gamma: float,
    lam: float,
    turn_gamma: float | None = None,
    turn_lam: float = 1.0,
    bootstrap: Mapping[str, float] | None = None,
    extra: Sequence[np.ndarray] | None = None,
) -> list[Sample]:
    """Gives every trained token its advantage by `gae`, or by `bi_level_gae` where `turn_gamma` is given.

    Args:
        samples: rows of trajectories in `groups`, with values and turn spans; all rows of each.
        groups: every group that the samples come from.
        gamma, lam: of tokens.
        turn_gamma, turn_lam: of turns.
        bootstrap: value of the state in which the episode was cut off, by trajectory id, 0 if missing
            (arXiv:1712.00378). Read only for episodes that did not end by themselves (a stop reason
            other than terminated).
        extra: rewards of single tokens beside those of turns, one [T] per sample, 0 where not trained.

    Returns:
        The samples of scored trajectories in their order, with `advantages` and `returns` [T] float64, 0
        where not trained.

    Raises:
        RecordError: as `assign_turns`, or a sample without values.
    """
    scored_samples(samples, groups)  # each has its trajectory
    scored = {t.id: t for group in groups for t in group.scored}
    numbers = {(t.id, turn.id): k for t in scored.values() for k, turn in enumerate(t.turns)}
    turns = {i: _turns_of(s, numbers) for i, s in enumerate(samples) if s.trajectory in scored}
    rows: defaultdict[str, list[int]] = defaultdict(list)
    for i in sorted(turns, key=lambda i: turns[i][0]):
        rows[samples[i].trajectory].append(i)

    result: dict[int, Sample] = {}
    for name, own in rows.items():
        turns_T = torch.from_numpy(np.concatenate([turns[i] for i in own]))
        values_T = torch.from_numpy(np.concatenate([_values(samples[i]) for i in own]))
        trained_T = torch.from_numpy(np.concatenate([samples[i].loss_weights > 0 for i in own]))
        rewards_T = token_rewards(turn_rewards(scored[name]), turns_T, trained_T)
        if extra is not None:
            rewards_T = rewards_T + torch.from_numpy(np.concatenate([extra[i] for i in own]))
        end = 0.0 if scored[name].stop_reason == "terminated" else (bootstrap or {}).get(name, 0.0)
        if turn_gamma is None:
            found = gae(values_T, rewards_T, trained_T, gamma=gamma, lam=lam, bootstrap=end)
        else:
            found = bi_level_gae(
                values_T, rewards_T, trained_T, turns_T,
                gamma=gamma, lam=lam, turn_gamma=turn_gamma, turn_lam=turn_lam, bootstrap=end,
            )  # fmt: skip
        cuts = np.cumsum([len(turns[i]) for i in own])[:-1]
        advantages, returns = (np.split(array.numpy(), cuts) for array in found)
        for i, advantages_T, returns_T in zip(own, advantages, returns, strict=True):
            result[i] = samples[i].replace(advantages=advantages_T, returns=returns_T)
    return [result[i] for i in turns]


def hard(samples: Sequence[Sample]) -> list[Sample]:
    """A turn that several trajectories share gets the mean of their advantages (ARPO, arXiv:2507.19849).

    Averaged token by token over the leaves below it, so it also serves advantages that differ by token.

    Args:
        samples: all rows of their groups, with turn spans and advantages.

    Raises:
        RecordError: a sample without advantages, or copies of a turn that differ in length.
    """
    leaves: defaultdict[tuple[str, str], list[np.ndarray]] = defaultdict(list)
    for sample in samples:
        for turn, (start, stop) in zip(sample.turn_ids, sample.turn_spans, strict=True):
            leaves[sample.group, turn].append(advantages_of(sample)[start:stop])
    means = {}
    for (group, turn), copies in leaves.items():
        if len(sizes := {len(copy) for copy in copies}) > 1:
            raise RecordError(
                f"turn {turn!r} of group {group!r}: got copies of {sorted(sizes)} tokens, expected one length"
            )
        if len(copies) > 1:
            means[group, turn] = np.mean(copies, axis=0, dtype=np.float64)

    result = []
    for sample in samples:
        advantages = advantages_of(sample).copy()
        for turn, (start, stop) in zip(sample.turn_ids, sample.turn_spans, strict=True):
            if (sample.group, turn) in means:
                advantages[start:stop] = means[sample.group, turn]
        result.append(sample.replace(advantages=advantages))
    return result


# What the tokens of a turn get that several trajectories share: each leaf's own advantage, or their mean.
TREE_CREDIT: dict[str, Callable[[Sequence[Sample]], list[Sample]]] = {"soft": list, "hard": hard}


def scale_by_entropy(samples: Sequence[Sample], scale: float) -> list[Sample]:
    """A (1 + scale z), z = (H - mean) / std over the trained tokens of a batch (AEPO, arXiv:2510.14545).

    Tokens that nobody sampled, such as an expert's, have no entropy (NaN) and keep their advantage.

    Args:
        samples: all of a batch, with advantages.
        scale: 0.2 is the authors' own.

    Raises:
        CapabilityError: samples without entropies.
        RecordError: a sample without advantages.
    """
    entropies = [sample.entropies for sample in samples if sample.entropies is not None]
    if len(entropies) < len(samples):
        raise CapabilityError(
            "algorithm.entropy_advantage: got samples without entropies, expected an engine that gives them"
        )

    def scaled(advantages_N: Tensor) -> Tensor:
        entropies_N = torch.from_numpy(np.concatenate(entropies).astype(np.float64))
        trained_N = torch.from_numpy(np.concatenate([sample.loss_weights > 0 for sample in samples]))
        z_N, sampled_N = torch.zeros_like(advantages_N), trained_N & ~entropies_N.isnan()
        own = entropies_N[sampled_N]
        z_N[sampled_N] = whiten(own, torch.ones_like(own))
        return advantages_N * (1 + scale * z_N)

    return map_advantages(samples, scaled)


def raw_returns(group: Group, gamma: float) -> list[list[float]]:
    """What credit by turn compares, without penalties: the raw discounted returns of the first turns of the
    scored trajectories, then of the second turns, and so on.

    Raises:
        RecordError: a reward is not finite.
    """
    rows = [discounted_returns(turn_rewards(t, shaped=False), gamma).tolist() for t in group.scored]
    longest = max(map(len, rows), default=0)
    return [[row[k] for row in rows if k < len(row)] for k in range(longest)]


def turn_rewards(trajectory: Trajectory, *, shaped: bool = True) -> Tensor:
    """[K] float64: what each turn earned; rewards that belong to no turn are added to the last.

    Args:
        shaped: whether to add the shaped rewards to the raw ones.

    Raises:
        RecordError: the trajectory's reward is not finite.
    """
    total = finite_reward(trajectory)
    if not shaped:
        total = trajectory.raw_reward
    rewards = [
        float(sum(turn.rewards.values()) + (sum(turn.shaped.values()) if shaped else 0.0))
        for turn in trajectory.turns
    ]
    if rewards:
        rewards[-1] += total - sum(rewards)
    return as_float64(rewards)


def _turns_of(sample: Sample, numbers: Mapping[tuple[str, str], int]) -> np.ndarray:
    """[T] int64: the number of the turn that each token belongs to."""
    lengths = [stop - start for start, stop in sample.turn_spans]
    unknown = [turn for turn in sample.turn_ids if (sample.trajectory, turn) not in numbers]
    if unknown or sum(lengths) != len(sample):
        raise RecordError(
            f"turns of a sample of {sample.trajectory}: got {sum(lengths)} tokens in turns, and the turns "
            f"{unknown} that its trajectory lacks, expected all {len(sample)} tokens in turns of it"
        )
    return np.repeat([numbers[sample.trajectory, turn] for turn in sample.turn_ids], lengths)


def _values(sample: Sample) -> np.ndarray:
    if sample.values is None:
        raise RecordError(f"values of a sample of {sample.trajectory}: got none, expected {len(sample)}")
    return sample.values.astype(np.float64)
