"""Expert parallel (GShard, Lepikhin et al. 2020): each rank has some of a layer's experts, and tokens travel.

    [N, H] of this rank ──a row for each of its k experts, in their order──> [N k, H]
      ──to the ranks of these experts──> [n, H] ──experts──> [n, H] ──back──> [N k, H]
      ──weighted, summed──> [N, H]

The ranks of one copy of the model stand in a grid for this, so that all of them have a part of every weight:

    experts' weights    ep ranks side by side have different experts; those with the same have a part (FSDP)
    all others          a part on every rank (FSDP), adapters of experts among them

Every rank makes every pass, so that exchanges meet. All ranks keep the same graph, too: a rank that no token
has come to still takes part in the exchanges of the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
)
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from silva.errors import CapabilityError
from silva.models.adapters import EXPERTS
from silva.trainer.gradients import read

Forward = Callable[..., torch.Tensor]


class ExpertParallel:
    """Divides the experts of models.

    Args:
        shape: copies of the model, ranks of a copy, and among how many of these experts are divided.
    """

    def __init__(self, device: str, shape: tuple[int, int, int]) -> None:
        copies, parts, self._ep = shape
        grid = {"expert_copies": copies, "expert_parts": parts // self._ep, "ep": self._ep}
        if copies == 1:
            del grid["expert_copies"]
        mesh = init_device_mesh(device, tuple(grid.values()), mesh_dim_names=tuple(grid))
        self._mesh, self._group = mesh["ep"], mesh.get_group("ep")
        # Also where it is of one rank: FSDP then only copies, and sums over the copies of the model.
        self._fsdp = (
            FSDPMeshInfo(mesh["expert_parts"], 0)
            if copies == 1
            else HSDPMeshInfo(mesh["expert_copies", "expert_parts"], 1, 0)
        )

    def divide(self, part: nn.Module) -> None:
        """Leave this rank its experts of all layers in `part` that are whole, in place."""
        here = self._mesh.get_local_rank()
        for outer in _experts(part):
            experts: Any = _inner(outer)
            if not (
                names := [n for n, p in experts.named_parameters(recurse=False) if not isinstance(p, DTensor)]
            ):
                continue
            every = experts.num_experts
            experts.num_experts = count = every // self._ep
            mine = slice(here * count, (here + 1) * count)
            for name in names:
                whole = experts.get_parameter(name)
                piece = DTensor.from_local(whole.detach()[mine], self._mesh, [Shard(0)], run_check=False)
                experts.register_parameter(name, nn.Parameter(piece, whole.requires_grad))
            for wrapper in _wrappers(outer):
                _only(wrapper, mine)
            outer.forward = _travelling(outer.forward, experts, self._group, every)  # type: ignore[method-assign]

    def placement(self, parameter: nn.Parameter) -> ShardPlacementResult | None:
        """Where FSDP divides a parameter once more; None: as all others."""
        if not isinstance(parameter, DTensor) or parameter.device_mesh != self._mesh:
            return None
        dim = _dim(parameter.shape, self._ep, self._fsdp.shard_mesh_size)
        return ShardPlacementResult(Shard(dim), self._fsdp)


def check_experts(model: PreTrainedModel, ep: int, ranks: int) -> None:
    """Whether a model's experts can be divided among `ep` ranks, and each of these parts among `ranks`.

    Raises:
        CapabilityError: they cannot, and why.
    """
    key, family = f"trainer.parallel.ep = {ep}", model.config.model_type
    found = [*_experts(model)]
    if not found:
        raise CapabilityError(f"{key}: a model of the family {family} has no experts; expected 1")
    for outer in found:
        experts: Any = _inner(outer)
        count, shapes = (
            getattr(experts, "num_experts", 0),
            [p.shape for p in experts.parameters(recurse=False)],
        )
        if not shapes or any(shape[0] != count for shape in shapes):
            raise CapabilityError(
                f"{key}: experts of the family {family} are not in parameters [experts, ...], which alone "
                "are divided; expected 1, or a family such as Qwen3-MoE"
            )
        if count % ep:
            raise CapabilityError(f"{key}: the model has {count} experts; expected a divisor of it")
        for shape in shapes:
            _dim(shape, ep, ranks)


def _dim(shape: torch.Size, ep: int, ranks: int) -> int:
    """Experts of one part are divided by their number if each rank gets as many, or else within each."""
    if shape[0] // ep % ranks == 0:
        return 0
    if shape[1] % ranks == 0:
        return 1
    raise CapabilityError(
        f"trainer.parallel.ep = {ep}: {ranks} ranks share the same experts, and cannot divide their weights "
        f"{list(shape)} evenly; expected {ranks} to divide {shape[0] // ep} or {shape[1]}"
    )


def _experts(part: nn.Module) -> Iterator[nn.Module]:
    """The modules of experts within `part`; with adapters the outermost of those that wrap them."""
    for name, module in part.named_modules():
        if name.rpartition(".")[2] == EXPERTS:
            yield module


def _wrappers(outer: nn.Module) -> Iterator[ParamWrapper]:
    while isinstance(outer, ParamWrapper):
        yield outer
        outer = outer.base_layer  # type: ignore[assignment]


def _inner(outer: nn.Module) -> nn.Module:
    return outer.get_base_layer() if isinstance(outer, ParamWrapper) else outer


def _only(wrapper: ParamWrapper, mine: slice) -> None:
    """Adapters stay whole in a pass, and are added to the experts that are here."""
    whole = wrapper.get_delta_factors

    def factors(adapter: str) -> tuple[torch.Tensor, torch.Tensor, float]:
        left, right, scaling = whole(adapter)
        return left[mine], right[mine], scaling

    wrapper.get_delta_factors = factors  # type: ignore[method-assign]


def _travelling(compute: Forward, experts: nn.Module, group: dist.ProcessGroup, every: int) -> Forward:
    """The forward pass of experts of which some are here, `compute`, as that of all `every` of them."""
    ranks = group.size()

    def forward(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [N, H], chosen [N, k] experts and their weights -> [N, H]."""
        if torch.is_grad_enabled() and not hidden.requires_grad:
            # or the graph of a rank would depend on whether a token has come to its experts
            hidden = hidden.detach().requires_grad_()
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=every)  # of rows for each expert
        coming = exchanged(counts.view(ranks, -1), group)  # [ranks, experts here]
        send, receive = counts.view(ranks, -1).sum(1).tolist(), coming.sum(1).tolist()
        rows = exchanged(read(hidden, order // chosen.shape[1]), group, send, receive)
        if len(rows):
            here = torch.arange(coming.shape[1], device=rows.device).repeat(ranks)
            here = here.repeat_interleave(coming.flatten())[:, None]
            with _here(experts):
                rows = compute(rows, here, torch.ones_like(here, dtype=weights.dtype))
        back = exchanged(rows, group, receive, send)
        # What this last step keeps for its backward pass is what makes a checkpointed layer go through all
        # exchanges when it is computed again: torch stops once it has made what was kept.
        back = read(back, order.argsort()).unflatten(0, chosen.shape)
        return (back * weights[..., None]).sum(1).to(hidden.dtype)

    return forward


@contextmanager
def _here(experts: nn.Module) -> Iterator[None]:
    """Weights of experts as plain tensors of what is here, for code that knows no DTensor."""
    divided = {name: p for name, p in experts.named_parameters(recurse=False)}
    for name, parameter in divided.items():
        local = parameter.to_local()  # type: ignore[attr-defined]
        experts._parameters[name] = local if local.requires_grad else nn.Parameter(local, False)
    try:
        yield
    finally:
        experts._parameters.update(divided)


def exchanged(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    send: Sequence[int] | None = None,
    receive: Sequence[int] | None = None,
) -> torch.Tensor:
    """Rows in runs, one for each rank of `group` in order -> the runs that all ranks have for this one.

    Args:
        x: [rows, ...]; its gradient goes back the same way.
        send: how many rows each run has; None: all the same.
        receive: of the runs that come.
    """
    return _Exchanged.apply(x, group, send, receive)  # type: ignore[no-any-return, no-untyped-call]


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, send: Any, receive: Any) -> torch.Tensor:
        ctx.way = group, receive, send
        return _all_to_all(x, group, send, receive)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        return _all_to_all(gradient, *ctx.way), None, None, None


def _all_to_all(x: torch.Tensor, group: dist.ProcessGroup, send: Any, receive: Any) -> torch.Tensor:
    found = x.new_empty((len(x) if receive is None else sum(receive), *x.shape[1:]))
    dist.all_to_all_single(found, x.contiguous(), receive, send, group=group)
    return found
