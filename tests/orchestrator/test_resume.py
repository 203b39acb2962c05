"""What --resume, --overwrite and neither do; damaged checkpoints, full disks, and Ctrl-C in every phase."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.runs import LIMIT, differences, end_state, metrics

from silva.storage.checkpoints import MANIFEST, CheckpointStore
from silva.storage.ledger import audit, read
from silva.storage.run_folder import LOCK

WARM = ("--warm_start.steps", "3", "--warm_start.episodes_per_step", "4", "--warm_start.mistakes", "0.2")
SIZES = (48, 300, 850, 900)  # kibibytes
LORA = ("--model.lora.rank", "4", "--model.lora.dropout", "0.1", "--algorithm.kl_coef", "0.1")


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


def test_a_foreign_folder_is_left_alone_with_any_flag(server, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.toml").write_text("x = 1\n")
    for flag in ((), ("--resume",), ("--overwrite",)):
        ended = server.rl("mine", *flag, into=tmp_path)
        assert ended.status == 2 and "not a run of Silva" in ended.output
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["config.toml"]


def test_a_file_in_place_of_the_folder(server, tmp_path):
    (tmp_path / "mine").write_text("text")
    ended = server.rl("mine", into=tmp_path)
    assert ended.status == 2 and "there is a file in its place" in ended.output
    assert (tmp_path / "mine").read_text() == "text"


# Damaged checkpoints.


def _newest(run: Path) -> Path:
    return run / "checkpoints" / "step_4"


@pytest.mark.parametrize("name", ["trainer/weights.safetensors", "state.json", MANIFEST])
def test_the_checkpoint_before_a_damaged_one_is_used_without_help(server, copy, undisturbed, tmp_path, name):
    file = _newest(copy) / name
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


@pytest.mark.parametrize("every", [3, 8, 21, 55, 89])
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


@pytest.mark.parametrize("size", SIZES)
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


# Ctrl-C.


@pytest.fixture(scope="module")
def warm(server):
    """A run with a warm start that nothing befell."""
    ended = server.rl("warm", *WARM)
    assert ended.status == 0, ended.output
    return end_state(ended.path)


@pytest.mark.parametrize(
    "place",
    ["load:1", "warm_start:6", "eval:5", "rollout:3", "issue:2", "backward:2", "optim:3", "eval:20",
     "checkpoint_file:2", "rename:2", "eval:36", "export:1"],
)  # fmt: skip
def test_ctrl_c_in_every_phase_loses_nothing(server, warm, tmp_path, place):
    ended = server.rl("run", *WARM, into=tmp_path, interrupt=place)
    assert ended.proof == place.partition(":")[0]
    assert ended.status == 130 and ended.resumable(), ended.output
    in_warm_start = place in ("warm_start:6", "backward:2", "optim:3")  # of its three steps
    assert ("begins the warm start again" in ended.output) == in_warm_start
    ended = server.rl("run", *WARM, "--resume", into=tmp_path)
    assert ended.status == 0, ended.output
    assert ("supervised steps" in ended.output) == (in_warm_start or place == "load:1")
    assert differences(ended.path, warm) == []


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


def test_the_second_ctrl_c_ends_at_once(server, undisturbed, tmp_path):
    ended = server.rl("run", into=tmp_path, interrupt="backward:2", signals=2)
    assert ended.status == 130 and ended.resumable(), ended.output
    assert [row["step"] for row in metrics(ended.path)] == [0]
    assert not list((ended.path / "checkpoints").glob("step_*"))  # the first would have saved
    ended = server.rl("run", "--resume", into=tmp_path)
    assert ended.status == 0, ended.output
    assert differences(ended.path, undisturbed) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_from_outside(server, undisturbed, tmp_path, number):
    argv = [
        "rl",
        f"@{server.config}",
        "--name",
        "run",
        "--output_dir",
        str(tmp_path),
        "--monitoring.report=true",
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "silva", *argv], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        while not (tmp_path / "run" / "metrics.jsonl").exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
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
    assert "start again with --overwrite" in ended.output and "Traceback" not in ended.output


# Other kinds of runs.


@pytest.mark.parametrize("crash", ["rename:1", "latest:1", "latest:2", "prune:2"])
def test_killed_between_the_best_checkpoint_and_its_mark(server, undisturbed, tmp_path, crash):
    killed = server.rl("run", into=tmp_path, crash=crash)
    assert killed.status == -signal.SIGKILL
    ended = server.rl("run", "--resume", into=tmp_path)
    assert ended.status == 0, ended.output
    assert "checkpoints/best" in undisturbed["files"]
    assert differences(ended.path, undisturbed) == []


@pytest.mark.same_bits
def test_a_run_with_adapters_dropout_and_a_reference_goes_on_to_the_bit(server, tmp_path):
    whole = server.rl("whole", *LORA, into=tmp_path)
    assert whole.status == 0, whole.output
    killed = server.rl("killed", *LORA, into=tmp_path, crash="backward:6")
    assert (killed.status, killed.proof) == (-signal.SIGKILL, "backward")
    ended = server.rl("killed", *LORA, "--resume", into=tmp_path)
    assert ended.status == 0, ended.output
    assert differences(ended.path, end_state(whole.path)) == []


@pytest.mark.same_bits
@pytest.mark.parametrize("model", [(), ("--model.lora.rank", "4")])
def test_a_reference_goes_on_to_the_bit(server, tmp_path, model):
    """The frozen copy is of the warm-started weights or adapters, so it must come from the checkpoint."""
    options = (*WARM, *model, "--algorithm.kl_coef", "0.1")
    whole = server.rl("whole", *options, into=tmp_path)
    assert whole.status == 0, whole.output
    killed = server.rl("killed", *options, into=tmp_path, crash="publish:3")
    assert killed.status == -signal.SIGKILL
    ended = server.rl("killed", *options, "--resume", into=tmp_path)
    assert ended.status == 0, ended.output
    assert differences(ended.path, end_state(whole.path)) == []


def left_by(run: Path) -> tuple[list, dict[str, bytes]]:
    """Metrics and files of a run, those in a critic's folder too; not what tells of the time."""
    rows = [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in metrics(run)]
    files = [f for part in ("checkpoints", "weights", "rollouts") for f in sorted((run / part).rglob("*"))]
    kept = [f for f in files if f.is_file() and f.name not in (MANIFEST, "state.json")]
    return rows, {str(f.relative_to(run)): f.read_bytes() for f in kept}


def controllers_of(run: Path) -> dict[str, float]:
    return json.loads((run / "checkpoints" / "step_4" / "state.json").read_text())["controllers"]


CRITIC = ("--algorithm.type", "ppo", "--trainer.critic.optimizer.lr", "1e-2", "--trainer.critic.warmup", "1")
BILEVEL = ("--algorithm.type", "bi_level_gae", "--algorithm.kl_reward_coef", "0.1",
           "--trainer.critic.trunk", "policy", "--trainer.critic.optimizer.lr", "0.1")  # fmt: skip
CONTROLLERS = ("--algorithm.type", "reinforce", "--algorithm.advantage", "running",
               "--algorithm.kl_coef", "0.1", "--algorithm.drop_zero_variance", "false",
               "--algorithm.reference_refresh", "3", "--algorithm.adaptive_kl.target", "1e-4",
               "--algorithm.adaptive_entropy.target", "9",
               "--algorithm.adaptive_temperature.reference_std", "0.5")  # fmt: skip


@pytest.mark.same_bits
@pytest.mark.parametrize(
    ("options", "crash"), [(CRITIC, "backward:5"), (CRITIC, "publish:3"), (BILEVEL, "optim:6")]
)
def test_a_run_with_a_critic_goes_on_to_the_bit(server, tmp_path, options, crash):
    whole = server.rl("whole", *options, into=tmp_path)
    assert whole.status == 0, whole.output
    rows, files = left_by(whole.path)
    assert {"checkpoints/step_4/trainer/critic/weights.safetensors", "checkpoints/best"} <= files.keys()
    assert all(row["train/critic/grad_norm"] > 0 for row in rows[1:])
    killed = server.rl("killed", *options, into=tmp_path, crash=crash)
    assert (killed.status, killed.proof) == (-signal.SIGKILL, crash.partition(":")[0])
    ended = server.rl("killed", *options, "--resume", into=tmp_path)
    assert ended.status == 0, ended.output
    assert left_by(ended.path) == (rows, files)
    assert audit(read(ended.path / "ledger.jsonl"), finished=True) == []


THOUGHTS = ("--rollout.type", "thoughts", "--rollout.group_size", "3", "--rollout.joint", "true",
            "--rollout.limits.max_turn_tokens", "40", "--algorithm.type", "act_prm")  # fmt: skip
BRANCHING = ("--rollout.type", "branching", "--rollout.group_size", "6", "--rollout.initial_rollouts", "2",
             "--rollout.branch_probability", "0.9", "--rollout.entropy_weight", "1", "--algorithm.type",
             "arpo", "--algorithm.tree_credit", "hard", "--environments.0.turns", "5")  # fmt: skip


@pytest.mark.same_bits
@pytest.mark.parametrize("crash", ["seal:3", "backward:5"])
def test_a_run_that_branches_goes_on_to_the_bit(server, tmp_path, crash):
    """Steps of an environment take up to 3 ms, at random, so both runs meet the forest in another order."""
    whole = server.rl("whole", *BRANCHING, into=tmp_path)
    assert whole.status == 0, whole.output
    branches = [row["forest/branches"] for row in metrics(whole.path) if "forest/branches" in row]
    assert len(branches) == 4 and min(branches) > 0.1
    killed = server.rl("killed", *BRANCHING, into=tmp_path, crash=crash)
    assert killed.status == -signal.SIGKILL
    ended = server.rl("killed", *BRANCHING, "--resume", into=tmp_path)
    assert ended.status == 0, ended.output
    assert differences(ended.path, end_state(whole.path)) == []
    assert audit(read(ended.path / "ledger.jsonl"), finished=True) == []


@pytest.mark.same_bits
def test_a_run_of_thoughts_goes_on_to_the_bit(server, tmp_path):
    """Killed in its third step, after all groups were played."""
    whole = server.rl("whole", *THOUGHTS, into=tmp_path)
    assert whole.status == 0, whole.output
    rows = metrics(whole.path)[1:]
    assert all(0 < row["environment/parity/action_prob"] < 1 and row["train/kl"] >= 0 for row in rows)
    groups = [list(r.fields["groups"]) for r in read(whole.path / "ledger.jsonl") if r.event == "sealed"]
    names = {tuple(name.partition("/")[2] for name in each) for each in groups}
    assert names == {("t0", "demonstration"), ("t0", "t1", "demonstration")}, "letters has one turn"
    killed = server.rl("killed", *THOUGHTS, into=tmp_path, crash="seal:3")
    assert killed.status == -signal.SIGKILL
    ended = server.rl("killed", *THOUGHTS, "--resume", into=tmp_path)
    assert ended.status == 0, ended.output
    assert differences(ended.path, end_state(whole.path)) == []
    assert audit(read(ended.path / "ledger.jsonl"), finished=True) == []


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


@pytest.mark.same_bits
def test_the_state_of_controllers_goes_on_to_the_bit(server, tmp_path):
    """A baseline of each world, the temperature, two coefficients, and a reference that was refreshed."""
    whole = server.rl("whole", *CONTROLLERS, into=tmp_path)
    assert whole.status == 0, whole.output
    rows, files = left_by(whole.path)
    controllers = controllers_of(whole.path)
    assert controllers.keys() == {
        "baseline/parity", "baseline/letters", "temperature", "kl_coef", "entropy_coef_ungated",
        "entropy_coef",
    }  # fmt: skip
    logged = {name.removeprefix("control/"): v for name, v in rows[4].items() if "control/" in name}
    assert controllers == logged
    for name in controllers:  # all of it moves, or nothing would be shown
        assert len({row[f"control/{name}"] for row in rows[1:]}) > 1
    for crash in ("publish:3", "rename:1"):  # in step 3, and within the first checkpoint
        killed = server.rl(f"killed-{crash[0]}", *CONTROLLERS, into=tmp_path, crash=crash)
        assert killed.status == -signal.SIGKILL
        ended = server.rl(f"killed-{crash[0]}", *CONTROLLERS, "--resume", into=tmp_path)
        assert ended.status == 0, ended.output
        assert left_by(ended.path) == (rows, files) and controllers_of(ended.path) == controllers
        assert audit(read(ended.path / "ledger.jsonl"), finished=True) == []


@pytest.mark.parametrize("crash", ["backward:2", "backward:5", "publish:3"])
def test_killed_during_the_warm_start_and_after_it(server, warm, tmp_path, crash):
    killed = server.rl("run", *WARM, into=tmp_path, crash=crash)
    assert killed.status == -signal.SIGKILL
    ended = server.rl("run", *WARM, "--resume", into=tmp_path)
    assert ended.status == 0, ended.output
    assert differences(ended.path, warm) == []
