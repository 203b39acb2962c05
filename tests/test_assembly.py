"""What is loaded, while a command uses it, and in which order."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tests import outside_parts

import silva
from silva import process
from silva.assembly import Assembly
from silva.commands.train import train
from silva.config.load import load
from silva.models import steady
from silva.models.same_bits import RowRules
from silva.registries import REGISTRIES
from silva.run import loaded
from silva.storage.metrics import read_metrics
from silva.types import SamplingParams

CONFIG = Path(__file__).parents[1] / "configs" / "smoke.toml"


@pytest.mark.slow
def test_garbage_collection_leaves_out_what_is_loaded_until_the_command_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "gc", gc)
    with loaded(load(["@", str(CONFIG)], REGISTRIES).config) as assembly:
        alive = {id(x) for x in gc.get_objects()}
        assert gc.get_freeze_count() > 10_000
        assert id(assembly.model.model.config.__dict__) not in alive
    assert gc.get_freeze_count() == 0
    gc.freeze()  # as it was


def test_it_is_said_which_tasks_are_read() -> None:
    stages: list[str] = []
    resolved = load(["@", str(CONFIG)], REGISTRIES)
    with loaded(resolved.config, stage=stages.append):
        pass
    assert stages == [f"read the tasks of {e.label}" for e in resolved.config.environments]


def test_a_machine_without_equal_bits_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady, "probe", lambda *_, **__: RowRules(hold=False))
    with loaded(load(["@", str(CONFIG)], REGISTRIES).config) as assembly:
        (note,) = [note for note in assembly.notes if "bit for bit" in note]
        assert "the last bits of a matrix product depend on how many rows it has" in note
        assert assembly.engine.machine["rows"] == "no number of rows gives equal bits"


@pytest.mark.slow
@pytest.mark.same_bits  # its engine takes its time, so that other requests share a step
def test_a_run_of_parts_from_outside_is_the_same_run(tmp_path: Path) -> None:
    """An engine, a trainer, a rollout, a placement and an environment that are not Silva's own."""
    registries = replace(
        REGISTRIES,
        engines={**REGISTRIES.engines, "slow_engine": "tests.outside_parts:SlowEngine"},
        trainers={**REGISTRIES.trainers, "slow_trainer": "tests.outside_parts:SlowTrainer"},
        rollouts={**REGISTRIES.rollouts, "other_rollout": "tests.outside_parts:OtherRollout"},
        placements={**REGISTRIES.placements, "other_placement": "tests.outside_parts:OtherPlacement"},
    )
    common = {
        "output_dir": str(tmp_path),
        "steps": 2,
        "model": {"type": "tiny", "layers": 1, "width": 32, "heads": 2, "kv_heads": 1},
        "environments": [{"type": f"{Path(__file__).parent / 'worlds.py'}:Parity", "eval_size": 2}],
        "rollout.groups_per_step": 2,
        "rollout.group_size": 4,
        "rollout.limits.max_turn_tokens": 4,
        "monitoring.report": False,
    }
    types = {
        "engine.type": "slow_engine",
        "trainer.type": "slow_trainer",
        "rollout.type": "other_rollout",
        "placement.type": "other_placement",
    }
    outside_parts.BUILT.clear()
    own = train(load([], registries, values={**common, "name": "own"}))
    assert outside_parts.BUILT == []
    other = train(load([], registries, values={**common, **types, "name": "other"}))
    assert sorted(set(outside_parts.BUILT)) == sorted(types.values())
    first, second = (read_metrics(run.directory / "metrics.jsonl") for run in (own, other))
    assert [_without_perf(row) for row in first] == [_without_perf(row) for row in second]
    assert len(first) == 3


def _without_perf(row: Mapping[str, float]) -> dict[str, float]:
    return {key: value for key, value in row.items() if not key.startswith("perf/")}


@pytest.mark.slow
def test_two_models_live_in_one_process() -> None:
    """Each with an engine and a trainer: what one does changes nothing of the other."""
    config = load(["@", str(CONFIG)], REGISTRIES).config
    other = config.model_copy(update={"seed": config.seed + 1})
    with loaded(config) as one:
        alone = _sampled(one)
    with loaded(config) as one, loaded(other) as two:
        assert _sampled(two) != alone
        assert two.trainer().version == 0
        assert _sampled(one) == alone


def _sampled(assembly: Assembly) -> tuple[int, ...]:
    return asyncio.run(assembly.engine.sample([1, 2, 3], SamplingParams(max_tokens=12, seed=4))).tokens


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_a_run_says_that_torch_came_first(
    first: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(silva, "TORCH_CAME_FIRST", first)
    run = silva.train(
        {
            "output_dir": str(tmp_path),
            "steps": 1,
            "model": {"type": "tiny", "layers": 1, "width": 32, "heads": 2, "kv_heads": 1},
            "environments": [{"type": "bandit", "eval_size": 2}],
            "rollout": {"groups_per_step": 1, "group_size": 2, "limits": {"max_turn_tokens": 4}},
        }
    )
    assert (run.directory / "run.log").read_text().count("torch was imported before silva") == first


@pytest.mark.parametrize(
    ("modules", "mkl", "first"), [(["torch"], {}, 1), ([], {}, 0), (["torch"], {"MKL_CBWR": "AUTO"}, 0)]
)
def test_torch_came_first_if_mkl_was_not_told(modules: list[str], mkl: dict[str, str], first: bool) -> None:
    code = f"import sys; sys.modules |= dict.fromkeys({modules}); import silva; print(silva.TORCH_CAME_FIRST)"
    env = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"} | mkl
    done = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    assert done.stdout == f"{bool(first)}\n"


def test_an_environment_of_weight_0_is_evaluated_and_never_trained_on() -> None:
    rows = [{"question": f"{i}?", "answer": str(i)} for i in range(3)]
    test_set = {"type": "dataset", "rows": rows, "reward": "exact_match", "eval_share": 1, "weight": 0}
    worlds = {"environments": [test_set, {"type": "bandit"}]}
    assembly = Assembly(load([], REGISTRIES, values=worlds, env={}).config)
    stream = assembly.stream("train")
    assert {stream.draw()[0].label for _ in range(8)} == {"bandit"} == set(assembly.trained)
    assert [label for label, taskset in assembly.tasksets.items() if taskset.tasks("eval")] == [
        "dataset",
        "bandit",
    ]
    assert any(note.startswith("dataset: 0 training tasks, 3 held-out tasks") for note in assembly.data_notes)
