"""The recipes: a `type` alone is a full setting of `Algorithm`, and every key may be overridden.

One entry a recipe: what it is and where it comes from, and how its defaults differ from those of `Algorithm`
and of its loss. docs/algorithms.md has them in one table.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

from pydantic import create_model

from silva.algorithms.filters import VarianceFilter
from silva.algorithms.losses import (
    AipoLoss,
    CispoLoss,
    ClippedLoss,
    CrossEntropyLoss,
    DroLoss,
    GspoLoss,
    ReinforceLoss,
)
from silva.algorithms.settings import Algorithm


def _recipe(type: str, says: str, base: type[Algorithm] = Algorithm, **defaults: Any) -> type[Algorithm]:
    fields: dict[str, Any] = {"type": (Literal[type], type)}
    for name, default in defaults.items():
        info = copy.copy(base.model_fields[name])
        info.default = default
        fields[name] = (info.annotation, info)
    words = "".join(part.capitalize() for part in type.split("_"))
    # else pydantic looks through the source for docstrings of these fields, which have none: 30 ms each
    quick = {"use_attribute_docstrings": False}
    return create_model(
        words, __base__=base, __doc__=says, __module__=__name__, __cls_kwargs__=quick, **fields
    )


Reinforce = _recipe(
    "reinforce", "Policy gradient with the mean of the group as baseline; every token counts the same.",
    advantage="mean", loss=ReinforceLoss(), aggregation="token_mean",
)  # fmt: skip

ReinforcePp = _recipe(
    "reinforce_pp", "PPO's clip without critic or group; the batch is whitened (arXiv:2501.03262).",
    advantage="reward", whiten="tokens", loss=ClippedLoss(), aggregation="token_mean",
    drop_zero_variance=False,
)  # fmt: skip

ReinforcePpBaseline = _recipe(
    "reinforce_pp_baseline", "REINFORCE++ with the mean of the group as baseline (arXiv:2501.03262).",
    advantage="mean", whiten="tokens", loss=ClippedLoss(), aggregation="token_mean",
)  # fmt: skip

Rloo = _recipe(
    "rloo", "REINFORCE against the others of the group, a sequence as one action (arXiv:2402.14740).",
    advantage="leave_one_out", loss=ReinforceLoss(), aggregation="sequence_mean_token_sum",
)  # fmt: skip

Grpo = _recipe(
    "grpo", "Group-relative policy optimisation, without its KL, as is usual by now (arXiv:2402.03300).",
    advantage="mean_std", loss=ClippedLoss(), aggregation="sequence_mean_token_mean",
)  # fmt: skip

DrGrpo = _recipe(
    "dr_grpo", "GRPO without division by std or by a trajectory's length (arXiv:2503.20783).",
    advantage="mean", loss=ClippedLoss(), aggregation="constant",
)  # fmt: skip

Dapo = _recipe(
    "dapo", "GRPO with clip-higher, refills, overlong shaping and token mean (arXiv:2503.14476).",
    advantage="mean_std", loss=ClippedLoss(clip_high=0.28), aggregation="token_mean", overlong_buffer=0.2,
    max_refills=8,
)  # fmt: skip

Gspo = _recipe(
    "gspo", "GRPO with the length-normalised ratio of the whole row (arXiv:2507.18071).",
    advantage="mean_std", loss=GspoLoss(), aggregation="sequence_mean_token_mean",
)  # fmt: skip

Cispo = _recipe(
    "cispo", "The ratio clipped as a weight, so that no token loses its gradient (arXiv:2506.13585).",
    advantage="mean_std", loss=CispoLoss(), aggregation="token_mean",
)  # fmt: skip

Opo = _recipe(
    "opo", "On-policy, with the length-weighted baseline of least variance (arXiv:2505.23585).",
    advantage="length_weighted", loss=ReinforceLoss(), aggregation="token_mean",
)  # fmt: skip

Aipo = _recipe(
    "aipo", "For stale samples: the ratio clipped on one side (LlamaRL, arXiv:2505.24034).",
    advantage="mean", loss=AipoLoss(), aggregation="token_mean",
)  # fmt: skip

Gpg = _recipe(
    "gpg", "Policy gradient with the mean of the batch as baseline (MinRL's; after arXiv:2504.02546).",
    advantage="mean", advantage_over="batch", loss=ReinforceLoss(), aggregation="token_mean",
    drop_zero_variance=False,
)  # fmt: skip

MaxRl = _recipe(
    "max_rl", "Rewards relative to the group's rate of success: hard tasks weigh more (arXiv:2602.02710).",
    advantage="max_rl", loss=ClippedLoss(), aggregation="token_mean",
)  # fmt: skip

Ppo = _recipe(
    "ppo", "Proximal policy optimisation with a critic and GAE over tokens (arXiv:1707.06347).",
    advantage="reward", credit="gae", whiten="tokens", loss=ClippedLoss(clip_dual=3.0),
    aggregation="token_mean", drop_zero_variance=False,
)  # fmt: skip

Starpo = _recipe(
    "starpo", "PPO over trajectories of several turns, with a KL, as in RAGEN (arXiv:2504.20073).",
    base=Ppo, kl_coef=0.001, kl_estimator="k1", entropy_coef=0.001, bootstrap=False,
)  # fmt: skip

StarpoS = _recipe(
    "starpo_s", "StarPO on the quarter of the groups that vary most, no KL, clip-higher (arXiv:2504.20073).",
    base=Starpo, kl_coef=0.0, loss=ClippedLoss(clip_high=0.28, clip_dual=3.0), oversample=4.0,
    variance_filter=VarianceFilter(keep="top_fraction", value=0.25),
)  # fmt: skip

BiLevelGae = _recipe(
    "bi_level_gae", "PPO with GAE over turns, then over the tokens of each (VAGEN, arXiv:2510.16907; RAGEN).",
    base=Ppo, credit="bi_level_gae", bootstrap=False,
)  # fmt: skip

Arpo = _recipe(
    "arpo", "GRPO on trees; each leaf trains what it shares with its own advantage (arXiv:2507.19849).",
    advantage="mean_std", loss=ClippedLoss(clip_dual=3.0), aggregation="token_mean",
)  # fmt: skip

Aepo = _recipe(
    "aepo", "ARPO with entropy-balanced clipping and entropy-aware advantages (arXiv:2510.14545).",
    base=Arpo, loss=ClippedLoss(clip_dual=3.0, balanced_clip_min_entropy=0.0), entropy_advantage=0.2,
)  # fmt: skip

ActPrm = _recipe(
    "act_prm", "Thoughts by how likely they make the known action, as shares of a group (Act-PRM).",
    advantage="share", loss=ReinforceLoss(), aggregation="token_mean", drop_zero_variance=False,
    kl_coef=0.01, early_stop=3,
)  # fmt: skip

ActPrmProbs = _recipe(
    "act_prm_probs", "Act-PRM with the probability of the action itself as the advantage (action_probs).",
    base=ActPrm, advantage="reward",
)  # fmt: skip

Dro = _recipe(
    "dro", "Off-policy by a quadratic pull towards the sampler (arXiv:2405.19107).",
    advantage="mean", loss=DroLoss(), aggregation="token_mean",
)  # fmt: skip

Distillation = _recipe(
    "distillation", "The reverse KL to another model, the `reference`, is all the reward (arXiv:2306.13649).",
    advantage="reward", use_rewards=False, kl_reward_coef=1.0, loss=ReinforceLoss(), aggregation="token_mean",
    drop_zero_variance=False,
)  # fmt: skip

CrossEntropy = _recipe(
    "cross_entropy", "Plain imitation of what was played, for rollouts of experts or chosen by a filter.",
    advantage="reward", loss=CrossEntropyLoss(), aggregation="token_mean", drop_zero_variance=False,
)  # fmt: skip
