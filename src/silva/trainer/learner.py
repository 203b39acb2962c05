"""What learns, on one rank: synchronous, and the same on every rank.

    samples -> plan -> micro-batches -> policy.token_logprobs -> objective.compute -> sum(weights * loss)
                                                                                           | backward
    optim_step (norm, clip, skip what is not finite, AdamW) <- gradients of all ranks <- gradients

Blind to the algorithm: advantages and normalised weights travel on the samples. Not here: what is sampled,
what an advantage is, the schedule of the learning rate, threads, how weights reach an engine (transfer.py),
and how a checkpoint becomes atomic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from silva.algorithms import objective
from silva.errors import CapabilityError, NonFiniteError
from silva.models.loading import LoadedModel, copied
from silva.models.routing import Routing
from silva.models.trie import MIN_SHARED, NEVER
from silva.ports import crash_point, derive
from silva.trainer.critic import Critic
from silva.trainer.exact import called
from silva.trainer.explained_errors import explained_memory, refuse_too_large, size_of
from silva.trainer.export import export_model, save_adapters, save_trained
from silva.trainer.gradients import summed_in_place
from silva.trainer.optimizer import Stepper, check_params
from silva.trainer.plan import RankWork, imbalance, plan
from silva.trainer.policy import IDLE, Pack, attention_cost, check_rows, pack, token_logprobs, trained
from silva.trainer.randomness import Randomness
from silva.trainer.reference import Reference
from silva.trainer.routed import keys
from silva.trainer.scoring import Parts, computed, of_tokens
from silva.trainer.self_check import CHECKED, compared
from silva.trainer.settings import LocalTrainerSettings
from silva.trainer.sharding import combinations
from silva.trainer.sharding.parallel import Mesh
from silva.trainer.sharding.pipeline import Pipeline, refuse_longer
from silva.trainer.state import TrainerState, load_state, save_state
from silva.trainer.training_mode import enable_gradient_checkpointing, training_mode
from silva.trainer.update import Begun, Update, seconds_at_peak
from silva.types import LossSpec, OptimParams, Sample, Signals


class Learner:
    """Scores and updates one model. Every call is made on every rank of `mesh`.

    Between calls the model is in eval mode, and during an update mostly too (training_mode.py).

    Args:
        loaded: the model to train, in place; only parameters that require a gradient change.
        settings: `[trainer]`.
        seed: of what dropout draws.
        reference: another model to compare with, or True for a frozen copy of the trained weights as they
            are now (with LoRA of the adapters), which checkpoints hold.
        critic: learn values beside the policy, as `settings.critic` says.
        mesh: who shares the updates; None: nobody.
        say: takes what people should know.

    Raises:
        CapabilityError: there is nothing to train, or too much for the memory here.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: LocalTrainerSettings,
        *,
        seed: int,
        reference: LoadedModel | bool = False,
        critic: bool = False,
        mesh: Mesh | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.settings, self._seed = settings, seed
        self.mesh, self._say, self._checked = mesh or Mesh(), say, not settings.self_check
        if not any(p.requires_grad for p in loaded.model.parameters()):
            raise CapabilityError(
                f"model {loaded.name}: no parameter requires a gradient, expected at least one"
            )
        refuse_too_large(loaded, self.mesh.parts)
        beside = {combinations.CRITIC: critic, combinations.REPLAY: settings.replay_routing}
        self.mesh.refuse(name for name, holds in beside.items() if holds)
        self._routing = Routing(loaded.model) if settings.replay_routing else None
        self._at_peak = seconds_at_peak(loaded, settings.peak_flops)
        # Copies can only be made of a whole model: the policy is divided after them.
        self._reference = Reference(loaded, reference, self.mesh)
        if settings.gradient_checkpointing:
            enable_gradient_checkpointing(loaded.model)
        own = critic and settings.critic.trunk == "own"
        trunk = self.mesh.divide(copied(loaded, [])) if own else None
        self.loaded = loaded = self.mesh.divide(loaded)
        parameters = {n: p for n, p in loaded.model.named_parameters() if p.requires_grad}
        most = settings.max_nonfinite
        self.stepper = Stepper(parameters, self.mesh, most=most)
        self.critic = (
            Critic(loaded, settings.critic, self.mesh, max_nonfinite=most, trunk=trunk) if critic else None
        )
        self._randomness = self._random()
        self.clipped: tuple[np.ndarray, ...] = ()  # of the last `forward_backward`, [T] bool per sample
        able = {"logprobs": True, "reference_logprobs": self._reference.exists, "values": critic}
        self.needs = frozenset(need for need, known in able.items() if known)

    def _random(self) -> Randomness:
        at, first = self.mesh.rank // self.mesh.siblings, self._seed  # siblings may have parts of one layer
        return Randomness(derive(first, "rank", at) if at else first, self.loaded.device)

    @property
    def version(self) -> int:
        """Publishes so far; in the checkpoint."""
        return self.stepper.counters.version

    @version.setter
    def version(self, version: int) -> None:
        self.stepper.counters.version = version

    @property
    def _least(self) -> int:  # the shortest prefix that rows share
        return NEVER if self.stepper.counters.flat else MIN_SHARED

    def score(self, samples: Sequence[Sample], needs: frozenset[str]) -> Signals:
        """What is known of every trained token before an update, [T] per sample, NaN elsewhere.

        Args:
            needs: "logprobs" (current policy), "reference_logprobs", and "values" of the states before the
                tokens, as the recipe asks.

        Raises:
            CapabilityError: a need this trainer cannot meet.
        """
        if unknown := needs - self.needs:
            raise CapabilityError(
                f"score: got the needs {sorted(unknown)}, expected some of {sorted(self.needs)} "
                "(reference_logprobs need a reference, values need critic=True)"
            )
        check_rows(self.loaded, samples)
        critic, budget = self.critic, self.settings.micro_batch_tokens
        return Signals(
            self._logprobs(self.loaded, samples) if "logprobs" in needs else None,
            self._logprobs(self._reference.model, samples) if "reference_logprobs" in needs else None,
            self._of_tokens(samples, lambda batch, passes: critic.values(batch, budget, passes), self.loaded)
            if critic and "values" in needs
            else None,
        )

    def _logprobs(self, loaded: LoadedModel, samples: Sequence[Sample]) -> tuple[np.ndarray, ...]:
        budget = self.settings.micro_batch_tokens

        def compute(batch: Pack, passes: int) -> torch.Tensor:
            return token_logprobs(loaded, batch, budget=budget, passes=passes).logprobs

        return self._of_tokens(samples, compute, loaded)

    @torch.no_grad()
    def _of_tokens(
        self, samples: Sequence[Sample], compute: Callable[[Pack, int], torch.Tensor], loaded: LoadedModel
    ) -> tuple[np.ndarray, ...]:
        """`compute` gives [N] for a micro-batch; what comes out is [T] per sample, NaN without a loss."""

        def values(parts: Parts) -> Iterator[tuple[Pack, torch.Tensor]]:
            return computed(loaded, self.settings, self.pack, compute, parts)

        kind = np.float64 if self.loaded.dtype == torch.float64 else np.float32
        return of_tokens(samples, self._plan, values, self.mesh, kind)

    def pack(self, rows: Sequence[Sample]) -> Pack:
        """Rows of a micro-batch."""
        return pack(self.loaded, rows or [IDLE], least=self._least, routing=self._routing)

    def forward_backward(self, samples: Sequence[Sample], loss: LossSpec) -> dict[str, float]:
        """Add the gradient of sum(loss_weights * loss) over all trained tokens to what is there, and that of
        the cross-entropy of every other stream.

        Returns:
            `loss` (the sum), `trained_tokens`, and the mean over the trained tokens of the update of
            `entropy` and of each metric of the loss; those of another stream under its name. Of several ranks
            `imbalance` too, see `plan.imbalance`. `perf/seconds_at_peak`: as of `seconds_at_peak`.

        Raises:
            RecordError: samples without advantages, for a loss that reads them.
            OutOfMemory: with what to lower. Gradients are back at zero then, as after any error.
        """
        with self.undone_after_errors():
            begun = self.begin(samples, loss)
            with self._randomness.drawn():
                self._micro_batches(begun)
            return self.metrics(begun)

    @contextmanager
    def undone_after_errors(self) -> Iterator[None]:
        """A part of an update must never be stepped on."""
        try:
            yield
        except BaseException:
            self.drop_gradients()
            raise

    def begin(self, samples: Sequence[Sample], loss: LossSpec) -> Begun:
        """All of `forward_backward` that comes before its micro-batches."""
        check_rows(self.loaded, samples)
        asked, samples = samples, [sample for sample in samples if trained(sample).any()]
        with self._randomness.drawn():
            references = self._needed_reference(samples, loss)
            # A supervised update leaves a critic nothing to learn from.
            supervised = objective.parse(loss)[0].imitates and all(s.returns is None for s in samples)
            if critic := None if supervised else self.critic:
                critic.check(samples)
            if not (self._checked or self.stepper.counters.flat):
                self._check_trie(Update(samples, references, loss, self.version, self.stepper))
        update = Update(samples, references, loss, self.version, self.stepper, self._at_peak)
        return Begun(asked, update, self._plan(samples), critic)

    def metrics(self, begun: Begun) -> dict[str, float]:
        """What `forward_backward` returns, after all micro-batches."""
        self.clipped = begun.update.clipped(begun.asked, self.mesh)
        of_ranks = {"imbalance": imbalance(begun.dealt)} if len(begun.dealt) > 1 else {}
        return begun.update.metrics(self.mesh) | of_ranks

    def _micro_batches(self, begun: Begun) -> None:
        works = begun.dealt[self.mesh.share]
        if isinstance(pipeline := self.loaded.division, Pipeline):
            with training_mode(self.loaded.model):
                self._by_stages(pipeline, begun.update, [work.rows for work in works])
            crash_point("backward")
            return
        for work in self.mesh.rounds(works):
            self.micro_batch(begun, work)

    def micro_batch(self, begun: Begun, work: RankWork) -> None:
        """The gradient of a few rows of an update."""
        update, critic = begun.update, begun.critic
        rows = update.rows(work.rows)
        memory = explained_memory(self.settings, f"training {size_of(rows or [IDLE])}")
        with memory, training_mode(self.loaded.model):
            batch = self.pack(rows)
            if not (critic and critic.warming_up):
                self._backward(batch, work.rows, update, work.passes)
            if critic:
                with batch.replayed():  # its trunk may be the policy
                    budget = self.settings.micro_batch_tokens
                    update.add(critic.learn(batch, rows, budget, work.passes))
        crash_point("backward")

    def _backward(self, batch: Pack, part: list[int], update: Update, passes: int = 1) -> None:
        """Forward and backward of one micro-batch; adds to gradients and to sums over its tokens."""
        budget, asked = self.settings.micro_batch_tokens, update.entropy_grad
        with summed_in_place(called(self.loaded)), batch.replayed():
            found = token_logprobs(self.loaded, batch, budget=budget, passes=passes, entropy_grad=asked)
            # Also where it is not finite: the gradients say which parameter it reaches.
            update.loss(found, part, batch).backward()

    def _by_stages(self, pipeline: Pipeline, update: Update, parts: list[list[int]]) -> None:
        """The same for all micro-batches, as a pipeline orders them."""
        parts = pipeline.filled_up(parts, [])
        with explained_memory(self.settings, f"training {len(parts)} micro-batches"):
            batches = [self.pack(update.rows(part)) for part in parts]
            pipeline.learn(
                self.loaded,
                batches,
                lambda number, found: update.loss(found, parts[number], batches[number]),
                entropy_grad=update.entropy_grad,
            )

    def _check_trie(self, update: Update) -> None:
        """The gradient of a few rows on their trie against that of one row at a time, before any other.

        Where they differ nothing is shared from here on. Rows without a gradient leave it to the next call.
        """
        works = (work.rows for share in self._plan(update.samples) for work in share)
        few = next((rows for rows in works if len(rows) > 1), [])[:CHECKED]
        if not few:
            return

        def backward(parts: list[list[int]]) -> None:
            if isinstance(pipeline := self.loaded.division, Pipeline):
                self._by_stages(pipeline, update, parts)
                return
            for part in parts:
                with explained_memory(self.settings, "checking the trie"):
                    self._backward(self.pack(update.rows(part)), part, update)

        found = compared(self.stepper, few, backward, self.loaded.dtype)
        if found is None:
            return
        self._checked, (agrees, text) = True, found
        self.stepper.counters.flat = int(not agrees)
        self._say(text)

    def refresh_reference(self) -> None:
        """Make the current policy the reference.

        Raises:
            CapabilityError: the reference is another model, or there is none.
        """
        self._reference.refresh()

    def restart(self) -> None:
        """Keep the weights and reset everything else: moments, counts, reference and critic."""
        if self._reference.parameters is not None:
            self._reference.refresh()
        self.stepper.begin()
        if self.critic:
            self.critic.restart()
        self._randomness = self._random()

    def optim_step(self, policy: OptimParams, critic: OptimParams | None = None) -> dict[str, float]:
        """One AdamW step on the gradients so far, then zero them.

        Args:
            critic: needed if a critic has learnt since the last step, as it does but in supervised updates.

        A loss or gradient that is not finite skips the step; the critic's step depends on its own loss and
        gradient.

        Returns:
            `grad_norm` (before clipping), `lr`, `nonfinite` (1 for a skipped step); those of a critic
            under `critic/`.

        Raises:
            NonFiniteError: `trainer.max_nonfinite` steps in a row of the policy or the critic were skipped.
            RecordError: numbers that AdamW does not take.
        """
        learnt = self.mesh.gather(bool(self.critic and self.critic.stepper.gradients), bool)
        if critic is None and any(learnt):
            raise CapabilityError("optim_step: got no numbers for the critic, expected OptimParams")
        crash_point("optim")
        try:
            check_params(policy, critic)
            # The first step allocates both moments.
            with explained_memory(self.settings, "stepping the optimizer"):
                found, problem = self.stepper.step(policy)
                if self.critic and critic:
                    of_critic, its_problem = self.critic.stepper.step(critic)
                    found |= {f"critic/{name}": number for name, number in of_critic.items()}
                    problem = its_problem or problem
        finally:
            self.drop_gradients()
        if problem:
            raise NonFiniteError(problem)
        return found

    def _needed_reference(self, samples: list[Sample], loss: LossSpec) -> tuple[np.ndarray, ...] | None:
        if not loss.params.get("kl_coef", 0):
            return None
        return self._logprobs(self._reference.needed(loss), samples)

    def _plan(self, samples: Sequence[Sample]) -> list[list[RankWork]]:
        tokens = keys(samples, self._routing) if self._routing else [sample.tokens for sample in samples]
        budget, shares = self.settings.micro_batch_tokens, self.mesh.shares
        cost: Any = {"least": self._least, "attention": attention_cost(self.loaded)}
        if isinstance(pipeline := self.loaded.division, Pipeline):
            refuse_longer(samples, budget)
            return pipeline.planned(tokens, budget, shares, **cost)
        return plan(tokens, budget, shares, **cost)

    def save(self, path: Path) -> None:
        """Write the trainer's state into the folder `path`, made if missing (see `trainer/state.py`)."""
        with self.mesh.agreed():
            save_state(self._state(), path, self.mesh.rank)

    def load(self, path: Path) -> None:
        """Continue bit for bit where `save` was called; weights keep their storage.

        Raises:
            CheckpointError: what is there does not fit, and how. Nothing has changed then.
        """
        state = self._state()
        with self.mesh.agreed():
            apply = load_state(state, path, self.mesh.rank - self.mesh.rank % self.mesh.tp)
        apply()
        self._checked = not self.settings.self_check
        self.drop_gradients()

    def export(self, path: Path) -> None:
        """Write a plain Hugging Face folder, LoRA merged; the trainer's own weights stay as they are."""
        export_model(self.loaded, path, self.mesh)

    def save_parameters(self, path: Path) -> None:
        """Write the parameters that training changes into the new folder `path`, for an engine to load."""
        save_trained(self.loaded, path, self.mesh)

    def save_adapter(self, path: Path) -> None:
        """Write LoRA's adapters into the new folder `path`, as PEFT stores them."""
        save_adapters(self.loaded, path, self.mesh)

    def drop_gradients(self) -> None:
        """Forget the gradients so far."""
        self.stepper.drop_gradients()
        if self.critic:
            self.critic.stepper.drop_gradients()

    def _state(self) -> TrainerState:
        critic = TrainerState(self.critic.stepper, self._randomness) if self.critic else None
        return TrainerState(self.stepper, self._randomness, self._reference.parameters, critic)
