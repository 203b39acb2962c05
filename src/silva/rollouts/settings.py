"""Settings of the rollout strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from silva.config.field_types import refuse_idle
from silva.config.sections import (
    EpisodeContext,
    EpisodeLimits,
    Fraction,
    FullContext,
    NotNegative,
    Positive,
    Sampling,
    Section,
)

if TYPE_CHECKING:
    from silva.assembly import Assembly
    from silva.protocols import Rollout
    from silva.rollouts.faults import Watch


class RolloutSettings(Section):
    """What every strategy has."""

    strategy: ClassVar[str]
    """ "module:Class" of the strategy, a `Strategy`."""
    forks: ClassVar[bool] = False
    """Whether episodes are forked: their environments must be able to."""
    imitates: ClassVar[bool] = False
    """Whether experts play: environments must have one."""
    groups_per_step: Positive = 8
    """Tasks of one step; each becomes a group."""
    max_async_level: Annotated[int, Field(ge=0)] = 0
    """How many steps rollouts may be ahead of training, and with it how many versions their policy may be
    behind (staleness). 0: a step's rollouts begin when the step before it is published."""
    overlap_training: bool = False
    """Make each update of a step as soon as its share of the groups is played, while the others are still
    played ("periodic asynchrony"). All groups of a step have one version of the policy: staleness stays 0."""
    max_off_policy_steps: Annotated[int, Field(ge=0)] | None = None
    """How many updates a rollout in flight may live through; at the next one it is cancelled and begins again
    with the new policy. 0: each update cancels all that have not ended. null: none is cancelled."""
    group_size: Positive = 8
    """Episodes of one task."""
    sampling: Sampling = Sampling()
    limits: EpisodeLimits = EpisodeLimits()
    context: EpisodeContext = FullContext()
    """What the model is shown of an episode so far, in training and evaluation."""
    redo: Annotated[int, Field(ge=0)] = 1
    """How often an episode that gave no result (its environment failed) is tried again."""
    max_failed: Fraction = 0.5
    """The run stops after three steps in a row in which more than this share of episodes gave no result. 1: a
    run stops only where no episode of a step has one."""

    @model_validator(mode="after")
    def _a_reply_has_room(self) -> Self:
        turn, episode = self.limits.max_turn_tokens, self.limits.max_episode_tokens
        if self.context.overflow == "drop_oldest" and turn >= episode:
            raise ValueError(
                f'context.overflow = "drop_oldest" makes room for limits.max_turn_tokens = {turn}: expected '
                f"less than limits.max_episode_tokens = {episode}"
            )
        return self

    @property
    def longest_answer(self) -> int:
        """Tokens that a policy can give in one episode: what is no longer shown takes no room."""
        given = self.limits.max_turns * self.limits.max_turn_tokens
        return min(given, self.limits.max_episode_tokens) if self.context == FullContext() else given

    @property
    def reads_entropies(self) -> bool:
        """Whether the strategy needs the entropies of sampled tokens."""
        return False

    def build(
        self,
        context: Assembly,
        *,
        on_turn: Callable[[str, str | None], None] = lambda episode, waiting_for: None,
        watch: Watch | None = None,
    ) -> Rollout:
        from silva.config.schema import import_settings
        from silva.rollouts.faults import UNWATCHED

        made: Rollout = import_settings(self.strategy)(
            self, context.engine, context.renderer, seed=context.config.seed, on_turn=on_turn,
            watch=watch or UNWATCHED,
        )  # fmt: skip
        return made


class LinearRolloutSettings(RolloutSettings):
    """Independent episodes of one task, all from its start."""

    type: Literal["linear"] = "linear"
    strategy: ClassVar[str] = "silva.rollouts.linear:Linear"


class BranchingRolloutSettings(RolloutSettings):
    """Episodes that branch where the policy is uncertain: ARPO (arXiv:2507.19849), AEPO (arXiv:2510.14545).

    A turn branches with probability `branch_probability + entropy_weight * (H - H_root)`, where H is the
    entropy of the first tokens of its reply, and H_root that of its root's first reply.
    """

    type: Literal["branching"] = "branching"
    strategy: ClassVar[str] = "silva.rollouts.branching:Branching"
    forks: ClassVar[bool] = True
    group_size: Annotated[int, Field(ge=2)] = 16
    """Leaves of one task: roots and branches."""
    initial_rollouts: Positive = 8
    """Roots. The other leaves are branches, shared evenly among the roots; what a root has not used when it
    ends becomes new roots."""
    beam_size: Annotated[int, Field(ge=2)] = 2
    """A turn goes on in so many ways at most, itself included; each further one is drawn for itself."""
    branch_probability: Fraction = 0.5
    """How likely a turn branches whose entropy is that of the first one."""
    entropy_weight: NotNegative = 0.2
    """0 branches at random."""
    entropy_tokens: Positive = 20
    """So many tokens at the beginning of a reply say how uncertain the policy is: H is their mean entropy in
    units of ln(vocabulary), times this number."""
    branch_penalty: Fraction = 0.0
    """AEPO's, 0.05 there: with c branchings in a row behind it, a turn branches with 1 - c * penalty of the
    probability."""
    entropy_gap_weight: NotNegative | None = None
    """AEPO's number of roots, with 0.5 there, in place of `initial_rollouts`: group_size * sigmoid(weight *
    (H_root - mean H of later replies)), as found in one root that is played first."""
    variant: Literal["paper", "code"] = "paper"
    """`paper`: the entropy of a reply decides whether its place gets others too. `code`, as the authors
    released it: it decides so for the place of the next reply, and H is a sum."""

    @model_validator(mode="after")
    def _roots_fit(self) -> Self:
        if self.entropy_gap_weight is None and self.initial_rollouts > self.group_size:
            raise ValueError(
                f"initial_rollouts = {self.initial_rollouts}: expected at most group_size = {self.group_size}"
            )
        if self.entropy_gap_weight is not None:
            refuse_idle(self, {"initial_rollouts": f"entropy_gap_weight = {self.entropy_gap_weight}"})
        if not self.reads_entropies:
            refuse_idle(self, {"entropy_tokens": "entropy_weight = 0 and no entropy_gap_weight"})
        return self

    @property
    def reads_entropies(self) -> bool:
        return bool(self.entropy_weight) or self.entropy_gap_weight is not None


class ThoughtsRolloutSettings(RolloutSettings):
    """Thoughts for an expert's actions, by how likely they make these: Act-PRM.

    The expert of the environment plays (`demonstrations` has those of a file). Before each of its actions the
    policy thinks; the reward of a thought is exp(mean log p) of the action's tokens after it.
    """

    type: Literal["thoughts"] = "thoughts"
    strategy: ClassVar[str] = "silva.rollouts.thoughts:Thoughts"
    imitates: ClassVar[bool] = True
    group_size: Positive = 8
    """Thoughts for each state; with commit = "own", episodes of one task."""
    commit: Literal["best", "own"] = "best"
    """`best`: the best thought is played, and each state is a group of its own. `own`: `group_size` episodes
    go on with their own thoughts; a turn's reward is that of its thought."""
    train_given: bool = True
    """Train the tags around a thought and the expert's action too (the gradient of log p(action, thought));
    false: the thought alone."""
    shows_action: bool = False
    """Tell the policy the action before it thinks (Act-PRM's action-prompted thoughts). Thoughts are trained
    in that context, scored and played in the usual one."""
    hint: str = "The next action is: {action}\nThink aloud what leads to it."
    """How it is told, in a message of the user."""
    joint: bool = False
    """Train the demonstration with its best thoughts too, as a group of its own: with the recipes `act_prm`
    this is cross-entropy on thoughts and actions."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for name in ("shows_action", "joint"):
            if self.commit == "own" and getattr(self, name):
                raise ValueError(f'{name}: got true with commit = "own", expected commit = "best"')
        if "{action}" not in self.hint:
            raise ValueError(f"hint: got {self.hint!r}, expected {{action}} in it")
        if not self.shows_action:
            refuse_idle(self, {"hint": "shows_action = false"})
        return self

    @property
    def longest_answer(self) -> int:
        """Tokens of a reply, or of a whole episode if these are trained."""
        whole = self.commit == "own" or self.joint
        return super().longest_answer if whole else self.limits.max_turn_tokens
