"""Does what the policy says still depend on what it was asked? RAGEN-2's diagnosis, now and then in a run.

    first replies of some tasks x their prompts ──> every reply under every prompt ──trainer.score──> [n, n]

n^2 rows, but a prompt is computed once for all replies under it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from silva.algorithms.diagnostics import collapse
from silva.protocols import Trainer
from silva.rollouts.samples import to_score
from silva.types import Group, Turn

MOST = 16  # tasks: 256 rows


async def collapse_metrics(trainer: Trainer, groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of `diagnostics.collapse` over the first replies to up to `MOST` different prompts.

    Nothing where fewer than two prompts were answered.
    """
    firsts: dict[tuple[int, ...], tuple[int, ...]] = {}
    for turn in (t.turns[0] for group in groups for t in group.scored[:1] if t.turns):
        prompt, reply = _halves(turn)
        if prompt and reply and len(firsts) < MOST:
            firsts.setdefault(prompt, reply)
    if len(firsts) < 2:
        return {}
    prompts, replies = list(firsts), list(firsts.values())
    rows = [to_score(prompt, reply, "collapse", "collapse") for reply in replies for prompt in prompts]
    scored = (await trainer.score(rows, frozenset({"logprobs"}))).logprobs
    assert scored is not None
    sums = [float(np.nansum(logprobs.astype(np.float64))) for logprobs in scored]
    matrix = torch.tensor(sums, dtype=torch.float64).view(len(replies), len(prompts))
    return collapse(matrix, torch.tensor([len(reply) for reply in replies]))


def _halves(turn: Turn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What was shown, and what the policy replied."""
    *shown, reply = turn.segments
    return tuple(t for segment in shown for t in segment.tokens), reply.tokens
