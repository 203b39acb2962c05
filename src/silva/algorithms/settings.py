"""What an algorithm can set; recipes.py names settings that go together.

    rewards ── penalties ──> advantage ── credit, tree, entropy, whiten, clip ──> loss ── correction, KL
       └── filters: which groups are worth it

The keys of a loss, filter, controller or correction stand beside the function that reads them. compose.py
applies them; docs/algorithms.md has formulas and sources.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from silva.algorithms.advantages import ADVANTAGES, OVER
from silva.algorithms.control import AdaptiveEntropy, AdaptiveKl, AdaptiveTemperature
from silva.algorithms.filters import DifficultyPools, VarianceFilter
from silva.algorithms.losses import LOSSES, LossSettings
from silva.algorithms.objective import Terms
from silva.config.field_types import default_of, plain, refuse_idle
from silva.config.sections import Above0, Fraction, Natural, NotNegative, Positive, PretrainedModel, Section

CREDITS: dict[str, Callable[..., Any] | None] = {
    "trajectory": None, "turn": None, "gae": None, "bi_level_gae": None,
}  # fmt: skip
"""How advantages differ within a trajectory. None: compose.py knows it. A function is of a user's own: from
samples, groups and the recipe to the samples of scored trajectories with `advantages` [T]."""

if TYPE_CHECKING:
    from silva.algorithms.compose import ControllerState
    from silva.types import LossSpec

    AdvantageName = str
    OverName = str
    CreditName = str
    AnyLoss = LossSettings
else:
    AdvantageName, OverName = Literal[tuple(ADVANTAGES)], Literal[tuple(OVER)]
    CreditName = Literal[tuple(CREDITS)]
    AnyLoss = Annotated[reduce(or_, (loss.settings for loss in LOSSES.values())), Field(discriminator="type")]

Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]


class AdvantageKeys(Section):
    """How rewards become one advantage for each token."""

    advantage: AdvantageName
    """Baseline of a trajectory's reward."""
    advantage_over: OverName = "group"
    """What the baseline is taken over."""
    credit: CreditName = "trajectory"
    """One advantage a trajectory, one a turn (discounted returns), or one a token, with a critic."""
    gamma: Fraction = 1.0
    """Discount: per turn with credit = "turn", per token with a critic."""
    lam: Fraction = 1.0
    """GAE's lambda of tokens."""
    turn_gamma: Fraction = 0.95
    """Discount per turn of bi_level_gae (0.95 is RAGEN's)."""
    turn_lam: Fraction = 1.0
    """GAE's lambda of turns of bi_level_gae."""
    bootstrap: bool = True
    """GAE: after an episode that a limit cut off, add the value of the next state; false: 0, as in RAGEN."""
    tree_credit: Literal["soft", "hard"] = "soft"
    """What a turn that branches share gets: each leaf's own advantage, or their mean."""
    entropy_advantage: NotNegative = 0.0
    """Share by which a standard deviation of entropy raises a token's advantage (AEPO: 0.2)."""
    whiten: Literal["tokens", "trajectories"] | None = None
    """Give the advantages of a batch mean 0 and std 1, counting each token, or each trajectory, once."""
    advantage_clip: tuple[float, float] | None = None
    """Bounds of the advantages (RAGEN's asymmetric clip: [-1, 3])."""

    use_rewards: bool = True
    """False: nothing but the KL to the reference counts (distillation)."""
    kl_reward_coef: NotNegative = 0.0
    """Weight of the KL to the reference as a reward of each token."""
    kl_reward_gamma: Fraction = 0.0
    """Discount with which a token also answers for the KL of later ones; 0: for its own alone."""
    overlong_buffer: Fraction = 0.0
    """Share of the room of a reply, at its end, over which length costs up to a reward of 1 (DAPO: 0.2)."""
    length_penalty: NotNegative = 0.0
    """Share of a group's mean reward that its longest answer loses (PRIME-RL: 0.25)."""


class ReplaySettings(Section):
    """Groups of earlier steps that are trained once more. What another policy sampled is corrected for by a
    loss with a ratio, or by `rollout_correction`."""

    groups: Positive = 4
    """Trained in a step besides its own."""
    max_staleness: Positive = 4
    """How many versions older the policy may be that sampled them."""
    capacity: Positive = 256
    """Groups that are kept; the oldest make room."""


class Algorithm(Terms, AdvantageKeys):  # pydantic lists the keys of the last base first
    """What all recipes can set."""

    loss: AnyLoss
    """`reinforce` is exact only for the first update of a batch; the others bound or correct later ones."""
    aggregation: Aggregation
    """How the losses of tokens become one number."""
    aggregation_constant: Above0 | None = None
    """What `constant` divides by; null: trajectories times the longest answer possible (Dr. GRPO)."""

    reference: PretrainedModel | None = None
    """Another model as the reference; null: the policy as it was before training."""
    reference_refresh: Natural = 0
    """Steps after which the policy of the moment becomes the reference; 0: never."""
    adaptive_kl: AdaptiveKl | None = None
    adaptive_entropy: AdaptiveEntropy | None = None
    adaptive_temperature: AdaptiveTemperature | None = None

    drop_zero_variance: bool = True
    """Leave out groups whose raw rewards are all equal."""
    difficulty_range: tuple[float, float] | None = None
    """Leave out groups whose mean raw reward is outside these bounds."""
    difficulty_pools: DifficultyPools | None = None
    variance_filter: VarianceFilter | None = None
    """Then keep those that vary most."""
    oversample: Annotated[float, Field(ge=1)] = 1.0
    """How many times groups_per_step are played for the filters to choose from."""
    replay: ReplaySettings | None = None
    """Train groups of earlier steps again."""
    early_stop: Natural = 0
    """End the run after so many evaluations in a row without a new best one; 0: never. The best checkpoint
    stays (`checkpoint.keep_best`)."""
    max_refills: Natural = 2
    """How many times a step may ask for groups in place of those left out one by one."""

    @model_validator(mode="after")
    def _groups_are_consistent(self) -> Algorithm:
        low, high = self.difficulty_range or (0.0, 0.0)
        if not low <= high:
            raise ValueError(f"difficulty_range: got [{low}, {high}], expected the lower bound first")
        if self.drop_zero_variance and not self.relative:
            raise ValueError(
                f'drop_zero_variance: got true with advantage = "{self.advantage}", credit = "{self.credit}" '
                f'and advantage_over = "{self.advantage_over}", expected false: without a baseline of the '
                "group, groups of equal rewards do teach something"
            )
        return self

    @model_validator(mode="after")
    def _advantages_are_consistent(self) -> Algorithm:
        if self.credit == "turn" and self.advantage == "running":
            raise ValueError('advantage: got "running" with credit = "turn", expected credit = "trajectory"')
        if self.critic and self.advantage != "reward":
            raise ValueError(
                f'advantage: got "{self.advantage}" with credit = "{self.credit}", expected "reward": there '
                "the critic is the baseline"
            )
        if not self.use_rewards and not self.kl_reward_coef:
            raise ValueError(
                "use_rewards: got false with kl_reward_coef = 0, expected something to learn from"
            )
        if self.credit != "trajectory" and not self.use_rewards:
            raise ValueError(f'use_rewards: got false with credit = "{self.credit}", expected "trajectory"')
        if self.critic and self.imitates:
            raise ValueError(
                f'credit: got "{self.credit}" with loss.type = "{self.loss.type}", expected "trajectory": '
                "this loss reads no advantages, and needs no critic"
            )
        low, high = self.advantage_clip or (0.0, 1.0)
        if not low < high:
            raise ValueError(f"advantage_clip: got [{low}, {high}], expected a lower and a higher bound")
        return self

    @model_validator(mode="after")
    def _loss_is_consistent(self) -> Algorithm:
        if self.aggregation_constant is not None and self.aggregation != "constant":
            raise ValueError(
                f"aggregation_constant: got {self.aggregation_constant} with aggregation = "
                f'"{self.aggregation}", expected one only with "constant"'
            )
        if self.imitates and self.rollout_correction is not None:
            raise ValueError(
                f'rollout_correction: got one with loss.type = "{self.loss.type}", expected none: this loss '
                "does not depend on who sampled"
            )
        if self.reference_refresh and self.reference is not None:
            raise ValueError(
                f"reference_refresh: got {self.reference_refresh} with a `reference`, expected one of the two"
            )
        if self.reference_refresh and not self.refers:
            raise ValueError(
                f"reference_refresh: got {self.reference_refresh} with kl_coef = 0 and kl_reward_coef = 0, "
                "expected 0: no reference is used"
            )
        if self.adaptive_kl and not self.kl_coef:
            raise ValueError("adaptive_kl: got it with kl_coef = 0, expected more: it moves the coefficient")
        if self.replay is not None and self.on_policy and self.rollout_correction is None:
            raise ValueError(
                f'replay: got loss.type = "{self.loss.type}", which takes stale samples for its own; '
                "expected [algorithm.rollout_correction], or a loss with a ratio"
            )
        return self

    @model_validator(mode="after")
    def _every_key_does_something(self) -> Algorithm:
        refuse_idle(self, self._idle, Algorithm)
        return self

    @property
    def _idle(self) -> dict[str, str]:
        """Keys that the others leave nothing to do, and which others."""
        credit, loss = f'credit = "{self.credit}"', f'loss.type = "{self.loss.type}"'
        of_advantages = (
            "gamma", "tree_credit", "entropy_advantage", "whiten", "advantage_clip", "advantage_over",
            "kl_reward_coef", "overlong_buffer", "length_penalty",
        )  # fmt: skip
        correction = self.rollout_correction
        empty = correction is not None and not (correction.weight or correction.reject)
        found = [
            (self.credit == "trajectory", credit, ("gamma",)),
            (not self.critic, credit, ("lam", "bootstrap")),
            (self.credit != "bi_level_gae", credit, ("turn_gamma", "turn_lam")),
            (self.critic, credit, ("advantage_over", "kl_reward_gamma")),
            (self.advantage == "running", 'advantage = "running"', ("advantage_over",)),
            (self.advantage == "reward", 'advantage = "reward"', ("advantage_over",)),
            (not self.kl_reward_coef, "kl_reward_coef = 0", ("kl_reward_gamma",)),
            (not self.refers, "kl_coef = 0 and kl_reward_coef = 0", ("reference",)),
            (not self.kl_coef, "kl_coef = 0", ("kl_estimator", "kl_bias_correction")),
            (not self.use_rewards, "use_rewards = false",
             ("advantage", "advantage_over", "overlong_buffer", "length_penalty")),
            (empty and self.on_policy, f"neither weight nor reject, and {loss}", ("rollout_correction",)),
            (self.imitates, loss, (*of_advantages, "kl_bias_correction")),
        ]  # fmt: skip
        return {key: why for holds, why, keys in found if holds for key in keys}

    @property
    def notes(self) -> list[str]:
        """Which keys of the recipe's loss do not apply because another loss took its place."""
        own: LossSettings = type(self).model_fields["loss"].default
        if own.type == self.loss.type:
            return []
        lost = [
            f"{name} = {getattr(own, name)}"
            for name, field in type(own).model_fields.items()
            if plain(getattr(own, name)) != default_of(field) and name not in self.loss.model_fields_set
        ]
        if not lost:
            return []
        return [
            f'algorithm.loss = "{self.loss.type}" in place of "{own.type}": {", ".join(lost)} of the recipe '
            "does not apply"
        ]

    @property
    def relative(self) -> bool:
        """Whether a group of equal rewards gets advantages of 0."""
        return (
            self.advantage_over == "group"
            and ADVANTAGES[self.advantage].zero_if_equal
            and not self.critic
            and not self.kl_reward_coef
        )

    @property
    def on_policy(self) -> bool:
        """Whether the loss takes every token for the policy's own: it has no ratio to who sampled it."""
        return not self.imitates and "old_logprobs" not in LOSSES[self.loss.type].takes

    @property
    def imitates(self) -> bool:
        """Whether the loss reads no advantages."""
        return LOSSES[self.loss.type].imitates

    @property
    def critic(self) -> bool:
        return self.credit in ("gae", "bi_level_gae")

    @property
    def bootstraps(self) -> bool:
        """Whether the critic has to score the states in which episodes were cut off."""
        return self.critic and self.bootstrap

    @property
    def needs(self) -> frozenset[str]:
        """What the trainer has to score before the update: names of fields of `Signals`."""
        needs = {"reference_logprobs"} if self.kl_reward_coef else set()
        if self.critic:
            needs.add("values")
        if self.rollout_correction is not None:
            needs.add("logprobs")
        return frozenset(needs)

    @property
    def refers(self) -> bool:
        """Whether a reference policy is needed."""
        return bool(self.kl_coef or self.kl_reward_coef)

    def loss_spec(self, state: ControllerState | None = None) -> LossSpec:
        """The loss of the next update; `state` holds what controllers have set (compose.py)."""
        from silva.types import LossSpec  # numpy: not for help

        params = {name: plain(getattr(self, name)) for name in Terms.model_fields}
        params |= {
            name: value for name, value in (state or {}).items() if name in ("kl_coef", "entropy_coef")
        }
        own = plain(self.loss)
        return LossSpec(own.pop("type"), {**own, **params})
