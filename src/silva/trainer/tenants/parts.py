"""A run's pass, cut into what goes through the model at once: by its own data, whoever else is there."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from silva.algorithms import summed
from silva.errors import NonFiniteError, RecordError, SilvaError, error_named
from silva.models.loading import LoadedModel
from silva.models.trie import build
from silva.trainer.head import wide
from silva.trainer.plan import plan
from silva.trainer.policy import Pack, attention_cost
from silva.trainer.sharding.parallel import Mesh
from silva.trainer.tenants import Datum, Pass


@dataclass(frozen=True)
class PassPart:
    """Some of the data of a pass, on a trie of their own."""

    data: list[int]  # which of the pass; none: nothing of it is learned from
    pack: Pack  # its targets are [M, K] if those of a datum are [n, K]
    inputs: Mapping[str, torch.Tensor]  # of the loss, [N] or [N, K]


@dataclass(frozen=True)
class Round:
    """What the ranks compute of a pass at the same time."""

    data: list[int]  # this rank's
    tokens: int  # of the largest trie of a rank: all ranks join the same passes


IDLE = Datum(np.zeros(2, np.int64), np.zeros(2, np.int64), {})
"""What a rank without data sends through its part of the model while others need that part."""


@dataclass
class PassWork:
    """A pass in the making."""

    asked: Pass
    waiting: deque[Round]  # the parts to come
    next: PassPart | None = None
    logprobs: dict[int, np.ndarray] = field(default_factory=dict)
    total: float = 0.0
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    error: SilvaError | None = None

    def loss(self, part: PassPart, logprobs: torch.Tensor) -> torch.Tensor | None:
        """Of a part, from the log-probabilities of its targets; None: it has no gradient, as it is not
        finite, which is the pass's error, or nobody has asked for one."""
        asked = self.asked
        total = summed.named(asked.loss).total(logprobs, part.pack.rows, part.inputs, asked.params)
        if not math.isfinite(number := float(total.detach())):
            self.error = NonFiniteError(f"run {asked.run}: the loss {asked.loss} is {number}")
            return None
        self.total += number
        sizes = [len(asked.data[number].tokens) for number in part.data]
        for datum, values in zip(part.data, logprobs.detach().cpu().split(sizes), strict=True):
            self.logprobs[datum] = values.numpy()
        return total if asked.backward else None

    def add(self, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> None:
        for name, gradient in zip(names, gradients, strict=True):
            so_far = self.gradients.get(name)
            self.gradients[name] = gradient if so_far is None else so_far + gradient


@dataclass(frozen=True)
class RankFound:
    """What a rank has found of its share of a pass. `error`: the name of its class, and its words."""

    data: tuple[int, ...]
    logprobs: tuple[np.ndarray, ...]
    total: float
    error: tuple[str, str]


def share(works: Sequence[PassWork], mesh: Mesh) -> None:
    """Let every rank know what the others have found: all but gradients."""
    errors = [
        ("", "") if work.error is None else (type(work.error).__name__, str(work.error)) for work in works
    ]
    mine = tuple(
        RankFound(tuple(work.logprobs), tuple(work.logprobs.values()), work.total, error)
        for work, error in zip(works, errors, strict=True)
    )
    of_ranks = mesh.gather(mine, tuple[RankFound, ...])
    for work, found in zip(works, zip(*of_ranks, strict=True), strict=True):
        work.total = sum(each.total for each in found)
        for each in found:
            work.logprobs |= zip(each.data, each.logprobs, strict=True)
            kind, words = each.error
            if kind and work.error is None:
                work.error = error_named(kind, words) or SilvaError(words)


def check(each: Pass, loaded: LoadedModel) -> None:
    """Raise RecordError for data that no model or loss takes, before any of them is computed with."""
    loss = summed.named(each.loss)
    if unknown := each.params.keys() - loss.params.keys():
        expected = ", ".join(loss.params) or "none"
        raise RecordError(f"loss {each.loss}: got parameters {sorted(unknown)}, expected {expected}")
    if wrong := {name: value for name, value in each.params.items() if not math.isfinite(value)}:
        raise RecordError(f"loss {each.loss}: got parameters {wrong}, expected finite numbers")
    if not each.data:
        raise RecordError("data: got none, expected one datum or more")
    for number, datum in enumerate(each.data):
        _check(datum, each.loss, loaded, f"datum {number}")
    kinds = {(datum.targets.shape[1:], *sorted(datum.inputs)) for datum in each.data}
    if len(kinds) > 1:
        raise RecordError(f"data: got k and inputs {sorted(kinds)}, expected the same of each datum")


def _check(datum: Datum, name: str, loaded: LoadedModel, where: str) -> None:
    n, targets, loss = len(datum.tokens), datum.targets, summed.SUMMED[name]
    if {datum.tokens.dtype.kind, targets.dtype.kind} - {*"iu"}:
        raise RecordError(f"{where}: got {datum.tokens.dtype} and {targets.dtype}, expected whole numbers")
    if datum.tokens.ndim != 1 or not 1 <= n <= loaded.context:
        got = f"tokens of shape {list(datum.tokens.shape)}"
        raise RecordError(f"{where}: got {got}, expected 1 to {loaded.context} in one row")
    if targets.shape[:1] != (n,) or targets.ndim > 2 or not targets.size:
        raise RecordError(f"{where}: got targets of shape {list(targets.shape)}, expected [{n}] or [{n}, k]")
    if targets.ndim == 2 and name != "cross_entropy":
        raise RecordError(f"{where}: got targets of shape {list(targets.shape)}, which loss {name} has not")
    size = int(loaded.model.config.get_text_config().vocab_size)
    for kind, ids in (("token", datum.tokens), ("target", targets)):
        if len(wrong := ids[(ids < 0) | (ids >= size)]):
            raise RecordError(f"{where}: got {kind} {wrong[0]}, expected 0 to {size - 1}")
    if missing := [each for each in loss.needs if each not in datum.inputs]:
        raise RecordError(f"{where}: got no {', '.join(missing)}, which loss {name} reads")
    for each, array in datum.inputs.items():
        if each not in (*loss.needs, *loss.takes):
            raise RecordError(
                f"{where}: got {each}, which loss {name} does not read; expected {', '.join(loss.needs)}"
                + (f" and perhaps {', '.join(loss.takes)}" if loss.takes else "")
            )
        if array.shape != targets.shape:
            shapes = f"got {each} of shape {list(array.shape)}, expected {list(targets.shape)}"
            raise RecordError(f"{where}: {shapes}, as the targets")
        if not np.isfinite(array).all():
            raise RecordError(f"{where}: got {each} with a number that is not finite")


def cut(each: Pass, loaded: LoadedModel, budget: int, mesh: Mesh) -> list[Round]:
    """This rank's data in parts of at most `budget` tokens, or those of the longest datum; shared ones count
    once. If ranks have parts of the model, all make the same rounds, also without data."""
    rows = [datum.tokens for datum in each.data]
    most = max(budget, *map(len, rows))
    dealt = plan(rows, most, mesh.shares, walk=False, attention=attention_cost(loaded))
    rounds = [
        Round(works[mesh.share].rows, max(work.tokens for work in works))
        for works in zip(*dealt, strict=True)
    ]
    return [each for each in rounds if each.data or mesh.parts > 1]


def part_of(each: Pass, data: list[int], loaded: LoadedModel) -> PassPart:
    """Places and targets that several rows share are predicted once."""
    chosen = [each.data[number] for number in data] or [IDLE]
    trie = build([datum.tokens for datum in chosen])
    before = np.concatenate(trie.rows)
    targets = np.concatenate([datum.targets for datum in chosen])
    wanted = np.column_stack([before, targets])
    unique, pairs = np.unique(wanted, axis=0, return_inverse=True)

    def moved(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(loaded.device)

    kind = wide(loaded.dtype)
    pack = Pack(
        trie=trie,
        tokens=moved(trie.tokens)[None],
        positions=moved(trie.positions)[None],
        predictors=moved(unique[:, 0]),
        targets=moved(unique[:, 1:].reshape(-1, *targets.shape[1:])),
        temperatures=torch.ones(len(unique), dtype=kind, device=loaded.device),
        pairs=moved(pairs.reshape(-1)),
        rows=moved(np.repeat(np.arange(len(chosen)), [len(datum.tokens) for datum in chosen])),
        places=moved(np.concatenate([np.arange(len(datum.tokens)) for datum in chosen])),
    )
    inputs = {
        name: moved(np.concatenate([datum.inputs[name] for datum in chosen])).to(kind)
        for name in chosen[0].inputs
    }
    return PassPart(data, pack, inputs)
