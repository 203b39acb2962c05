"""What an algorithm can set; recipes.py names settings that go together.

    rewards ── shaping ──> advantage ── credit, tree, entropy, whiten, clip ──> loss ── correction, KL
       └── filter: which groups are worth it

compose.py applies them; docs/algorithms.md has formulas and sources.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from silva.config.sections import Fraction, Natural, PretrainedModel, Section

if TYPE_CHECKING:
    from collections.abc import Mapping

    from silva.types import LossSpec

Advantage = Literal[
    "mean", "mean_std", "leave_one_out", "length_weighted", "max_rl", "share", "running", "raw"
]
Loss = Literal["reinforce", "clipped", "gspo", "cispo", "aipo", "dro", "cross_entropy"]
Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]
Credit = Literal["trajectory", "turn", "gae", "bi_level_gae"]
Over = Literal["group", "environment", "batch"]
Level = Literal["token", "geometric", "product", "any"]
NotNegative = Annotated[float, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]

# What each loss reads of the fields below.
LOSS_FIELDS: dict[str, tuple[str, ...]] = {
    "reinforce": (),
    "clipped": ("clip_low", "clip_high", "clip_dual", "clip_balanced_above"),
    "gspo": ("clip_low", "clip_high"),
    "cispo": ("clip_low", "clip_high"),
    "aipo": ("delta", "kl_tau"),
    "dro": ("beta",),
    "cross_entropy": (),
}


class Filter(Section):
    """Which groups of a batch are trained, by the standard deviation of their raw rewards."""

    keep: Literal["top_p", "top_k", "min_p", "nucleus"]
    """A share of the groups, a number, those above a share of the largest, or a share of the sum."""
    value: Above0


class Pools(Section):
    """Tasks that were too easy or too hard come again only now and then, once all have been played."""

    easy: float = 1.0
    """Mean raw reward of a group from which its task is easy."""
    hard: float = 0.0
    """Mean raw reward down from which it is hard."""
    easy_share: Fraction = 0.1
    """How often an easy task is played when its turn comes again."""
    hard_share: Fraction = 0.5
    """How often a hard one is."""

    @model_validator(mode="after")
    def _apart(self) -> Pools:
        if not self.hard < self.easy:
            raise ValueError(f"easy: got {self.easy} with hard = {self.hard}, expected more")
        return self


class Correction(Section):
    """For a sampler that computes otherwise than the trainer: w = p_trainer / p_sampler before the update."""

    weight: Literal["truncate", "mask"] | None = "truncate"
    """`truncate` bounds w (TIS); `mask` drops tokens outside the bounds (IcePop); null only rejects."""
    level: Literal["token", "geometric", "product"] = "token"
    """Of a token, or the mean or product over its row."""
    low: NotNegative | None = None
    """null: 0 to truncate, 0.5 to mask."""
    high: Above0 | None = None
    """null: 2 to truncate, 5 to mask."""
    reject: dict[Level, tuple[float | None, float | None]] = {}  # noqa: RUF012 - pydantic copies it
    """Bounds of p_now / p_sampler outside which a token, or its whole row, is dropped."""


class AdaptiveTemperature(Section):
    """Sample hotter while rewards are alike: T * reference / std of the last batch (MinRL)."""

    reference: Above0 = 1.0
    low: Above0 = 0.6
    high: Above0 = 2.0


class EntropyTarget(Section):
    """Move entropy_coef, from 0, so that the entropy stays above a target (Skywork-OR1)."""

    target: Above0 = 0.2
    """In nats a token."""
    step: Above0 = 1e-4
    high: Above0 = 5e-3


class AdaptiveKl(Section):
    """Move kl_coef towards a KL per token (arXiv:1909.08593)."""

    target: Above0 = 0.01
    horizon: Above0 = 10.0
    """In updates."""


class Algorithm(Section):
    """What all recipes can set."""

    advantage: Advantage
    """Baseline of a trajectory's reward."""
    advantage_over: Over = "group"
    """What the baseline is taken over."""
    credit: Credit = "trajectory"
    """One advantage a trajectory, one a turn (discounted returns), or one a token, with a critic."""
    gamma: Fraction = 1.0
    """Discount: per turn with credit = "turn", per token with a critic."""
    lam: Fraction = 1.0
    """GAE's lambda of tokens."""
    turn_gamma: Fraction = 0.95
    """Discount per turn of bi_level_gae."""
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
    overlong: Fraction = 0.0
    """Share of the longest answer, at its end, over which length costs up to a reward of 1 (DAPO: 0.2)."""
    length_penalty: NotNegative = 0.0
    """Share of a group's mean reward that its longest answer loses (PRIME-RL: 0.25)."""

    loss: Loss
    """`reinforce` is exact only for the first update of a batch; the others bound or correct later ones."""
    aggregation: Aggregation
    """How the losses of tokens become one number."""
    aggregation_constant: Above0 | None = None
    """What `constant` divides by; null: trajectories times the longest answer possible (Dr. GRPO)."""
    clip_low: Fraction | None = None
    """The ratio is clipped below 1 - clip_low; null: the loss's own bound (0.2, gspo 0.0003, cispo 1)."""
    clip_high: NotNegative | None = None
    """The ratio is clipped above 1 + clip_high; null: the loss's own bound (0.2, gspo 0.0004, cispo 3)."""
    clip_dual: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio that counts where the advantage is negative (3 is common); null sets no limit."""
    clip_balanced_above: NotNegative | None = None
    """Clipped tokens of at least this entropy keep a bounded gradient (AEPO: 0, all of them)."""
    delta: Annotated[float, Field(ge=1)] = 8.0
    """Largest ratio of `aipo`."""
    kl_tau: NotNegative = 0.0
    """Weight of the squared log-ratio in `aipo`."""
    beta: NotNegative = 0.05
    """Weight of the squared log-ratio in `dro`."""
    correction: Correction | None = None
    """Correct for a sampler whose probabilities are not the trainer's; costs a forward pass."""

    kl_coef: NotNegative = 0.0
    """Weight of the KL to the reference in the loss; 0 needs no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimator: k1 (high variance), k2 (biased), k3 (low variance)."""
    kl_correction: bool = True
    """Weight it by the probability ratio, for the gradient of its mean; without it k1 regularises nothing."""
    adaptive_kl: AdaptiveKl | None = None
    reference: PretrainedModel | None = None
    """The reference or teacher; null: the policy as it was before training."""
    reference_refresh: Natural = 0
    """Steps after which the policy of the moment becomes the reference; 0: never."""
    entropy_coef: NotNegative = 0.0
    """Weight of the bonus for the entropy of the token distribution, in nats."""
    entropy_target: EntropyTarget | None = None
    temperature: AdaptiveTemperature | None = None

    drop_zero_variance: bool = True
    """Leave out groups whose raw rewards are all equal."""
    difficulty: tuple[float, float] | None = None
    """Leave out groups whose mean raw reward is outside these bounds."""
    pools: Pools | None = None
    filter: Filter | None = None
    """Then keep those that vary most."""
    oversample: Annotated[float, Field(ge=1)] = 1.0
    """How many times groups_per_step are played for the filters to choose from."""
    max_refills: Natural = 2
    """How many times a step may ask for groups in place of those left out one by one."""

    @model_validator(mode="after")
    def _consistent(self) -> Algorithm:
        if self.aggregation_constant is not None and self.aggregation != "constant":
            raise ValueError(
                f"aggregation_constant: got {self.aggregation_constant} with aggregation = "
                f'"{self.aggregation}", expected one only with "constant"'
            )
        for name in sorted(
            {n for names in LOSS_FIELDS.values() for n in names} - set(LOSS_FIELDS[self.loss])
        ):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f'{name}: got {getattr(self, name)} with loss = "{self.loss}", which does not read it'
                )
        high = 0.2 if self.clip_high is None else self.clip_high
        if self.loss == "clipped" and self.clip_dual is not None and self.clip_dual <= 1 + high:
            raise ValueError(f"clip_dual: got {self.clip_dual}, expected more than 1 + clip_high ({high})")
        if self.drop_zero_variance and not self.relative:
            raise ValueError(
                f'drop_zero_variance: got true with advantage = "{self.advantage}", credit = "{self.credit}" '
                f'and advantage_over = "{self.advantage_over}", expected false: without a baseline of the '
                "group, groups of equal rewards do teach something"
            )
        if self.credit == "turn" and self.advantage == "running":
            raise ValueError('advantage: got "running" with credit = "turn", expected credit = "trajectory"')
        if self.credit in ("gae", "bi_level_gae") and self.advantage != "raw":
            raise ValueError(
                f'advantage: got "{self.advantage}" with credit = "{self.credit}", expected "raw": there the '
                "critic is the baseline"
            )
        if not self.use_rewards and not self.kl_reward_coef:
            raise ValueError(
                "use_rewards: got false with kl_reward_coef = 0, expected something to learn from"
            )
        if self.critic and not self.use_rewards:
            raise ValueError(f'use_rewards: got false with credit = "{self.credit}", expected "trajectory"')
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
        if self.filter and self.filter.keep != "top_k" and self.filter.value > 1:
            raise ValueError(
                f"filter.value: got {self.filter.value} with {self.filter.keep}, expected at most 1"
            )
        return self

    @property
    def notes(self) -> list[str]:
        """Which of the recipe's bounds still apply if its loss was replaced by another one."""
        recipe = type(self).model_fields
        own = recipe["loss"].default
        if self.loss == own:
            return []
        set_by_recipe = {
            name: f"{name} = {recipe[name].default}"
            for name in LOSS_FIELDS[own]
            if recipe[name].default not in (None, Algorithm.model_fields[name].default)
            and getattr(self, name) == recipe[name].default
        }
        read = LOSS_FIELDS[self.loss]
        kept = ", ".join(text for name, text in set_by_recipe.items() if name in read)
        lost = ", ".join(text for name, text in set_by_recipe.items() if name not in read)
        says = [f"{kept} of the recipe stays in force"] if kept else []
        says += [f"{lost} of the recipe does not apply: this loss does not read it"] if lost else []
        return [f'algorithm.loss = "{self.loss}" instead of "{own}": {"; ".join(says)}'] if says else []

    @property
    def relative(self) -> bool:
        """Whether a group of equal rewards gets advantages of 0."""
        return (
            self.advantage_over == "group"
            and self.advantage not in ("raw", "running", "share")
            and self.credit in ("trajectory", "turn")
            and not self.kl_reward_coef
        )

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
        if self.correction is not None:
            needs.add("logprobs")
        return frozenset(needs)

    @property
    def refers(self) -> bool:
        """Whether a reference policy is needed."""
        return bool(self.kl_coef or self.kl_reward_coef)

    def loss_spec(self, memory: Mapping[str, float] | None = None) -> LossSpec:
        """The loss of the next update; `memory` holds what controllers have set (compose.py)."""
        from silva.types import LossSpec  # numpy: not for help

        memory = memory or {}
        own = {name: getattr(self, name) for name in LOSS_FIELDS[self.loss]}
        params: dict[str, object] = {name: value for name, value in own.items() if value is not None}
        params |= {
            "kl_coef": memory.get("kl_coef", self.kl_coef),
            "kl_estimator": self.kl_estimator,
            "kl_correction": self.kl_correction,
            "entropy_coef": memory.get("entropy_coef", self.entropy_coef),
        }
        if self.correction is not None:
            params |= {
                "correction": self.correction.weight,
                "correction_level": self.correction.level,
                "correction_low": self.correction.low,
                "correction_high": self.correction.high,
                "reject": {level: list(bounds) for level, bounds in self.correction.reject.items()},
            }
        return LossSpec(self.loss, params)
