"""Calls of a Tinker server's runs that other ranks make too."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from silva.errors import CheckpointError
from silva.server.tinker.ranks import LeadingRuns, following
from silva.trainer.tenants import AdamParams, Datum, Pass


class Recorded:
    """Runs that note what they are asked for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, method: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            self.calls.append((method, given, named))
            if method == "load":
                raise CheckpointError("no such folder")
            return {"grad_norm": 1.0}

        return call


class Handed:
    """`SharedCalls` whose other rank is in this process."""

    def __init__(self, other: Recorded, compute: ThreadPoolExecutor) -> None:
        self._answer = following(other, compute)  # type: ignore[arg-type]

    async def make(self, call: bytes, work: Any) -> Any:
        with suppress(CheckpointError):
            await self._answer(call)
        return await work()


def test_every_rank_makes_the_same_calls(tmp_path: Path) -> None:
    first, other = Recorded(), Recorded()
    with ThreadPoolExecutor(1) as compute:
        runs = LeadingRuns(first, Handed(other, compute))  # type: ignore[arg-type]
        runs.create("a", rank=4, alpha=32.0, seed=(1 << 63) - 1, attn=True, mlp=False, unembed=True)
        row = np.arange(3)
        datum = Datum(row, np.stack([row, row], 1), {"weights": np.float32([[1, 2], [3, 4], [0.1, 0]])})
        runs.passes([Pass("a", [datum], "cross_entropy", {"beta": 0.1}, True)])
        assert runs.optim_step("a", AdamParams(1e-3, grad_clip_norm=0.5)) == {"grad_norm": 1.0}
        runs.save("a", tmp_path / "x", optimizer=False)
        with pytest.raises(CheckpointError):
            runs.load("a", tmp_path / "x", optimizer=True)
        runs.drop("a")
    passes, theirs = (each.calls.pop(1)[1][0][0] for each in (first, other))
    assert first.calls == other.calls
    assert [name for name, *_ in first.calls] == ["create", "optim_step", "save", "load", "drop"]
    assert first.calls[2] == ("save", ("a", tmp_path / "x"), {"optimizer": False})
    assert (theirs.run, theirs.loss, theirs.params, theirs.backward) == (
        passes.run, passes.loss, passes.params, True
    )  # fmt: skip
    (mine,), (found,) = passes.data, theirs.data
    for name in ("tokens", "targets"):
        np.testing.assert_array_equal(getattr(found, name), getattr(mine, name))
        assert getattr(found, name).dtype == np.int64
    np.testing.assert_array_equal(found.inputs["weights"], mine.inputs["weights"])
    assert found.inputs["weights"].dtype == np.float32
