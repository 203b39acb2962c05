"""The simulation: its seeds, its checker, its disk and its loop. docs/simulation.md says what it is."""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from tests.runs import ROOT
from tests.simulation import loop as loops
from tests.simulation.disk import SimulatedDisk
from tests.simulation.ledger_check import check, lasting, read_lines
from tests.simulation.loop import Hang, SimulatedLoop
from tests.simulation.scenarios import FAMILIES, resolved
from tests.simulation.world import Simulation, simulate

from silva.orchestrator.phases import Phases
from silva.ports import FILES, use_files
from silva.run import Run
from silva.storage.layout import Layout

SEEDS = 2000  # three minutes of one core; a change of the loop deserves more: make simulate
KINDS = {"busy", "cut", "die", "disk", "error", "garbage", "gateway", "gone", "kill", "late", "lie", "lost",
         "never", "null", "other", "power", "rot", "signal", "stop", "trainer raises", "twice"}  # fmt: skip


@pytest.mark.slow
def test_the_first_seeds(tmp_path: Path) -> None:
    """Each ends with progress or a named error, and what every kind of fault does is seen."""
    found = tmp_path / "found.json"
    argv = [
        sys.executable,
        "-m",
        "tests.simulation",
        "--seeds",
        f"{SEEDS}",
        "--jobs",
        "2",
        "--json",
        str(found),
    ]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert found.exists(), ended.stderr
    result = json.loads(found.read_text())
    assert result["faults"] == {} and result["seeds"] == SEEDS and ended.returncode == 0, ended.stdout
    assert {kind for kind, count in result["fired"].items() if count >= 5} == KINDS
    assert result["ends"]["through"] >= 0.9 * SEEDS and result["compared"] >= 0.2 * SEEDS
    assert {*result["ends"]} <= {"through", "NoSignalError", "CheckpointError"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 10])
def test_a_seed_is_the_same_seed_every_time(tmp_path: Path, seed: int) -> None:
    told: list[list[str]] = [[], []]
    for lines in told:
        simulate(seed, tmp_path / "run", lines.append)
    first, second = ([line for line in lines if "/sessions/" not in line] for lines in told)
    assert first == second and len(first) > 1


# --- the checker, on ledgers that were changed


def played(root: Path, wanted: Callable[[Any], bool]) -> tuple[Path, int]:
    """A finished run of a configuration that nothing befell, and its level."""
    family = next(n for n in range(FAMILIES) if wanted(resolved(n, root / "runs").config))
    simulation = Simulation(-1, family, Random(0), root, lambda line: None)
    simulation.plans = []
    assert simulation.play().end == "through"
    return simulation.run, simulation.level


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    return played(
        tmp_path_factory.mktemp("simulated") / "run",
        lambda c: c.rollout.max_async_level == 1 and c.steps == 3 and c.algorithm.replay is None,
    )


@pytest.mark.parametrize("wrong", ["a row twice", "an epoch again", "a step without a row"])
def test_supervised_training_that_repeats_or_leaves_out_rows_is_found(tmp_path: Path, wrong: str) -> None:
    run, level = played(tmp_path / "run", lambda c: c.data is not None and c.data.epochs == 1)
    assert check(run, level, finished=True) == []
    (path,) = (run / "weights").glob("step_*/model.safetensors")
    policy = json.loads(path.read_bytes())
    first, *_, last = policy["updates"]
    if wrong == "a row twice":
        last["rows"][0] = first["rows"][0]
    elif wrong == "an epoch again":
        policy["updates"] *= 2
    else:
        first["rows"] = []
    path.write_text(json.dumps(policy))
    problems = check(run, level, finished=True)
    assert any("times" in problem or "updates of" in problem for problem in problems)


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    text = ""
    for number, line in enumerate(lines):
        body = json.dumps({**line, "seq": number})
        text += f'{body[:-1]}, "crc": "{zlib.crc32(body.encode()):08x}"}}\n'
    path.write_text(text)


def at(lines: list[dict[str, Any]], event: str, number: int = 0) -> int:
    return [i for i, line in enumerate(lines) if line["event"] == event][number]


def twice(lines: list[dict[str, Any]]) -> None:
    last = lines[at(lines, "trained", -1)]
    last["groups"] = [*last["groups"], lines[at(lines, "trained")]["groups"][0]]


def not_sealed(lines: list[dict[str, Any]]) -> None:
    lines[at(lines, "trained")]["groups"].append("s1g77")


def left_out(lines: list[dict[str, Any]]) -> None:
    lines[at(lines, "trained")]["groups"].pop()


def never_trained(lines: list[dict[str, Any]]) -> None:
    del lines[at(lines, "trained")]


def too_old(lines: list[dict[str, Any]]) -> None:
    """One that is trained last was issued with the first."""
    mine = lines[at(lines, "sealed", -1)]["work"]
    place = next(i for i, line in enumerate(lines) if line["event"] == "issued" and line["work"] == mine)
    lines.insert(at(lines, "issued"), lines.pop(place))


def in_another_step(lines: list[dict[str, Any]]) -> None:
    lines[at(lines, "sealed")]["step"] = 2


def dropped_and_trained(lines: list[dict[str, Any]]) -> None:
    place = at(lines, "trained")
    lines.insert(place, {"event": "dropped", "group": lines[place]["groups"][0], "reason": "failed"})


def sealed_twice(lines: list[dict[str, Any]]) -> None:
    place = at(lines, "sealed")
    lines.insert(place, copy.deepcopy(lines[place]))


def issued_twice(lines: list[dict[str, Any]]) -> None:
    lines.insert(at(lines, "sealed"), copy.deepcopy(lines[at(lines, "issued")]))


def out_of_order(lines: list[dict[str, Any]]) -> None:
    first, last = at(lines, "trained"), at(lines, "trained", -1)
    lines[first]["step"], lines[last]["step"] = lines[last]["step"], lines[first]["step"]


def a_version_is_missing(lines: list[dict[str, Any]]) -> None:
    del lines[at(lines, "published")]


def another_reward(lines: list[dict[str, Any]]) -> None:
    (first, *_) = lines[at(lines, "sealed")]["groups"].values()
    first["rewards"] = [(reward or 0) + 0.5 for reward in first["rewards"]]


def an_episode_is_missing(lines: list[dict[str, Any]]) -> None:
    (first, *_) = lines[at(lines, "sealed")]["groups"].values()
    first["rewards"].pop()


CHANGES = [twice, not_sealed, left_out, never_trained, too_old, in_another_step, dropped_and_trained,
           sealed_twice, issued_twice, out_of_order, a_version_is_missing, another_reward,
           an_episode_is_missing]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_ledger_that_was_changed_is_found(
    finished: tuple[Path, int], change: Callable[[list[dict[str, Any]]], None]
) -> None:
    run, level = finished
    path = run / "ledger.jsonl"
    before = path.read_bytes()
    lines = [dict(line) for line in read_lines(path)]
    try:
        write(path, lines)
        assert path.read_bytes() == before and check(run, level, finished=True) == []
        change(lines)
        write(path, lines)
        assert check(run, level, finished=True)
    finally:
        path.write_bytes(before)


def test_a_damaged_ledger_is_found(finished: tuple[Path, int]) -> None:
    run, level = finished
    path = run / "ledger.jsonl"
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    try:
        for damaged, words in (
            (data.replace(b'"issued"', b'"isssed"', 1), "line 1: the checksum is wrong"),
            (b"".join(lines[:2] + lines[3:]), "line 3: seq 3"),
            (data[:-9] + b"\n", f"line {len(lines)}: the checksum is wrong"),
        ):
            path.write_bytes(damaged)
            assert check(run, level, finished=False) == [f"ledger {words}"]
        path.write_bytes(data + data[:40])  # a line whose writer was killed
        assert check(run, level, finished=True) == []
    finally:
        path.write_bytes(data)


def test_what_metrics_and_weights_say_otherwise_is_found(finished: tuple[Path, int]) -> None:
    run, level = finished
    (weights,) = (run / "weights").glob("step_*/model.safetensors")
    for path, change, words in (
        (
            run / "metrics.jsonl",
            lambda text: text.replace('"groups/trained": ', '"groups/trained": 1', 1),
            "trained",
        ),
        (run / "metrics.jsonl", lambda text: text.partition("\n")[2], "steps"),
        (run / "metrics.jsonl", lambda text: text + text, "steps"),
        (
            run / "summary.json",
            lambda text: text.replace('"tokens_trained": ', '"tokens_trained": 1'),
            "tokens",
        ),
        (
            weights,
            lambda text: text.replace('"groups": ["', '"groups": ["x', 1),
            "the weights were trained on",
        ),
        (
            weights,
            lambda text: text.replace('"updates": [', '"updates": [{"groups": [], "tokens": 0}, '),
            "updates",
        ),
    ):
        before = path.read_text()
        try:
            path.write_text(change(before))
            assert any(words in problem for problem in check(run, level, finished=True)), words
        finally:
            path.write_text(before)


def test_what_was_rolled_back_never_was() -> None:
    lines = [{"seq": i, "event": "issued"} for i in range(4)]
    lines += [{"seq": 4, "event": "rolled_back", "to": 2}, {"seq": 5, "event": "issued"}]
    assert [line["seq"] for line in lasting(lines)] == [0, 1, 4, 5]


# --- the disk


def disk(root: Path) -> SimulatedDisk:
    root.mkdir(parents=True)
    return SimulatedDisk(root, lambda operation, path: None)


def after_cuts(tmp_path: Path, work: Callable[[SimulatedDisk, Path], None]) -> set[str]:
    """What stands in the file `f` after power cuts of 200 kinds; "-" if it is not there."""
    found = set()
    for number in range(200):
        root = tmp_path / f"{number}"
        made = disk(root)
        work(made, root / "f")
        made.power_cut(Random(number))
        found.add((root / "f").read_text() if (root / "f").exists() else "-")
    return found


def test_a_power_cut_tears_what_was_not_synced(tmp_path: Path) -> None:
    def work(disk: SimulatedDisk, path: Path) -> None:
        disk.append(path, b"ab")
        disk.fsync_dir(path.parent)
        disk.append(path, b"cd", sync=False)

    assert after_cuts(tmp_path, work) == {"ab", "abc", "abcd"}


def test_a_new_file_is_not_there_before_its_folder_is_synced(tmp_path: Path) -> None:
    assert after_cuts(tmp_path, lambda disk, path: disk.append(path, b"ab")) == {"-", "ab"}


def test_a_rename_is_old_or_new_if_the_content_was_synced(tmp_path: Path) -> None:
    def work(disk: SimulatedDisk, path: Path, sync: bool = True) -> None:
        disk.write_atomic(path, b"old")
        disk.write(path.with_name("new"), b"new")
        if sync:
            disk.fsync(path.with_name("new"))
        disk.rename(path.with_name("new"), path)

    assert after_cuts(tmp_path / "a", work) == {"old", "new"}
    assert "" in after_cuts(tmp_path / "b", lambda disk, path: work(disk, path, sync=False))
    assert after_cuts(tmp_path / "c", lambda disk, path: disk.write_atomic(path, b"x")) == {"x"}


def test_a_folder_that_was_removed_may_come_back(tmp_path: Path) -> None:
    def work(disk: SimulatedDisk, path: Path) -> None:
        disk.write_atomic(path, b"x")
        disk.remove_tree(path)

    assert after_cuts(tmp_path, work) == {"x", "-"}


def test_exported_weights_survive_a_power_cut(tmp_path: Path) -> None:
    """Found by the simulation: the summary of a run was on disk, and the weights were torn."""

    class Exporter:
        async def export(self, path: Path) -> None:
            path.mkdir(parents=True)
            FILES.write(path / "model.safetensors", b"weights")

    for number in range(20):
        root = tmp_path / f"{number}"
        made = disk(root)
        run: Any = SimpleNamespace(folder=Layout(root / "run"), phases=Phases(), monitor=MagicMock())
        with use_files(made):
            folder = asyncio.run(Run.export(run, Exporter(), 3))  # type: ignore[arg-type]
        made.power_cut(Random(number))
        assert (folder / "model.safetensors").read_bytes() == b"weights"
        assert [path.name for path in folder.parent.iterdir()] == ["step_3"]


# --- the loop


def run(work: Any) -> Any:
    loop = SimulatedLoop()
    loop.set_exception_handler(lambda *_: None)  # what a hang leaves behind
    try:
        task = loop.create_task(work)
        loop.run_until(task)
        return task.result()
    finally:
        loop.close()


async def spins() -> None:
    while True:
        await asyncio.sleep(0)


async def asks_for_ever() -> None:
    while True:
        await asyncio.sleep(1.0)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda: asyncio.Event().wait(), "every task waits for another one"),
        (spins, "no end after"),
        (asks_for_ever, "nothing has moved for 90 virtual seconds"),
    ],
)
def test_a_hang_is_noticed(monkeypatch: pytest.MonkeyPatch, work: Any, words: str) -> None:
    monkeypatch.setattr(loops, "MOST_TURNS", 1000)
    with pytest.raises(Hang, match=words):
        run(work())


def test_threads_and_loop_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", loops.run_coroutine_threadsafe)
    seen = []

    async def tell(text: str) -> str:
        seen.append(text)
        await asyncio.sleep(5.0)
        return text.upper()

    def asks(loop: Any) -> str:
        seen.append("thread")
        answer: str = asyncio.run_coroutine_threadsafe(tell("asked"), loop).result()
        seen.append("again")
        return answer

    async def work() -> tuple[str, float]:
        loop = asyncio.get_running_loop()
        return await asyncio.to_thread(asks, loop), loop.time()

    assert run(work()) == ("ASKED", 5.0) and seen == ["thread", "asked", "again"]
