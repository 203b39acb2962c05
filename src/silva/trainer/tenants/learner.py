"""The learner of many runs: adapters of each on one base model, gradients of several in one pass.

    passes   a: [a1][a2]   b: [b1]   c: [c1]       each cut by its own data
                 |
    joint    [a1 b1 c1] [a2]                       at most one part of a run, within the budget
                 |
    model    all parts together (joint.py)
    head     and loss, each part alone
                 |
    gradient of each run -> its own AdamW

A run has the bits that it would have alone. Where they would depend on the others (`joint.rule_of`), each
part has a pass of its own. So has each part of a run that trains all weights: it has a copy of the model
(full.py).

The base model may be divided among ranks (FSDP2): each layer is gathered for a pass and dropped again. Then
all ranks make the same passes. Adapters, which are small, are whole on every rank.

Not here: the order of requests, who may do what, when a run goes to disk.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import nn

from silva.errors import CapabilityError, ModelError, NonFiniteError, OutOfMemory, RecordError, SilvaError
from silva.models.division import WHOLE
from silva.models.loading import LoadedModel, copied
from silva.models.lora_runs import LoraRuns
from silva.models.snapshots import UNTRAINED, base_of
from silva.trainer.explained_errors import explained_memory
from silva.trainer.gradients import read
from silva.trainer.head import Head
from silva.trainer.optimizer import Stepper, check_params
from silva.trainer.settings import LocalTrainerSettings
from silva.trainer.sharding.parallel import Mesh
from silva.trainer.streamed import base_of_divided
from silva.trainer.tenants import AdamParams, Pass, Passed, folder
from silva.trainer.tenants.folder import LoraShape, TenantRun
from silva.trainer.tenants.full import full_run, through
from silva.trainer.tenants.joint import JointDecoder, rule_of
from silva.trainer.tenants.parts import PassPart, PassWork, check, cut, part_of, share
from silva.trainer.training_mode import enable_gradient_checkpointing, training_mode
from silva.types import OptimParams


class _RunHead(Head):
    """The head with the adapter that a run may have there."""

    def __init__(self, loaded: LoadedModel, runs: LoraRuns, run: str) -> None:
        super().__init__(loaded)
        self._runs, self._run = runs, run

    def _whole(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with self._runs.rows([(self._run, 0, len(hidden))]):  # also when it is computed again
            return super()._whole(hidden, targets, temperatures)


class Tenants:
    """Trains the runs of many clients on one plain model, which stays as it is.

    Args:
        settings: the budget of a pass, and whether layers are computed again in the backward pass.
        targets: the linear layers that runs may adapt, beside the head; None: those of `[model.lora]`.
        head: runs may adapt the head, which not every engine can sample with.
        mesh: ranks that have all runs each, share the data of every pass, and have a part of the model or all
            of it; None: nobody.

    Attributes:
        loaded: the model, of which this rank may have a part.
        rule: see `joint.rule_of`.

    Raises:
        CapabilityError: the model has adapters of its own.
        ModelError: a target is no linear layer of the model.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: LocalTrainerSettings,
        *,
        targets: Sequence[str] | None = None,
        head: bool = True,
        mesh: Mesh | None = None,
    ) -> None:
        from silva.config.sections import Lora

        if loaded.lora:
            raise CapabilityError("tenants: got a model with adapters, expected a plain one: no [model.lora]")
        if settings.exact:
            raise CapabilityError(
                "trainer.exact = true: a pass of several tenants has other bits; expected false"
            )
        self._settings, self._head = settings, head
        self._mesh, self.rule = mesh or Mesh(), rule_of(loaded)
        divided = self._mesh.parts > 1
        weights = [*loaded.model.parameters(), *loaded.model.buffers()]
        self._plain = None if divided else copied(loaded, weights)
        model, head = loaded.model, loaded.model.get_output_embeddings()
        (name,) = [name for name, module in model.named_modules() if module is head]
        linear = {
            name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, nn.Linear)
        }
        self._experts = any(parameter.ndim > 2 for parameter in model.parameters())
        usual = [each for each in Lora().targets if each in linear or not self._experts]
        self._adapters = LoraRuns(model, [*(usual if targets is None else targets), name.rpartition(".")[2]])
        if settings.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        self.loaded = self._mesh.divide(loaded) if divided else loaded
        self._decoder = JointDecoder(self.loaded, self._adapters, self.rule)
        self._runs: dict[str, TenantRun] = {}

    @property
    def runs(self) -> tuple[str, ...]:
        """Those in memory."""
        return tuple(self._runs)

    def create(
        self, run: str, *, rank: int, alpha: float, seed: int, attn: bool, mlp: bool, unembed: bool
    ) -> None:
        """Begin a run with fresh adapters, which change nothing yet; arguments as of `LoraRuns.add`.

        Args:
            rank: 0: the run trains all weights of a copy of the model (full.py).

        Raises:
            CapabilityError: such a copy does not fit into memory, or no rank has the model to copy, or it
                cannot be trained so; or the head or experts may not be adapted.
        """
        shape = LoraShape(rank, alpha, attn, mlp, unembed)
        if rank == 0:
            if run in self._runs:
                raise ModelError(f"run {run}: it exists, expected the name of a new run")
            if self._plain is None:
                raise CapabilityError(
                    f"run {run}: rank 0 trains all weights of a copy of the model, which is divided among "
                    "ranks here; expected rank 1 or more"
                )
            self._runs[run] = full_run(self._plain, shape, self._settings, self._mesh, f"run {run}")
            return
        if unembed and not self._head:
            raise CapabilityError(
                f"run {run}: train_unembed: the engine here has no adapters of the head; expected false"
            )
        if mlp and self._experts:
            raise CapabilityError(
                f"run {run}: train_mlp: experts have no adapters here; expected false, or a run of rank 0"
            )
        made = self._adapters.add(run, rank, alpha, seed, attn=attn, mlp=mlp, unembed=unembed)
        self._runs[run] = TenantRun(shape, Stepper(made, self._mesh, most=sys.maxsize, of=f"run {run}"))

    def drop(self, run: str) -> None:
        """Forget a run."""
        if self._get(run).whole is None:
            self._adapters.remove(run)
        del self._runs[run]

    def passes(self, passes: Sequence[Pass]) -> list[Passed | SilvaError]:
        """Compute passes, those of several runs together, and add their gradients to the runs'.

        Passes of one run are computed in their order.

        Returns:
            Of each pass what it has found, or why it failed: then its run's gradient is what it was before.
        """
        works = [self._begun(each) for each in passes]
        queues: defaultdict[str, deque[PassWork]] = defaultdict(deque)
        for work in works:
            queues[work.asked.run].append(work)
        while together := self._next(queues):
            self._compute(together)
        share(works, self._mesh)
        for work in works:
            if work.error is None and work.asked.backward:
                self._commit(work)
        return [work.error or _passed(work) for work in works]

    def optim_step(self, run: str, params: AdamParams) -> Mapping[str, float]:
        """One step of AdamW on a run's gradient, then zero it. A run without a gradient stays as it is.

        Returns:
            `grad_norm` (before clipping) and `lr`.

        Raises:
            NonFiniteError: the gradient is not finite. Weights and moments are as before; it is dropped.
            RecordError: numbers that AdamW does not take, or no such run.
        """
        stepper = self._get(run).stepper
        given = OptimParams(
            lr=params.lr,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
            max_grad_norm=params.grad_clip_norm or None,
        )
        check_params(given)
        with explained_memory(self._settings, f"stepping the optimizer of run {run}"):
            found, _ = stepper.step(given)
        stepper.drop_gradients()
        if found.pop("nonfinite"):
            raise NonFiniteError(
                f"run {run}: no step, as the norm of its gradient is {found['grad_norm']}. Weights and "
                "moments are as they were, and the gradient is dropped; lower the learning rate"
            )
        return found

    def save(self, run: str, path: Path, *, optimizer: bool = True) -> None:
        """Write a run into the folder `path` (folder.py), made if missing.

        Args:
            optimizer: with all that training needs to go on bit for bit: moments, and a gradient that has not
                been stepped on.
        """
        mine, mesh, base = self._get(run), self._mesh, self._base
        with mesh.agreed():
            if mesh.rank == 0:
                folder.save(self.loaded, mine, path, base, optimizer=optimizer)

    def load(self, run: str, path: Path, *, optimizer: bool) -> None:
        """Bring a run to what `save` has written, of this one or another of the same kind.

        Args:
            optimizer: with the moments and the gradient there; otherwise the run begins without any.

        Raises:
            CheckpointError: the folder is damaged, or of another model or kind of run. Nothing has changed.
        """
        mine, base = self._get(run), self._base
        with self._mesh.agreed():
            apply = folder.load(mine, path, base, optimizer=optimizer)
        apply()
        if self._mesh.rank > 0:  # the first one has the gradient
            mine.stepper.drop_gradients()

    def parameters(self, run: str) -> Mapping[str, nn.Parameter]:
        """Its adapters, by the names of their layers in the plain model, or all its weights."""
        return self._get(run).stepper.parameters

    @cached_property
    def _base(self) -> str:
        """A digest of the model; all ranks ask for it at the same time."""
        whole = self.loaded.division is WHOLE
        found = base_of(self.loaded) if whole else base_of_divided(self.loaded, self._mesh)
        return self._mesh.gather(found.get(UNTRAINED, ""))[0]

    def _get(self, run: str) -> TenantRun:
        if run not in self._runs:  # the names of others are not this client's to know
            raise RecordError(f"run {run}: got no run of this name in memory")
        return self._runs[run]

    def _begun(self, each: Pass) -> PassWork:
        work = PassWork(each, deque())
        try:
            self._get(each.run)
            check(each, self.loaded)
            work.waiting.extend(cut(each, self.loaded, self._settings.micro_batch_tokens, self._mesh))
        except SilvaError as error:
            work.error = error
        return work

    def _next(self, queues: Mapping[str, deque[PassWork]]) -> list[PassWork]:
        """The works whose next parts are computed together: all with a backward pass, or all without."""
        chosen: list[PassWork] = []
        left = self._settings.micro_batch_tokens
        for queue in queues.values():
            while queue and not queue[0].waiting:
                queue.popleft()
            if not queue:
                continue
            work, size = queue[0], queue[0].waiting[0].tokens
            if chosen and not (size <= left and self._fit(chosen[0], work)):
                continue
            work.next = part_of(work.asked, work.waiting.popleft().data, self.loaded)
            chosen.append(work)
            left -= size
        return chosen

    def _fit(self, one: PassWork, other: PassWork) -> bool:
        """Whether their parts may be computed together."""
        of_base = all(self._get(each.asked.run).whole is None for each in (one, other))
        return self.rule is not None and of_base and one.asked.backward == other.asked.backward

    def _compute(self, works: Sequence[PassWork]) -> None:
        """One part of each work. If memory runs out, all of these fail.

        Raises:
            OutOfMemory: the model is divided, so that other ranks may wait in the middle of the pass.
        """
        first = self._get(works[0].asked.run)
        try:
            memory = explained_memory(self._settings, f"training {len(works)} runs at once")
            model = (first.whole or self.loaded).model
            with memory, training_mode(model), torch.set_grad_enabled(works[0].asked.backward):
                if first.whole is None:
                    self.loaded.division.run(partial(self._through, works))
                else:
                    through(first.whole, first.stepper, works[0])
        except OutOfMemory as error:
            if self._plain is None:
                raise
            for work in works:
                work.error = error
                work.waiting.clear()
        for work in works:
            work.next = None

    def _through(self, works: Sequence[PassWork]) -> None:
        parts = [work.next for work in works if work.next]
        runs = [work.asked.run for work in works]
        with self._decoder.hidden([(n, part.pack) for n, part in zip(runs, parts, strict=True)]) as joint:
            hidden, rows = joint
            pulls = torch.zeros_like(hidden)
            for work, part, mine in zip(works, parts, rows, strict=True):
                pulls[mine] = self._loss(work, part, hidden[mine].detach())
            self._backward(works, hidden, pulls)

    def _loss(self, work: PassWork, part: PassPart, hidden: torch.Tensor) -> torch.Tensor | float:
        """Head and loss of a part; the gradient of its hidden states [U, H], 0 without one."""
        if not part.data:
            return 0.0
        asked, pack, run = work.asked, part.pack, work.asked.run
        hidden.requires_grad_(asked.backward)
        head = _RunHead(self.loaded, self._adapters, run)
        found, _ = head(read(hidden, pack.predictors), pack.targets, pack.temperatures)
        logprobs = read(found, pack.pairs)
        if (total := work.loss(part, logprobs)) is None:
            return 0.0
        leaves = self._leaves(run, of_head=True)
        of_hidden, *of_head = torch.autograd.grad(total, [hidden, *leaves.values()])
        work.add([*leaves], of_head)
        return of_hidden

    def _backward(self, works: Sequence[PassWork], hidden: torch.Tensor, pulls: torch.Tensor) -> None:
        """From the hidden states to the adapters."""
        leaves = [(work, name, leaf) for work in works if work.asked.backward
                  for name, leaf in self._leaves(work.asked.run, of_head=False).items()]  # fmt: skip
        if leaves:
            gradients = torch.autograd.grad(hidden, [leaf for *_, leaf in leaves], pulls)
            for (work, name, _), gradient in zip(leaves, gradients, strict=True):
                work.add([name], [gradient])

    def _leaves(self, run: str, *, of_head: bool) -> dict[str, nn.Parameter]:
        """The adapters of the head, or all others."""
        kind, layers = self._adapters.kind, self._adapters.parameters(run)
        return {n: p for n, p in layers.items() if (kind(n.rpartition(".lora_")[0]) == "unembed") == of_head}

    def _commit(self, work: PassWork) -> None:
        """Add a pass's gradient to its run's, which the first rank has; its part of it comes from every rank.

        It is added up here and not when it is stepped on, so that a folder that is written in between, and a
        pass that is done again after that, change no order of sums.
        """
        parameters = self._get(work.asked.run).stepper.parameters
        before = {name: parameter.grad for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.grad = work.gradients.pop(name, None)
        self._mesh.reduce(parameters)
        for name, parameter in parameters.items():
            gradient = parameter.grad if self._mesh.rank == 0 else None
            so_far = before[name]
            parameter.grad = so_far if gradient is None else gradient if so_far is None else so_far + gradient


def _passed(work: PassWork) -> Passed:
    logprobs = [work.logprobs[number] for number in range(len(work.asked.data))]
    return Passed(logprobs, {"loss:sum": work.total})
