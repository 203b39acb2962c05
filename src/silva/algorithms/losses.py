"""Policy-gradient losses, per token, over the trained tokens of a micro-batch laid out in one dimension.

There are no masks here: tokens without loss never arrive. There is no averaging either: the normaliser
of the whole update sits in each token's weight (`aggregation.py`), so that

    total = (weights_N * loss_N).sum()

has the same gradient however the update was cut into micro-batches. What is common to all losses
(correction, KL, entropy, metrics of the ratio) is added in `objective.py`.

A loss is a function, the settings it reads, and an entry in `LOSSES`. Settings stand here and not beside the
trainer, so this module must import neither torch nor numpy: help has to be instant.

| loss | gradient = factor * grad log p | beyond its bounds |
|---|---|---|
| reinforce | -A | none: exact on-policy only |
| clipped (PPO) | -A r | 0 where the ratio has already moved the way A wants |
| gspo | -A s, s of the whole row | as clipped, whole rows |
| cispo | -A clip(r) | bounded |
| aipo | -A r | 0 |
| dro | -A + kl_beta log r | pulled back, the further the more |

Where a ratio is above e^20 it counts as e^20, and has no gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from silva.algorithms.correction import bounded_ratio, over_rows
from silva.config.sections import Fraction, NotNegative, Section
from silva.errors import ConfigError, RecordError

if TYPE_CHECKING:
    from torch import Tensor

    Metrics = dict[str, Tensor]  # [N] each, detached
    LossFunction = Callable[..., tuple[Tensor, Metrics]]


@dataclass(frozen=True, eq=False)
class LossInputs:
    """What is known of N trained tokens: a loss takes what it needs of it as keyword arguments.

    Args:
        logprobs: [N] of the policy being trained at the sample's temperature, with gradient.
        old_logprobs: [N] of the trainer before the update if it scored them (sampler_logprobs is given
            then), else of the policy that sampled; NaN on tokens nobody sampled (expert tokens).
        advantages: [N].
        rows: [N] int64, which sample a token belongs to; samples are whole.
        reference_logprobs: [N] of the reference policy; needed if `kl_coef` is above 0.
        entropies: [N] in nats, with gradient; needed if `entropy_coef` is not 0.
        sampler_logprobs: [N] as recorded while sampling; needed for a `rollout_correction` with a weight.
        ages: [N] whole, version of the trainer minus that of the token; adds metrics by age. Worth giving
            if they differ within the update.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    rows: Tensor
    reference_logprobs: Tensor | None = None
    entropies: Tensor | None = None
    sampler_logprobs: Tensor | None = None
    ages: Tensor | None = None

    @property
    def behaviour_logprobs(self) -> Tensor:
        """[N] of the policy that sampled the tokens."""
        return self.old_logprobs if self.sampler_logprobs is None else self.sampler_logprobs

    def __post_init__(self) -> None:
        if self.logprobs.ndim != 1:
            raise RecordError(f"logprobs of LossInputs: got shape {tuple(self.logprobs.shape)}, expected [N]")
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and value.shape != self.logprobs.shape:
                raise RecordError(
                    f"{each.name} must align with logprobs of LossInputs: "
                    f"got {tuple(value.shape)}, expected {tuple(self.logprobs.shape)}"
                )


class LossSettings(Section):
    """What a loss reads: its keys stand in `[algorithm.loss]`. Subclasses say `type: Literal["name"]`."""

    type: str


@dataclass(frozen=True)
class Loss:
    """A loss: how it is set, and how it is computed.

    Args:
        settings: a class whose `type` is the name of the loss.
        function: takes what it names of `LossInputs`, and `settings` if it names them, as keyword arguments;
            returns a loss [N] with gradient and metrics [N] each, detached.

    Raises:
        ConfigError: the function names something else.
    """

    settings: type[LossSettings]
    function: LossFunction
    takes: frozenset[str] = field(init=False)  # names of its arguments
    required: frozenset[str] = field(init=False)  # those without a default

    def __post_init__(self) -> None:
        names = inspect.signature(self.function).parameters
        known = ("settings", *(each.name for each in fields(LossInputs)))
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(
                f"loss {self.settings.__name__}: its function takes {', '.join(unknown)}, expected some of "
                f"{', '.join(known)}"
            )
        needed = (name for name, each in names.items() if each.default is each.empty)
        object.__setattr__(self, "takes", frozenset(names))
        object.__setattr__(self, "required", frozenset(needed))

    @property
    def imitates(self) -> bool:
        """Whether it reads no advantages: it is for tokens that nobody need have sampled."""
        return "advantages" not in self.takes


class ReinforceLoss(LossSettings):
    """-A log p: exact for the first update of a batch only."""

    type: Literal["reinforce"] = "reinforce"


def reinforce(*, logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Metrics]:
    """-A log p (Williams 1992): the gradient is exact on-policy only; nothing corrects for staleness.

    Returns:
        loss [N]; no metrics.
    """
    return -advantages * logprobs, {}


class ClippedLoss(LossSettings):
    """The clipped surrogate of PPO, per token."""

    type: Literal["clipped"] = "clipped"
    clip_low: Fraction = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: NotNegative = 0.2
    """The ratio is clipped above 1 + clip_high (DAPO: 0.28)."""
    clip_dual: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio that counts if the advantage is negative (3 is common); null sets no limit."""
    balanced_clip_min_entropy: NotNegative | None = None
    """Tokens clipped above keep a bounded gradient if their entropy is at least this (AEPO: 0, all)."""

    @model_validator(mode="after")
    def _dual_is_above(self) -> ClippedLoss:
        if self.clip_dual is not None and self.clip_dual <= 1 + self.clip_high:
            raise ValueError(
                f"clip_dual: got {self.clip_dual}, expected more than 1 + clip_high ({self.clip_high})"
            )
        return self


def clipped(
    *,
    settings: ClippedLoss,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    entropies: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) with r = p / p_old (PPO, arXiv:1707.06347, eq. 7).

    `clip_high` above `clip_low` is DAPO's clip-higher (arXiv:2503.14476). `clip_dual` = c bounds the loss
    of tokens with A < 0 by -A c, so that one very unlikely old token cannot dominate (dual-clip PPO,
    arXiv:1912.09729, eq. 5). `balanced_clip_min_entropy` is AEPO's balanced clipping (arXiv:2510.14545):
    above 1 + high the bound becomes (1 + high) r / sg(r), of the same value, so that tokens with A > 0 and
    at least that entropy, in nats, keep the gradient -A (1 + high) grad log p. 0 is all tokens, as the
    authors' code has it (there with `clip_dual` 3). At r = 1 the gradient is that of `reinforce`.

    Returns:
        loss [N]; metric `clipped` (1 where the clip took the gradient away).

    Raises:
        RecordError: `balanced_clip_min_entropy` above 0 without entropies.
    """
    high, dual, least = settings.clip_high, settings.clip_dual, settings.balanced_clip_min_entropy
    ratio_N = bounded_ratio(logprobs - old_logprobs)
    loss_N, clipped_N = surrogate(ratio_N, advantages, 1 - settings.clip_low, 1 + high)
    if least is not None:
        balanced_N = (advantages > 0) & (ratio_N > 1 + high)
        if least > 0:
            if entropies is None:
                raise RecordError(
                    f"loss clipped with balanced_clip_min_entropy {least}: got no entropies, expected [N]"
                )
            balanced_N = balanced_N & (entropies >= least)
        bound_N = (1 + high) * (logprobs - logprobs.detach()).exp()
        loss_N = (-advantages * bound_N).where(balanced_N, loss_N)
        clipped_N = clipped_N & ~balanced_N
    if dual is not None:
        bad_N = advantages < 0
        loss_N = loss_N.minimum(-advantages * dual).where(bad_N, loss_N)
        clipped_N = clipped_N | (bad_N & (ratio_N > dual))
    return loss_N, {"clipped": clipped_N.to(loss_N.dtype)}


class GspoLoss(LossSettings):
    """The clipped surrogate by the length-normalised ratio of the whole row."""

    type: Literal["gspo"] = "gspo"
    clip_low: Fraction = 3e-4
    """The row's ratio is clipped below 1 - clip_low."""
    clip_high: NotNegative = 4e-4
    """The row's ratio is clipped above 1 + clip_high."""


def gspo(
    *, settings: GspoLoss, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Tensor
) -> tuple[Tensor, Metrics]:
    """`clipped` by the ratio of the whole row, s = exp(mean of log r) (GSPO, arXiv:2507.18071, eq. 7).

    In its token form (eq. 13 and 14) s_t = sg(s) p_t / sg(p_t): every token has the value s and its own
    gradient, which allows an advantage per token; where all are equal the two forms have one gradient.
    Bounds are the paper's (section 5.1), much tighter than a token's, as s is a mean. It belongs with
    `sequence_mean_token_mean`. Of a trajectory whose context was rewritten each row is a sequence.

    Returns:
        loss [N]; metric `clipped` (1 on the tokens of a row where the clip took the gradient away).
    """
    mean_N = over_rows((logprobs - old_logprobs).detach(), rows, "geometric")
    ratio_N = bounded_ratio(mean_N + (logprobs - logprobs.detach()))
    loss_N, clipped_N = surrogate(ratio_N, advantages, 1 - settings.clip_low, 1 + settings.clip_high)
    return loss_N, {"clipped": clipped_N.to(loss_N.dtype)}


class CispoLoss(LossSettings):
    """The ratio clipped as a weight, so that no token loses its gradient."""

    type: Literal["cispo"] = "cispo"
    clip_low: Fraction = 1.0
    """The weight is at least 1 - clip_low."""
    clip_high: NotNegative = 3.0
    """The weight is at most 1 + clip_high."""


def cispo(
    *, settings: CispoLoss, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor
) -> tuple[Tensor, Metrics]:
    """-sg(clip(r, 1 - low, 1 + high)) A log p: no token loses its gradient (CISPO, arXiv:2506.13585, eq. 4).

    Defaults as Tinker's, a weight in [0, 4]; the paper too has no lower bound. TRL's `epsilon_high` is the
    weight itself: 1 + clip_high (ScaleRL, arXiv:2510.13786, takes 5).

    Returns:
        loss [N]; metric `clipped` (1 where the weight was bounded).
    """
    ratio_N = bounded_ratio(logprobs - old_logprobs)
    weight_N = ratio_N.detach().clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -weight_N * advantages * logprobs, {"clipped": (weight_N != ratio_N).to(weight_N.dtype)}


class AipoLoss(LossSettings):
    """For stale samples: the ratio clipped on one side."""

    type: Literal["aipo"] = "aipo"
    max_ratio: Annotated[float, Field(ge=1)] = 8.0
    """Tokens with a larger ratio lose their gradient."""
    kl_tau: NotNegative = 0.0
    """Weight of (log r)^2, which pulls back to the policy that sampled (PRIME-RL, later: 1e-3)."""


def aipo(
    *, settings: AipoLoss, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor
) -> tuple[Tensor, Metrics]:
    """-min(r, max_ratio) A + kl_tau (log r)^2: clipped on one side (AIPO, LlamaRL, arXiv:2505.24034).

    As PRIME-RL had it at first, so that tokens above max_ratio lose their gradient (the paper keeps it, times
    max_ratio, which is `cispo` with clip_low 1 and clip_high max_ratio - 1); 8 is PRIME-RL's. From December
    2025 it masked by the ratio: `reject` {"token": [0.125, 8]}, see correction.py, with a kl_tau of 1e-3. Now
    it masks tokens whose probability has moved by over 0.2 the way A wants, which no setting here does.

    Returns:
        loss [N]; metric `clipped` (1 where r is above max_ratio).
    """
    ratio_N = bounded_ratio(logprobs - old_logprobs)
    loss_N = -ratio_N.clamp(max=settings.max_ratio) * advantages
    if settings.kl_tau:
        loss_N = loss_N + settings.kl_tau * (logprobs - old_logprobs).square()
    return loss_N, {"clipped": (ratio_N > settings.max_ratio).to(ratio_N.dtype)}


class DroLoss(LossSettings):
    """Off-policy by a quadratic pull towards the policy that sampled."""

    type: Literal["dro"] = "dro"
    kl_beta: NotNegative = 0.05
    """Weight of (log r)^2 / 2, an estimate of the KL to the policy that sampled."""


def dro(
    *, settings: DroLoss, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor
) -> tuple[Tensor, Metrics]:
    """-(A log p - kl_beta / 2 (log r)^2): off-policy by a quadratic pull to p_old (DRO, arXiv:2405.19107).

    The paper's squared error, divided by beta and without what is constant in p, with the advantage in
    place of reward minus value; beta as in Tinker's example.

    Returns:
        loss [N]; no metrics.
    """
    pull_N = (logprobs - old_logprobs).square()
    return settings.kl_beta / 2 * pull_N - advantages * logprobs, {}


class CrossEntropyLoss(LossSettings):
    """-log p: imitation, without advantages."""

    type: Literal["cross_entropy"] = "cross_entropy"
    weighting: Literal["none", "dft"] = "none"
    """`dft`: each token weighs its own probability, so that unlikely ones pull less (DFT)."""


def cross_entropy(*, settings: CrossEntropyLoss, logprobs: Tensor) -> tuple[Tensor, Metrics]:
    """-log p: for tokens to imitate; with `dft` -sg(p) log p (Wu et al. 2025, arXiv:2508.05629).

    Returns:
        loss [N]; metric `nll`, -log p in nats.
    """
    nll_N = -logprobs.detach()
    weights_N = (-nll_N).exp() if settings.weighting == "dft" else 1.0
    return -weights_N * logprobs, {"nll": nll_N}


LOSSES: dict[str, Loss] = {
    "reinforce": Loss(ReinforceLoss, reinforce),
    "clipped": Loss(ClippedLoss, clipped),
    "gspo": Loss(GspoLoss, gspo),
    "cispo": Loss(CispoLoss, cispo),
    "aipo": Loss(AipoLoss, aipo),
    "dro": Loss(DroLoss, dro),
    "cross_entropy": Loss(CrossEntropyLoss, cross_entropy),
}


def surrogate(
    ratio_N: Tensor, advantages_N: Tensor, low: Tensor | float, high: Tensor | float
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate of PPO by bounds of the ratio, and where it has no gradient, both [N]."""
    loss_N = (-advantages_N * ratio_N).maximum(-advantages_N * ratio_N.clamp(low, high))  # type: ignore[arg-type]
    too_good_N = (advantages_N > 0) & (ratio_N > high)
    too_bad_N = (advantages_N < 0) & (ratio_N < low)
    return loss_N, too_good_N | too_bad_N
