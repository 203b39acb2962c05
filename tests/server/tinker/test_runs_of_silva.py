"""Silva's own trainer and engine, through the SDK, against `silva serve tinker`: what they learn is what the
local trainer learns from the same rows."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch

pytest.importorskip("tinker", reason="needs tinker: pip install tinker")

import tinker
from peft import PeftModel
from tinker.cli.commands.checkpoint import _download_checkpoint

from silva.commands.plan import describe, plan_run
from silva.commands.sft import supervise
from silva.commands.train import train
from silva.config.load import load
from silva.config.sections import Lora, TinyModel
from silva.conversion.rows import convert_rows
from silva.engines.tinker.engine import TinkerEngine
from silva.engines.tinker.settings import TinkerEngineSettings
from silva.errors import ConfigError, CostLimit
from silva.models.loading import load_model, load_tokenizer
from silva.models.lora_runs import LoraRuns
from silva.registries import REGISTRIES
from silva.storage.rollouts import read_rollouts
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
SEED, RANK, KEY = 3, 4, "tml-me"
ACT_PRM = Path(__file__).parents[3] / "configs" / "act_prm"
TINY = """
steps = 2
seed = 3
[model]
type = "tiny"
lora.rank = 4
[trainer]
optimizer.lr = 1e-2
[rollout]
groups_per_step = 2
group_size = 2
limits = { max_turns = 2, max_turn_tokens = 40 }
[monitoring]
terminal = "off"
tensorboard = false
report = false
[eval]
tasks = 1
"""
BRIEF = [f"--environments.0.{key}" for key in ("style=compact", "think=false", "answer_tags=false")]


class Served:
    """A server with a tiny model, in a process of its own."""

    def __init__(self, state: Path) -> None:
        self._state, self.address = state, ""
        self.begin()

    def begin(self) -> None:
        """At the address that it had, if it had one."""
        command = [sys.executable, "-m", "silva", "serve", "tinker", "--model.type", "tiny"]
        port = self.address.rpartition(":")[2] or "0"
        command += ["--model.context", "8192", "--port", port, "--state", str(self._state)]
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, cwd=self._state, env=variables
        )
        assert self._server.stderr is not None
        said = next(line for line in self._server.stderr if "listening at" in line)
        self.address = said.split()[-1]

    def kill(self) -> None:
        self._server.kill()
        self._server.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(tmp_path_factory.mktemp("service"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TINKER_API_KEY", KEY)
            yield found
    finally:
        found.kill()


@pytest.fixture
def address(served: Served) -> str:
    return served.address


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


def test_samples_and_scores_of_a_version_stay_its_own_and_a_checkpoint_goes_on(
    address, tmp_path, monkeypatch
):
    decode = load_tokenizer(TinyModel()).decode
    engine = TinkerEngine(TinkerEngineSettings(url=address), "tiny", decode)
    adapter = ServiceAdapter("tiny", RANK, SEED, frozenset({"attn"}))
    params, prompt = SamplingParams(max_tokens=6, seed=5), list(range(40, 60))

    def trainer() -> TinkerTrainer:
        return TinkerTrainer(TinkerEngineSettings(url=address), adapter, "a run/of: mine")

    async def update(trainer: TinkerTrainer, seed: int) -> None:
        await trainer.forward_backward(rows(seed), LOSSES[0])
        await trainer.optim_step(OptimParams(lr=3e-2))

    async def main() -> tuple[str, list[int], tuple[float, ...]]:
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
        return path, [*prompt, *before.tokens], expected.logprobs

    path, tokens, expected = asyncio.run(main())
    # What the SDK downloads of it PEFT loads, over the same base model.
    monkeypatch.setenv("TINKER_BASE_URL", address)
    rest, folder = tinker.RestClient(), tmp_path / "downloaded"
    folder.mkdir()
    _download_checkpoint(rest, path, folder, show_progress=False, format="json")
    theirs = PeftModel.from_pretrained(load_model(TinyModel(), seed=0).model, str(folder))
    with torch.no_grad():
        logits = theirs(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    found = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    np.testing.assert_allclose(found[len(prompt) - 1 :], expected, atol=1e-5)


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


def test_a_run_whose_server_was_killed_and_whose_session_is_gone_goes_on(served, tmp_path, monkeypatch):
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
            "engine": {"type": "tinker", "url": served.address},
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


Made = list[tuple[str, Any, dict[str, float]]]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Made:
    """What trainers at the service are asked, in this order (answers may cross), and what they answer."""
    made: Made = []

    def note(name: str) -> None:
        real = getattr(TinkerTrainer, name)

        async def method(self: TinkerTrainer, *given: Any) -> Mapping[str, float]:
            answer: dict[str, float] = {}
            made.append((name, given, answer))
            answer |= await real(self, *given)
            return answer

        monkeypatch.setattr(TinkerTrainer, name, method)

    note("forward_backward")
    note("optim_step")
    return made


def pipeline(name: str, address: str, *more: str) -> Any:
    """A file of Act-PRM's, made small, with one file on top for the service."""
    Path("tiny.toml").write_text(TINY)
    files = [f"@{ACT_PRM / f'{name}.toml'}", f"@{ACT_PRM / 'tinker.toml'}", "@tiny.toml"]
    return load([*files, f"--engine.url={address}", *more], REGISTRIES, env={}, cwd=Path.cwd())


def metrics_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]


def made_here(made: Made, reference: bool = True) -> None:
    """Of the rows that were sent the local trainer makes the same updates; both compute in float32 and add up
    in another order, so the last digits differ."""
    with torch.random.fork_rng():
        learner = local(reference=reference)
        for number, (name, given, theirs) in enumerate(made):
            ours = getattr(learner, name)(*given)
            shared = set(ours) & set(theirs) - {"entropy"}
            assert "loss" in shared or "grad_norm" in shared, number
            expected = {key: ours[key] for key in shared}
            assert {key: theirs[key] for key in shared} == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("thoughts", BRIEF),
        ("joint", [*BRIEF, "--algorithm.kl_reward_coef=0.1"]),
        ("action_prompted", BRIEF),
        ("browsecomp_plus_search", ["--rollout.limits.max_turn_tokens=160",
                                    "--rollout.limits.max_episode_tokens=7000"]),
    ],
)  # fmt: skip
def test_a_pipeline_of_act_prm_learns_at_the_service_what_it_learns_here(
    name, more, address, tmp_path, monkeypatch, noted
):
    monkeypatch.chdir(tmp_path)
    compared, real = list[float](), TinkerTrainer.score

    async def score(self: TinkerTrainer, samples: Any, needs: frozenset[str]) -> Any:
        found = await real(self, samples, needs)
        rows = found.reference_logprobs or ()  # the probe asks for none
        for sample, row in zip(samples, rows, strict=bool(rows)):
            sampled = (sample.loss_weights > 0) & ~np.isnan(sample.logprobs)
            compared.append(float(np.abs(row - sample.logprobs)[sampled].max()))
        return found

    monkeypatch.setattr(TinkerTrainer, "score", score)
    train(pipeline(name, address, *more))
    lines = metrics_of(name)
    # KL as a reward: the base model scores what the policy has sampled, which has moved after a step.
    assert bool(compared) == ("--algorithm.kl_reward_coef=0.1" in more)
    assert not compared or compared[0] < 1e-4 < compared[-1]
    assert lines[-1]["perf/mismatch_max"] < 1e-3
    updates = [name for name, _, _ in noted]
    assert updates and updates == ["forward_backward", "optim_step"] * (len(updates) // 2)
    if name == "thoughts":
        assert [line["step"] for line in lines] == [0, 1, 2] and 0 < lines[-1]["reward/raw"] < 1
        assert "kl" in noted[0][2]
    if name == "joint":  # the demonstration with its best thoughts is a group beside those of the states
        groups = {sample.group for sample in noted[0][1][0]}
        assert any(each.endswith("/demonstration") for each in groups) and len(groups) > 1
    made_here(noted)


def test_a_run_at_the_service_begins_as_the_local_one_with_its_seed(address, tmp_path, monkeypatch):
    """Before the first update the policies are one, and greedy replies have no draws: all numbers are equal,
    to the bit. What differs afterwards stands in docs/tinker.md."""
    monkeypatch.chdir(tmp_path)
    keys = [*BRIEF, "--steps=1", "--eval.sampling.temperature=0", "--eval.tasks=2"]
    train(pipeline("thoughts", address, *keys))
    here = load([f"@{ACT_PRM / 'thoughts.toml'}", "@tiny.toml", "--name=here", *keys], REGISTRIES, env={})
    train(here)
    theirs, ours = ({k: v for k, v in metrics_of(name)[0].items() if not k.startswith("perf/")}
                    for name in ("thoughts", "here"))  # fmt: skip
    assert theirs == ours and any(key.startswith("eval/") for key in ours)
    tasks = [
        [row.trajectory.id for row in read_rollouts(Path(f"runs/{name}/rollouts/step_1.parquet"))]
        for name in ("thoughts", "here")
    ]
    assert tasks[0] == tasks[1] and tasks[0]


def test_relabelled_demonstrations_are_learned_at_the_service_and_rl_begins_from_there(
    address, tmp_path, monkeypatch, noted
):
    monkeypatch.chdir(tmp_path)
    train(pipeline("action_prompted", address, *BRIEF, "--steps=1"))
    convert_rows("runs/action_prompted", "messages", tmp_path / "relabelled.jsonl", overwrite=False,
                 on_row=lambda rows, size: None, best=True, min_reward=1e-6)  # fmt: skip
    noted.clear()
    data = '--data.sources=[{"path": "relabelled.jsonl", "weigh_by": "advantage"}]'
    more = ["--data.validation=0", "--data.early_stop=0", "--data.dialogues_per_step=4", "--steps=4"]
    supervise(pipeline("sft_relabelled", address, *BRIEF, data, *more, "--trainer.optimizer.lr=1e-2"))
    losses = [line["train/nll"] for line in metrics_of("sft_relabelled") if "train/nll" in line]
    assert len(losses) == 4 and losses[-1] < losses[0]
    made_here(noted, reference=False)
    kept = json.loads(Path("runs/sft_relabelled/weights/step_4/tinker.json").read_text())["path"]
    more = [f"--engine.weights={kept}", "--steps=1", "--algorithm.drop_zero_variance=false"]
    train(pipeline("rl", address, *BRIEF, *more))
    assert metrics_of("rl")[-1]["perf/mismatch_max"] < 1e-3
