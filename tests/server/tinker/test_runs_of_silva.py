"""Silva's own trainer and engine, through the SDK, against `silva serve tinker`: what they learn is what the
local trainer learns from the same rows."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch

pytest.importorskip("tinker", reason="needs tinker: pip install tinker")

import tinker
from peft import PeftModel
from tests.server.tinker.conftest import KEY
from tinker.cli.commands.checkpoint import _download_checkpoint

from silva.commands.plan import describe, plan_run
from silva.commands.train import train
from silva.config.load import load
from silva.config.sections import Lora, TinyModel
from silva.engines.tinker.engine import TinkerEngine
from silva.engines.tinker.settings import TinkerEngineSettings
from silva.errors import ConfigError, CostLimit
from silva.models.loading import load_model, load_tokenizer
from silva.models.lora_runs import LoraRuns
from silva.registries import REGISTRIES
from silva.trainer.learner import Learner
from silva.trainer.settings import LocalTrainerSettings
from silva.trainer.tinker import ServiceAdapter, TinkerTrainer
from silva.types import LossSpec, OptimParams, Sample, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]
TARGETS = Lora().targets
LOSSES = [
    LossSpec("clipped", {"clip_low": 0.2, "clip_high": 0.28}),  # by its name at the service
    LossSpec("aipo", {"kl_tau": 0.01}),  # computed here
    LossSpec("cross_entropy"),
]
SEED, RANK = 3, 4


def rows(seed: int) -> list[Sample]:
    """Rows with a common prompt, half of whose tokens are trained; what sampled them was another policy."""
    rng = np.random.default_rng(seed)
    prompt, found = rng.integers(0, 200, 9), []
    for row in range(4):
        tokens = np.concatenate([prompt, rng.integers(0, 200, 6 + row)])
        mask = (rng.random(len(tokens)) < 0.5) & (np.arange(len(tokens)) > 4)
        mask[-1] = True
        found.append(
            Sample(
                tokens=tokens,
                loss_weights=(mask / 20).astype(np.float32),
                logprobs=np.where(mask, rng.normal(-5.6, 0.3, len(tokens)), np.nan),
                temperatures=np.ones(len(tokens)),
                versions=np.where(mask, 0, -1),
                trajectory=f"t{row}",
                group="g",
                advantages=rng.normal(size=len(tokens)),
            )
        )
    return found


def local(reference: bool = False) -> Learner:
    """The local trainer, its fresh adapters those that the service draws."""
    loaded = load_model(TinyModel(lora=Lora(rank=RANK)), seed=0)
    drawn = LoraRuns(load_model(TinyModel(), seed=0).model, TARGETS).add("run", RANK, 32.0, SEED)
    own = {name.replace(".default", ""): p for name, p in loaded.model.named_parameters() if "lora_" in name}
    assert own.keys() == drawn.keys()
    for name, parameter in own.items():
        parameter.data.copy_(drawn[name])
    return Learner(loaded, LocalTrainerSettings(), seed=0, reference=reference)


def test_updates_at_the_service_are_those_of_the_local_trainer(address):
    learner = local()
    adapter = ServiceAdapter("tiny", RANK, SEED, frozenset({"attn", "mlp"}))
    trainer = TinkerTrainer(TinkerEngineSettings(url=address), adapter, "run")
    numbers = OptimParams(lr=1e-2, max_grad_norm=0.5)

    async def main() -> None:
        await trainer.connect()
        for number, loss in enumerate(LOSSES * 2):
            samples = rows(number)
            theirs = await trainer.forward_backward(samples, loss)
            ours = learner.forward_backward(samples, loss)
            expected = {name: ours[name] for name in ours if name not in ("entropy", "perf/seconds_at_peak")}
            assert theirs == pytest.approx(expected, rel=1e-4, abs=1e-6), loss.name
            stepped = await trainer.optim_step(numbers)
            norm = learner.optim_step(numbers)["grad_norm"]
            assert stepped["grad_norm"] == pytest.approx(norm, rel=1e-4)
        signals = await trainer.score(rows(9), frozenset({"logprobs", "reference_logprobs"}))
        scored = learner.score(rows(9), frozenset({"logprobs"})).logprobs
        for found, known, base in zip(signals.logprobs, scored, signals.reference_logprobs, strict=True):
            np.testing.assert_allclose(found, known, rtol=0, atol=1e-4)
            assert np.nanmax(np.abs(found - base)) > 0.01  # it has learned, the reference has not
        await trainer.close()

    with torch.random.fork_rng():
        asyncio.run(main())


def test_samples_and_scores_of_a_version_stay_its_own_and_a_checkpoint_goes_on(address, tmp_path):
    decode = load_tokenizer(TinyModel()).decode
    engine = TinkerEngine(TinkerEngineSettings(url=address), "tiny", decode)
    adapter = ServiceAdapter("tiny", RANK, SEED, frozenset({"attn"}))
    params, prompt = SamplingParams(max_tokens=6, seed=5), list(range(40, 60))

    def trainer() -> TinkerTrainer:
        return TinkerTrainer(TinkerEngineSettings(url=address), adapter, "a run/of: mine")

    async def update(trainer: TinkerTrainer, seed: int) -> None:
        await trainer.forward_backward(rows(seed), LOSSES[0])
        await trainer.optim_step(OptimParams(lr=3e-2))

    async def main() -> None:
        first = trainer()
        await first.connect()
        await engine.connect()
        before = await engine.sample(prompt, params)
        assert len(before.tokens) <= 6 and np.isfinite(before.logprobs).all()
        scored = await engine.score([*prompt, *before.tokens], len(prompt))
        np.testing.assert_allclose(scored.logprobs, before.logprobs, atol=1e-5)
        cool = await engine.sample(prompt, dataclasses.replace(params, temperature=0.5))
        assert np.isnan(cool.logprobs).all()  # of a distribution that is not known here

        await update(first, 0)
        await engine.load(await first.publish())
        moved = await engine.score([*prompt, *before.tokens], len(prompt))
        assert (moved.version, engine.version) == (1, 1)
        assert np.abs(np.subtract(moved.logprobs, scored.logprobs)).max() > 1e-3

        await first.save(tmp_path / "trainer")
        await update(first, 1)
        await engine.load(await first.publish())
        expected = await engine.score([*prompt, *before.tokens], len(prompt))

        second = trainer()  # in another session, with the moments
        await second.connect()
        await second.load(tmp_path / "trainer")
        assert second.version == 1
        await update(second, 1)
        await engine.load(await second.publish())
        again = await engine.score([*prompt, *before.tokens], len(prompt))
        assert again.logprobs == expected.logprobs
        await second.export(tmp_path / "exported")
        path = json.loads((tmp_path / "exported/tinker.json").read_text())["path"]
        later = TinkerEngine(TinkerEngineSettings(url=address, weights=path), "tiny", decode)
        await later.connect()
        assert (await later.score([*prompt, *before.tokens], len(prompt))).logprobs == expected.logprobs
        begun = TinkerTrainer(TinkerEngineSettings(url=address, weights=path), adapter, "later")
        await begun.connect()
        await engine.load(await begun.snapshot())
        assert (await engine.score([*prompt, *before.tokens], len(prompt))).logprobs == expected.logprobs
        for change, words in (
            ({"rank": 8}, f"model.lora.rank: got 8, expected {RANK} as in {path}"),
            ({"modules": frozenset({"mlp"})}, r"trainer.modules: got \['mlp'\], expected \['attn'\] as in "),
            ({"model": "other"}, "model.name: got other, expected tiny as in "),
        ):
            wrong = dataclasses.replace(adapter, **change)
            other = TinkerTrainer(TinkerEngineSettings(url=address, weights=path), wrong, "other")
            await other.connect()
            with pytest.raises(ConfigError, match=words):
                await other.snapshot()
            await other.close()
        await begun.close()
        await first.close()
        await second.close()

    asyncio.run(main())


def test_what_the_sdk_downloads_peft_loads_over_the_same_base_model(address, tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", address)
    tokens, folder = list(range(40, 60)), tmp_path / "downloaded"

    async def saved() -> tuple[str, tuple[float, ...]]:
        adapter = ServiceAdapter("tiny", RANK, SEED, frozenset({"attn"}))
        trainer = TinkerTrainer(TinkerEngineSettings(url=address), adapter, "downloaded")
        await trainer.connect()
        await trainer.forward_backward(rows(0), LOSSES[0])
        await trainer.optim_step(OptimParams(lr=3e-2))
        await trainer.export(tmp_path)
        await trainer.close()
        path = json.loads((tmp_path / "tinker.json").read_text())["path"]
        settings = TinkerEngineSettings(url=address, weights=path)
        engine = TinkerEngine(settings, "tiny", load_tokenizer(TinyModel()).decode)
        await engine.connect()
        return path, (await engine.score(tokens, 1)).logprobs

    path, expected = asyncio.run(saved())
    folder.mkdir()
    _download_checkpoint(tinker.RestClient(), path, folder, show_progress=False, format="json")
    base = load_model(TinyModel(), seed=0).model
    with torch.no_grad():
        plain = base(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1].log_softmax(-1)
        theirs = PeftModel.from_pretrained(base, str(folder))
        logits = theirs(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    at = torch.tensor(tokens[1:])[:, None]
    found = logits.log_softmax(-1).gather(1, at)[:, 0]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert (found - plain.gather(1, at)[:, 0]).abs().max() > 1e-3


def test_a_run_of_reinforcement_learning_and_what_is_left_of_it(address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {
        "name": "lake",
        "steps": 2,
        "model": {"type": "tiny", "lora": {"rank": 4}},
        "engine": {
            "type": "tinker",
            "url": address,
            "input_price": 1.0,
            "output_price": 4.0,
            "train_price": 2.0,
        },
        "trainer": {"type": "tinker", "optimizer": {"lr": 1e-3}},
        "environments": [
            {"type": "bandit", "style": "compact", "think": False, "answer_tags": False, "eval_size": 8}
        ],
        "warm_start": {"steps": 3, "episodes_per_step": 4},
        "rollout": {
            "groups_per_step": 2,
            "group_size": 2,
            "limits": {"max_turns": 1, "max_turn_tokens": 8, "max_episode_tokens": 250},
        },
        "algorithm": {"max_refills": 0, "drop_zero_variance": False},
        "eval": {"tasks": 4},
        "checkpoint": {"every": 1},
    }
    plan = describe(plan_run(load([], REGISTRIES, values={**config, "warm_start": None}).config))
    train(config)
    run = Path("runs/lake")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[-1]["perf/mismatch_max"] < 1e-3
    assert lines[1]["perf/cost"] > 0
    planned = re.search(r"cost: about (\S+) a step", plan)
    assert planned is not None
    assert float(planned[1]) == pytest.approx(lines[1]["perf/cost"], rel=0.3)
    assert "the probe's 48 episodes at the service read" in plan and "memory" not in plan
    assert "1 more like it cost about" in (run / "run.log").read_text()
    kept = json.loads((run / "checkpoints/step_2/trainer/tinker.json").read_text())
    assert kept["path"].startswith("tinker://") and kept["version"] == 2
    assert json.loads((run / "weights/step_2/tinker.json").read_text())["model"] == "tiny"
    most = lines[1]["perf/cost"] / 2
    with pytest.raises(CostLimit, match=r"engine.max_cost = .* would be exceeded"):
        train({**config, "steps": 3, "engine": {**config["engine"], "max_cost": most}}, resume=True)
    train({**config, "steps": 3}, resume=True)
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 3


def test_a_run_whose_server_was_killed_and_whose_session_is_gone_goes_on(
    served, address, tmp_path, monkeypatch
):
    """From its last checkpoint, with the moments that the service has kept."""
    monkeypatch.chdir(tmp_path)
    real, saved = TinkerTrainer.save, []

    async def save(self: TinkerTrainer, path: Path) -> None:
        await real(self, path)
        saved.append(path)
        if len(saved) == 1:  # after the first step
            served.kill()
            served.begin()
            with httpx2.Client(base_url=f"{served.address}/api/v1", headers={"x-api-key": KEY}) as client:
                for name in client.get("/sessions").json()["sessions"]:
                    client.post(f"/sessions/{name}/finish", json={}).raise_for_status()

    monkeypatch.setattr(TinkerTrainer, "save", save)
    train(
        {
            "name": "lost",
            "steps": 2,
            "model": {"type": "tiny", "lora": {"rank": 4}},
            "engine": {"type": "tinker", "url": address},
            "trainer": {"type": "tinker", "optimizer": {"lr": 1e-3}},
            "environments": [{"type": "bandit", "style": "compact", "think": False, "answer_tags": False}],
            "rollout": {
                "groups_per_step": 1,
                "group_size": 2,
                "limits": {"max_turns": 1, "max_turn_tokens": 4},
            },
            "algorithm": {"max_refills": 0, "drop_zero_variance": False},
            "eval": {"tasks": 1},
            "checkpoint": {"every": 1},
            "monitoring": {"report": False, "tensorboard": False},
        }
    )
    assert "HTTP 410" in Path("runs/lost/run.log").read_text()
    kept = [
        json.loads(path.read_text()) for path in sorted(Path("runs/lost").glob("checkpoints/*/trainer/*"))
    ]
    assert [each["version"] for each in kept] == [1, 2]
    assert len({each["path"].split("/")[2] for each in kept}) == 2  # another run at the service
    assert '"rolled_back"' in Path("runs/lost/ledger.jsonl").read_text()
