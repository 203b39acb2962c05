"""The pipelines of Act-PRM at `silva serve tinker`: what they learn there is what they learn here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tinker", reason="needs tinker: pip install tinker")

from tests.server.tinker.test_runs_of_silva import local

from silva.commands.sft import supervise
from silva.commands.train import train
from silva.config.load import load
from silva.conversion.rows import convert_rows
from silva.registries import REGISTRIES
from silva.storage.rollouts import read_rollouts
from silva.trainer.tinker import TinkerTrainer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]
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
