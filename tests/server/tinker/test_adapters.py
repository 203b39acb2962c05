"""Adapters that are folders, in an engine that has room for one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from silva.errors import CapabilityError, CheckpointError
from silva.server.tinker.adapters import FolderSampler, ServedSampler
from silva.types import SamplingParams


class OneAdapter:
    """Answers with the name and the scale of the adapter that it was asked with."""

    def __init__(self) -> None:
        self.adapters: dict[str, int] = {}
        self.loads: list[tuple[str, list[str], float]] = []

    async def load_adapter(self, name, parameters, *, scale, version=0):
        await asyncio.sleep(0)
        self.adapters = {name: version}
        self.loads.append((name, sorted(parameters), scale))

    async def sample(self, tokens, params, *, session="", adapter=None):
        assert adapter is None or adapter in self.adapters
        await asyncio.sleep(0.001)
        return adapter


def folder(path: Path, alpha: float) -> Path:
    path.mkdir()
    named = {f"base_model.model.model.q.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
    save_file(named, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": alpha}))
    return path


async def test_what_servers_of_vllm_do_not_send_is_refused():
    served = ServedSampler(None, 8, 64, ())
    with pytest.raises(
        CapabilityError, match=r"tells the likeliest tokens alone; expected topk_prompt_logprobs"
    ):
        await served.score([1, 2], 1, None, 0, lambda logits, first: None)


async def test_every_request_has_its_adapter_though_another_takes_its_place(tmp_path: Path):
    engine = OneAdapter()
    sampler = FolderSampler(engine, 128, 64, (1,))
    one, other = folder(tmp_path / "one", 32), folder(tmp_path / "other", 8)
    asked = [one, other, None, one, one, other, other, one]
    found = await asyncio.gather(*(sampler.sample([1], SamplingParams(1), each) for each in asked))
    assert found == [None if each is None else each.name for each in asked]
    names = ["model.q.lora_A.weight", "model.q.lora_B.weight"]
    assert {(name, *parameters, scale) for name, parameters, scale in engine.loads} == {
        ("one", *names, 8.0), ("other", *names, 2.0)
    }  # fmt: skip
    before = len(engine.loads)
    last = next(iter(engine.adapters))
    assert await sampler.sample([1], SamplingParams(1), tmp_path / last) == last
    assert len(engine.loads) == before
    with pytest.raises(CheckpointError, match="are gone"):
        await sampler.sample([1], SamplingParams(1), tmp_path / "none")
