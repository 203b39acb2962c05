"""The contracts between Silva's parts, on one page. Implementations never import each other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from silva.errors import ContextOverflow, EngineError
from silva.thoughts import answer_of
from silva.types import (
    Completion,
    CompletionStop,
    Group,
    LossSpec,
    Message,
    Observation,
    OptimParams,
    Sample,
    SamplingParams,
    Segment,
    Signals,
    Snapshot,
    Split,
    Step,
    Task,
    TokenScores,
    ToolSpec,
)

if TYPE_CHECKING:
    import numpy as np
    import torch

    from silva.rollouts.calls import CallRecorder


class Environment(Protocol):
    """One episode of one task: single-use, speaks messages, never tokens."""

    async def reset(self) -> Observation: ...
    async def step(self, message: Message) -> Step: ...
    async def close(self) -> None: ...


@runtime_checkable
class Forkable(Protocol):
    """A fork has the same state and, from here on, noise of its own: that of `seed`.

    With the seed of the environment itself (`task.seed`, or the one it was forked with) the noise goes on.
    Neither changes the other.
    """

    async def fork(self, seed: int) -> Environment: ...


@runtime_checkable
class Scripted(Protocol):
    """An environment that can play itself: for warm starts and for baselines."""

    def expert_reply(self) -> str | Awaitable[str]: ...
    def random_reply(self, seed: int) -> str | Awaitable[str]: ...


@runtime_checkable
class Queued(Protocol):
    """An environment that waits for its turn, as others use what it runs on. The wait is not its own time."""

    starting: bool  # what it runs on has been started, and is not there yet

    def worker_slot(self) -> AbstractAsyncContextManager[None]: ...  # held during reset, step and fork


class TaskSet(Protocol):
    def tasks(self, split: Split) -> Sequence[Task]: ...  # lazy, seeded, splits disjoint by content
    def environment(self, task: Task) -> Environment: ...


class Tool(Protocol):
    """Its attributes `timeout` (seconds) and `max_chars`, if it has them, go before the environment's."""

    spec: ToolSpec

    async def __call__(self, arguments: Mapping[str, object]) -> str: ...  # ToolError for a bad call


class ToolSession(Protocol):
    """The tools of one episode, with whatever they remember of it."""

    @property
    def tools(self) -> Sequence[Tool]: ...  # on offer now: a call may change them
    def metrics(self) -> Mapping[str, float]: ...  # counts of what happened since they were last asked for
    async def close(self) -> None: ...


@runtime_checkable
class ForkableTools(Protocol):
    """Tools of an episode that can be forked: see `Forkable`."""

    async def fork(self, seed: int) -> ToolSession: ...


class Toolset(Protocol):
    """Tools that are configured together, for all episodes: here are indices, caches and limits of rate."""

    async def open(self, seed: int) -> ToolSession: ...


@dataclass(frozen=True, slots=True)
class Attempt:
    """A finished dialogue to be graded. `answer` and `data` (other columns) are those of the task."""

    messages: tuple[Message, ...]
    answer: Any = None
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reply(self) -> str:
        """What the last reply says, without its thoughts."""
        last = next((m for m in reversed(self.messages) if m.role == "assistant"), None)
        return "" if last is None else answer_of(last.content)


@dataclass(frozen=True, slots=True)
class Score:
    """`value` is the raw reward. Only a solved attempt may have the highest one."""

    value: float
    solved: bool
    metrics: Mapping[str, float] = field(default_factory=dict)


class Reward(Protocol):
    """Grades attempts. An exception means that there is no result: a failure never becomes a reward."""

    async def score(self, attempt: Attempt) -> Score: ...


@runtime_checkable
class ChecksTasks(Protocol):
    """A reward that knows before any attempt whether it can grade a task."""

    def check(self, answer: Any, data: Mapping[str, Any]) -> None: ...  # RecordError, RewardError: it cannot


OnTokens = Callable[[Sequence[int], Sequence[float]], None]  # the new tokens and their log-probabilities


@dataclass(frozen=True, slots=True)
class Request:
    """One turn to be taken: the whole context as messages and, for an actor that reads them, as tokens."""

    label: str  # the environment's name in the configuration
    environment: Environment | None  # None: a program plays
    messages: Sequence[Message]
    tools: Sequence[ToolSpec]
    prefill: str  # the beginning of the answer, in `tokens` but not in `messages`
    max_tokens: int  # of the answer
    seed: int
    session: str  # a routing hint
    render: Callable[[], Sequence[int]]
    stop: tuple[str, ...] = ()  # strings that end the answer, besides those of the actor
    on_tokens: OnTokens | None = None  # hears of tokens as they are sampled, if the engine tells

    @property
    def tokens(self) -> Sequence[int]:
        """The context as tokens, `prefill` included; rendered when they are first read."""
        return self.render()


@dataclass(frozen=True, slots=True)
class Reply:
    """`prompt_tokens`: of the whole context, as a chat API counts them; None if the actor read the tokens.
    `prompt_routes`: [tokens of the context, layers, k], if the engine records them (routes.py)."""

    segments: tuple[Segment, ...]
    message: Message
    stop_reason: CompletionStop
    prompt_tokens: int | None = None
    prompt_routes: np.ndarray | None = field(default=None, compare=False)


class Actor(Protocol):
    """Who answers: a policy, an expert, a chat API.

    `reads_tokens`: limits count the tokens of the context. Otherwise the actor plays through messages, and
    limits count the tokens that it reports.

    Raises:
        NoReply: this request failed; the episode has no result.
        ContextOverflow: the context leaves no room for an answer.
    """

    @property
    def reads_tokens(self) -> bool: ...
    async def reply(self, request: Request) -> Reply: ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a program finds the model of its episode: the session is a part of the address.

    Attributes:
        url: the base URL of Anthropic's clients. A reward may be posted to `url`/reward.
        model: a name for it. Requests may name any other.
        outcome: waits for the reward that is posted.
        offer: waits until an agent has called in, and gives it the task and this address.
    """

    url: str
    model: str
    outcome: Callable[[], Awaitable[Step]]
    offer: Callable[[], Awaitable[None]]

    @property
    def openai(self) -> str:
        """The base URL of OpenAI's clients."""
        return f"{self.url}/v1"


class Gateway(Protocol):
    """Serves a model to programs, at an address of its own for each episode."""

    def open(self, calls: CallRecorder, task: Task) -> AbstractAsyncContextManager[Endpoint]: ...


class Harness(Protocol):
    """A program that drives itself: it plays a task with calls to the model at an endpoint."""

    async def run(self, task: Task, endpoint: Endpoint) -> Step | None: ...  # None: others know the reward


@runtime_checkable
class Driven(Protocol):
    """A task set whose episodes are played by a program, in place of an environment."""

    harness: Harness
    gateway: Gateway

    async def graded(self, task: Task, given: Step | None, messages: Sequence[Message]) -> Step: ...


@dataclass(frozen=True, slots=True)
class Work:
    """A task to be played. `id` is unique in a run; all random numbers of the work derive from it."""

    id: str
    task: Task
    taskset: TaskSet
    temperature: float


class Rollout(Protocol):
    """A strategy: how one piece of work becomes groups of trajectories.

    Keys of groups and ids of trajectories begin with the id of the work, so that they are unique too.
    """

    def run(self, work: Work) -> AsyncIterator[Group]: ...


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    context: int  # tokens of prompt and answer together
    entropies: bool = True
    loads: frozenset[str] = frozenset({"shared", "folder", "parameters"})  # some of `Publishes`
    routes: bool = False  # completions say which experts their tokens went to

    def check_prompt(self, tokens: Sequence[int]) -> None:
        """Raises EngineError or ContextOverflow for what no engine with them can continue."""
        if len(tokens) == 0:
            raise EngineError("sample: got an empty prompt, expected at least one token")
        if len(tokens) >= self.context:
            raise ContextOverflow(
                f"prompt of {len(tokens)} tokens leaves no room in a context of {self.context}"
            )

    def check_score(self, tokens: Sequence[int], start: int) -> None:
        """Raises EngineError or ContextOverflow for what no engine with them can score."""
        if not 1 <= start <= len(tokens):
            raise EngineError(f"score: start {start} out of range, expected 1 to {len(tokens)}")
        if len(tokens) > self.context:
            raise ContextOverflow(f"score: got {len(tokens)} tokens, expected at most {self.context}")


class Engine(Protocol):
    """Samples tokens from tokens. `session` is a routing hint only."""

    @property
    def capabilities(self) -> EngineCapabilities: ...
    @property
    def version(self) -> int: ...  # of the weights
    @property
    def machine(
        self,
    ) -> Mapping[str, Any]: ...  # where this is equal, so are the last bits of what it samples
    @property
    def notes(self) -> Sequence[str]: ...  # what its users should know

    async def sample(
        self, tokens: Sequence[int], params: SamplingParams, *, session: str = ""
    ) -> Completion: ...
    async def score(self, tokens: Sequence[int], start: int) -> TokenScores: ...  # of tokens[start:]
    async def load(self, snapshot: Snapshot) -> None: ...
    async def sleep(self) -> None: ...  # gives its memory back until the next request
    def memory(self, sequences: int, length: int) -> float: ...  # bytes of their keys and values
    def counts(self) -> Mapping[str, float]: ...  # sums of what it has done so far, for perf/


ReadLogits = Callable[["torch.Tensor", int], None]  # [n, V], and the index of the token the first are for


@runtime_checkable
class Streaming(Protocol):
    """An engine that tells of tokens while it samples, in order: all of them before `stream` returns."""

    async def stream(
        self, tokens: Sequence[int], params: SamplingParams, on_tokens: OnTokens
    ) -> Completion: ...  # what `sample` gives


Publishes = Literal["shared", "folder", "parameters", "adapter", "sent", "sampler"]
"""What a snapshot is: the parameters that trainer and engine share, a plain Hugging Face folder, a folder of
the parameters that training changes, one of LoRA's adapters as PEFT stores them, what servers have got, or a
sampler of the service that trains."""


@dataclass(frozen=True, slots=True)
class TrainerCapabilities:
    needs: frozenset[str] = frozenset({"logprobs", "reference_logprobs"})  # what `score` can give
    publishes: Publishes = "shared"
    temperatures: bool = True  # it learns from tokens that were sampled at others than 1
    entropies: bool = True  # its losses may read entropies
    references: bool = True  # the reference may be another model, or the policy of some moment
    exact: bool = False  # its log-probabilities have the bits of Silva's engine on the same machine
    pipelined: bool = False  # calls may be made before the one before has ended; they take effect in order


class Trainer(Protocol):
    """Changes weights. Blind to the algorithm: advantages and normalised weights travel on the sample."""

    capabilities: TrainerCapabilities
    version: int  # publishes so far

    async def score(self, samples: Sequence[Sample], needs: frozenset[str]) -> Signals: ...
    async def forward_backward(self, samples: Sequence[Sample], loss: LossSpec) -> Mapping[str, float]: ...
    async def clipped(self) -> Sequence[np.ndarray]: ...  # [T] bool for each sample of the last call above
    async def optim_step(
        self, policy: OptimParams, critic: OptimParams | None = None
    ) -> Mapping[str, float]: ...
    async def publish(self) -> Snapshot: ...  # the current weights become the next version
    async def snapshot(self) -> Snapshot: ...  # the version published last, for an engine that lacks it
    async def refresh_reference(self) -> None: ...  # the current policy becomes the reference
    async def restart(self) -> None: ...  # keeps the weights and forgets all else, as after a warm start
    async def save(self, path: Path) -> None: ...  # all that `load` needs to continue bit for bit
    async def load(self, path: Path) -> None: ...
    async def export(self, path: Path) -> None: ...  # a plain Hugging Face folder
    async def close(self) -> None: ...


@runtime_checkable
class Remote(Protocol):
    """A part in another process: `connect` comes before everything else, in the loop that uses the part."""

    async def connect(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A process that plays episodes, as environments/process/worker.py does.

    Attributes:
        number: which one of the run, from 0.
        type, settings: of its environments; the settings are JSON.
        variables: of its environment, beside those of the machine.
    """

    number: int
    type: str
    settings: str
    variables: Mapping[str, str] = field(repr=False)  # there may be keys among them


class WorkerChannel(Protocol):
    """The way to such a process; EOFError says how it ended."""

    async def ready(self) -> bytes: ...  # its first words, once it has started
    async def ask(self, call: bytes) -> bytes: ...  # one at a time
    def stop(self) -> None: ...  # ends it, whatever it does


class Host(Protocol):
    """Where the parts are: in this process, or in others, of which it gives clients."""

    @property
    def holds_model(self) -> bool: ...  # whether the model is in this process

    def engine(self) -> Engine: ...
    def trainer(self, *, recipe: bool = False) -> Trainer: ...  # recipe: with its reference and critic
    def worker(self, spec: WorkerSpec) -> WorkerChannel: ...  # a new process
