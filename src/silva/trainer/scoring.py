"""Values of every trained token of some samples: computed in micro-batches, brought together by ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from silva.models.loading import LoadedModel
from silva.trainer.exact import called
from silva.trainer.explained_errors import explained_memory, size_of
from silva.trainer.gradients import summed_in_place
from silva.trainer.plan import RankWork
from silva.trainer.policy import IDLE, Pack, trained
from silva.trainer.settings import LocalTrainerSettings
from silva.trainer.sharding.parallel import Mesh
from silva.trainer.sharding.pipeline import Pipeline
from silva.types import Sample

Parts = list[tuple[list[Sample], int]]
"""The rows of each micro-batch, and how many passes it makes."""


def of_tokens(
    samples: Sequence[Sample],
    plan: Callable[[Sequence[Sample]], list[list[RankWork]]],
    compute: Callable[[Parts], Iterable[tuple[Pack, torch.Tensor]]],
    mesh: Mesh,
    dtype: type[np.floating],
) -> tuple[np.ndarray, ...]:
    """[T] per sample, NaN without a loss; `compute` gives [N] for each micro-batch."""
    found = [np.full(len(sample), np.nan, dtype=dtype) for sample in samples]
    used = [index for index, sample in enumerate(samples) if trained(sample).any()]
    shares = plan([samples[i] for i in used])
    of_share = [[used[i] for work in share for i in work.rows] for share in shares]
    works = shares[mesh.share]
    parts = [([samples[used[i]] for i in work.rows] or [IDLE], work.passes) for work in works]
    for work, (batch, computed) in zip(works, compute(parts), strict=True):
        values = computed.cpu().numpy()
        row_of, places = batch.rows.cpu().numpy(), batch.places.cpu().numpy()
        for row, i in enumerate(work.rows):
            of_row = row_of == row
            found[used[i]][places[of_row]] = values[of_row]
    mine = tuple(found[i] for i in of_share[mesh.share])
    of_all = mesh.by_share(mesh.gather(mine, tuple[np.ndarray, ...]))
    for theirs, arrays in zip(of_share, of_all, strict=True):
        for index, array in zip(theirs, arrays, strict=True):
            found[index] = array
    return tuple(found)


def computed(
    loaded: LoadedModel,
    settings: LocalTrainerSettings,
    pack: Callable[[Sequence[Sample]], Pack],
    compute: Callable[[Pack, int], torch.Tensor],
    parts: Parts,
) -> Iterator[tuple[Pack, torch.Tensor]]:
    """What `compute` gives for each micro-batch, or a pipeline for all of them."""
    if isinstance(pipeline := loaded.division, Pipeline):
        with explained_memory(settings, f"scoring {len(parts)} micro-batches"):
            batches = [pack(rows) for rows, _ in parts]
            yield from zip(batches, pipeline.logprobs(loaded, batches), strict=True)
        return
    for rows, passes in parts:
        with explained_memory(settings, f"scoring {size_of(rows)}"):
            batch = pack(rows)
            with batch.replayed(), summed_in_place(called(loaded)):
                found = compute(batch, passes)
        yield batch, found
