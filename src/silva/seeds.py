"""The parts of several runs that differ in their seed only, over one base model.

    base model ──> engine (one decode batch) <── OneAdapter of each seed
          └──────> a copy of its modules for each seed, over the very tensors, with adapters of its own
                        └──> Learner of each seed ──> JoinedLearners (joint passes)

Each seed gets an `Assembly` as it would have alone, whose model, engine and trainer are views of these. Not
here: the runs themselves (commands/seeds.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch

from silva.assembly import Assembly
from silva.compute import ComputeThread
from silva.config.schema import RunConfig
from silva.config.sections import Lora
from silva.engines.one_adapter import OneAdapter
from silva.models import adapters
from silva.models.loading import LoadedModel, copied
from silva.protocols import Engine, TaskSet, Trainer
from silva.trainer.joined import JoinedLearners


class SharedBase:
    """What `count` runs share, made when the first of them is: base model, tasks, joint passes, and an engine
    with room for as many requests of each as the configuration says.

    Args:
        config: of any of the runs.
    """

    def __init__(self, config: RunConfig, count: int) -> None:
        assert config.model.lora is not None
        self.lora, engine = config.model.lora, config.engine
        wide = {
            "max_concurrent": engine.max_concurrent * count,
            "cached_sequences": engine.cached_sequences * count,
            "max_adapters": max(engine.max_adapters, count),
        }
        shared = {
            "model": config.model.model_copy(update={"lora": None}),
            "engine": engine.model_copy(update=wide),
        }
        self._told: list[Callable[[str], None]] = []
        self._parts = Assembly(config.model_copy(update=shared), say=self._say)

    @property
    def model(self) -> LoadedModel:
        """The plain one."""
        return self._parts.model

    @property
    def tasksets(self) -> dict[str, TaskSet]:
        return self._parts.tasksets

    @property
    def compute(self) -> ComputeThread:
        return self._parts.compute

    @property
    def engine(self) -> Any:
        return self._parts.engine

    @cached_property
    def joined(self) -> JoinedLearners:
        config = self._parts.config
        return self.compute.run(JoinedLearners, self.model, config.trainer, self.lora, self.compute)

    @contextmanager
    def of_run(
        self,
        config: RunConfig,
        *,
        say: Callable[[str], None] = lambda text: None,
        stage: Callable[[str], None] = lambda text: None,
    ) -> Iterator[Assembly]:
        """The parts of one run, as `run.loaded` gives them to a run alone. Its name is its own. `say` takes
        what concerns all runs, too."""
        self._told.append(say)
        try:
            yield _OfRun(self, config, say, stage).load()
        finally:
            self._told.remove(say)

    def _say(self, text: str) -> None:
        for say in self._told:
            say(text)

    def close(self, *, wait: bool = True) -> None:
        self._parts.close(wait=wait)


class _OfRun(Assembly):
    def __init__(
        self, base: SharedBase, config: RunConfig, say: Callable[[str], None], stage: Callable[[str], None]
    ) -> None:
        super().__init__(config, compute=base.compute, tasksets=base.tasksets, say=say, stage=stage)
        self._base = base

    @cached_property
    def model(self) -> LoadedModel:
        base, seed = self._base, self.config.seed
        return self.compute.run(with_adapters, base.model, base.lora, seed=seed)

    @cached_property
    def engine(self) -> Engine:
        return OneAdapter(self._base.engine, self.config.name, self.model)

    def trainer(self, *, recipe: bool = False) -> Trainer:
        trainer: Any = super().trainer(recipe=recipe)
        trainer.gradients = self._base.joined.add(self.config.name, trainer.learner)
        return cast(Trainer, trainer)

    def close(self, *, wait: bool = True) -> None:
        """Others compute on the thread."""


def with_adapters(plain: LoadedModel, lora: Lora, *, seed: int) -> LoadedModel:
    """The model with modules of its own over the very tensors of a plain one, and the fresh adapters that
    `load_model` gives it with this seed."""
    loaded = copied(plain, [*plain.model.parameters(), *plain.model.buffers()])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapters.inject(loaded.model, lora)
    return replace(loaded, lora=True)
