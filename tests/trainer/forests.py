"""Random forests of rows, and the models whose gradients over them are compared."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from silva.config.sections import Lora, TinyModel
from silva.types import Sample

MODELS = {
    "full": TinyModel(layers=2, width=32, heads=4, kv_heads=2, context=128, dtype="float64"),
    "lora": TinyModel(layers=2, width=32, heads=4, kv_heads=2, context=128, dtype="float64",
                      lora=Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj"))),
}  # fmt: skip


@st.composite
def forests(draw: st.DrawFn) -> list[Sample]:
    """Each new row keeps some beginning of an earlier one (all, none, any) and goes on at random."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    rows: list[np.ndarray] = []
    for _ in range(draw(st.integers(1, 7))):
        kept = np.empty(0, np.int64)
        if rows and draw(st.booleans()):
            source = rows[draw(st.integers(0, len(rows) - 1))]
            kept = source[: draw(st.integers(0, len(source)))]
        own = draw(st.integers(0 if len(kept) >= 2 else 2, 9))
        rows.append(np.concatenate([kept, rng.integers(0, 250, own)]))
    samples = []
    for number, row in enumerate(rows):
        mask = rng.random(len(row)) < 0.6
        mask[0], mask[-1] = False, True  # the last node is always trained
        samples.append(
            Sample(
                tokens=row,
                loss_weights=np.where(mask, rng.random(len(row)) + 0.1, 0.0),
                logprobs=np.where(mask, -5.0, np.nan),
                temperatures=np.where(rng.random(len(row)) < 0.5, 0.7, 1.0),
                versions=np.where(mask, 0, -1),
                trajectory=f"t{number}",
                group="g",
                advantages=rng.normal(size=len(row)),
            )
        )
    return samples
