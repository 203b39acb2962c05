"""The supervised loop on dialogues: resumed to the bit, ended early, evaluated, and mixed into RL."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.runs import metrics, small

import silva
from silva.commands.sft import supervise
from silva.config.sections import Optimizer
from silva.errors import ConfigError
from silva.evaluation.evaluator import Evaluation, standing
from silva.evaluation.statistics import Estimate
from silva.orchestrator.evaluations import stalled
from silva.orchestrator.state import RunState
from silva.orchestrator.updates import echoed
from silva.storage.checkpoints import CheckpointStore
from silva.storage.layout import Layout
from silva.types import Sample


def dialogues(count: int) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"{n} {'a' * (n % 5)}?"},
                {"role": "assistant", "content": str(n % 3)},
            ]
        }
        for n in range(count)
    ]


def keys(folder: Path, **more: Any) -> dict[str, Any]:
    keys = small(folder, steps=6, **{"eval.every": 2, "checkpoint.every": 2, "trainer.optimizer.lr": 1e-2})
    del keys["environments"]
    data = {"sources": [{"rows": dialogues(40)}], "validation": 0.2, "dialogues_per_step": 4}
    return keys | {"data": data} | more


def plain(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in metrics(folder / "run")]


def weights(folder: Path) -> Mapping[str, np.ndarray]:
    (path,) = (folder / "run" / "weights").iterdir()
    found: Mapping[str, np.ndarray] = load_file(path / "model.safetensors")
    return found


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervise(keys(tmp_path / "whole"))
    from silva.orchestrator.supervised import Supervision

    update = Supervision.update

    async def dies(self: Supervision, trainer: Any, rows: Any, number: int) -> dict[str, float]:
        if number == 3:  # after the checkpoint of step 2
            raise RuntimeError("killed")
        return await update(self, trainer, rows, number)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(Supervision, "update", dies)
        supervise(keys(tmp_path / "cut"))
    supervise(keys(tmp_path / "cut"), resume=True)
    assert plain(tmp_path / "cut") == plain(tmp_path / "whole")
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert whole.keys() == cut.keys() and all(np.array_equal(whole[name], cut[name]) for name in whole)


@pytest.mark.slow
def test_a_run_killed_before_it_marks_its_best_checkpoint_marks_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(self: CheckpointStore, step: int) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(CheckpointStore, "mark_best", dies)
        supervise(keys(tmp_path, steps=2))
    supervise(keys(tmp_path, steps=2), resume=True)
    assert (tmp_path / "run" / "checkpoints" / "best").read_text().strip() == "step_2"


def test_held_out_rows_have_a_loss_and_decide_which_step_is_the_best(tmp_path: Path) -> None:
    outcome = supervise(keys(tmp_path))
    rows = metrics(tmp_path / "run")
    curve = {row["step"]: row["eval/validation/nll"] for row in rows if "eval/validation/nll" in row}
    assert [*curve] == [0, 2, 4, 6] and curve[6] < curve[0] - 1
    assert rows[1]["train/rows"] == 4 and rows[1]["train/nll"] == pytest.approx(rows[1]["train/loss"])
    (after,) = outcome.summary["eval_after"]
    assert (after["environment"], after["metric"], after["mean"]) == ("validation", "nll", curve[6])
    best = json.loads((Layout(tmp_path / "run").checkpoints / "step_6" / "state.json").read_text())[
        "best_step"
    ]
    assert best == min(curve, key=lambda step: curve[step])


@pytest.mark.slow
def test_epochs_say_how_many_steps_there_are(tmp_path: Path) -> None:
    """40 dialogues twice, a fifth held out: about 64 of them, 4 a step."""
    given = keys(tmp_path)
    given["data"] = given["data"] | {"epochs": 2.0}
    assert supervise(given).summary["steps"] == 16


@pytest.mark.slow
def test_it_ends_when_evaluations_bring_nothing_better(tmp_path: Path) -> None:
    given = keys(tmp_path, **{"trainer.optimizer.lr": 10.0, "steps": 40})
    given["data"] = given["data"] | {"early_stop": 2}
    outcome = supervise(given)
    assert outcome.summary["steps"] < 40
    assert "2 evaluations in a row were not better" in (tmp_path / "run" / "run.log").read_text()
    assert not stalled(RunState(step=9, best_step=4), 0, 2) and not stalled(RunState(step=9), 2, 2)
    assert stalled(RunState(step=8, best_step=4), 2, 2) and not stalled(RunState(step=7, best_step=4), 2, 2)


@pytest.mark.slow
def test_what_is_played_is_evaluated_too_and_then_decides(tmp_path: Path) -> None:
    given = keys(tmp_path, environments=small(tmp_path)["environments"])
    summary = supervise(given).summary
    assert {row["metric"] for row in summary["eval_after"]} == {"nll", "success", "reward"}
    solved = Evaluation("w", {"success": Estimate(0.5, 0, 1, 4)}, {"success": (0.5, 0.5)}, ())
    lost = Evaluation("validation", {"nll": Estimate(3.0, 2, 4, 9)}, {}, ())
    found, alone = standing([lost, solved]), standing([lost])
    assert found is not None and (found.by_success, found.value) == (1, 0.5)
    assert alone is not None and alone.value == -3.0 and standing([]) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": None, "environments": [{"type": "bandit"}]}, r"got neither of \[data\] and \[warm_start\]"),
        ({"warm_start": {"steps": 2}}, r"got both of \[data\] and \[warm_start\]"),
    ],
)
def test_what_to_learn_from_is_said_once(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        supervise(keys(tmp_path, **changes))


def test_nothing_can_be_played_without_environments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environments: got \[data\] alone"):
        silva.train(keys(tmp_path))


@pytest.mark.slow
def test_rows_are_mixed_into_the_updates_of_rl(tmp_path: Path) -> None:
    """Adding them changes nothing of what the loss of RL says of the first step."""
    alone = small(tmp_path / "alone")
    silva.train(alone)
    data = {"sources": [{"rows": dialogues(40)}], "mix": 0.5, "dialogues_per_step": 4}
    silva.train(small(tmp_path / "mixed", data=data))
    (before,), (after,) = (
        [row for row in metrics(tmp_path / name / "run") if "train/loss" in row]
        for name in ("alone", "mixed")
    )
    of_rl = [name for name in before if name.startswith("train/")]
    changed = {name for name in of_rl if before[name] != after[name]}
    assert changed <= {"train/loss", "train/grad_norm", "train/trained_tokens"}
    assert (after["data/dialogues"], after["data/rows_bad"]) == (4, 0) and "data/dialogues" not in before
    nll = after["train/data_assistant/nll"]
    assert after["train/loss"] == pytest.approx(before["train/loss"] + 0.5 * nll, rel=1e-5)


def test_answers_of_an_environment_are_foreseen(tmp_path: Path) -> None:
    (environment,) = small(tmp_path)["environments"]
    silva.train(
        small(tmp_path, environments=[environment | {"echo": 0.1}], **{"rollout.limits.max_turns": 3})
    )
    (row,) = (row for row in metrics(tmp_path / "run") if "train/loss" in row)
    assert row["train/observations/nll"] > 0


def test_what_is_foreseen_comes_after_the_first_reply() -> None:
    weights = np.array([0, 0, 1, 1, 0, 0, 1, 0], np.float32)
    sample = Sample(np.arange(8), weights, *(np.zeros(8) for _ in range(3)), "t", "g")
    assert echoed(sample, 0.5).streams["observations"].tolist() == [0, 0, 0, 0, 0.5, 0.5, 0, 0.5]
    assert echoed(sample, 0.0) is sample


def test_schedules_count_the_steps_of_the_data(tmp_path: Path) -> None:
    given = keys(tmp_path, **{"trainer.optimizer": Optimizer(lr=1.0, schedule="linear").model_dump()})
    supervise(given)
    rates = [row["train/lr"] for row in metrics(tmp_path / "run") if "train/lr" in row]
    assert rates == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
