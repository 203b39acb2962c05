"""Learners of several runs on one base model, whose micro-batches go through it together.

    forward_backward of a, b, c, as far as they wait on the compute thread
        micro-batches    [a1 b1 c1] [a2 c2] [a3]      at most one of a learner, within the budget
        decoder          all together (tenants/joint.py)
        head and loss    each learner's own

Each learner has adapters of its own on modules of its own, over the tensors of one base model, and the bits
that it has alone. What cannot be joined (a critic, routes that are replayed, dropout, rows above the budget,
a model without joint passes) it computes alone, as ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from silva.models.loading import LoadedModel, copied
from silva.models.lora_runs import LoraRuns, adapters_in
from silva.ports import crash_point
from silva.trainer.explained_errors import explained_memory
from silva.trainer.plan import RankWork
from silva.trainer.policy import Pack, of_hidden
from silva.trainer.settings import LocalTrainerSettings
from silva.trainer.tenants.joint import JointDecoder, rule_of
from silva.trainer.training_mode import enable_gradient_checkpointing, training_mode
from silva.trainer.update import Begun
from silva.types import LossSpec, Sample

if TYPE_CHECKING:
    from silva.config.sections import Lora
    from silva.trainer.learner import Learner


Gradients = Callable[[Sequence[Sample], LossSpec], Awaitable[Mapping[str, float]]]


@dataclass
class _Asked:
    run: str
    learner: Learner
    samples: Sequence[Sample]
    loss: LossSpec
    answer: Future[dict[str, float]] = field(default_factory=Future)
    begun: Begun | None = None
    left: deque[RankWork] = field(default_factory=deque)
    next: Pack | None = None

    def fail(self, error: BaseException) -> None:
        self.left.clear()
        if not self.answer.done():
            self.answer.set_exception(error)


class JoinedLearners:
    """Computes the gradients of learners on the compute thread, together where they wait together.

    Args:
        loaded: the base model, plain; it stays as it is.
        settings: of all learners.
        lora: the adapters of all learners.
    """

    def __init__(
        self, loaded: LoadedModel, settings: LocalTrainerSettings, lora: Lora, compute: Executor
    ) -> None:
        self._settings, self._compute = settings, compute
        self._asked: deque[_Asked] = deque()
        self._joins: set[str] = set()
        self.passes: dict[int, int] = {}  # how many had so many learners
        self._decoder: JointDecoder | None = None
        if (rule := rule_of(loaded)) is None or lora.dropout:
            return
        self._loaded = copied(loaded, [*loaded.model.parameters(), *loaded.model.buffers()])
        self._runs = LoraRuns(self._loaded.model, lora.targets, in_place=True)
        if settings.gradient_checkpointing:
            enable_gradient_checkpointing(self._loaded.model)
        self._decoder = JointDecoder(self._loaded, self._runs, rule)

    def add(self, run: str, learner: Learner) -> Gradients:
        """Take a learner, whose model is a copy of the base over its very tensors, with adapters.

        Returns:
            Its `forward_backward`, together with those of others that wait meanwhile.
        """
        settings = self._settings
        if not (self._decoder is None or learner.critic or settings.replay_routing or settings.exact):
            mine = adapters_in(learner.loaded.model)
            if "unembed" not in map(self._runs.kind, mine):  # the head is each learner's own
                self._runs.adopt(run, mine)
                self._joins.add(run)
        return partial(self._forward_backward, run, learner)

    async def _forward_backward(
        self, run: str, learner: Learner, samples: Sequence[Sample], loss: LossSpec
    ) -> Mapping[str, float]:
        asked = _Asked(run, learner, samples, loss)
        self._asked.append(asked)
        self._compute.submit(self._work)
        return await asyncio.wrap_future(asked.answer)

    def _work(self) -> None:
        """Compute all that is asked for."""
        together = []
        while self._asked:
            asked = self._asked.popleft()
            if asked.answer.set_running_or_notify_cancel():
                together.append(asked)
        for asked in together:
            self._begin(asked)
        while waiting := [asked for asked in together if asked.left]:
            self._step(waiting)
        for asked in together:
            if not asked.answer.done() and asked.begun:
                try:
                    asked.answer.set_result(asked.learner.metrics(asked.begun))
                except Exception as error:  # somebody waits for an answer
                    asked.fail(error)

    def _begin(self, asked: _Asked) -> None:
        learner = asked.learner
        try:
            if asked.run not in self._joins:
                asked.answer.set_result(learner.forward_backward(asked.samples, asked.loss))
                return
            with learner.undone_after_errors():
                asked.begun = learner.begin(asked.samples, asked.loss)
            (works,) = asked.begun.dealt
            asked.left.extend(works)
        except Exception as error:
            asked.fail(error)

    def _step(self, waiting: Sequence[_Asked]) -> None:
        """The next micro-batch of some of these, those with most to do first."""
        chosen: list[_Asked] = []
        left = budget = self._settings.micro_batch_tokens
        for asked in sorted(waiting, key=lambda each: -len(each.left)):
            learner, begun, work = asked.learner, asked.begun, asked.left[0]
            assert begun is not None
            try:
                with learner.undone_after_errors():
                    batch = asked.next = asked.next or learner.pack(begun.update.rows(work.rows))
                    if work.passes > 1 or len(batch.trie) > budget:
                        learner.micro_batch(begun, asked.left.popleft())
                        asked.next = None
                    elif len(batch.trie) <= left:
                        chosen.append(asked)
                        left -= len(batch.trie)
            except Exception as error:
                asked.fail(error)
        if chosen:
            self._together(chosen)

    def _together(self, chosen: Sequence[_Asked]) -> None:
        assert self._decoder is not None
        self.passes[len(chosen)] = self.passes.get(len(chosen), 0) + 1
        try:
            memory = explained_memory(self._settings, f"training {len(chosen)} runs at once")
            with memory, training_mode(self._loaded.model):
                parts = [(asked.run, asked.next) for asked in chosen if asked.next]
                with self._decoder.hidden(parts) as (hidden, rows):
                    pulls = torch.zeros_like(hidden)
                    for asked, mine in zip(chosen, rows, strict=True):
                        pulls[mine] = self._pull(asked, hidden[mine].detach())
                    hidden.backward(pulls)
        except Exception as error:  # nobody knows whose gradient is whole
            for asked in chosen:
                asked.fail(error)
        for asked in chosen:
            asked.next = None
            if asked.left:
                asked.left.popleft()
            else:  # it has failed, beside others
                asked.learner.drop_gradients()
        crash_point("backward")

    def _pull(self, asked: _Asked, hidden: torch.Tensor) -> torch.Tensor | float:
        """Head and loss of a learner's micro-batch: the gradient of its hidden states."""
        assert asked.begun is not None and asked.next is not None
        update = asked.begun.update
        try:
            hidden.requires_grad_()
            found = of_hidden(asked.learner.loaded, asked.next, hidden, entropy_grad=update.entropy_grad)
            update.loss(found, asked.left[0].rows, asked.next).backward()
        except Exception as error:
            asked.fail(error)
            return 0.0
        return hidden.grad if hidden.grad is not None else 0.0
