"""The plan against what the run then needed, and its arithmetic."""

import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from tests import moe
from transformers import LlamaConfig

from silva.algorithms.recipes import Grpo
from silva.cli import main
from silva.commands import plan as plans
from silva.commands.plan import Footprint, Plan, ProbeResult, _mlp_width, _summarise, describe, plan_run
from silva.config.load import load
from silva.config.sections import Lora, TinyModel
from silva.models import memory
from silva.models.loading import load_model
from silva.registries import REGISTRIES
from silva.trainer.optimizer import Stepper, learning_bytes
from silva.types import Group, OptimParams, Segment, Task, Trajectory, Turn

ROOT = Path(__file__).parents[2]
TASK = Task("w/train/0", "w", 0, {})


@pytest.mark.slow
def test_smoke_needs_what_its_plan_says(tmp_path):
    """Each in a process of its own, so that the peak of its memory is its own."""

    def silva(*arguments):
        command = [sys.executable, "-m", "silva", "rl", "@", str(ROOT / "configs" / "smoke.toml")]
        # All groups are trained: how many of a few dozen have a signal is chance.
        command += ["--no-algorithm.drop_zero_variance", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    plan = silva("--dry-run")
    assert list(tmp_path.iterdir()) == []  # a dry run writes nothing
    silva("--monitoring.terminal", "off")
    summary = json.loads((tmp_path / "runs" / "smoke" / "summary.json").read_text())
    found = re.search(r"in all: about (\S+) tokens sampled and (\S+) in rows", plan)
    memory = re.search(r"memory: about (\S+ \S+) at most", plan)
    assert number(found[1]) == pytest.approx(summary["tokens_generated"], rel=0.2)
    assert number(found[2]) == pytest.approx(summary["tokens_in_rows"], rel=0.2)
    assert number(memory[1]) == pytest.approx(summary["peak_memory_bytes"], rel=0.3)


CONFIG = """
steps = 5
model = {type = "tiny", layers = 1, width = 32}
environments = [{type = "bandit", style = "compact"}]
rollout = {groups_per_step = 4, group_size = 4, limits = {max_turns = 2, max_turn_tokens = 4}}
trainer = {updates_per_step = 2}
"""


@pytest.mark.parametrize("warm", [False, True])
def test_dry_run_prints_toml_that_says_the_same(tmp_path, monkeypatch, capsys, warm):
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(CONFIG + ("warm_start = {steps = 3, episodes_per_step = 2}\n" if warm else ""))
    assert main(["rl", "@", "a.toml", "--steps", "7", "--dry-run"]) == 0
    text = capsys.readouterr().out
    resolved = tomllib.loads(text)
    assert (resolved["steps"], resolved["model"]["type"], resolved["trainer"]["updates_per_step"]) == (
        7,
        "tiny",
        2,
    )
    assert "steps = 7  # --steps" in text
    assert "#   7 steps, each 4 tasks x 4 = 16 rollouts" in text and ", 2 updates of 8\n" in text
    assert ("before them up to 3 supervised steps" in text) == warm
    Path("b.toml").write_text(text)
    assert main(["rl", "@", "b.toml", "--dry-run"]) == 0
    assert tomllib.loads(capsys.readouterr().out) == resolved
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.toml", "b.toml"]


def test_a_plan_trains_no_long_warm_start(tmp_path, monkeypatch, capsys):
    """A script plays in its place, as it does before a large model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("silva.commands.plan.warm_start", None)  # calling it would fail
    Path("a.toml").write_text(CONFIG + "warm_start = {steps = 601, episodes_per_step = 2}\n")
    assert main(["rl", "@", "a.toml", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "before them up to 601 supervised steps" in text and "groups in a probe" not in text


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--steps", "100"), ("--no-algorithm.drop_zero_variance",)])
def test_a_plan_that_teaches_nothing_says_so_first(tmp_path, monkeypatch, capsys, options):
    """Whatever the number of steps: replies of 4 tokens call no calculator, nor do its expert's fit in."""
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(CONFIG.replace('"bandit", style = "compact"', '"calculator"'))
    assert main(["rl", "@", "a.toml", "--dry-run", *options]) == 0
    text = capsys.readouterr().out
    expert, nothing = [line for line in text.splitlines() if "WARNING" in line]
    assert (
        "the expert's own first reply has up to 88 tokens, more than rollout.limits.max_turn_tokens = 4"
        in (expert)
    )
    assert nothing.startswith("# WARNING: nothing would be learned from the episodes of a probe. 100% of the")
    assert "The episodes of a task all earned the same reward (0 on average)" in nothing
    assert "#   0 of 12 groups in a probe have episodes that earned different rewards" in text
    # What the model reads, with the description of the tool, and where it is to speak.
    assert '#   | {"type": "function", "function": {"name": "calculator", ' in text
    assert re.search(r"What is .*<\|assistant\|>\n# a reply to it:\n#   \| ", text)


@pytest.mark.parametrize("arguments", [(), ("--dry-run",)])
def test_groups_of_one_are_refused_before_anything_is_loaded(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(CONFIG)
    assert main(["rl", "@", "a.toml", "--rollout.group_size", "1", *arguments]) == 2
    assert "rollout.group_size = 1 leaves nothing to compare" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.toml"]


def test_a_dry_run_refuses_what_the_memory_cannot_train(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(CONFIG)
    monkeypatch.setattr(
        memory, "memory_limit", lambda: 2**18
    )  # its 20,000 parameters take 80 kB, trained 320
    assert main(["rl", "@", "a.toml", "--dry-run"]) == 2
    words = capsys.readouterr().err
    assert "gradients and moments alone take" in words and "256 KiB of memory here" in words


@pytest.mark.slow
def test_a_dry_run_plays_in_one_process_what_ranks_will_train(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(CONFIG)
    ranks = ["--trainer.ranks", "2", "--trainer.parallel.tp", "2", "--trainer.transfer", "shm"]
    assert main(["rl", "@", "a.toml", "--dry-run", "--placement.type", "services", *ranks]) == 0
    text = capsys.readouterr().out
    assert "ranks = 2" in text and "memory: about" in text


@pytest.mark.slow
def test_torch_built_for_cuda_takes_more_memory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(CONFIG)
    found = []
    for version in (None, "13.0"):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert main(["rl", "@", "a.toml", "--dry-run"]) == 0
        found.append(number(re.search(r"memory: about (\S+ \S+) at most", capsys.readouterr().out)[1]))
    assert found[1] - found[0] == pytest.approx(0.3 * 2**30, rel=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("lora", [None, Lora(rank=4)])
def test_what_learning_takes_is_what_a_trainer_then_holds(dtype, lora):
    loaded = load_model(TinyModel(layers=1, width=32, dtype=dtype, lora=lora), seed=0)
    stepper = Stepper({n: p for n, p in loaded.model.named_parameters() if p.requires_grad})
    for parameter in stepper.parameters.values():
        (parameter * 1.0).sum().backward()
    held = sum(gradient.nbytes for gradient in stepper.gradients)
    stepper.step(OptimParams(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0))
    held += sum(x.nbytes for state in stepper.optimizer.state.values() for x in state.values() if x.ndim)
    held += sum(m.nbytes for n, m in stepper.masters.items() if m is not stepper.parameters[n])
    assert held == learning_bytes(loaded.model.parameters())


def number(text: str) -> float:
    size = {"k": 1e3, "M": 1e6, "G": 1e9, " KiB": 2**10, " MiB": 2**20, " GiB": 2**30}
    digits, unit = re.fullmatch(r"([\d.]+)(.*)", text).groups()
    return float(digits) * size.get(unit, 1)


def episode(id, *replies, reward=0.0, **failed):
    """An episode of one prompt of 20 tokens and 2 tokens before each later reply."""
    turns = [
        Turn(f"{id}/{i}", (Segment("environment", (0,) * (20 if i == 0 else 2)),
                           Segment("policy", (1,) * n, (0.0,) * n, versions=(0,) * n)), (),
             rewards={"goal": reward}, fresh=i == 0)
        for i, n in enumerate(replies)
    ]  # fmt: skip
    return Trajectory(id, tuple(turns), "terminated", rewards={"goal": reward * len(turns)}, **failed)


def test_probe_counts_usable_episodes():
    groups = [
        Group("a", TASK, (episode("a", 4), episode("b", 2, 6, reward=1.0))),
        Group("b", TASK, (episode("c", 4), episode("d", 4), episode("e", failure="mask", error="x"))),
    ]
    # Replies 4, 8, 4, 4; rows 24, 20 + 2 + 2 + 6 = 30, 24, 24; only the second group is all equal.
    # The first two have 22 tokens in common (20 + 2), the last two are the same row: 24 + 8 + 24.
    found = _summarise(Grpo(), groups)
    assert found == ProbeResult(
        generated=5.0, row_tokens=25.5, rows=1.0, unique=14.0, longest=30, groups=2, silent=1
    )


def test_probe_counts_the_rows_of_a_rewritten_context():
    """Of 24 and 2 + 6 tokens; the other episode has one of 24."""
    first, second = episode("a", 4, 6).turns
    rewritten = dataclasses.replace(
        episode("a", 4, 6), turns=(first, dataclasses.replace(second, fresh=True))
    )
    found = _summarise(Grpo(), [Group("a", TASK, (rewritten, episode("b", 4)))])
    assert (found.rows, found.row_tokens, found.longest) == (1.5, 28.0, 24)


def test_probe_sees_what_the_credit_sees():
    """Both episodes earn 1 in all, one of them a turn earlier: only credit by turn tells them apart."""
    early, late = episode("a", 4, 4), episode("b", 4, 4)
    paid = [
        dataclasses.replace(t, rewards={"goal": 1.0}, turns=tuple(
            dataclasses.replace(turn, rewards={"goal": earned})
            for turn, earned in zip(t.turns, rewards, strict=True)
        ))
        for t, rewards in ((early, (1.0, 0.0)), (late, (0.0, 1.0)))
    ]  # fmt: skip
    groups = [Group("a", TASK, tuple(paid))]
    assert [_summarise(recipe, groups).silent for recipe in (Grpo(), Grpo(credit="turn"))] == [1, 0]


def test_probe_without_a_usable_episode_says_why():
    broken = episode("a", failure="redo", error="reset: OSError: no server")
    with pytest.raises(
        RuntimeError, match=r"every episode of the plan's probe failed: 1 x reset: OSError: no server"
    ):
        _summarise(Grpo(), [Group("a", TASK, (broken,))])


@pytest.mark.parametrize(("gain", "warned"), [(0.7, True), (2.0, False)])
def test_bfloat16_is_warned_of_where_its_products_are_no_faster(gain, warned, monkeypatch):
    monkeypatch.setattr(plans, "bfloat16_gain", lambda: gain)
    values = {"environments": [{"type": "bandit"}], "model.type": "tiny", "model.dtype": "bfloat16"}
    found = plan_run(load([], REGISTRIES, values=values).config).warnings
    assert any("0.70 times as fast as those of float32" in each for each in found) is warned


def test_plan_in_words():
    values = {
        "environments": [{"type": "bandit"}], "model.type": "tiny", "steps": 20, "name": "x",
        "eval.every": 10, "rollout.groups_per_step": 64, "rollout.group_size": 8,
        "trainer.updates_per_step": 4, "warm_start.steps": 50, "checkpoint.keep": 2,
    }  # fmt: skip
    probe = ProbeResult(
        generated=100.0, row_tokens=390.625, rows=4.0, unique=1.0, longest=301, groups=6, silent=3
    )
    plan = Plan(
        load([], REGISTRIES, values=values).config, probe, refills=12.5, kept=48.0, compares=True,
        eval_episodes=128, footprint=Footprint(134_515_008, 2_442_240, 1.99 * 2**30, 30 * 2**20),
        shown=("Say a\nnow", "b" * 4_000),
    )  # fmt: skip
    warned = describe(dataclasses.replace(plan, warnings=("one", "two")))
    assert warned == "WARNING: one\nWARNING: two\n" + describe(plan)
    assert describe(plan).splitlines()[:16] == [
        "a prompt, as the model reads it:",
        "  | Say a",
        "  | now",
        "a reply to it:",
        "  | " + "b" * 1_500,
        "  | ... (1,000 more characters) ...",
        "  | " + "b" * 1_500,
        "plan:",
        "  20 steps, each 64 tasks x 8 = 512 rollouts, and about 12.5 tasks more for groups without signal, "
        "4 updates of 128",
        "  before them up to 50 supervised steps on scripted play",
        "  3 of 6 groups in a probe have episodes that earned different rewards, as learning needs",
        "  a step: about 61.2k tokens sampled and 1.54k rows trained, of 150k tokens with their prompts; the "
        "longest row has 301",
        "  in all: about 1.22M tokens sampled and 3M in rows, if all stays as in a probe",
        "  3 evaluations of 128 held-out episodes",
        "  memory: about 1.99 GiB at most, for 135M parameters, 2.44M trained",
        "  disk: checkpoints of about 30 MiB, at most 3 kept",
    ]


def test_a_token_is_counted_in_the_experts_that_it_goes_to() -> None:
    """Two of them, and the shared one of Qwen2-MoE, of 16 numbers each."""
    widths = {family: _mlp_width(moe.config(family)) for family in ("qwen3_moe", "qwen2_moe", "mixtral")}
    assert widths == {"qwen3_moe": 32, "qwen2_moe": 48, "mixtral": 32}
    assert _mlp_width(LlamaConfig(intermediate_size=77)) == 77
