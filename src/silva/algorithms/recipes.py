"""Settings of the algorithms: a `type` alone is a full recipe; every field may be overridden."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from silva.config.sections import Natural, Section

if TYPE_CHECKING:
    from silva.types import LossSpec

Advantage = Literal["mean", "mean_std", "leave_one_out", "raw"]
Loss = Literal["reinforce", "clipped"]
Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]
NotNegative = Annotated[float, Field(ge=0)]


class Algorithm(Section):
    """What all recipes can set. Names are keys of ADVANTAGES, LOSSES, KL_ESTIMATORS and AGGREGATIONS."""

    advantage: Advantage
    """Baseline of a trajectory's reward, from its group."""
    loss: Loss
    """`reinforce` is exact only for the first update of a batch; `clipped` corrects later ones."""
    aggregation: Aggregation
    """How the losses of tokens become one number."""
    aggregation_constant: Annotated[float, Field(gt=0)] | None = None
    """What `aggregation = "constant"` divides by."""
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """The probability ratio is clipped below 1 - clip_low."""
    clip_high: NotNegative = 0.2
    """The probability ratio is clipped above 1 + clip_high."""
    clip_dual: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio that counts where the advantage is negative (3 is common); null sets no limit."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL to the model before training; 0 needs no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimator: k1 (high variance), k2 (biased), k3 (low variance)."""
    kl_correction: bool = True
    """Weight it by the probability ratio, for the gradient of its mean; without it k1 regularises nothing."""
    entropy_coef: NotNegative = 0.0
    """Weight of the bonus for the entropy of the token distribution, in nats."""
    drop_zero_variance: bool = True
    """Leave out groups whose raw rewards are all equal."""
    max_refills: Natural = 2
    """How many times a step may ask for groups in place of those left out."""

    @model_validator(mode="after")
    def _consistent(self) -> Algorithm:
        if (self.aggregation == "constant") != (self.aggregation_constant is not None):
            raise ValueError(
                f"aggregation_constant: got {self.aggregation_constant} with aggregation = "
                f'"{self.aggregation}", expected a number with "constant" and none without'
            )
        if self.clip_dual is not None and self.clip_dual <= 1 + self.clip_high:
            raise ValueError(
                f"clip_dual: got {self.clip_dual}, expected more than 1 + clip_high ({self.clip_high})"
            )
        if self.advantage == "raw" and self.drop_zero_variance:
            raise ValueError(
                'drop_zero_variance: got true with advantage = "raw", expected false: without a baseline '
                "groups of equal rewards do teach something"
            )
        return self

    @property
    def needs(self) -> frozenset[str]:
        """What the trainer has to score before the update: names of fields of `Signals`."""
        return frozenset({"reference_logprobs"} if self.kl_coef else ())

    def loss_spec(self) -> LossSpec:
        from silva.types import LossSpec  # numpy: not for help

        params: dict[str, float | str | None] = {
            "kl_coef": self.kl_coef,
            "kl_estimator": self.kl_estimator,
            "kl_correction": self.kl_correction,
            "entropy_coef": self.entropy_coef,
        }
        if self.loss == "clipped":
            params |= {"clip_low": self.clip_low, "clip_high": self.clip_high, "clip_dual": self.clip_dual}
        return LossSpec(self.loss, params)


class Reinforce(Algorithm):
    """Policy gradient with the mean of the group as baseline; every token counts the same."""

    type: Literal["reinforce"] = "reinforce"
    advantage: Advantage = "mean"
    """Baseline of a trajectory's reward, from its group."""
    loss: Loss = "reinforce"
    """`reinforce` is exact only for the first update of a batch; `clipped` corrects later ones."""
    aggregation: Aggregation = "token_mean"
    """How the losses of tokens become one number."""


class Rloo(Algorithm):
    """REINFORCE with the others of the group as baseline, a sequence as one action (arXiv:2402.14740)."""

    type: Literal["rloo"] = "rloo"
    advantage: Advantage = "leave_one_out"
    """Baseline of a trajectory's reward, from its group."""
    loss: Loss = "reinforce"
    """`reinforce` is exact only for the first update of a batch; `clipped` corrects later ones."""
    aggregation: Aggregation = "sequence_mean_token_sum"
    """How the losses of tokens become one number."""


class Grpo(Algorithm):
    """Group-relative policy optimisation (arXiv:2402.03300), without its KL, as is usual by now."""

    type: Literal["grpo"] = "grpo"
    advantage: Advantage = "mean_std"
    """Baseline of a trajectory's reward, from its group."""
    loss: Loss = "clipped"
    """`reinforce` is exact only for the first update of a batch; `clipped` corrects later ones."""
    aggregation: Aggregation = "sequence_mean_token_mean"
    """How the losses of tokens become one number."""
