"""What a run does when its trainer is gone: with an earlier run to replace, and while it was told to end."""

import json
import os
import signal
from pathlib import Path

import pytest
from tests.runs import differences, end_state, small

import silva
from silva.errors import ConfigError, PartLost
from silva.signals import Interrupted
from silva.storage.checkpoints import CheckpointStore
from silva.storage.run_folder import LOCK
from silva.trainer.local import LocalTrainer


def train(folder: Path, *, overwrite: bool = False, **more):
    keys = {"steps": 3, "environments": [{"type": "bandit"}], "rollout.group_size": 2, "checkpoint.every": 1,
            "monitoring": {"terminal": "plain", "tensorboard": False, "report": False}}  # fmt: skip
    return silva.train(small(folder, **keys | more), overwrite=overwrite)


def content(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != LOCK}


@pytest.fixture
def losing(monkeypatch):
    """`losing(name, times, first)`: calls of the trainer's method from the `first` on find nobody.
    `told`: Ctrl-C comes just before the first of them."""

    def make(name: str, times: int = 1, first: int = 1, told: bool = False) -> None:
        original, calls = getattr(LocalTrainer, name), 0

        async def lost(self, *arguments):
            nonlocal calls
            calls += 1
            if calls == first and told:
                os.kill(os.getpid(), signal.SIGINT)
            if first <= calls < first + times:
                raise PartLost(f"nobody there (while it was asked to {name})")
            return await original(self, *arguments)

        monkeypatch.setattr(LocalTrainer, name, lost)

    return make


@pytest.mark.parametrize(("method", "times"), [("snapshot", 1), ("snapshot", 3), ("optim_step", 1)])
@pytest.mark.slow
def test_a_run_that_replaces_another_begins_again_and_not_the_other(tmp_path, losing, capsys, method, times):
    """The trainer is lost before the new run has done a step, when the earlier run could still come back."""
    train(tmp_path)
    losing(method, times)
    train(tmp_path, overwrite=True, seed=5)  # of another seed: the earlier one would be refused
    assert capsys.readouterr().out.count("the run begins again") == times
    assert json.loads((tmp_path / "run" / "config.json").read_text())["seed"] == 5
    train(tmp_path / "other", seed=5)
    assert differences(tmp_path / "run", end_state(tmp_path / "other" / "run")) == []


@pytest.mark.slow
def test_a_run_that_loses_its_trainer_for_good_gives_the_earlier_one_back(tmp_path, losing):
    train(tmp_path)
    before = content(tmp_path / "run")
    losing("snapshot", 100)
    with pytest.raises(PartLost):
        train(tmp_path, overwrite=True, seed=5)
    assert content(tmp_path / "run") == before


@pytest.mark.slow
def test_after_its_first_step_a_run_goes_on_from_its_own_checkpoint(tmp_path, losing, capsys):
    train(tmp_path)
    losing("optim_step", 1, first=2)
    train(tmp_path, overwrite=True, seed=5)
    assert "the run goes on from its last checkpoint" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forward_backward", "optim_step", "save", "of the interrupt"])
def test_a_run_that_was_told_to_end_does_not_wait_for_another_trainer(tmp_path, losing, method):
    """Ctrl-C comes, then the trainer is gone: the newest checkpoint is the one before."""
    if method == "of the interrupt":
        losing("optim_step", times=0, first=2, told=True)
        losing("save", times=9, first=2)
    else:
        losing(method, first=2, told=True)
    with pytest.raises(Interrupted):
        train(tmp_path)
    assert CheckpointStore(tmp_path / "run" / "checkpoints", read_only=True).steps() == [1]


@pytest.mark.slow
def test_tools_that_cannot_be_opened_end_a_run_before_anything_is_played_or_lost(tmp_path):
    train(tmp_path)
    before = content(tmp_path / "run")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "1 + {n}", "answer": "{n + 1}"}}\n' for n in range(9)))
    tools = [{"type": "mcp", "command": ["/nowhere/server"], "lock": str(tmp_path / "lock.json")}]
    world = {
        "type": "dataset",
        "path": str(rows),
        "eval_size": 1,
        "tools": tools,
        "reward": {"type": "exact_match"},
    }
    with pytest.raises(ConfigError, match="/nowhere/server"):
        train(tmp_path, overwrite=True, environments=[world])
    assert content(tmp_path / "run") == before
    with pytest.raises(ConfigError):
        train(tmp_path / "other", environments=[world])
    log = (tmp_path / "other" / "run" / "run.log").read_text()
    assert "/nowhere/server" in log and "eval at step" not in log
