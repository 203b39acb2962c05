"""Save, load and go on bit for bit; what does not fit is named."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.trainer.updates import optim_step

from silva.config.sections import CriticSettings, Optimizer
from silva.errors import CheckpointError
from silva.models.loading import LoadedModel
from silva.models.snapshots import save_parameters
from silva.trainer.learner import Learner
from silva.trainer.local import LocalTrainer
from silva.trainer.settings import LocalTrainerSettings
from silva.types import LossSpec, Sample

Make = Callable[..., LoadedModel]
Rows = Callable[..., list[Sample]]


def make_trainer(loaded: LoadedModel, *, seed: int = 0, reference: bool = False) -> LocalTrainer:
    settings = LocalTrainerSettings(optimizer=Optimizer(lr=1e-2, warmup=2, schedule="cosine"))
    return LocalTrainer(Learner(loaded, settings, seed=seed, reference=reference))


def train(
    trainer: LocalTrainer, samples: list[Sample], updates: int, **params: Any
) -> list[dict[str, float]]:
    history = []
    for _ in range(updates):
        metrics = asyncio.run(trainer.forward_backward(samples, LossSpec("reinforce", params)))
        history.append({**metrics, **asyncio.run(optim_step(trainer))})
        asyncio.run(trainer.publish())
    return history


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "dtype"), [(True, "float32"), (False, "bfloat16")])
def test_training_goes_on_bit_for_bit(
    tiny: Make, make_samples: Rows, tmp_path: Path, lora: bool, dtype: str
) -> None:
    """With LoRA the adapters have dropout, so the random state must come back too."""
    samples = make_samples([9, 30, 4])
    loaded = tiny(dtype, lora=lora, dropout=0.3)
    trainer = make_trainer(loaded)
    train(trainer, samples, 3)
    asyncio.run(trainer.save(tmp_path))
    expected = train(trainer, samples, 3)

    again = tiny(dtype, lora=lora, dropout=0.3)
    if not lora:  # nothing of the first weights may matter
        again = tiny(dtype, seed=7)
    storage = {n: p.data_ptr() for n, p in again.model.named_parameters()}
    resumed = make_trainer(again, seed=99)
    torch.rand(5)
    asyncio.run(resumed.load(tmp_path))
    assert (resumed.version, resumed.learner.stepper.counters.updates) == (3, 3)
    assert train(resumed, samples, 3) == expected
    for name, parameter in again.model.named_parameters():
        assert torch.equal(parameter, loaded.model.get_parameter(name))
        assert parameter.data_ptr() == storage[name]  # an engine that shares the weights sees them


@pytest.mark.slow
def test_two_trainers_in_one_process_do_not_share_random_numbers(tiny: Make, make_samples: Rows) -> None:
    samples = make_samples([9, 30, 4])
    alone = train(make_trainer(tiny(lora=True, dropout=0.3)), samples, 3)
    before = torch.get_rng_state()
    one, other = (make_trainer(tiny(lora=True, dropout=0.3), seed=seed) for seed in (0, 5))
    together = [(train(one, samples, 1), train(other, samples, 1)) for _ in range(3)]
    assert [row for (row,), _ in together] == alone
    assert torch.equal(torch.get_rng_state(), before)


def test_files_are_safetensors_and_json(tiny: Make, make_samples: Rows, tmp_path: Path) -> None:
    trainer = make_trainer(tiny(lora=True))
    train(trainer, make_samples([9]), 2)
    asyncio.run(trainer.save(tmp_path / "new"))
    names = {file.name for file in (tmp_path / "new").iterdir()}
    assert names == {"weights.safetensors", "optimizer.safetensors", "rng.safetensors", "trainer.json"}
    weights = load_file(tmp_path / "new" / "weights.safetensors")
    assert len(weights) == 2 * 7 * 2 and all("lora_" in name for name in weights)  # A and B, 7 layers, twice
    numbers = json.loads((tmp_path / "new" / "trainer.json").read_text())
    assert (numbers["version"], numbers["updates"], numbers["nonfinite"]) == (2, 2, 0)
    assert set(numbers["steps"].values()) == {2} and set(numbers["steps"]) == set(weights)
    assert load_file(tmp_path / "new" / "rng.safetensors")["cpu"].dtype == torch.uint8


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_files_are_for_whom_the_umask_says(tiny: Make, make_samples: Rows, tmp_path: Path, mask: int) -> None:
    trainer = make_trainer(tiny(), reference=True)
    train(trainer, make_samples([9]), 1)
    before = os.umask(mask)
    try:
        asyncio.run(trainer.save(tmp_path / "checkpoint"))
        asyncio.run(trainer.export(tmp_path / "export"))
        save_parameters(trainer.learner.loaded, tmp_path / "published")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(file.suffix == ".safetensors" for file in files) == 6
    assert {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~mask}


def test_a_checkpoint_before_the_first_update_loads(tiny: Make, make_samples: Rows, tmp_path: Path) -> None:
    trainer, samples = make_trainer(tiny()), make_samples([9])
    asyncio.run(trainer.save(tmp_path))
    expected = train(trainer, samples, 2)
    asyncio.run(trainer.load(tmp_path))  # back to the start, moments included
    assert train(trainer, samples, 2) == expected


def change(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path)


NORM = "model.norm.weight"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "edit", "words"),
    [
        ("weights", lambda t: t.pop(NORM), rf"weights.safetensors .*missing: {NORM}$"),
        ("weights", lambda t: t.update(more=torch.zeros(1)), "unexpected: more$"),
        (
            "weights",
            lambda t: t.update({NORM: torch.zeros(3)}),
            r"got float32 \[3\], expected float32 \[32\]",
        ),
        (
            "weights",
            lambda t: t.update({NORM: t[NORM].half()}),
            r"got float16 \[32\], expected float32 \[32\]",
        ),
        ("optimizer", lambda t: t.pop(f"{NORM}/exp_avg"), rf"missing: {NORM}/exp_avg$"),
        ("rng", lambda t: t.pop("cpu"), "rng.safetensors .*missing: cpu$"),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(
    tiny: Make, make_samples: Rows, tmp_path: Path, file: str, edit: Callable[..., object], words: str
) -> None:
    trainer, samples = make_trainer(tiny()), make_samples([9])
    train(trainer, samples, 1)
    asyncio.run(trainer.save(tmp_path))
    change(tmp_path / f"{file}.safetensors", edit)
    other = make_trainer(tiny(seed=5))
    expected = {n: p.clone() for n, p in other.learner.loaded.model.named_parameters()}
    with pytest.raises(CheckpointError, match=words):
        asyncio.run(other.load(tmp_path))
    assert all(torch.equal(expected[n], p) for n, p in other.learner.loaded.model.named_parameters())
    assert (other.version, other.learner.stepper.counters.updates) == (0, 0)


def test_a_full_model_does_not_load_into_adapters(tiny: Make, tmp_path: Path) -> None:
    asyncio.run(make_trainer(tiny()).save(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"does not belong to this model .*missing: .*lora_A.* and 25 more"
    ):
        asyncio.run(make_trainer(tiny(lora=True)).load(tmp_path))


def test_a_file_that_cannot_be_written_is_a_checkpoint_error(tiny: Make, tmp_path: Path) -> None:
    (tmp_path / "optimizer.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors: cannot be written"):
        asyncio.run(make_trainer(tiny()).save(tmp_path))


def with_critic(
    loaded: LoadedModel, samples: list[Sample], trunk: Any = "own", *, seed: int = 0
) -> tuple[LocalTrainer, list[Sample]]:
    """A trainer whose policy waits for the critic's first update, and samples to learn values from."""
    critic = CriticSettings(trunk=trunk, warmup=1, optimizer=Optimizer(lr=3e-2, warmup=2, schedule="linear"))
    settings = LocalTrainerSettings(optimizer=Optimizer(lr=1e-2), critic=critic)
    rng = np.random.default_rng(0)
    rows = [s.replace(values=np.zeros(len(s)), returns=rng.normal(size=len(s))) for s in samples]
    return LocalTrainer(Learner(loaded, settings, seed=seed, critic=True)), rows


@pytest.mark.slow
@pytest.mark.parametrize(("trunk", "lora"), [("own", True), ("policy", False)])
def test_a_critic_goes_on_bit_for_bit(
    tiny: Make, make_samples: Rows, tmp_path: Path, trunk: str, lora: bool
) -> None:
    """Its weights, moments and schedule, and that its warm-up is over."""
    loaded = tiny(lora=lora, dropout=0.3)
    trainer, samples = with_critic(loaded, make_samples([9, 30, 4]), trunk)
    train(trainer, samples, 3)
    asyncio.run(trainer.save(tmp_path))
    expected = train(trainer, samples, 3)
    assert all("ratio" in row and row["critic/loss"] > 0 for row in expected)
    assert len({row["critic/lr"] for row in expected}) == 3

    again = tiny(lora=lora, dropout=0.3, seed=0 if lora else 7)
    resumed, _ = with_critic(again, samples, trunk, seed=99)
    asyncio.run(resumed.load(tmp_path))
    assert train(resumed, samples, 3) == expected
    for name, parameter in again.model.named_parameters():
        assert torch.equal(parameter, loaded.model.get_parameter(name))
    values = [asyncio.run(t.score(samples, frozenset({"values"}))).values for t in (trainer, resumed)]
    assert values[0] is not None and values[1] is not None
    for row, other in zip(*values, strict=True):
        np.testing.assert_array_equal(row, other)
        assert np.nanmax(np.abs(row)) > 1e-3


def test_a_critic_has_a_folder_of_its_own(tiny: Make, make_samples: Rows, tmp_path: Path) -> None:
    trainer, samples = with_critic(tiny(), make_samples([9]), "policy")
    train(trainer, samples, 2)
    asyncio.run(trainer.save(tmp_path))
    names = {file.name for file in (tmp_path / "critic").iterdir()}
    assert names == {"weights.safetensors", "optimizer.safetensors", "rng.safetensors", "trainer.json"}
    weights = load_file(tmp_path / "critic" / "weights.safetensors")
    assert {n: list(t.shape) for n, t in weights.items()} == {
        "value_head.linear.weight": [1, 32], "value_head.linear.bias": [1]}  # fmt: skip
    counters = json.loads((tmp_path / "critic" / "trainer.json").read_text())
    assert (counters["updates"], set(counters["steps"].values())) == (2, {2})
    assert set(json.loads((tmp_path / "trainer.json").read_text())["steps"].values()) == {1}  # it waited once


def test_a_critic_that_does_not_fit_changes_nothing(tiny: Make, make_samples: Rows, tmp_path: Path) -> None:
    trainer, samples = with_critic(tiny(), make_samples([9]))
    train(trainer, samples, 2)
    asyncio.run(trainer.save(tmp_path))
    change(tmp_path / "critic" / "weights.safetensors", lambda t: t.pop("value_head.linear.bias"))
    other, _ = with_critic(tiny(seed=5), samples)
    before = {n: p.clone() for n, p in other.learner.loaded.model.named_parameters()}
    with pytest.raises(
        CheckpointError, match=r"critic/weights\.safetensors.*missing: value_head\.linear\.bias$"
    ):
        asyncio.run(other.load(tmp_path))
    assert all(torch.equal(before[n], p) for n, p in other.learner.loaded.model.named_parameters())
    assert (other.version, other.learner.stepper.counters.updates) == (0, 0)
