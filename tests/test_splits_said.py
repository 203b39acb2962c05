"""What the commands say of splits: an overlap is refused, and tasks that were trained on are counted."""

import json
from pathlib import Path

import pytest

from silva.cli import main

WORLD = """
from pathlib import Path

from silva.environments.tasks import Draft, listed
from silva.environments.settings import EnvironmentSettings
from silva.types import Message, Observation, Step, Task


class Letters(EnvironmentSettings):
    eval_size: int = 8
    eval_share: float = 0.5

    def taskset(self):
        first = int(Path("first.txt").read_text())
        drafts = [Draft({"n": n}) for n in range(first, first + 40)]
        return listed(self, drafts, Episode)


class Torn:
    def tasks(self, split):
        return [Task(f"{split}/{n}", "torn", n, {"n": n}, split=split) for n in range(4)]

    def environment(self, task):
        return Episode(task)


class Overlap(EnvironmentSettings):
    def taskset(self):
        return Torn()


class Episode:
    def __init__(self, task):
        self.task = task

    async def reset(self):
        return Observation((Message("user", str(self.task.data["n"]), id="q"),))

    async def step(self, message):
        return Step(rewards={"length": float(len(message.content))}, terminated=True)

    async def close(self):
        pass
"""
CONFIG = """
name = "said"
steps = 1

[model]
type = "tiny"
layers = 1
width = 32
context = 64

[[environments]]
type = "letters.py:Letters"

[rollout]
groups_per_step = 20
group_size = 2

[rollout.limits]
max_turn_tokens = 2
max_episode_tokens = 48

[eval]
tasks = 100

[monitoring]
terminal = "plain"
tensorboard = false
report = false
rollouts = false
"""


@pytest.fixture
def silva(tmp_path, monkeypatch, capsys):
    """Call the command in a folder that holds said.toml and its world: (exit code, output, errors)."""
    monkeypatch.chdir(tmp_path)
    Path("said.toml").write_text(CONFIG)
    Path("letters.py").write_text(WORLD)
    Path("first.txt").write_text("0")

    def call(*arguments):
        capsys.readouterr()
        return main(list(arguments)), *(text.replace("\n", " ") for text in capsys.readouterr())

    return call


@pytest.mark.slow
@pytest.mark.parametrize("command", ["rl", "eval"])
def test_a_world_whose_splits_overlap_is_refused(silva, command):
    code, _, err = silva(command, "@", "said.toml", "--environments.0.type", "letters.py:Overlap")
    assert code == 2
    assert "environment Overlap: training task train/0 has the content of the held-out task eval/0" in err


@pytest.mark.slow
def test_tasks_that_were_trained_on_are_named_by_eval_and_by_resume(silva):
    assert silva("rl", "@", "said.toml")[0] == 0
    assert len(json.loads(Path("runs/said/held_out.json").read_text())["Letters"]) == 8

    def notes(*options):
        code, _, err = silva("eval", "@", "said.toml", "--weights", "runs/said", *options)
        assert code == 0
        return err

    assert "trained on" not in notes() and "held-out set changed" not in notes()
    wide = notes("--environments.0.eval_share", "0.9", "--environments.0.eval_size", "30")
    assert "evaluated tasks were trained on in runs/said" in wide

    Path("first.txt").write_text("1000")  # the user's list was replaced
    changed = "Letters: the held-out set changed: 8 of 8 evaluated tasks were not held out when runs/said"
    assert changed in notes()
    assert silva("rl", "--resume", "--name", "said", "--steps", "2")[0] == 0
    assert Path("runs/said/run.log").read_text().count(changed) == 1


@pytest.mark.slow
def test_a_run_does_not_go_on_with_other_code(silva):
    assert silva("rl", "@", "said.toml")[0] == 0
    before = Path("runs/said/ledger.jsonl").read_bytes()
    Path("letters.py").write_text(WORLD + "# another reward\n")
    code, _, err = silva("rl", "--resume", "--name", "said", "--steps", "2")
    assert code == 2 and "files that its configuration points at have changed" in err
    assert f"letters.py: was {len(WORLD)} bytes, sha256 " in err
    assert Path("runs/said/ledger.jsonl").read_bytes() == before
    Path("letters.py").write_text(WORLD)
    assert silva("rl", "--resume", "--name", "said", "--steps", "2")[0] == 0
