"""A model with the engine, the renderer and the worlds around it: what every command shares."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import silva
from silva.algorithms.settings import Algorithm, Pools
from silva.compute import ComputeThread
from silva.config.schema import RunConfig
from silva.config.sections import Placement, PretrainedModel, Rendering
from silva.config.sections import Trainer as TrainerSettings
from silva.engines.local import LocalEngine
from silva.engines.settings import LocalEngine as EngineSettings
from silva.environments.tasks import check_splits
from silva.errors import CapabilityError, ConfigError, ModelError, SilvaError
from silva.models.loading import LoadedModel, load_model
from silva.models.machine import describe
from silva.models.memory import keep_freed_memory
from silva.orchestrator.tasks import TaskStream, World
from silva.ports import derive
from silva.protocols import TaskSet
from silva.rendering.renderer import Renderer
from silva.trainer.local import LocalTrainer


class Session:
    """A model with the engine and the renderer over it: what training, evaluation and chat share."""

    def __init__(self, config: RunConfig):
        self._open(config.model, config.engine, config.rendering, config.seed, config.placement)
        self.config = config
        self.tasksets = tasksets(config)

    @classmethod
    def of_model(cls, model: PretrainedModel, engine: EngineSettings) -> Session:
        """Without environments: for chat."""
        session = cls.__new__(cls)
        session._open(model, engine, Rendering(), 0, Placement())
        return session

    def _open(
        self, model: Any, engine: EngineSettings, rendering: Rendering, seed: int, placement: Placement
    ) -> None:
        where = device(placement.device)
        keep_freed_memory()
        self.compute = ComputeThread(placement.threads)
        try:
            self.loaded: LoadedModel = self.compute.run(load_model, model, seed=seed, device=where)
            self.renderer = Renderer(
                self.loaded.tokenizer,  # type: ignore[arg-type]
                history=rendering.history,
                tools=rendering.tools,
                system=rendering.system,
            )
            self.engine = self.compute.run(LocalEngine, self.loaded, engine, self.compute)
            self.machine: dict[str, Any] = self.compute.run(describe, self.loaded.device, self.engine.rules)
        except BaseException:
            self.compute.shutdown(wait=False)
            raise
        # What is loaded now stays. Python would look through it again and again while episodes are
        # played, and the event loop would stand still for a tenth of a second each time.
        gc.collect()
        gc.freeze()

    @property
    def notes(self) -> list[str]:
        """Settings that have no effect here, or a different one than they seem to have."""
        found, limits = [], self.config.rollout.limits
        if self.loaded.device.type == "cpu" and (silva.TORCH_CAME_FIRST or not self.engine.rules.hold):
            why = (
                "torch was imported before silva (import silva first)"
                if silva.TORCH_CAME_FIRST
                else "here the last bits of a matrix product depend on how many rows it has"
            )
            found.append(
                f"this run repeats within rounding, not bit for bit: {why}. `silva doctor` says more"
            )
        context, own = self.engine.capabilities.context, self.loaded.context
        if limits.max_episode_tokens > context:
            raised = f"or raise engine.context (the model has room for {own})" if own > context else (
                f"which is all that {self.loaded.name} has")  # fmt: skip
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
        if "tasks" in self.config.eval.model_fields_set:
            for label, taskset in self.tasksets.items():
                if (held_out := len(taskset.tasks("eval"))) < self.config.eval.tasks:
                    found.append(
                        f"eval.tasks = {self.config.eval.tasks}: {label} has {held_out} held-out tasks, so "
                        f"{held_out} are played (its key eval_size says how many are held out)"
                    )
        return found

    def teacher(self) -> LoadedModel | None:
        """The model that `algorithm.reference` names, if it is needed.

        Raises:
            CapabilityError: it does not read the policy's tokens.
            ModelError: it cannot be loaded.
        """
        algorithm = self.config.algorithm
        if algorithm.reference is None or not algorithm.refers:
            return None
        seed, where = self.config.seed, self.loaded.device.type
        try:
            teacher = self.compute.run(load_model, algorithm.reference, seed=seed, device=where)
        except ModelError as error:
            raise ModelError(f"algorithm.reference: {error}") from error
        if teacher.tokenizer.get_vocab() != self.loaded.tokenizer.get_vocab():
            raise CapabilityError(
                f"algorithm.reference: {teacher.name} has another vocabulary than {self.loaded.name}"
            )
        return teacher

    def trainer(
        self,
        settings: TrainerSettings,
        updates: int,
        *,
        algorithm: Algorithm | None = None,
        teacher: LoadedModel | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> LocalTrainer:
        """`algorithm`: what it needs beside the policy, a reference or a critic, is made too.

        `teacher`: the reference, where it is another model.
        """
        return LocalTrainer(
            self.loaded,
            settings,
            total_updates=updates,
            seed=self.config.seed,
            reference=teacher or bool(algorithm and algorithm.refers),
            critic=bool(algorithm and algorithm.critic),
            compute=self.compute,
            say=say,
        )

    def stream(
        self,
        purpose: str,
        position: Mapping[str, int] | None = None,
        *,
        passed: Mapping[str, int] | None = None,
        settings: Pools | None = None,
        pools: Mapping[str, str] | None = None,
    ) -> TaskStream:
        worlds = [World(e.label, self.tasksets[e.label], e.weight) for e in self.config.environments]
        seed = derive(self.config.seed, purpose)
        return TaskStream(worlds, seed, position, passed=passed, settings=settings, pools=pools)

    def close(self, *, wait: bool = True) -> None:
        gc.unfreeze()
        self.compute.shutdown(wait=wait, cancel_futures=True)


def tasksets(config: RunConfig) -> dict[str, TaskSet]:
    """Raises ConfigError with the world's name where its own code fails."""
    return {e.label: _taskset(e) for e in config.environments}


def _taskset(environment: Any) -> TaskSet:
    try:
        taskset = environment.taskset()
    except SilvaError:
        raise
    except Exception as error:
        raise ConfigError(
            f"environment {environment.label}: its taskset() raised {type(error).__name__}: {error}"
        ) from error
    check_splits(taskset, environment.label)
    return taskset


def offers_tools(environment: Any) -> bool:
    """Whether the settings of a world name tools, as those of `ToolQA` do."""
    tools = getattr(environment, "tools", ())
    return bool(tools() if callable(tools) else tools)


def device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise CapabilityError('placement.device = "cuda": torch sees no GPU; expected "cpu" or "auto"')
    return name


def model_settings(path: str | None) -> PretrainedModel:
    """A run's newest exported weights, or a model folder, hub id or GGUF file; the packaged model for None.

    Raises:
        ModelError: a run's folder that holds no weights.
    """
    if path is None:
        return PretrainedModel()
    folder = Path(path).expanduser() / "weights"
    if not folder.is_dir() and not (folder.parent / "ledger.jsonl").exists():
        return PretrainedModel(name=path)
    found = [p for p in folder.glob("step_*") if (p / "config.json").is_file()]
    if not found:
        raise ModelError(f"{path}: this run has exported no weights yet; --resume it to its end")
    return PretrainedModel(name=str(max(found, key=lambda p: int(p.name.removeprefix("step_")))))
