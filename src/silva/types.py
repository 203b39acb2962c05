"""The records every part of Silva exchanges: frozen, validated, small.

Task -> (Environment) -> Message, Segment -> Turn -> Trajectory -> Group -> Sample.

Turns are immutable and shared by reference: a fork of a trajectory copies no tokens. What is not
here: how records are made (rollouts), turned into tensors (trainer) or into bytes (codec).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from silva.errors import RecordError

if TYPE_CHECKING:
    import numpy as np

Split = Literal["train", "eval"]
Role = Literal["system", "user", "assistant", "tool"]
Source = Literal["environment", "policy", "expert"]
Failure = Literal["redo", "mask"]  # no result: do it again | a result that must not be used
CompletionStop = Literal["stop_token", "stop_string", "length", "context_overflow"]
StopReason = Literal[
    "terminated", "truncated",  # the environment ended the episode, or cut it short
    "max_turns", "max_tokens", "context_overflow", "timeout", "error",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Task:
    """One problem instance. `data` and `answer` are plain JSON, so another process can rebuild it."""

    id: str
    environment: str  # name of the environment in the configuration
    seed: int
    data: Mapping[str, Any]
    answer: Any = None
    split: Split = "train"

    def content(self) -> str:
        """Digest of what the problem *is*; train and eval splits share none."""
        text = json.dumps([self.data, self.answer], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool on offer: `parameters` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `raw` is the text as sampled; `errors` are malformed tool calls, in words."""

    role: Role
    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    raw: str | None = None
    id: str = ""
    name: str | None = None  # of the tool that answers
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """What the environment shows: messages to append or, in `context`, the whole new context.

    A replaced context refers to earlier messages by id: those with unchanged content keep their
    tokens, the others are rendered again. `prefill` is the beginning of the next answer.
    """

    messages: tuple[Message, ...] = ()
    prefill: str = ""
    context: tuple[Message, ...] | None = None
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """Result of one action. `rewards` are raw and named, `shaped` are aids to learning (penalties)."""

    observation: Observation = field(default_factory=Observation)
    rewards: Mapping[str, float] = field(default_factory=dict)
    shaped: Mapping[str, float] = field(default_factory=dict)
    terminated: bool = False
    truncated: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one completion. `seed` fixes the random numbers of every position in it."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name, fits, expected in (
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_p", 0 < self.top_p <= 1, "0 < top_p <= 1"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("min_p", 0 <= self.min_p < 1, "0 <= min_p < 1"),
        ):
            if not fits:
                raise RecordError(f"{name}: got {getattr(self, name)}, expected {expected}")


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled: one entry per token in every array.

    `logprobs` and `entropies` (in nats) belong to the distribution sampled from (after temperature and
    truncation), `raw_logprobs` to the model's own (temperature 1, full vocabulary).
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...]
    entropies: tuple[float, ...]
    versions: tuple[int, ...]
    stop_reason: CompletionStop
    cached_tokens: int = 0  # of the prompt, read from the cache
    routes: np.ndarray | None = field(default=None, compare=False)  # [T, layers, k] (routes.py)
    prompt_routes: np.ndarray | None = field(default=None, compare=False)  # of the prompt's tokens

    def __post_init__(self) -> None:
        _same_length("Completion", self.tokens, logprobs=self.logprobs, raw_logprobs=self.raw_logprobs,
                     entropies=self.entropies, versions=self.versions, routes=self.routes)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What a model makes of given tokens (temperature 1, full vocabulary): one entry per token in the tuples.
    `likeliest` are the tokens it would have taken instead, and `top` the first few, if asked for."""

    logprobs: tuple[float, ...]
    likeliest: tuple[int, ...]
    likeliest_logprobs: tuple[float, ...]
    version: int = 0  # of the policy
    top: tuple[tuple[tuple[int, float], ...], ...] = ()  # tokens with their log-probabilities

    def __post_init__(self) -> None:
        _same_length("TokenScores", self.logprobs, likeliest=self.likeliest, top=self.top or None,
                     likeliest_logprobs=self.likeliest_logprobs)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens with their source. `policy` segments carry log-probabilities and versions, `expert` segments do
    if the policy has scored them, and `environment` segments never."""

    source: Source
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    raw_logprobs: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    temperature: float = 1.0
    reported: int | None = None  # how many tokens there are, if a chat API counted them and gave none
    routes: np.ndarray | None = field(default=None, compare=False)  # [T, layers, k]; None: not recorded

    def __post_init__(self) -> None:
        if self.reported is not None and (self.tokens or self.reported < 0):
            got = f"{self.reported} and {len(self.tokens)} tokens"
            raise RecordError(f"Segment: reported: got {got}, expected 0 or more and no tokens")
        if self.logprobs and self.source == "environment":
            raise RecordError("Segment: environment tokens carry no log-probabilities")
        if self.logprobs or self.source == "policy":
            _same_length("Segment", self.tokens, logprobs=self.logprobs, versions=self.versions)
        if self.source == "policy":  # engines behind an interface may give neither of these two
            _same_length("Segment", self.tokens, raw_logprobs=self.raw_logprobs or self.tokens,
                         entropies=self.entropies or self.tokens)  # fmt: skip

    @property
    def count(self) -> int:
        """How many tokens, given or reported."""
        return self.reported or len(self.tokens)


@dataclass(frozen=True, slots=True)
class Turn:
    """What was shown (the first segment) and answered (the others). `fresh`: they are the whole context."""

    id: str
    segments: tuple[Segment, ...]
    messages: tuple[Message, ...] = ()  # the observation, then the reply
    rewards: Mapping[str, float] = field(default_factory=dict)
    shaped: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    fresh: bool = False
    stop_reason: CompletionStop = "stop_token"
    after: str | None = None  # of a program's call that forks: the turn it goes on from, "" for none

    @property
    def cut(self) -> bool:
        """Whether the answer ended for lack of room."""
        return self.stop_reason in ("length", "context_overflow")

    @property
    def reply(self) -> tuple[Segment, ...]:
        """The segments of the answer."""
        return self.segments[1:]

    @property
    def reply_tokens(self) -> tuple[int, ...]:
        return tuple(token for segment in self.reply for token in segment.tokens)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode of one agent. Rewards are sums over turns, by name."""

    id: str
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    rewards: Mapping[str, float] = field(default_factory=dict)
    shaped: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    observation: Observation = field(default_factory=Observation)  # never answered; with all tools on offer
    next_context: tuple[int, ...] = ()  # if a limit cut it off: what the policy would have answered next
    failure: Failure | None = None
    error: str | None = None
    parent: str | None = None  # the trajectory from which it was forked
    fork_turn: int | None = None  # how many of its first turns it shares with its parent
    agent: str = "policy"
    episode: str = ""  # the same for all forks

    def __post_init__(self) -> None:
        if self.turns and not self.turns[0].fresh:
            raise RecordError(f"trajectory {self.id}: the first turn must be fresh")
        if self.failure is not None and not self.error:
            raise RecordError(f"trajectory {self.id}: a failure needs its error")

    @property
    def raw_reward(self) -> float:
        return float(sum(self.rewards.values()))

    @property
    def shaped_reward(self) -> float:
        """What training sees: raw plus shaped."""
        return self.raw_reward + float(sum(self.shaped.values()))

    @property
    def limited(self) -> bool:
        """It met a limit that is the policy's fault: masked in training, not solved in evaluation."""
        return self.failure == "mask" and self.stop_reason != "error"

    @property
    def has_result(self) -> bool:
        """Whether the episode says something about the policy."""
        return self.failure is None or self.limited

    def tokens(self, source: Source | None = None) -> int:
        return sum(s.count for t in self.turns for s in t.segments if source in (None, s.source))


@dataclass(frozen=True, slots=True)
class Group:
    """What advantages are computed over: by default every trajectory of one task."""

    key: str
    task: Task
    trajectories: tuple[Trajectory, ...]

    @property
    def scored(self) -> tuple[Trajectory, ...]:
        """Trajectories whose result may be used; failures stay out of every baseline."""
        return tuple(t for t in self.trajectories if t.failure is None)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Every turn once, however many trajectories share it."""
        return tuple({turn.id: turn for t in self.trajectories for turn in t.turns}.values())


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One training row; every array has one entry per token.

    `loss_weights` start as 1 on policy (and expert) tokens and 0 elsewhere; normalising multiplies
    them by the global normaliser of the update. `logprobs` are NaN where nothing was sampled or scored.
    """

    tokens: np.ndarray  # [T] int64
    loss_weights: np.ndarray  # [T] float32
    logprobs: np.ndarray  # [T] float64
    temperatures: np.ndarray  # [T] float64
    versions: np.ndarray  # [T] int64, -1 where nothing was sampled
    trajectory: str
    group: str
    advantages: np.ndarray | None = None  # [T] float64
    entropies: np.ndarray | None = None  # [T] nats, NaN where nothing was sampled; None: the engine gave none
    old_logprobs: np.ndarray | None = None  # [T] of the trainer before the update; None: those of the sampler
    values: np.ndarray | None = None  # [T] of the critic before the update, NaN where nothing is trained
    returns: np.ndarray | None = None  # [T] what the critic learns
    turn_spans: tuple[tuple[int, int], ...] = ()
    turn_ids: tuple[str, ...] = ()
    streams: Mapping[str, np.ndarray] = field(default_factory=dict)  # [T] weights of cross-entropy, by name
    routes: np.ndarray | None = None  # [T, layers, k]: the experts that predicted each token (routes.py)

    def __post_init__(self) -> None:
        what = f"sample of {self.trajectory}"
        if self.tokens.ndim != 1 or not self.tokens.size or self.tokens.dtype.kind not in "iu":
            raise RecordError(f"{what}: got {self.tokens.dtype} {self.tokens.shape}, expected token ids [T]")
        arrays = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if str(f.type)[:3] == "np."}
        _same_length(what, self.tokens, **{**self.streams, **arrays})
        if any(float(weights[0]) != 0.0 for weights in (self.loss_weights, *self.streams.values())):
            raise RecordError(f"{what}: the first token is never trained")

    def __len__(self) -> int:
        return len(self.tokens)

    replace = dataclasses.replace


def plain_number(value: Any) -> Any:
    """A number of numpy or torch as Python's own; anything else as it is, also an array of several."""
    try:
        return value.item() if hasattr(value, "item") else value
    except (ValueError, RuntimeError, TypeError):
        return value


def _same_length(what: str, tokens: Sequence | np.ndarray, /, **others: Sequence | np.ndarray | None) -> None:
    for name, values in others.items():
        if values is not None and (got := len(values)) != (count := len(tokens)):
            raise RecordError(f"{name} must align with tokens of {what}: got {got}, expected {count}")


@dataclass(frozen=True, slots=True)
class LossSpec:
    """Which loss, with which numbers: what crosses to a trainer, never a callable."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OptimParams:
    """One step of AdamW (arXiv:1711.05101): the schedule is the caller's, so each step brings its numbers."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0  # L2 norm over all gradients; None: no limit


@dataclass(frozen=True, slots=True)
class WeightFolder:
    """A folder of safetensors: a plain Hugging Face folder, or what a trainer changes and nothing else."""

    path: str
    digest: str  # of the content of the files
    adapter: bool = False  # it holds LoRA's adapters as PEFT stores them


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A policy version and where its weights are: a trainer publishes it, an engine loads it.

    Without `folder` and `sent` the engine shares the trainer's parameters.
    """

    version: int
    folder: WeightFolder | None = None
    sent: str = ""  # what servers call it that have it already; of a service, the handle of a sampler


@dataclass(frozen=True, slots=True)
class Signals:
    """What `Trainer.score` computed, one array [T] per sample; None where the recipe asked for nothing."""

    logprobs: tuple[np.ndarray, ...] | None = None
    reference_logprobs: tuple[np.ndarray, ...] | None = None
    values: tuple[np.ndarray, ...] | None = None

    def first(self, count: int) -> Signals:
        """Those of the first samples."""
        return Signals(*(r and r[:count] for r in (self.logprobs, self.reference_logprobs, self.values)))
