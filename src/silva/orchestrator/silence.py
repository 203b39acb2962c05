"""Steps that teach nothing: whether one did, why, and which key to change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from silva.algorithms.filters import Reason
from silva.algorithms.settings import Algorithm
from silva.orchestrator.buffer import Batch
from silva.types import Group, Sample

NOTHING = "no token had an advantage other than 0 in any step"

MANY_CUT = 0.25
"""If a larger share of the replies is cut off, that comes first."""


def teaches(recipe: Algorithm, samples: Sequence[Sample]) -> bool:
    """Whether the loss of these rows depends on what was played.

    If not, an entropy bonus or the pull towards the reference may still change the policy.
    """
    if recipe.imitates:
        return bool(samples)
    return any(s.advantages is not None and bool(s.advantages[s.loss_weights > 0].any()) for s in samples)


def explain(recipe: Algorithm, batch: Batch) -> str:
    """One or two sentences on why the rows of a batch teach nothing."""
    counts = Counter(d.reason for d in batch.dropped)
    if batch.kept:
        what = "trained on rows whose advantages are all 0"
    else:
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
        what = f"trained nothing, since all {len(batch.dropped)} groups were left out ({reasons})"
    return f"step {batch.step} {what}. {_advice(recipe, batch, counts)}"


def _advice(recipe: Algorithm, batch: Batch, counts: Counter[Reason]) -> str:
    if counts["too_easy"] or counts["too_hard"]:
        return f"algorithm.difficulty_range = {list(recipe.difficulty_range or ())} may be too narrow."
    if counts["failed"] and len(counts) == 1:
        return "Every episode failed."
    return same_rewards(batch.groups)


def share_cut(groups: Sequence[Group]) -> float:
    """Of the replies: how many ended for lack of room."""
    turns = [turn for group in groups for turn in group.turns]
    return sum(turn.cut for turn in turns) / max(1, len(turns))


def same_rewards(groups: Sequence[Group]) -> str:
    """What to change if the episodes of each of these groups earned the same."""
    cut = share_cut(groups)
    first = (
        f"{cut:.0%} of the replies were cut off for lack of room (response/cut), perhaps before an answer: "
        "first raise rollout.limits.max_turn_tokens (or max_episode_tokens). "
    )
    rewards = [t.raw_reward for group in groups for t in group.scored]
    mean = sum(rewards) / max(1, len(rewards))
    return (first if cut > MANY_CUT else "") + (
        f"The episodes of a task all earned the same reward ({mean:.3g} on average): raise "
        "rollout.group_size or algorithm.max_refills, choose easier or harder tasks, or begin with "
        "[warm_start]."
    )
