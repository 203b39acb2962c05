"""AdamW with float32 masters of narrow weights, the global gradient norm, and updates that are skipped."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from silva.errors import RecordError
from silva.models.pieces import Box
from silva.ports import derive
from silva.trainer.sharding.parallel import Mesh
from silva.types import OptimParams

DRAWN = 1 << 22
"""Numbers at once."""


def check_params(*given: OptimParams | None) -> None:
    """Raises RecordError for numbers that AdamW does not take: one NaN would be in every weight."""
    for params in (each for each in given if each is not None):
        most = params.max_grad_norm
        for name, fits, expected in (
            ("lr", 0 <= params.lr < math.inf, "0 or more"),
            ("betas", all(0 <= beta < 1 for beta in params.betas), "two numbers from 0 to below 1"),
            ("eps", 0 < params.eps < math.inf, "more than 0"),
            ("weight_decay", 0 <= params.weight_decay < math.inf, "0 or more"),
            ("max_grad_norm", most is None or most > 0, "more than 0, or null"),
        ):
            if not fits:
                raise RecordError(f"OptimParams.{name}: got {getattr(params, name)}, expected {expected}")


@dataclass
class Counters:
    version: int = 0  # publishes
    updates: int = 0  # optimizer steps, skipped ones included
    nonfinite: int = 0  # skipped updates in a row
    flat: int = 0  # 1: rows share nothing, because their trie was found wrong (self_check.py)


class Stepper:
    """AdamW (Loshchilov & Hutter 2019) on the gradients of named parameters.

    A parameter narrower than float32 has a float32 master here. Gradients add up in float32, a step changes
    the master, and the parameter becomes the rounded master. Without it, updates smaller than 1/256 of a
    weight would round away, and so would the decay of the second moment. Every other parameter is its own
    master. Weight decay applies to every parameter.

    A master begins at a random place among the numbers that round to its parameter. If it began at the
    parameter itself, no weight would change until an update or a sum of updates came to half the distance
    between two numbers of the narrow type, which is tens of updates at usual rates. So a hundredth of that
    distance changes a hundredth of the weights, and the policy moves by the update on average from the
    first step on, as with stochastic rounding (Gupta et al. 2015), whose draws are here made once.

    Args:
        mesh: whose ranks have a part of the gradients each, and step together.
        most: trainer.max_nonfinite.
        of: whose parameters these are.
        key: where the optimizer's settings are in the configuration.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh | None = None,
        *,
        most: int = 1,
        of: str = "policy",
        key: str = "trainer.optimizer",
    ) -> None:
        self.parameters = dict(parameters)
        self.masters = {name: _master(name, parameter) for name, parameter in parameters.items()}
        self._mesh = mesh or Mesh()
        self._most, self._of, self._key = most, of, key
        self.counters = Counters()
        self.begin()

    def begin(self) -> None:
        """Drop gradients, moments and counts; weights stay, and whether rows may share."""
        self.counters = Counters(flat=self.counters.flat)
        self.drop_gradients()
        masters = list(self.masters.values())
        # One kernel for all numbers where the device has it: 3x faster on CPU. It takes divided ones apart.
        fused = all(m.device.type in ("cpu", "cuda") and m.dtype.is_floating_point for m in masters)
        kinds = defaultdict[DeviceMesh | None, list[torch.Tensor]](list)  # which one kernel cannot mix
        for master in masters:
            kinds[master.device_mesh if isinstance(master, DTensor) else None].append(master)
        self.optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds.values()], fused=fused)

    def names(self) -> tuple[str, ...]:
        """Of the parameters of all ranks, as other stages of a pipeline have others."""
        named = self._mesh.gather(tuple(self.parameters), tuple[str, ...])
        return tuple(dict.fromkeys(name for of_rank in named for name in of_rank))

    @property
    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def steps(self) -> dict[str, int]:
        """How often AdamW has changed each parameter, of all ranks; without those it has not."""
        states = {name: self.optimizer.state.get(master) for name, master in self.masters.items()}
        mine = {name: int(state["step"]) for name, state in states.items() if state}
        return {n: step for part in self._mesh.gather(mine, Mapping[str, int]) for n, step in part.items()}

    def drop_gradients(self) -> None:
        self._mesh.drop_kept()
        for parameter in self.parameters.values():
            parameter.grad = None
        self.bad_loss: list[str] = []  # trajectories whose loss was not finite since the last step

    def norm(self, tensors: Sequence[torch.Tensor]) -> float:
        return self._mesh.norm(tensors)

    def blame(self, loss: torch.Tensor, trajectories: Sequence[str]) -> None:
        """Skip the next step if the loss of these trajectories is not finite."""
        if not torch.isfinite(loss):
            self.bad_loss = self.bad_loss or list(trajectories[:4])

    def step(self, params: OptimParams) -> tuple[dict[str, float], str]:
        """Clip the gradients and step, or skip the update if its loss or a gradient is not finite.

        The gradients stay. Returns `grad_norm` (before clipping), `lr` and `nonfinite` (1 for a skipped
        update), and why there should be no further update: `most` in a row were skipped. "" if there may be.
        """
        self._mesh.reduce(self.parameters)
        blamed = self._mesh.gather(tuple(self.bad_loss), tuple[str, ...])
        self.bad_loss = [name for part in blamed for name in part][:4]
        norm, counters = self.norm(self.gradients), self.counters
        finite = not self.bad_loss and math.isfinite(norm)
        if finite:
            self._adamw(norm, params)
        counters.nonfinite = 0 if finite else counters.nonfinite + 1
        problem = self._problem(params) if counters.nonfinite >= self._most else ""
        counters.updates += 1
        return {"grad_norm": norm, "lr": params.lr, "nonfinite": float(not finite)}, problem

    def _problem(self, params: OptimParams) -> str:
        gradients = {name: [p.grad] for name, p in self.parameters.items() if p.grad is not None}
        names = self.names()
        bad = [name for name in names if not math.isfinite(self.norm(gradients.get(name, [])))]
        where = []
        if self.bad_loss:
            where.append(f"the loss of the micro-batch with trajectories {', '.join(self.bad_loss)}")
        if bad:
            where.append(f"the gradient of {len(bad)} of {len(names)} parameters, first {bad[0]}")
        return (
            f"update {self.counters.updates}: loss or gradient of the {self._of} was not finite for "
            f"{self.counters.nonfinite} updates in a row (trainer.max_nonfinite = {self._most}): "
            f"{' and '.join(where) or 'the norm of finite gradients'}. "
            f"Lower {self._key}.lr (now {params.lr:g}) or {self._key}.max_grad_norm "
            f'(now {params.max_grad_norm}), or use model.dtype = "float32"'
        )

    def _adamw(self, norm: float, params: OptimParams) -> None:
        clip(self.gradients, norm, params.max_grad_norm)
        for group in self.optimizer.param_groups:
            group.update(lr=params.lr, betas=params.betas, eps=params.eps, weight_decay=params.weight_decay)
        for name, master in self.masters.items():
            master.grad = self.parameters[name].grad
        self.optimizer.step()
        # The fused kernel does not count its changes.
        torch.autograd.graph.increment_version(list(self.parameters.values()))
        self.round()

    @torch.no_grad()
    def adopt(self) -> None:
        """Go on from the parameters as somebody else has set them, and drop all else."""
        for name, master in self.masters.items():
            if master is not (parameter := self.parameters[name]):
                master.copy_(anywhere_within(name, parameter))
        self.begin()

    @torch.no_grad()
    def round(self) -> None:
        """Give every parameter the value of its master."""
        for name, master in self.masters.items():
            parameter = self.parameters[name]
            if parameter is not master:
                parameter.copy_(master)
                master.grad = None


def _master(name: str, parameter: nn.Parameter) -> nn.Parameter:
    wide = torch.promote_types(parameter.dtype, torch.float32)
    if parameter.dtype == wide:
        return parameter
    parameter.grad_dtype = wide  # of the gradients that autograd and trainer/gradients.py add up
    return nn.Parameter(anywhere_within(name, parameter))


@torch.no_grad()
def anywhere_within(
    name: str, parameter: torch.Tensor, box: Box | None = None, of: Sequence[int] = ()
) -> torch.Tensor:
    """Numbers of float32, drawn around each weight of a parameter of 16 bits, that round to the weight.

    They lie within half the distance to the next number towards zero, on both sides; a zero stays zero.
    On the CPU a part of a parameter has the numbers that it has in the whole.

    Args:
        box: where `parameter` lies in the whole one; None: it is the whole one.
        of: the shape of that.
    """
    weight, wide = parameter.detach(), torch.float32
    exact = weight.to(wide)
    towards_zero = (weight.view(torch.int16) - 1).view(weight.dtype)  # NaN for zero
    drawn = torch.Generator(weight.device).manual_seed(derive(0, "master", name))
    part = _drawn(box or Box((0,) * weight.dim(), tuple(weight.shape)), of or weight.shape, drawn) - 0.5
    moved = exact + part * (exact - towards_zero)
    return torch.where(moved.to(weight.dtype) == weight, moved, exact)


def _drawn(box: Box, of: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """A part of what `torch.rand` gives for a whole tensor on the CPU, which is never there."""
    kind: Any = {"dtype": torch.float32, "device": generator.device}
    if box.shape == tuple(of):
        return torch.rand(box.shape, generator=generator, **kind)
    rows, found = max(1, DRAWN // math.prod(of[1:])), torch.empty(box.shape, **kind)
    for start in range(0, box.offset[0] + box.shape[0] if box.size else 0, rows):
        block = Box((start, *(0 for _ in of[1:])), (min(rows, of[0] - start), *of[1:]))
        drawn = torch.rand(block.shape, generator=generator, **kind)
        if (shared := block.shared(box)).size:
            found[shared.within(box)] = drawn[shared.within(block)]
    return found


def learning_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Gradients, two moments and the masters of narrow ones, of all parameters that are trained."""
    trained = [(p, torch.promote_types(p.dtype, torch.float32)) for p in parameters if p.requires_grad]
    return sum(p.numel() * wide.itemsize * (3 if p.dtype == wide else 4) for p, wide in trained)


def clip(gradients: Sequence[torch.Tensor], norm: float, limit: float | None) -> None:
    """Scale all gradients by `limit / norm` where their norm exceeds the limit (Pascanu et al. 2013)."""
    if limit is not None and norm > limit:
        for gradient in gradients:
            gradient.mul_(limit / norm)
