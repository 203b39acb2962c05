"""Whole models that are folders, in one engine that has one of them at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from silva.errors import CheckpointError, ModelError
from silva.server.tinker.adapters import FolderSampler
from silva.server.tinker.whole_models import WholeModels
from silva.types import SamplingParams


class OneModel:
    """Answers with the folder whose weights it has, which may not change meanwhile."""

    def __init__(self) -> None:
        self.has, self.loads, self.broken = "", list[str](), ""

    async def load(self, snapshot):
        self.has = ""
        await asyncio.sleep(0)
        name = Path(snapshot.folder.path).name
        if name == self.broken:
            raise ModelError(f"{name}: damaged")
        self.has = name
        self.loads.append(name)

    async def sample(self, tokens, params):
        before = self.has
        await asyncio.sleep(0.002 * params.max_tokens)
        assert self.has == before
        return before

    async def score(self, tokens, start, *, top=0, read=None):
        return await self.sample(tokens, SamplingParams(1)), top


def folder(path: Path) -> Path:
    path.mkdir()
    save_file({"weight": torch.ones(1)}, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    return path


async def test_an_answer_has_the_weights_of_one_folder_and_nobody_waits_for_ever(tmp_path: Path):
    engine = OneModel()
    whole = WholeModels(lambda: engine)
    sampler = FolderSampler(None, 128, 64, (1,), whole)  # type: ignore[arg-type]
    one, other = folder(tmp_path / "one"), folder(tmp_path / "other")
    asked = [one, one, other, one, one, other, other]
    found = await asyncio.gather(
        *(sampler.sample([1], SamplingParams(1 + n % 3), each) for n, each in enumerate(asked))
    )
    assert found == [each.name for each in asked]
    assert engine.loads == ["one", "other", "one", "other"]
    assert await sampler.score([1, 2], 1, other, 5) == ("other", 5)
    engine.broken = "one"
    with pytest.raises(ModelError, match="damaged"):
        await sampler.sample([1], SamplingParams(1), one)
    with pytest.raises(CheckpointError, match="are gone"):
        await whole.ask(tmp_path / "none", lambda engine: engine.sample([1], SamplingParams(1)))
    assert await sampler.sample([1], SamplingParams(1), other) == "other"
    assert engine.loads[-2:] == ["other", "other"]  # what a failed load left is not trusted
