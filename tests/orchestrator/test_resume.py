"""What --resume, --overwrite and neither do; damaged checkpoints, full disks, signals, runs of every kind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.runs import LIMIT, differences, end_state, metrics

from silva.orchestrator.replay import FILE as REPLAYED
from silva.storage.checkpoints import CheckpointStore
from silva.storage.ledger import audit, read
from silva.storage.run_folder import LOCK

WARM = ("--warm_start.steps", "3", "--warm_start.episodes_per_step", "4", "--warm_start.mistakes", "0.2")


@pytest.fixture
def copy(alone, tmp_path):
    """The run that was left alone, in another folder, as if killed just before its summary."""
    path = tmp_path / alone.name
    shutil.copytree(alone, path)
    (path / "summary.json").unlink()
    return path


# What a run's folder allows.


def test_a_finished_run_says_so_and_is_left_as_it_is(server, alone):
    before = {file: file.stat().st_mtime_ns for file in alone.rglob("*") if file.is_file()}
    ended = server.rl("alone", "--resume")
    assert ended.status == 0 and "has finished (4 steps); raise steps to go on" in ended.output
    before.pop(alone / ".silva.lock")
    assert {file: file.stat().st_mtime_ns for file in before} == before


def test_more_steps_go_on_where_a_finished_run_ended(server, copy, undisturbed, tmp_path):
    ended = server.rl("alone", "--resume", "--steps", "5", into=tmp_path)
    assert ended.status == 0, ended.output
    assert [row["step"] for row in metrics(copy)] == [0, 1, 2, 3, 4, 5]
    assert end_state(copy)["metrics"][:5] == undisturbed["metrics"]
    assert (copy / "weights" / "step_5" / "model.safetensors").exists()


def test_a_changed_key_is_named(server, alone):
    ended = server.rl("alone", "--resume", "--trainer.optimizer.lr", "0.5", "--seed", "3")
    assert ended.status == 2
    assert "trainer.optimizer.lr: was 0.01, now 0.5" in ended.output and "seed: was 0, now 3" in ended.output


def test_changed_files_are_refused_or_accepted_and_recorded(server, copy, tmp_path):
    saved = json.loads((copy / "config.json").read_text())
    rows = str(tmp_path / "rows.jsonl")
    before = json.dumps(saved | {"(files)": saved["(files)"] | {rows: "9 bytes, sha256 a"}})
    (copy / "config.json").write_text(before)
    ended = server.rl("alone", "--resume", "--steps", "5", into=tmp_path)
    assert ended.status == 2 and f"{rows}: was 9 bytes, sha256 a, now not there" in ended.output
    assert "--accept-files" in ended.output and (copy / "config.json").read_text() == before
    ended = server.rl("alone", "--accept-files", into=tmp_path)
    assert ended.status == 2 and "expected --resume too" in ended.output
    ended = server.rl("alone", "--resume", "--accept-files", "--steps", "5", into=tmp_path)
    assert ended.status == 0 and "goes on with changed files" in ended.output, ended.output
    records = list(read(copy / "ledger.jsonl"))
    (change,) = [record.fields for record in records if record.event == "files_changed"]
    assert change == {"step": 4, "files": {rows: ["9 bytes, sha256 a", "not there"]}}
    assert audit(records, finished=True) == []
    assert json.loads((copy / "config.json").read_text())["(files)"] == saved["(files)"]


def test_a_run_in_the_way_is_not_touched_without_a_flag(server, alone, undisturbed):
    ended = server.rl("alone")
    assert ended.status == 2 and "--resume" in ended.output and "--overwrite" in ended.output
    assert differences(alone, undisturbed) == []


def test_overwrite_begins_again(server, copy, undisturbed, tmp_path):
    ended = server.rl("alone", "--overwrite", into=tmp_path)
    assert ended.status == 0 and "it is removed when the first step is done" in ended.output
    assert differences(copy, undisturbed) == []


# Damaged checkpoints.


def test_the_checkpoint_before_a_damaged_one_is_used_without_help(server, copy, undisturbed, tmp_path):
    file = copy / "checkpoints" / "step_4" / "trainer" / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    ended = server.rl("alone", "--resume", into=tmp_path)
    assert ended.status == 0 and f"checkpoint of step 4 is not used: {file}" in ended.output
    assert differences(copy, undisturbed) == []


def test_without_any_whole_checkpoint_the_run_refuses(server, copy, tmp_path):
    for step in (2, 4):
        (copy / "checkpoints" / f"step_{step}" / "trainer" / "rng.safetensors").unlink()
    ended = server.rl("alone", "--resume", into=tmp_path)
    assert ended.status == 1 and ended.output.count("rng.safetensors: missing") == 2
    assert "--overwrite" in ended.output and "Traceback" not in ended.output


# A disk that takes no more.


@pytest.mark.parametrize("every", [3, 21, 89])
def test_a_disk_that_fails_at_every_kth_write(server, undisturbed, tmp_path, every):
    ended = server.rl("run", into=tmp_path, faults=every)
    assert ended.status in (1, 2) and int(ended.proof) >= 1
    assert "No space left on device" in ended.output and "Traceback" not in ended.output
    store = CheckpointStore(ended.path / "checkpoints", read_only=True)
    assert store.newest() is not None or not store.steps()
    assert store.skipped == []
    ended = server.rl("run", "--resume", into=tmp_path)
    assert ended.status == 0, ended.output
    assert differences(ended.path, undisturbed) == []


@pytest.mark.parametrize("size", [48, 850])  # kibibytes
def test_a_full_disk(server, undisturbed, tmp_path, size):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", disk]
    mounted = subprocess.run(mount, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        ended = server.rl("run", into=disk)
        assert ended.status == 1 and ended.resumable(), ended.output
        assert "No space left on device" in ended.output
        store = CheckpointStore(ended.path / "checkpoints", read_only=True)
        assert (store.newest() is not None or not store.steps()) and store.skipped == []
        subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
        ended = server.rl("run", "--resume", into=disk)
        assert ended.status == 0, ended.output
        assert differences(ended.path, undisturbed) == []
    finally:
        subprocess.run(["umount", disk], check=True)


# Signals; those in every phase of a run are in test_signal_phases.py.


def test_an_evaluation_interrupted_and_then_killed_is_logged_once(server, undisturbed, tmp_path):
    """The checkpoint of an interrupted evaluation comes before the step's row."""
    # the first evaluation (16 episodes), then the one after step 2
    for place, kill in (("eval:3", "issue:1"), ("eval:19", "checkpoint_file:1")):
        ended = server.rl("run", "--resume", into=tmp_path, interrupt=place)
        assert ended.status == 130, ended.output
        ended = server.rl("run", "--resume", into=tmp_path, crash=kill)
        assert ended.status == -signal.SIGKILL
    ended = server.rl("run", "--resume", into=tmp_path)
    assert ended.status == 0, ended.output
    assert differences(ended.path, undisturbed) == []


def test_a_signal_from_outside(server, undisturbed, tmp_path):
    argv = ["rl", f"@{server.config}", "--name", "run", "--output_dir", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "silva", *argv, "--monitoring.report=true"],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        while not (tmp_path / "run" / "metrics.jsonl").exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=LIMIT)[0].decode()
    finally:
        process.kill()
    assert process.returncode == 130 and "--resume goes on" in output, output
    assert (tmp_path / "run" / "report.html").exists()
    ended = server.rl("run", "--resume", into=tmp_path)
    assert ended.status == 0, ended.output
    assert differences(ended.path, undisturbed) == []


def test_ctrl_c_while_an_overwrite_loads_gives_the_earlier_run_back(server, tmp_path):
    def content():
        files = (path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != LOCK)
        return {path: path.read_bytes() for path in files}

    assert server.rl("run", "--steps", "1", into=tmp_path).status == 0
    before = content()
    ended = server.rl("run", "--overwrite", into=tmp_path, interrupt="load:1")
    assert ended.status == 130 and "the earlier run is back" in ended.output, ended.output
    assert "--resume" not in ended.output  # that would be of the run that is gone
    assert content() == before


def test_ctrl_c_in_supervised_training(server, tmp_path):
    ended = server.rl("run", *WARM, into=tmp_path, command="sft", interrupt="warm_start:6")
    assert (ended.status, ended.proof) == (130, "warm_start")
    assert "--resume goes on after step 1" in ended.output and "Traceback" not in ended.output
    again = server.rl("run", *WARM, "--resume", into=tmp_path, command="sft")
    assert again.status == 0 and "resumed after step 1" in again.output, again.output


@pytest.mark.parametrize("crash", ["rename:1", "latest:1", "latest:2", "prune:2"])
def test_killed_between_the_best_checkpoint_and_its_mark(server, undisturbed, tmp_path, crash):
    killed = server.rl("run", into=tmp_path, crash=crash)
    assert killed.status == -signal.SIGKILL
    ended = server.rl("run", "--resume", into=tmp_path)
    assert ended.status == 0, ended.output
    assert "checkpoints/best" in undisturbed["files"]
    assert differences(ended.path, undisturbed) == []


# Runs of every kind, killed, go on to the bit.


@dataclass(frozen=True)
class Kind:
    """`look`: that what has to go on is there at all, from the rows of a whole run and its folder."""

    options: str
    crashes: tuple[str, ...]
    look: Callable[[list[dict[str, Any]], Path], None] = lambda rows, run: None


def has_a_critic(rows, run):
    assert (run / "checkpoints/step_4/trainer/critic/weights.safetensors").exists()
    assert (run / "checkpoints/best").exists() and all(row["train/critic/grad_norm"] > 0 for row in rows)


def branches(rows, run):
    assert min(row["forest/branches"] for row in rows) > 0.1


def thinks(rows, run):
    assert all(0 < row["environment/parity/action_prob"] < 1 and row["train/kl"] >= 0 for row in rows)
    groups = [list(r.fields["groups"]) for r in read(run / "ledger.jsonl") if r.event == "sealed"]
    names = {tuple(name.partition("/")[2] for name in each) for each in groups}
    assert names == {("t0", "demonstration"), ("t0", "t1", "demonstration")}, "letters has one turn"


def is_controlled(rows, run):
    """By a baseline of each world, the temperature and two coefficients. All of it moves."""
    controllers = json.loads((run / "checkpoints/step_4/state.json").read_text())["controllers"]
    assert controllers.keys() == {"baseline/parity", "baseline/letters", "temperature", "kl_coef",
                                  "entropy_coef_ungated", "entropy_coef"}  # fmt: skip
    assert controllers == {name: rows[3][f"control/{name}"] for name in controllers}
    assert all(len({row[f"control/{name}"] for row in rows}) > 1 for name in controllers)


def replays(rows, run):
    assert rows[0]["replay/groups"] == 0 and {row["replay/groups"] for row in rows[1:]} == {3}
    assert all(1 <= row["replay/staleness"] <= 2 for row in rows[1:])
    replayed = [r.fields for r in read(run / "ledger.jsonl") if r.event == "replayed"]
    assert [sum(len(f["groups"]) for f in replayed if f["step"] == step) for step in (2, 3, 4)] == [3, 3, 3]
    assert (run / "checkpoints/step_2" / REPLAYED).exists()


def is_short_of_groups(rows, run):
    """One world pays all the same, and is refilled from both: some steps are short, some full."""
    issued = [row["groups/trained"] + row["groups/zero_variance"] for row in rows]
    assert all(5 <= count <= 10 for count in issued)
    assert 0 < sum(row["groups/trained"] for row in rows) < sum(issued)


KL = "--algorithm.kl_coef 0.1"
KINDS = {
    # The frozen copy is of the warm-started weights or adapters, so it must come from the checkpoint.
    "reference": Kind(f"{' '.join(WARM)} {KL}", ("publish:3",)),
    "adapters": Kind(f"{' '.join(WARM)} {KL} --model.lora.rank 4 --model.lora.dropout 0.1", ("optim:7",)),
    "critic": Kind(
        "--algorithm.type ppo --trainer.critic.optimizer.lr 1e-2 --trainer.critic.warmup 1",
        ("backward:5", "publish:3"), has_a_critic,
    ),
    "critic on the policy": Kind(
        "--algorithm.type bi_level_gae --algorithm.kl_reward_coef 0.1 --trainer.critic.trunk policy "
        "--trainer.critic.optimizer.lr 0.1", ("optim:6",), has_a_critic,
    ),
    # Steps of an environment take up to 3 ms, at random, so both runs meet the forest in another order.
    "branching": Kind(
        "--rollout.type branching --rollout.group_size 6 --rollout.initial_rollouts 2 "
        "--rollout.branch_probability 0.9 --rollout.entropy_weight 1 --algorithm.type arpo "
        "--algorithm.tree_credit hard --environments.0.turns 5", ("seal:3",), branches,
    ),
    "thoughts": Kind(
        "--rollout.type thoughts --rollout.group_size 3 --rollout.joint true "
        "--rollout.limits.max_turn_tokens 40 --algorithm.type act_prm", ("seal:3",), thinks,
    ),
    "controllers": Kind(
        "--algorithm.type reinforce --algorithm.advantage running --algorithm.kl_coef 0.1 "
        "--algorithm.drop_zero_variance false --algorithm.reference_refresh 3 "
        "--algorithm.adaptive_kl.target 1e-4 --algorithm.adaptive_entropy.target 9 "
        "--algorithm.adaptive_temperature.reference_std 0.5", ("publish:3", "rename:1"), is_controlled,
    ),
    "replay": Kind(
        "--algorithm.replay.groups 3 --algorithm.replay.max_staleness 2 "
        "--algorithm.rollout_correction.weight truncate", ("publish:3",), replays,
    ),
    "refills": Kind(
        "--environments.0.paid constant --algorithm.max_refills 1", ("seal:6",), is_short_of_groups
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(server):
    """The end state of a run of each kind that nothing befell."""
    states = {}

    def state(name):
        if name not in states:
            ended = server.rl(f"whole_{name}".replace(" ", "_"), *KINDS[name].options.split())
            assert ended.status == 0, ended.output
            states[name] = end_state(ended.path)
            KINDS[name].look([row for row in metrics(ended.path) if row["step"]], ended.path)
        return states[name]

    return state


@pytest.mark.same_bits
@pytest.mark.parametrize(
    ("name", "crash"), [(n, crash) for n, kind in KINDS.items() for crash in kind.crashes]
)
def test_a_killed_run_of_any_kind_goes_on_to_the_bit(server, whole, tmp_path, name, crash):
    options = KINDS[name].options.split()
    killed = server.rl("run", *options, into=tmp_path, crash=crash)
    assert (killed.status, killed.proof) == (-signal.SIGKILL, crash.partition(":")[0])
    ended = server.rl("run", *options, "--resume", into=tmp_path)
    assert ended.status == 0, ended.output
    assert differences(ended.path, whole(name)) == []


def test_a_run_stops_early_when_evaluations_bring_nothing_better(server, tmp_path):
    options = ("--algorithm.early_stop", "2", "--eval.every", "1", "--steps", "12")
    ended = server.rl("early", *options, into=tmp_path)
    assert ended.status == 0, ended.output
    names = ("eval/parity/success", "eval/letters/success")
    success = [sum(row[name] for name in names) for row in metrics(ended.path)[1:]]
    best = success.index(max(success)) + 1
    assert len(success) == best + 2 < 12
    assert f"stopped after step {best + 2} of 12: 2 evaluations in a row were not better" in ended.output
    assert (ended.path / "weights" / f"step_{best + 2}" / "model.safetensors").exists()
