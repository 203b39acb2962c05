"""Pipeline parallel (Huang et al. 2019): each rank has consecutive layers, micro-batches follow each other.

    stage 0   embeddings, layers 0 and 1    f0 f1 .. b0 f2 b1 f3 b2 .. b3      1F1B (Narayanan et al. 2019)
    stage 1   layers 2 and 3, norm, head    .. f0 b0 f1 b1 f2 b2 f3 b3

All ranks of a share of the plan have its rows and pack the same tries, so only hidden states and their
gradients travel. Their buffers have one size: a trie is filled up to the longest one by a row that nothing
looks at. torch.distributed.pipelining decides what is computed and sent when. Not here: walks (no trie is
above the budget), a critic, and who has which stage (ranks.py).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from silva.errors import CapabilityError
from silva.models.division import Undivided
from silva.models.loading import LoadedModel
from silva.models.trie import Trie, TrieNode
from silva.trainer.gradients import read
from silva.trainer.head import Head
from silva.trainer.plan import RankWork, plan
from silva.trainer.policy import Pack, TokenLogprobs, attention_over
from silva.types import Sample

T = TypeVar("T")
Finish = Callable[[int, torch.Tensor], torch.Tensor]
"""From the number of a micro-batch and its last hidden states [U, H] to a number with a gradient."""


class Elsewhere(nn.Module):
    """In place of a part of a model that another stage has."""

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return x


class InFlight(NamedTuple):
    """Micro-batches that go through the stages together, all of one length."""

    loaded: LoadedModel
    packs: Sequence[Pack]
    finish: Finish


class Stage(nn.Module):
    """One of the stages that a model is cut into; its parts stay those of the model."""

    run: InFlight | None = None

    def __init__(self, model: PreTrainedModel, number: int, stages: int) -> None:
        super().__init__()
        self.number, self.first, self.last = number, number == 0, number == stages - 1
        decoder: Any = model.get_decoder()
        count = len(decoder.layers)
        of_this = range(number * count // stages, (number + 1) * count // stages)
        self.layers: list[nn.Module] = [decoder.layers[each] for each in of_this]
        self.decoder = _only(decoder, model.get_input_embeddings(), of_this, self.first, self.last)
        self.head = model.get_output_embeddings() if self.last else None
        self.ends: list[Any] = (
            [model.get_input_embeddings()] if self.first else [self.head] if self.last else []
        )
        """What turns tokens into hidden states, or hidden states into logits."""

    def forward(self, x: torch.Tensor, *, number: torch.Tensor) -> torch.Tensor:
        """Tokens [1, U] or hidden states [1, U, H] of a micro-batch -> hidden states; on the last stage what
        `InFlight.finish` makes of them."""
        assert self.run is not None
        pack = self.run.packs[int(number)]
        hidden: torch.Tensor = self.decoder(
            **{"input_ids" if self.first else "inputs_embeds": x},
            position_ids=pack.positions,
            use_cache=False,
            packed=attention_over(self.run.loaded, pack.trie),
        ).last_hidden_state
        return self.run.finish(int(number), hidden[0]) if self.last else hidden


def cut(model: PreTrainedModel, rank: int, ranks: int, interleaved: bool) -> list[Stage]:
    """The stages of this rank; what others have is gone from the model then.

    Raises:
        CapabilityError: this model cannot be cut into as many.
    """
    decoder: Any = model.get_decoder()
    stages = check_stages(model, ranks, interleaved)
    _check(model, decoder)
    mine = [Stage(model, number, stages) for number in range(rank, stages, ranks)]
    embeddings: Any = model.get_input_embeddings()
    tied = embeddings if embeddings.weight is model.get_output_embeddings().weight else None
    own = {module for stage in mine for module in (*stage.layers, *stage.decoder.children(), stage.head)}
    for number, layer in enumerate(decoder.layers):
        if layer not in own:
            decoder.layers[number] = Elsewhere()
    for name, child in [*decoder.named_children()]:
        kept = child is decoder.layers or (mine[-1].last and child is tied)
        if not kept and child not in own:
            setattr(decoder, name, Elsewhere())
    if not mine[-1].last:
        model.set_output_embeddings(Elsewhere())
    return mine


def _only(
    decoder: Any, embeddings: nn.Module, layers: Sequence[int], embeds: bool = False, ends: bool = False
) -> Any:
    """The decoder with these layers, and with what comes before or after all of them."""
    found = copy.copy(decoder)
    found._modules = dict(decoder._modules)
    # As many as there are, since a layer's number may say what it is given.
    found.layers = nn.ModuleList(
        layer if number in layers else Elsewhere() for number, layer in enumerate(decoder.layers)
    )
    for name, child in decoder.named_children():
        stays = embeds if child is embeddings else ends or child is decoder.layers
        if not stays and any(True for _ in child.parameters()):
            setattr(found, name, Elsewhere())
    return found


def check_stages(model: PreTrainedModel, ranks: int, interleaved: bool) -> int:
    """How many stages so many ranks have.

    Raises:
        CapabilityError: the model, with or without its numbers, has fewer layers.
    """
    stages, layers = ranks * (2 if interleaved else 1), len(model.get_decoder().layers)
    if layers < stages:
        got = f"got {stages} stages for {layers} layers"
        raise CapabilityError(f"trainer.parallel.pp: {got}, expected at most as many")
    return stages


@torch.no_grad()
def _check(model: PreTrainedModel, decoder: Any) -> None:
    family, key = model.config.model_type, "trainer.parallel.pp"
    embeddings: Any = model.get_input_embeddings()
    device = "cpu" if model.device.type == "meta" else model.device  # its buffers have numbers
    x = torch.linspace(-1, 1, 2 * embeddings.weight.shape[1], device=device, dtype=model.dtype)
    x = x.view(1, 2, -1)
    nothing = _only(decoder, embeddings, ())
    found = nothing(inputs_embeds=x, position_ids=torch.arange(2, device=x.device)[None], use_cache=False)
    if not torch.equal(found.last_hidden_state, x):
        raise CapabilityError(
            f"{key}: {family} changes hidden states beside its embeddings, layers and norm, as every stage "
            "would do again; expected pp = 1"
        )


def refuse_longer(samples: Sequence[Sample], budget: int) -> None:
    """Raise CapabilityError for a row that would be walked."""
    longest = max(samples, key=len, default=None)
    if longest is not None and len(longest) > budget:
        raise CapabilityError(
            f"trainer.parallel.pp: the sample of {longest.trajectory} has {len(longest)} tokens, and stages "
            f"compute a row in one piece: expected at most trainer.micro_batch_tokens = {budget}"
        )


class Pipeline(Undivided):
    """The stages of one model: what runs micro-batches through them. Implements `Division`.

    Args:
        stages: those of this rank.
        group: of the ranks of all stages of this share, in their order.
    """

    def __init__(self, stages: Sequence[Stage], group: dist.ProcessGroup, interleaved: bool) -> None:
        self._stages, self._group, self._interleaved = stages, group, interleaved

    def filled_up(self, parts: Sequence[T], empty: T) -> list[T]:
        """Micro-batches, as many as the schedule takes."""
        count, ranks = max(len(parts), self._group.size()), self._group.size()
        if self._interleaved:
            count += -count % ranks
        return [*parts, *(empty for _ in range(count - len(parts)))]

    def planned(
        self, rows: Sequence[np.ndarray], budget: int, shares: int, **cost: Any
    ) -> list[list[RankWork]]:
        """What `plan` says, for stages that share a plan: the micro-batches of as many ranks, in turn."""
        stages = self._group.size()
        dealt = plan(rows, budget, shares * stages, walk=False, **cost)
        together = (chain.from_iterable(dealt[at : at + stages]) for at in range(0, len(dealt), stages))
        return [self.filled_up([w for w in works if w.rows], RankWork([], 1, 0, 0.0)) for works in together]

    def learn(
        self,
        loaded: LoadedModel,
        batches: Sequence[Pack],
        loss_of: Callable[[int, TokenLogprobs], torch.Tensor],
        *,
        entropy_grad: bool = False,
    ) -> None:
        """Add up the gradients of the losses of all micro-batches.

        Args:
            loss_of: called on the last stage, with the number of a micro-batch.
        """

        def finish(number: int, hidden: torch.Tensor) -> torch.Tensor:
            return loss_of(number, _found(loaded, batches[number], hidden, entropy_grad))

        self._run(loaded, batches, finish, torch.is_grad_enabled())

    @torch.no_grad()
    def logprobs(self, loaded: LoadedModel, batches: Sequence[Pack]) -> list[torch.Tensor]:
        """[N] of each micro-batch; on ranks without the last stage NaN."""
        found = [batch.temperatures.new_full((len(batch.pairs),), torch.nan) for batch in batches]

        def finish(number: int, hidden: torch.Tensor) -> torch.Tensor:
            found[number] = _found(loaded, batches[number], hidden, False).logprobs
            return hidden.new_zeros(())

        self._run(loaded, batches, finish, False)
        return found

    def _run(self, loaded: LoadedModel, batches: Sequence[Pack], finish: Finish, learns: bool) -> None:
        from torch.distributed.fsdp import FSDPModule

        length = max(len(batch.trie) for batch in batches)
        run = InFlight(loaded, [_filled(batch, length) for batch in batches], finish)
        schedule = self._schedule(loaded, length, len(batches), learns)
        numbers = torch.arange(len(batches))  # which torch splits, as it does the tokens
        tokens = (torch.cat([pack.tokens for pack in run.packs]),) if self._stages[0].first else ()
        wanted = {"target": numbers} if learns and self._stages[-1].last else {}
        try:
            for stage in self._stages:
                stage.run = run
            schedule.step(*tokens, number=numbers, **wanted, return_outputs=False)
        except RuntimeError as error:  # what a stage raises comes in one of these
            raise error.__cause__ or error from None
        finally:
            for stage in self._stages:
                stage.run = None
                for module in stage.modules():
                    if isinstance(module, FSDPModule):  # between calls parameters are always the parts
                        module.reshard()

    def _schedule(self, loaded: LoadedModel, length: int, count: int, learns: bool) -> Any:
        """For one run: buffers have the length of its micro-batches."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

        width = loaded.model.config.get_text_config().hidden_size
        hidden = torch.empty(1, length, width, dtype=loaded.dtype, device="meta", requires_grad=learns)
        tokens = torch.empty(1, length, dtype=torch.int64, device="meta")
        number = torch.empty((), dtype=loaded.dtype, device="meta", requires_grad=learns)
        of = self._group.size() * len(self._stages)
        stages = [
            PipelineStage(
                stage,
                stage.number,
                of,
                loaded.device,
                # Said here, for else ranks would send each other pickled shapes.
                input_args=tokens if stage.first else hidden,
                output_args=number if stage.last else hidden,
                group=self._group,
            )
            for stage in self._stages
        ]
        about: Any = {"loss_fn": (lambda total, _: total) if learns else None, "scale_grads": False}
        if self._interleaved:
            return ScheduleInterleaved1F1B(stages, count, **about)  # type: ignore[arg-type]
        return Schedule1F1B(stages[0], count, **about)


def _found(loaded: LoadedModel, batch: Pack, hidden: torch.Tensor, entropy_grad: bool) -> TokenLogprobs:
    head = Head(loaded, entropy_grad=entropy_grad)
    values = head(read(hidden, batch.predictors), batch.targets, batch.temperatures)
    logprobs, entropies = (read(each, batch.pairs) for each in values)
    return TokenLogprobs(logprobs, entropies, batch.rows)


def _filled(batch: Pack, length: int) -> Pack:
    """The same with a trie of so many tokens."""
    trie = batch.trie
    if not (gap := length - len(trie)):
        return batch
    zeros = np.zeros(gap, np.int64)
    row = TrieNode(len(trie), length, length, 0, -1)
    tokens, positions = np.concatenate([trie.tokens, zeros]), np.concatenate([trie.positions, zeros])
    longer = torch.zeros(2, 1, gap, dtype=torch.int64, device=batch.tokens.device)
    return dataclasses.replace(
        batch,
        trie=Trie(tokens, positions, (*trie.nodes, row), trie.rows),
        tokens=torch.cat([batch.tokens, longer[0]], 1),
        positions=torch.cat([batch.positions, longer[1]], 1),
    )
