"""A recipe applied to a batch: what settings.py says, in the order in which it happens.

    groups ── with_penalties ──> drop_reason, select ──> samples, signals ── with_advantages ──> samples
    state: what controllers and running baselines carry from step to step, plain numbers by name

`next_state` gives the state after a step. Nothing here has state of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from silva.algorithms import assign, control, credit, filters, shaping
from silva.algorithms.advantages import Scores
from silva.algorithms.kl import kl_rewards
from silva.algorithms.settings import CREDITS, Algorithm
from silva.errors import RecordError
from silva.types import Group, Sample, Signals, Trajectory

if TYPE_CHECKING:
    from silva.config.sections import EpisodeLimits

ControllerState = Mapping[str, float]
BASELINE = "baseline/"  # and the environment: key of a running baseline


def with_penalties(recipe: Algorithm, group: Group, limits: EpisodeLimits) -> Group:
    """The group with the penalties on length among its trajectories' shaped rewards.

    Args:
        limits: under which it was played.
    """
    scored, shaped = group.scored, {t.id: dict(t.shaped) for t in group.trajectories}
    if not scored or not (recipe.overlong_buffer or recipe.length_penalty):
        return group
    if recipe.overlong_buffer:
        for t in scored:
            shaped[t.id]["overlong"] = _overlong(recipe.overlong_buffer, t, limits)
    if recipe.length_penalty:
        rewards_B = assign.as_float64(t.raw_reward for t in scored)
        lengths_B = assign.as_float64(t.tokens("policy") for t in scored)
        scores = Scores(rewards_B, torch.zeros(len(scored), dtype=torch.int64), lengths_B)
        penalties_B = shaping.length_penalty(scores, coef=recipe.length_penalty)
        for t, penalty in zip(scored, penalties_B.tolist(), strict=True):
            shaped[t.id]["length"] = penalty
    played = (dataclasses.replace(t, shaped=shaped[t.id]) for t in group.trajectories)
    return dataclasses.replace(group, trajectories=tuple(played))


def _overlong(buffer: float, trajectory: Trajectory, limits: EpisodeLimits) -> float:
    """The punishment of the reply that came closest to being cut off.

    A reply may have what its limits leave it: fewer tokens where the context has less room. One that was cut
    off has had all of its room, whatever limit cut it.
    """
    lengths, rooms, context = [0], [1], 0
    for turn in trajectory.turns:
        context = turn.segments[0].count + (0 if turn.fresh else context)
        sampled = sum(s.count for s in turn.reply if s.source == "policy")
        given = sum(s.count for s in turn.reply) - sampled  # an expert's action, after a thought
        room = min(limits.max_turn_tokens, limits.max_episode_tokens - context) - given
        lengths.append(sampled)
        rooms.append(max(1, sampled if turn.cut else room))
        context += sampled + given
    found_K = shaping.overlong(assign.as_float64(lengths), assign.as_float64(rooms), buffer=buffer)
    return float(found_K.min())


def drop_reason(recipe: Algorithm, group: Group) -> filters.Reason | None:
    """Why a group, looked at by itself, is not trained; None if it is."""
    if not group.scored:
        return "failed"
    if recipe.drop_zero_variance and without_signal(recipe, group):
        return "zero_variance"
    return filters.out_of_range(group, *recipe.difficulty_range) if recipe.difficulty_range else None


def without_signal(recipe: Algorithm, group: Group) -> bool:
    """Whether all raw rewards of the group that the recipe compares with each other are equal."""
    return filters.zero_variance(group, _compared(recipe))


def compare(recipe: Algorithm, groups: Sequence[Group]) -> Sequence[filters.Reason | None]:
    """Why groups are not trained, compared with the others of the batch."""
    if recipe.variance_filter is None:
        return [None] * len(groups)
    return filters.drop_reasons(groups, recipe.variance_filter, _compared(recipe))


def with_advantages(
    recipe: Algorithm,
    samples: Sequence[Sample],
    groups: Sequence[Group],
    signals: Signals,
    state: ControllerState,
    *,
    bootstrap: Mapping[str, float] | None = None,
) -> list[Sample]:
    """The samples of scored trajectories with advantages and whatever else the loss and critic read.

    Args:
        samples: rows of `groups`.
        signals: what `recipe.needs` asked for, for these samples.
        bootstrap: with a critic, its value of the state in which an episode was cut off, by trajectory id.

    Raises:
        CapabilityError: `entropy_advantage` with an engine that gives no entropies.
        RecordError: records that do not fit each other; a reward that is not finite.
    """
    rows = [
        sample.replace(
            old_logprobs=_of(signals.logprobs, i) if recipe.rollout_correction else None,
            values=_of(signals.values, i),
        )
        for i, sample in enumerate(samples)
    ]
    penalties = _kl_rewards(recipe, rows, signals)
    if recipe.critic:
        turn_gamma = recipe.turn_gamma if recipe.credit == "bi_level_gae" else None
        rows = credit.assign_gae(
            rows, groups, gamma=recipe.gamma, lam=recipe.lam, turn_gamma=turn_gamma,
            turn_lam=recipe.turn_lam, bootstrap=bootstrap, extra=penalties,
        )  # fmt: skip
    else:
        if own := CREDITS[recipe.credit]:
            rows = own(rows, groups, recipe)
        elif recipe.credit == "turn":
            rows = credit.assign_turns(
                rows, groups, recipe.advantage, gamma=recipe.gamma, over=recipe.advantage_over
            )
        else:
            rows = assign.assign(
                rows, groups, recipe.advantage, over=recipe.advantage_over, baselines=_baselines(state)
            )
        if penalties:
            rows = _with_penalties(recipe, rows, penalties)
    rows = credit.TREE_CREDIT[recipe.tree_credit](rows)
    if recipe.entropy_advantage:
        rows = credit.scale_by_entropy(rows, recipe.entropy_advantage)
    if recipe.whiten:
        rows = assign.whiten_samples(rows, recipe.whiten)
    return assign.clip_samples(rows, *recipe.advantage_clip) if recipe.advantage_clip else rows


def next_state(
    recipe: Algorithm,
    state: ControllerState,
    groups: Sequence[Group],
    metrics: Mapping[str, float],
    base: float,
) -> dict[str, float]:
    """The state after a step.

    Args:
        groups: all that were played, whether trained or not.
        metrics: means over the step's updates, by the names of the losses; empty if none was made.
        base: the configured temperature.
    """
    after = dict(state)
    if recipe.advantage == "running":
        moved = assign.next_baselines(groups, _baselines(state))
        after |= {BASELINE + name: value for name, value in moved.items()}
    if recipe.adaptive_temperature is not None:
        rewards = [t.raw_reward for group in groups for t in group.scored]
        if rewards:
            after["temperature"] = control.adaptive_temperature(
                recipe.adaptive_temperature, base, float(np.std(rewards))
            )
    if recipe.adaptive_kl is not None and "kl" in metrics:
        coef = state.get("kl_coef", recipe.kl_coef)
        after["kl_coef"] = control.adaptive_kl_coef(recipe.adaptive_kl, coef, metrics["kl"])
    if recipe.adaptive_entropy is not None and "entropy" in metrics:
        settings, entropy = recipe.adaptive_entropy, metrics["entropy"]
        c = control.adaptive_entropy_coef(settings, state.get("entropy_coef_ungated", 0.0), entropy)
        after |= {"entropy_coef_ungated": c, "entropy_coef": control.gated_entropy_coef(settings, c, entropy)}
    return after


def _compared(recipe: Algorithm) -> filters.Compared:
    if recipe.credit == "turn":
        return partial(credit.raw_returns, gamma=recipe.gamma)
    return filters.totals


def _baselines(state: ControllerState) -> dict[str, float]:
    return {key.removeprefix(BASELINE): value for key, value in state.items() if key.startswith(BASELINE)}


def _kl_rewards(recipe: Algorithm, samples: Sequence[Sample], signals: Signals) -> list[np.ndarray] | None:
    """[T] for each sample, 0 where nothing is trained or nobody sampled; None without such a reward."""
    if not recipe.kl_reward_coef:
        return None
    if signals.reference_logprobs is None:
        raise RecordError("KL as a reward: got no reference_logprobs, expected [T] per sample")
    rewards = []
    for sample, reference in zip(samples, signals.reference_logprobs, strict=True):
        own, other = (torch.tensor(x, dtype=torch.float64) for x in (sample.logprobs, reference))
        found = kl_rewards(own, other, recipe.kl_reward_coef).numpy()
        sampled = (sample.loss_weights > 0) & ~np.isnan(sample.logprobs)
        rewards.append(np.where(sampled, found, 0.0))
    return rewards


def _with_penalties(
    recipe: Algorithm, samples: Sequence[Sample], penalties: Sequence[np.ndarray]
) -> list[Sample]:
    """Advantages plus each trained token's discounted sum of the penalties from it to the end of its row."""
    result = []
    for sample, penalty in zip(samples, penalties, strict=True):
        trained, total = sample.loss_weights > 0, np.zeros(len(sample))
        sums = credit.discounted_returns(torch.from_numpy(penalty[trained]), recipe.kl_reward_gamma)
        total[trained] = sums.numpy()
        if recipe.use_rewards:
            total += assign.advantages_of(sample)
        result.append(sample.replace(advantages=total))
    return result


def _of(rows: Sequence[np.ndarray] | None, index: int) -> np.ndarray | None:
    return None if rows is None else rows[index]
