"""`silva rl --seeds`: every run is the one that its seed alone gives, whatever befalls the others."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.contracts.test_environments import message
from tests.environments.process.test_workers import COUNTING
from tests.runs import Server, differences, end_state, small

from runs import CONFIG
from silva.commands import seeds as command
from silva.commands.common import as_resolved
from silva.commands.seeds import train_seeds
from silva.config.sections import TinyModel
from silva.errors import SilvaError
from silva.models.loading import load_model
from silva.seeds import SharedBase


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights of a tiny model."""
    folder = tmp_path_factory.mktemp("base")
    loaded = load_model(TinyModel(layers=1, width=32, heads=2, kv_heads=1, context=256), seed=7)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def config(base: Path) -> str:
    """Micro-batches of several runs fit into one pass, and an update has more than one."""
    tiny = CONFIG[CONFIG.index("[model]") : CONFIG.index("[[environments]]")]
    return CONFIG.replace(tiny, f'[model]\nname = "{base}"\nlora.rank = 4\n\n', 1).replace("256", "400")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, config: str, server: Server) -> Path:
    folder = tmp_path_factory.mktemp("seeds")
    (folder / "seeds.toml").write_text(config)
    return folder


def rl(server: Server, own: Path, name: str, *options: str, **job: Any) -> Any:
    before, server.config = server.config, own / "seeds.toml"
    try:
        return server.rl(name, *options, into=own, **job)
    finally:
        server.config = before


@pytest.fixture(scope="module")
def alone(server: Server, own: Path) -> dict[int, dict[str, Any]]:
    """What each seed comes to by itself."""
    found = {}
    for seed in (0, 3):
        ended = rl(server, own, f"alone_{seed}", "--seed", str(seed))
        assert ended.status == 0, ended.output
        found[seed] = end_state(ended.path)
    return found


@pytest.mark.slow
@pytest.mark.same_bits
def test_two_seeds_at_once_are_the_runs_that_each_gives_alone(
    server: Server, own: Path, alone: dict[int, dict[str, Any]]
) -> None:
    ended = rl(server, own, "both", "--seeds", "0,3")
    assert ended.status == 0, ended.output
    assert {seed: differences(ended.path / f"seed_{seed}", alone[seed]) for seed in alone} == {0: [], 3: []}
    assert alone[0]["files"] != alone[3]["files"]
    summary = json.loads((ended.path / "summary.json").read_text())
    assert summary["seeds"] == [0, 3] and summary["failed"] == []
    means = {(row["environment"], row["metric"]): row["mean"] for row in summary["eval_after"]}
    for row, other in zip(*(state["summary"]["eval_after"] for state in alone.values()), strict=True):
        assert means[row["environment"], row["metric"]] == pytest.approx((row["mean"] + other["mean"]) / 2)
    assert "seed_3: step 4/4" in ended.output and (ended.path / "report.html").exists()


@pytest.mark.slow
@pytest.mark.same_bits
def test_killed_and_stopped_they_go_on_to_the_same_end(
    server: Server, own: Path, alone: dict[int, dict[str, Any]]
) -> None:
    ended = rl(server, own, "killed", "--seeds", "0,3", crash="publish:5")
    assert ended.status != 0 and ended.proof
    ended = rl(server, own, "killed", "--seeds", "0,3", "--resume", interrupt="rollout:3")
    assert ended.status == 130 and ended.output.count("stopped; --resume goes on after step") == 2
    ended = rl(server, own, "killed", "--seeds", "0,3", "--resume")
    assert ended.status == 0, ended.output
    assert {seed: differences(ended.path / f"seed_{seed}", alone[seed]) for seed in alone} == {0: [], 3: []}
    again = rl(server, own, "killed", "--seeds", "0,3", "--resume")
    assert again.status == 0 and again.output.count("has finished") == 2


@pytest.mark.slow
def test_a_seed_that_fails_is_told_and_the_others_go_on(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = command.train_in

    async def failing(resolved: Any, *rest: Any, **how: Any) -> Any:
        if resolved.config.seed == 1:
            raise RuntimeError("the world of seed 1 has ended")
        return await real(resolved, *rest, **how)

    runs = [
        as_resolved(
            small(tmp_path, seed=seed, name=f"seed_{seed}", model={"name": str(base), "lora": {"rank": 2}})
        )
        for seed in range(2)
    ]
    said = io.StringIO()
    monkeypatch.setattr(command, "train_in", failing)
    with pytest.raises(SilvaError, match=r"1 of 2 seeds have failed \(1\)"):
        train_seeds(runs, output=said)
    assert "seed_1: RuntimeError: the world of seed 1 has ended" in said.getvalue()
    assert json.loads((tmp_path / "summary.json").read_text())["failed"] == ["1"]
    assert (tmp_path / "seed_0" / "summary.json").exists()
    monkeypatch.undo()
    assert [each.trained for each in train_seeds(runs, resume=True, output=said)] == [True, True]
    assert json.loads((tmp_path / "summary.json").read_text())["seeds"] == [0, 1]


@pytest.mark.slow
def test_what_befalls_a_part_that_runs_share_is_said_to_all(base: Path, tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(COUNTING)
    world = {"type": f"{tmp_path / 'world.py'}:Counting", "workers": 1, "mark": str(tmp_path / "died")}
    given = {"environments": [world], "model": {"name": str(base), "lora": {"rank": 2}}}
    configs = [as_resolved(small(tmp_path, name=f"{n}", **given)).config for n in range(3)]
    said: list[list[str]] = [[], [], []]
    shared = SharedBase(configs[0], 3)

    async def die() -> None:
        taskset = shared.tasksets["counting"]
        world: Any = taskset.environment(taskset.tasks("train")[0])
        await world.reset()
        await world.step(message("die once"))

    try:
        with shared.of_run(configs[2], say=said[2].append):
            pass
        with ExitStack() as stack:
            for config, lines in zip(configs[:2], said[:2], strict=True):
                stack.enter_context(shared.of_run(config, say=lines.append))
            asyncio.run(die())
    finally:
        shared.close()
    told = "a worker of counting is lost (exit status -9): another one plays its episodes again"
    assert said == [[told], [told], []]  # the last one has ended before
