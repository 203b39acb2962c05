"""Ranks that are processes of torch.distributed: who they are, how they agree, and what each has of a model.

    files of a model ──divide──> a part of every parameter on each rank (FSDP2), gradients summed
                       <─bring── one whole parameter, on the rank that asks for it

Every pass of a chunk through the model (`LoadedModel.run`) gathers the weights and drops them again, layer by
layer, and its backward pass adds the gradients of all ranks up. So all ranks make the same number of passes,
which plan.py counts. What ranks tell each other beside tensors is bytes of wire/codec.py.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import functools
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from silva.models.checks import check_model
from silva.models.division import Division
from silva.models.loading import LoadedModel, no_warnings
from silva.models.pieces import local, whole_of
from silva.models.ulysses import check_heads
from silva.trainer.optimizer import anywhere_within
from silva.trainer.settings import Parallel
from silva.trainer.sharding import combinations
from silva.trainer.sharding.expert_parallel import ExpertParallel, check_experts, exchanged
from silva.trainer.sharding.filling import fill
from silva.trainer.sharding.parallel import Mesh
from silva.trainer.sharding.pipeline import Pipeline, check_stages, cut
from silva.trainer.sharding.tensor_parallel import divide_tensors, styles
from silva.wire.codec import decode, encode

T = TypeVar("T")

PATIENCE = datetime.timedelta(minutes=10)
"""How long a rank waits for another in the middle of an update."""


PASS = "make_pass"
"""A method of a divided model."""
# Nobody writes into what a pass has returned.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")


def mesh_of(parallel: Parallel, device: str) -> Mesh:
    """Of this process and all that it has joined; it is called on each of them."""
    return _made(parallel, device) if dist.is_initialized() else Mesh()


@functools.cache  # a process group keeps its threads, sockets and communicators until the process ends
def _made(parallel: Parallel, device: str) -> Mesh:
    return Ranks(parallel, device)


def check(model: PreTrainedModel, parallel: Parallel, ranks: int) -> None:
    """Whether a model, with or without its numbers, can be divided among so many ranks in this way.

    Raises:
        CapabilityError: it cannot, and why.
    """
    combinations.refuse(parallel, combinations.of_model(model))
    if parallel.ep > 1:
        check_experts(model, parallel.ep, parallel.shape(ranks)["parts"] // parallel.ep)
    if parallel.cp > 1 and parallel.cp_style == "ulysses":
        check_heads(model.config, parallel.cp, parallel.tp)
    if parallel.tp > 1:
        styles(model, parallel.tp)
    if parallel.pp > 1:
        check_stages(model, parallel.pp, parallel.pp_schedule == "interleaved_1f1b")


class Ranks(Mesh):
    """All processes of torch's process group.

    Args:
        parallel: how a model is divided among them.
        device: "cpu" or "cuda": what holds the parts.

    Raises:
        CapabilityError: these ways do not go together, or so many ranks cannot be divided in them.
    """

    def __init__(self, parallel: Parallel, device: str) -> None:
        self._parallel = parallel
        self.refuse(())
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        shape = parallel.shape(self.size)
        self.parts = self.size // shape["copies"]
        # Pinned memory is for what copies to a GPU.
        self._offload = CPUOffloadPolicy(pin_memory=device == "cuda") if parallel.offload else OffloadPolicy()
        names = [name for name, size in shape.items() if size > 1 or name == "parts"]
        mesh = init_device_mesh(device, [shape[name] for name in names], mesh_dim_names=names)
        self._fsdp = mesh["copies", "parts"] if "copies" in names else mesh["parts"]
        self._tp = mesh["tp"] if "tp" in names else None
        self._pp, self.stages = mesh["pp"] if "pp" in names else None, parallel.pp
        self._ends: DeviceMesh | None = None
        if self._pp and not self._tp:
            # Both ends have embeddings that are the head too: copies of each other, as those of HSDP are.
            ends = torch.arange(self.size).view(parallel.pp, -1, shape["parts"])[[0, -1]].flatten(0, 1)
            self._ends = DeviceMesh(device, ends, mesh_dim_names=("copies", "parts"))
        self.siblings, self.tp, self._context = parallel.cp * parallel.tp, parallel.tp, None
        if parallel.cp > 1:
            among = range(parallel.cp * parallel.tp)
            self._context = self._group([[*among[at :: parallel.tp]] for at in range(parallel.tp)])
        self._experts = None
        if parallel.ep > 1:
            self._experts = ExpertParallel(device, (shape["copies"], shape["parts"], parallel.ep))
        self._plain: WeakKeyDictionary[nn.Module, PreTrainedModel] = WeakKeyDictionary()
        self._holders: WeakKeyDictionary[nn.Module, Mapping[str, Sequence[int]]] = WeakKeyDictionary()

    def _group(self, among: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Of this rank, where `among` the ranks of a share there are these groups."""
        first = [at for at in range(0, self.size, self.siblings)]
        of_all = [[at + each for each in ranks] for at in first for ranks in among]
        made = [(ranks, dist.new_group(ranks)) for ranks in of_all]  # by every rank, also for others
        return next(group for ranks, group in made if self.rank in ranks)

    def gather(self, mine: T, kind: Any = None) -> list[T]:
        kind = kind or type(mine)
        return [decode(kind, each) for each in self._gathered(encode(mine, kind))]

    def _gathered(self, mine: bytes) -> list[bytes]:
        size = torch.tensor([len(mine)])
        sizes = [torch.zeros_like(size) for _ in range(self.size)]
        dist.all_gather(sizes, size)
        longest = max(int(each) for each in sizes)
        padded = torch.frombuffer(bytearray(mine.ljust(longest, b" ")), dtype=torch.uint8)
        found = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(found, padded)
        return [each.numpy().tobytes()[: int(n)] for each, n in zip(found, sizes, strict=True)]

    def reduce(self, parameters: Mapping[str, torch.Tensor]) -> None:
        for parameter in parameters.values():  # of norms that see the heads of their rank
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
                parameter.grad = gradient.redistribute(gradient.device_mesh, parameter.placements)  # type: ignore[attr-defined]
        mine = tuple(n for n, p in parameters.items() if not isinstance(p, DTensor) and p.grad is not None)
        for name in sorted({name for names in self.gather(mine, tuple[str, ...]) for name in names}):
            parameter = parameters[name]
            parameter.grad = (
                torch.zeros_like(parameter, dtype=parameter.grad_dtype)
                if parameter.grad is None
                else parameter.grad
            )
            dist.all_reduce(parameter.grad)
            parameter.grad /= self._tp.size() if self._tp else 1  # which have all computed the same

    def rounds(self, works: Sequence[T]) -> Iterable[T]:
        for left, work in zip(reversed(range(len(works))), works, strict=True):
            for module in self._copied():
                module.set_requires_all_reduce(left == 0, recurse=False)
            yield work

    def drop_kept(self) -> None:
        for module in self._copied():
            module.set_requires_all_reduce(True, recurse=False)
            for group in module._get_fsdp_state()._fsdp_param_groups:
                group._partial_reduce_output = None  # torch itself would add it to the next update

    def _copied(self) -> Iterator[FSDPModule]:
        """The units of all models, if there are copies of these. What is offloaded would be kept on the GPU,
        and is added up in every round."""
        if self._parallel.dp_replicate > 1 and not self._parallel.offload:
            modules = (module for model in self._plain for module in model.modules())
            yield from (module for module in modules if isinstance(module, FSDPModule))

    def norm(self, tensors: Sequence[torch.Tensor]) -> float:
        mine = math.fsum(self._squares(each) for each in tensors)
        return math.sqrt(math.fsum(self.gather(mine, float)))

    def _squares(self, tensor: torch.Tensor) -> float:
        """This rank's share of the sum of squares: of copies each has an equal one."""
        copies = self.size
        if isinstance(tensor, DTensor):
            placed = enumerate(tensor.placements)
            copies = math.prod(tensor.device_mesh.size(dim) for dim, each in placed if each.is_replicate())
        mine = super().norm([local(tensor)])
        return mine * mine / copies  # infinite where ** would raise, on this rank alone

    def refuse(self, beside: Iterable[str]) -> None:
        combinations.refuse(self._parallel, beside)

    def divide(self, loaded: LoadedModel) -> LoadedModel:
        model = loaded.model
        check(model, self._parallel, self.size)
        ulysses = self._context is not None and self._parallel.cp_style == "ulysses"
        memory = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
        self._plain[model] = copy.deepcopy(model, memory)
        # Adapters of a narrow model are float32, and so is what they compute.
        narrow = loaded.dtype in (torch.bfloat16, torch.float16) and not loaded.lora
        policy = MixedPrecisionPolicy(loaded.dtype, torch.float32) if narrow else MixedPrecisionPolicy()
        names = {parameter: name for name, parameter in model.named_parameters()}
        chosen = styles(model, self._tp.size()) if self._tp else {}
        embeddings: Any = model.get_input_embeddings()
        tied = embeddings.weight is model.get_output_embeddings().weight
        interleaved = self._parallel.pp_schedule == "interleaved_1f1b"
        stages = cut(model, self._pp.get_local_rank(), self.stages, interleaved) if self._pp else []
        ends = [module for stage in stages for module in stage.ends if tied]
        layers = [layer for stage in stages for layer in stage.layers] or [*model.get_decoder().layers]
        masters = set[str]()  # see Stepper
        parts: list[Any] = [*ends, *layers, *(stages or [model])]
        for part in parts:
            for parameter in part.parameters():
                if narrow and parameter.requires_grad and parameter.dtype == loaded.dtype:
                    masters.add(name := names[parameter])
                    wide = parameter.detach().float()
                    parameter.data = wide if wide.is_meta else anywhere_within(name, parameter)
            if self._tp:
                divide_tensors(part, self._tp, chosen)
            if part is model and tied:
                model.get_output_embeddings().weight = embeddings.weight
            placed = None
            if self._experts:
                self._experts.divide(part)
                placed = self._experts.placement
            # Also the root, so that between calls parameters are always the parts. Stages keep what they have
            # gathered for all micro-batches.
            fully_shard(
                part,
                mesh=self._ends if part in ends else self._fsdp,
                mp_policy=policy,
                reshard_after_forward=not stages,
                offload_policy=self._offload,
                shard_placement_fn=placed,
            )
            # The weights of the losses hold the normaliser of the whole update: no mean over ranks.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        if self._pp:
            for head in ends:  # under the name that the parameter has in the whole model
                embeddings.weight = head.weight
            self._holders[model] = self._holding(model)
            division: Division = Pipeline(stages, self._pp.get_group(), interleaved)
        else:
            model.set_reduce_scatter_unused_params(True)
            setattr(model, PASS, _now)
            register_fsdp_forward_method(model, PASS)
            division = Divided(model, self._context, ulysses)
        divided = dataclasses.replace(loaded, division=division, stored=None)
        if loaded.stored:
            self._fill(loaded, masters, divided)
        return divided

    def _holding(self, model: nn.Module) -> Mapping[str, Sequence[int]]:
        """The ranks that have a part of each parameter."""
        found: dict[str, list[int]] = {}
        names = tuple(name for name, _ in model.named_parameters())
        for rank, of_rank in enumerate(self.gather(names, tuple[str, ...])):
            for name in of_rank:
                found.setdefault(name, []).append(rank)
        return found

    def _fill(self, loaded: LoadedModel, masters: Collection[str], divided: LoadedModel) -> None:
        assert loaded.stored
        with self.agreed():
            fill(loaded, masters, "cpu" if self._parallel.offload else loaded.device)
        if not (loaded.stored.checked or self._pp):  # a stage has no model to compare with
            with no_warnings():
                check_model(divided)
            loaded.stored.checked = True

    def outline(self, loaded: LoadedModel) -> PreTrainedModel:
        return copy.deepcopy(self._plain[loaded.model])

    @torch.no_grad()
    def bring(self, loaded: LoadedModel, name: str, to: int) -> torch.Tensor | None:
        like = self._plain[loaded.model].get_parameter(name)
        holders = self._holders.get(loaded.model, {}).get(name, range(self.size))
        found = None
        if self.rank in holders:
            full = whole_of(loaded.model.get_parameter(name))
            if self.rank in (to, holders[0]):
                found = full.to("cpu", like.dtype)
        if to not in holders and found is not None:
            dist.send(found.contiguous(), to)
        elif to not in holders and self.rank == to:
            found = torch.empty(like.shape, dtype=like.dtype)
            dist.recv(found, holders[0])
        return found if self.rank == to else None


class Divided:
    """Implements `Division`. `group`: of the ranks that share a context; None: each has its own."""

    def __init__(
        self, model: PreTrainedModel, group: dist.ProcessGroup | None, ulysses: bool = False
    ) -> None:
        self._model, self._group, self.ulysses = model, group, ulysses
        self.rank: int = 0 if group is None else group.rank()
        self.size: int = 1 if group is None else group.size()

    def run(self, work: Callable[[], T]) -> T:
        """FSDP gathers weights for methods of the root alone."""
        return getattr(self._model, PASS)(work)  # type: ignore[no-any-return]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return _Gathered.apply(x, self._group)  # type: ignore[no-any-return, no-untyped-call]

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        assert self._group is not None
        return exchanged(x, self._group)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        if self._group is not None:
            dist.all_reduce(x, group=self._group)
        return x


class _Gathered(torch.autograd.Function):
    """[.., n, d] of each rank -> [.., ranks * n, d] on all, whose gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.n = group, x.shape[-2]
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.narrow(-2, ctx.group.rank() * ctx.n, ctx.n).contiguous(), None


def _now(work: Callable[[], T]) -> T:
    return work()
