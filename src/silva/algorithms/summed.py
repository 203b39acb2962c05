"""Losses as the Tinker service has them: sums over all tokens, each with its inputs beside it.

Formulas of https://tinker-docs.thinkingmachines.ai/tinker/losses, written with losses.py where the two agree.
Nothing is averaged: a client scales its weights or advantages. r is p / q, q that of the policy that sampled.

| loss | sum over tokens of |
|---|---|
| cross_entropy | -w log p; targets and weights may be [N, K], K targets for each place |
| importance_sampling | -r A |
| ppo | -min(r A, clip(r, low, high) A) |
| cispo | -sg(clip(r, low, high)) A log p |
| dro | -(A log p - beta / 2 (log r)^2) |
| gspo | as ppo by s, the geometric mean of r over the tokens of `sequence_ratio_mask`; gradients by token |

The service's own bounds for gspo are not published: here they are the paper's, as in losses.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from silva.algorithms.correction import bounded_ratio
from silva.algorithms.losses import DroLoss, GspoLoss, surrogate
from silva.algorithms.losses import dro as dro_per_token
from silva.errors import RecordError

if TYPE_CHECKING:
    from torch import Tensor

    Inputs = Mapping[str, Tensor]

LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
"""Bounds of the ratio: parameters of a loss, which inputs of the same names replace token by token."""
MASK = "sequence_ratio_mask"
BOUNDS = (LOW, HIGH)


@dataclass(frozen=True)
class SummedLoss:
    """A loss of the service.

    Args:
        function: of log-probabilities [N], the row of each token [N] int64, inputs and parameters -> [N].
        needs: its inputs, each as the log-probabilities are shaped.
        takes: inputs that may be left out.
        params: its parameters with their defaults.
    """

    function: Callable[[Tensor, Tensor, Inputs, Mapping[str, float]], Tensor]
    needs: tuple[str, ...]
    takes: tuple[str, ...] = ()
    params: Mapping[str, float] = field(default_factory=dict)

    def total(self, logprobs: Tensor, rows: Tensor, inputs: Inputs, params: Mapping[str, float]) -> Tensor:
        """The sum, with gradient.

        Args:
            logprobs: [N] of the policy being trained; [N, K] for cross_entropy.
            rows: [N] int64, which sequence each token belongs to, 0, 1, ...
            params: those that are not the defaults.
        """
        return self.function(logprobs, rows, inputs, {**self.params, **params}).sum()


def named(name: str) -> SummedLoss:
    """Raises RecordError for a loss that is not here."""
    if name not in SUMMED:
        raise RecordError(f"loss_fn: got {name!r}, expected one of {', '.join(SUMMED)}")
    return SUMMED[name]


def _ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return bounded_ratio(logprobs - inputs["logprobs"])


def _bounds(like: Tensor, inputs: Inputs, params: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    low, high = (inputs.get(name, like.new_full(like.shape, params[name])) for name in BOUNDS)
    return low, high


def _cross_entropy(logprobs: Tensor, _: Tensor, inputs: Inputs, __: Mapping[str, float]) -> Tensor:
    return -inputs["weights"] * logprobs


def _importance_sampling(logprobs: Tensor, _: Tensor, inputs: Inputs, __: Mapping[str, float]) -> Tensor:
    return -_ratio(logprobs, inputs) * inputs["advantages"]


def _ppo(logprobs: Tensor, _: Tensor, inputs: Inputs, params: Mapping[str, float]) -> Tensor:
    bounds = _bounds(logprobs, inputs, params)
    return surrogate(_ratio(logprobs, inputs), inputs["advantages"], *bounds)[0]


def _cispo(logprobs: Tensor, _: Tensor, inputs: Inputs, params: Mapping[str, float]) -> Tensor:
    weights = _ratio(logprobs, inputs).detach().clamp(*_bounds(logprobs, inputs, params))
    return -weights * inputs["advantages"] * logprobs


def _dro(logprobs: Tensor, _: Tensor, inputs: Inputs, params: Mapping[str, float]) -> Tensor:
    return dro_per_token(
        settings=DroLoss(kl_beta=params["beta"]),
        logprobs=logprobs,
        old_logprobs=inputs["logprobs"],
        advantages=inputs["advantages"],
    )[0]


def _gspo(logprobs: Tensor, rows: Tensor, inputs: Inputs, params: Mapping[str, float]) -> Tensor:
    """Of a row without a token in the mask the mean is 0, and so the ratio 1."""
    marked = (inputs[MASK] != 0).to(logprobs.dtype)
    sums = [
        logprobs.new_zeros(int(rows.max()) + 1).index_add(0, rows, x)
        for x in ((logprobs.detach() - inputs["logprobs"]) * marked, marked)
    ]
    mean = (sums[0] / sums[1].clamp(min=1))[rows]
    ratio = bounded_ratio(mean + (logprobs - logprobs.detach()))
    return surrogate(ratio, inputs["advantages"], *_bounds(logprobs, inputs, params))[0]


_OF_POLICY = ("logprobs", "advantages")
SUMMED: dict[str, SummedLoss] = {
    "cross_entropy": SummedLoss(_cross_entropy, ("weights",)),
    "importance_sampling": SummedLoss(_importance_sampling, _OF_POLICY),
    "ppo": SummedLoss(_ppo, _OF_POLICY, BOUNDS, {LOW: 0.8, HIGH: 1.2}),
    "cispo": SummedLoss(_cispo, _OF_POLICY, BOUNDS, {LOW: 0.0, HIGH: 4.0}),
    "dro": SummedLoss(_dro, _OF_POLICY, params={"beta": 0.05}),
    "gspo": SummedLoss(
        _gspo, (*_OF_POLICY, MASK), BOUNDS, {LOW: 1 - GspoLoss().clip_low, HIGH: 1 + GspoLoss().clip_high}
    ),
}
