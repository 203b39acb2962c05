"""The parts of a run, built by their settings: the one place where they meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from silva.algorithms.filters import DifficultyPools
from silva.compute import ComputeThread
from silva.config.schema import RunConfig
from silva.environments.tasks import check_splits
from silva.errors import CapabilityError, ConfigError, Escaped, SilvaError, contained, errors_about
from silva.evaluation.evaluator import Evaluation, Job, evaluate, play_jobs
from silva.evaluation.summary import ranges_of
from silva.models.loading import LoadedModel, generation_stops, load_model, load_tokenizer, name_of
from silva.orchestrator.probe import Probe, WeightSync
from silva.orchestrator.scripted import ScriptedPlay
from silva.orchestrator.tasks import Source, TaskStream
from silva.ports import derive
from silva.protocols import Actor, Engine, Gateway, Host, Remote, TaskSet, Trainer
from silva.rendering.renderer import Renderer
from silva.rollouts.faults import UNWATCHED, Watch
from silva.storage.layout import Layout
from silva.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


class Assembly:
    """What settings build their parts from: each part is made when it is first asked for, and then kept.

    `tasksets`: by label of their environment. `say` takes what people should know, `stage` what is being
    done. `compute`, `tasksets`: those of another assembly of this process. `stored`: weights stay in their
    files, of which this process reads a part.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        compute: ComputeThread | None = None,
        tasksets: dict[str, TaskSet] | None = None,
        say: Callable[[str], None] = lambda text: None,
        stage: Callable[[str], None] = lambda text: None,
        stored: bool = False,
    ) -> None:
        self.config, self.say, self.stage, self.stored = config, say, stage, stored
        self.host: Host = config.placement.build(self)
        self._compute = compute
        if tasksets is not None:
            self.tasksets = tasksets

    def load(self) -> Assembly:
        """Build what every command needs now; what is built is closed if a part cannot be."""
        try:
            self.engine, self.renderer, self.tasksets  # noqa: B018
        except BaseException:
            self.close(wait=False)
            raise
        return self

    @cached_property
    def model(self) -> LoadedModel:
        seed, device = self.config.seed, self.device
        return self.compute.run(load_model, self.config.model, seed=seed, device=device, stored=self.stored)

    @property
    def device(self) -> str:
        """Of torch, where this process computes."""
        asked: str = self.config.placement.device
        return asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def compute(self) -> ComputeThread:
        """What computes in this process.

        Raises:
            CapabilityError: a GPU is asked for, and there is none.
        """
        if self._compute is None:
            if self.device == "cuda" and not torch.cuda.is_available():
                raise CapabilityError(
                    'placement.device = "cuda": torch sees no GPU; expected "cpu" or "auto"'
                )
            self._compute = ComputeThread(self.config.placement.threads)
        return self._compute

    @property
    def run_layout(self) -> Layout:
        """The run's folder."""
        return Layout((Path(self.config.output_dir) / self.config.name).absolute())

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self.host.holds_model:
            return self.model.tokenizer
        return load_tokenizer(self.config.model)

    @cached_property
    def renderer(self) -> Renderer:
        settings = self.config.rendering
        return Renderer(
            self.tokenizer,  # type: ignore[arg-type]
            history=settings.history,
            tools=settings.tools,
            system=settings.system,
            result=settings.result,
            stops=generation_stops(self.config.model),
        )

    @cached_property
    def engine(self) -> Engine:
        return self.host.engine()

    @cached_property
    def tasksets(self) -> dict[str, TaskSet]:
        found, workers = dict[str, TaskSet](), 0
        for environment in self.config.environments:
            self.stage(f"read the tasks of {environment.label}")  # a minute for a million rows
            found[environment.label] = _taskset(environment, self, workers)
            workers += environment.workers
        return found

    @property
    def trained(self) -> dict[str, TaskSet]:
        """Those of environments that are trained on."""
        return {e.label: self.tasksets[e.label] for e in self.config.environments if e.weight}

    def trainer(self, *, recipe: bool = False) -> Trainer:
        """`recipe`: what the algorithm needs beside the policy, a reference or a critic, is made too."""
        return self.host.trainer(recipe=recipe)

    async def connect(self) -> None:
        """Reach the engine if it is in another process."""
        await connected(self.engine)

    @property
    def notes(self) -> list[str]:
        """Settings that have no effect here, or a different one than they seem to have."""
        found, limits = list(self.engine.notes), self.config.rollout.limits
        context = self.engine.capabilities.context
        own = self.model.context if self.host.holds_model else context
        if self.config.environments and limits.max_episode_tokens > context:
            raised = f"or raise engine.context (the model has room for {own})" if own > context else (
                f"which is all that {name_of(self.config.model)} has")  # fmt: skip
            found.append(
                f"rollout.limits.max_episode_tokens = {limits.max_episode_tokens} is more than the engine's "
                f"context of {context} tokens, prompt and answers together: longer episodes overflow, "
                "which gives no score in training and counts as not solved in evaluation. "
                f"Lower it to {context}, {raised}"
            )
        if limits.max_turn_tokens > limits.max_episode_tokens:
            found.append(
                f"rollout.limits.max_turn_tokens = {limits.max_turn_tokens} is never reached: "
                f"max_episode_tokens = {limits.max_episode_tokens} ends the episode before"
            )
        return found

    @property
    def data_notes(self) -> list[str]:
        """How data sets were understood, and how much of each environment is trained and evaluated on."""
        found, wanted = list[str](), self.config.eval.tasks
        for label, taskset in self.tasksets.items():
            held_out = len(taskset.tasks("eval"))
            apart = getattr(taskset, "only_held_out", False) or label not in self.trained
            train = 0 if apart else len(taskset.tasks("train"))
            most = "at most " if getattr(taskset, "made_up", False) else ""
            played = "all of which" if held_out <= wanted else f"of which {wanted:,}"
            found += [
                *getattr(taskset, "notes", ()),
                f"{label}: {most}{train:,} training tasks, {held_out:,} held-out tasks, {played} are played "
                f"at each evaluation (eval.tasks = {wanted})",
            ]
        return found

    def stream(self, purpose: str, *, step: int = 1, settings: DifficultyPools | None = None) -> TaskStream:
        weights = {e.label: e.weight for e in self.config.environments}
        sources = [Source(label, taskset, weights[label]) for label, taskset in self.trained.items()]
        return TaskStream(sources, derive(self.config.seed, purpose), step=step, settings=settings)

    def sync(self, trainer: Trainer) -> WeightSync:
        """How what `trainer` learns gets to the engine."""
        how = trainer.capabilities
        if how.publishes == "shared":
            return WeightSync(trainer, self.engine, None)
        probe = Probe(self.renderer.vocabulary, self.config.model.dtype, exact=how.exact)
        return WeightSync(trainer, self.engine, probe)

    def scripted(self, watch: Watch = UNWATCHED) -> ScriptedPlay:
        """What a warm start imitates."""
        config, warm = self.config, self.config.warm_start
        assert warm is not None
        return ScriptedPlay(
            self.stream("warm", step=warm.episodes_per_step), self.renderer, warm, config.rollout.limits,
            config.seed, watch, config.rollout.context,
        )  # fmt: skip

    async def evaluate(
        self,
        actor: Actor,
        renderer: Renderer | None,
        on_episode: Callable[[int, int, str], None],
        watch: Watch = UNWATCHED,
    ) -> list[Evaluation]:
        """Play the held-out tasks as the configuration says; arguments as of `evaluator.play_jobs`."""
        return await evaluate(
            self.tasksets, actor, renderer, self.config.eval, on_episode=on_episode, watch=watch,
            ranges=ranges_of(self.config.environments), **self._how,
        )  # fmt: skip

    async def play(
        self, jobs: Sequence[Job], actor: Actor, renderer: Renderer | None, **how: Any
    ) -> list[Trajectory]:
        """Play jobs as the configuration says; other arguments as of `evaluator.play_jobs`."""
        return await play_jobs(jobs, self.tasksets, actor, renderer, **self._how, **how)

    @property
    def _how(self) -> dict[str, Any]:
        rollout = self.config.rollout
        return {"limits": rollout.limits, "seed": self.config.seed, "redo": rollout.redo,
                "context": rollout.context}  # fmt: skip

    def close(self, *, wait: bool = True) -> None:
        if self._compute is not None:
            self._compute.shutdown(wait=wait, cancel_futures=True)


async def connected(part: T) -> T:
    """The part, reached if it is in another process."""
    if isinstance(part, Remote):
        await part.connect()
    return part


def _taskset(environment: Any, assembly: Assembly, first: int) -> TaskSet:
    """`first`: the number of its first worker. ConfigError names the environment whose own code fails."""
    try:
        with contained():
            apart = environment.workers
            taskset: Any = _in_workers(environment, assembly, first) if apart else environment.taskset()
    except Escaped as error:
        raise ConfigError(f"environment {environment.label}: its taskset() raised {error}") from error
    except SilvaError:
        raise
    except Exception as error:
        raise ConfigError(
            f"environment {environment.label}: its taskset() raised {type(error).__name__}: {error}"
        ) from error
    check_splits(taskset.inner if environment.workers else taskset, environment.label)
    if hasattr(taskset, "harness"):
        taskset.gateway = _gateway(environment, assembly.say)
    return taskset


def _gateway(environment: Any, say: Callable[[str], None]) -> Gateway:
    """Where the program of an environment finds its model; its settings are `GatewaySettings` too."""
    from silva.server.gateway import SessionGateway
    from silva.wire.listening import Bind

    e = environment
    with errors_about(f"environment {e.label}"):
        return SessionGateway(
            Bind(e.host, e.port, certificate=e.certificate, private_key=e.private_key),
            key_variable=e.key_variable, url=e.public_url or "", lease=e.lease, log=say,
        )  # fmt: skip


def _in_workers(environment: Any, assembly: Assembly, first: int) -> TaskSet:
    from silva.environments.process.workers import Workers

    return Workers(environment, assembly.host.worker, first, assembly.say)
