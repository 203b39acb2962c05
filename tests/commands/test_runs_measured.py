"""What runs measured while they trained, afterwards: compared, graded again, and played again from their
checkpoints, with the same numbers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from silva import assembly
from silva.actors.policy import Policy
from silva.cli import main
from silva.storage.rollouts import read_rollouts

pytestmark = pytest.mark.slow  # it makes the runs

GRADERS = """
def even(attempt):
    return float(sum(map(ord, attempt.reply)) % 2 == 0)

def odd(attempt):
    return 1.0 - even(attempt)
"""
ROWS = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(24)]
RUN = """
model = {{type = "tiny", layers = 1, width = 32, heads = 2, kv_heads = 1, context = 128}}
rollout = {{groups_per_step = 2, group_size = 4, limits = {{max_turn_tokens = 4, max_episode_tokens = 100}}}}
eval = {{every = 1, tasks = 8, samples_per_task = 2}}
checkpoint = {{every = 1, keep = 9}}
trainer = {{self_check = false, optimizer = {{lr = 0.01}}}}
monitoring = {{terminal = "off", tensorboard = false, report = false}}
[[environments]]
type = "dataset"
name = "sums"
rows = {rows}
reward = "{folder}/graders.py:even"
eval_share = 0.5
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: `one` of two steps, and `two` of one step with another seed."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "graders.py").write_text(GRADERS)
    (folder / "run.toml").write_text(RUN.format(rows=json.dumps(ROWS).replace('":', '" ='), folder=folder))
    for name, steps, seed in (("one", 2, 0), ("two", 1, 2)):
        keys = [f"--name={name}", f"--steps={steps}", f"--seed={seed}", f"--output_dir={folder}"]
        assert main(["rl", f"@{folder / 'run.toml'}", *keys]) == 0
    return folder


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded or asked")

    monkeypatch.setattr(assembly, "load_model", refuse)
    monkeypatch.setattr(Policy, "reply", refuse)


def solved(
    run: Path, step: int, of: Callable[[dict[str, Any]], float] | None = None
) -> dict[str, list[float]]:
    """The successes of held-out tasks at a step, from the file itself; or what else is `of` a row."""
    found: dict[str, list[float]] = {}
    for row in pq.read_table(run / "rollouts" / f"step_{step}.parquet").to_pylist():
        if row["status"] == "eval":
            found.setdefault(row["task"], []).append(of(row) if of else dict(row["metrics"])["success"])
    assert len(found) == 8 and {len(samples) for samples in found.values()} == {2}
    return found


def reply(row: dict[str, Any]) -> str:
    return row["turns"][-1]["messages"][-1]["content"]


def measured(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def p_by_all_signs(deltas: list[float]) -> float:
    sums = [abs(sum(map(np.prod, zip(signs, deltas, strict=True))))
            for signs in itertools.product((-1, 1), repeat=len(deltas))]  # fmt: skip
    return sum(each >= abs(sum(deltas)) - 1e-9 for each in sums) / len(sums)


@pytest.mark.usefixtures("no_model")
def test_what_two_runs_measured_is_compared(silva, runs):
    out, _ = silva("compare", runs / "one@step_0", runs / "two", "--json")
    found, a, b = json.loads(out), solved(runs / "one", 0), solved(runs / "two", 1)
    rows = {row["metric"]: row for row in found["differences"]}
    deltas = [np.mean(b[task]) - np.mean(a[task]) for task in a]
    assert rows["success"]["mean"] == pytest.approx(np.mean(deltas)) and any(deltas)
    assert rows["success"]["p"] == pytest.approx(p_by_all_signs(deltas)) and rows["success"]["n"] == 8
    both = [max(b[task]) - max(a[task]) for task in a]  # pass@2 of 2 samples
    assert rows["pass@2"]["mean"] == pytest.approx(np.mean(both))
    assert rows["pass@2"]["p"] == pytest.approx(p_by_all_signs(both))
    sides = {task for task in a if (np.mean(a[task]) >= 0.5) != (np.mean(b[task]) >= 0.5)}
    assert {each["task"] for each in found["changes"]} == sides != set()
    assert found["notes"] == [f"{runs}/one@step_0 and {runs}/two also differ in seed"]
    assert Path("evals/compare-one@step_0-two.html").exists()


@pytest.mark.usefixtures("no_model")
def test_the_best_step_of_a_run_is_what_was_measured_there(silva, runs):
    out, _ = silva("compare", runs / "one@best", runs / "one@step_0", "--json")
    rows = {row["metric"]: row["estimates"] for row in json.loads(out)["metrics"]}
    measured = [np.mean([*solved(runs / "one", step).values()]) for step in (1, 2)]
    assert rows["success"][0]["mean"] == pytest.approx(max(measured))


@pytest.mark.usefixtures("no_model")
def test_three_are_compared_with_the_first_and_corrected_together(silva, runs):
    names = [str(runs / name) for name in ("one@step_0", "one@step_2", "two")]
    out, _ = silva("compare", *names, "--json")
    found = json.loads(out)
    sides = [solved(runs / "one", 0), solved(runs / "one", 2), solved(runs / "two", 1)]
    means = {row["metric"]: [each["mean"] for each in row["estimates"]] for row in found["metrics"]}
    assert means["success"] == pytest.approx([np.mean([*side.values()]) for side in sides])
    rows = found["differences"]
    assert {row["a"] for row in rows} == {names[0]}
    assert [row["b"] for row in rows if row["metric"] == "success"] == names[1:]
    for side, row in zip(sides[1:], (row for row in rows if row["metric"] == "success"), strict=True):
        assert row["mean"] == pytest.approx(np.mean([np.mean(side[t]) - np.mean(sides[0][t]) for t in side]))
    tested = sorted((row for row in rows if row["p"] is not None), key=lambda row: row["p"])
    assert [row["p_holm"] for row in tested] == pytest.approx(holm([row["p"] for row in tested]))
    assert len(tested) == 6  # three metrics, two differences each: one family
    table, _ = silva("compare", *names)
    lines = table.splitlines()
    for name in names[1:]:  # a table for each, and no name or metric is cut off
        after = lines[lines.index(f"{name} against {names[0]}:") + 1 :]
        assert [line.split()[1] for line in after if line.startswith("│")][:6] == [
            "success", "pass@2", "reward", "turns", "tool_calls", "response_tokens",
        ]  # fmt: skip
        assert f"changed sides from {names[0]} to {name}: " in table


def holm(p: list[float]) -> list[float]:
    """From its definition (Holm 1979), for p-values in rising order."""
    return [min(1.0, max((len(p) - j) * p[j] for j in range(i + 1))) for i in range(len(p))]


@pytest.mark.usefixtures("no_model")
def test_a_run_is_graded_again_without_a_model(silva, runs):
    silva("--regrade", runs / "one", "--reward", runs / "graders.py:even", "--name", "same")
    stored = [row for row in read_rollouts(runs / "one/rollouts/step_2.parquet") if row.status == "eval"]
    assert repr(read_rollouts(Path("evals/same/episodes.parquet"))) == repr(stored)  # every bit of a float
    out, err = silva("--regrade", runs / "one@step_1", "--reward", runs / "graders.py:odd", "--json")
    (found,), before = json.loads(out), solved(runs / "one", 1)
    after = solved(runs / "one", 1, lambda row: float(sum(map(ord, reply(row))) % 2))
    assert "16 episodes, graded without a call of the model" in err
    means = {row["metric"]: [each["mean"] for each in row["estimates"]] for row in found["metrics"]}
    assert means["success"] == pytest.approx([np.mean([*side.values()]) for side in (before, after)])
    sides = {task for task in before if (np.mean(before[task]) >= 0.5) != (np.mean(after[task]) >= 0.5)}
    assert {each["task"] for each in found["changes"]} == sides != set()
    again, _ = silva("--regrade", runs / "one@step_1", "--reward", runs / "graders.py:odd")
    chained = itertools.chain.from_iterable
    pairs = [*zip(chained(before.values()), chained(after.values()), strict=True)]
    assert (
        f"16 episodes: {pairs.count((0, 1))} are solved now, {pairs.count((1, 0))} no longer, "
        f"{pairs.count((1, 1))} still, {pairs.count((0, 0))} neither"
    ) in " ".join(again.split())
    assert {path.name for path in Path("evals").iterdir()} == {"same", "one-odd"}


@pytest.mark.usefixtures("no_model")
def test_rollouts_of_training_are_graded_again_by_a_key(silva, runs):
    """Those of the last step, or of the one that is named; of an evaluation there are none."""
    train = ("--split", "train", "--reward")
    for step, name in ((2, runs / "one"), (1, runs / "one@step_1")):
        silva("--regrade", name, *train, runs / "graders.py:even", "--name", f"same-{step}")
        all_of = read_rollouts(runs / f"one/rollouts/step_{step}.parquet")
        stored = [row for row in all_of if row.status != "eval"]
        assert repr(read_rollouts(Path(f"evals/same-{step}/episodes.parquet"))) == repr(stored) != "[]"
    out, err = silva("--regrade", runs / "one", *train, runs / "graders.py:odd")
    graded = read_rollouts(Path("evals/same-2/episodes.parquet"))
    right = sum(row.trajectory.metrics["success"] == 1 for row in graded)
    counts = f"{8 - right} are solved now, {right} no longer, 0 still, 0 neither"
    assert f"8 episodes: {counts}" in " ".join(out.split())
    assert "evals/one-odd-train: 8 episodes, graded without a call of the model" in err
    found = json.loads(silva("compare", "same-2", "one-odd-train", "--json")[0])
    rows = {each["metric"]: each["estimates"] for each in found["metrics"]}
    assert [each["mean"] for each in rows["success"]] == [right / 8, 1 - right / 8]
    silva("export", "same-2", "--to", "inspect")  # which needs the tasks
    _, err = silva("--regrade", "same-2", *train, runs / "graders.py:odd", code=2)
    assert "--split train: evals/same-2 is an evaluation, of held-out tasks; expected a run" in err
    _, err = silva("--regrade", runs / "one@step_0", *train, runs / "graders.py:odd", code=2)
    assert "has rollouts of training of steps 1, 2" in err
    _, err = silva("--regrade", runs / "one", "--split", "test", "--reward", "math", code=2)
    assert "--split: got 'test', expected eval or train" in err


def test_checkpoints_that_are_played_again_measure_what_their_run_did(silva, runs):
    """The seeds of a held-out episode are those of the run, so even samples are the same."""
    known = {row["step"]: row for row in measured(runs / "one")}
    rows = json.loads(silva("--weights-dir", runs / "one", "--steps", "2,1", "--json")[0])
    assert list(dict.fromkeys(row["step"] for row in rows)) == [1, 2]
    for row in rows:
        assert row["mean"] == known[row["step"]][f"eval/sums/{row['metric']}"]
    by_step = {step: [row for row in rows if row["step"] == step] for step in (1, 2)}
    best = max((1, 2), key=lambda step: known[step]["eval/sums/success"])
    assert by_step[1] != by_step[2]
    assert json.loads(silva("--weights", runs / "one@best", "--json")[0]) == by_step[best]
    assert json.loads(silva("--weights", runs / "one@step_2", "--json")[0]) == by_step[2]
    table, _ = silva("--weights-dir", runs / "one", "--steps", "2,1")
    assert [line.split()[1] for line in table.splitlines() if line.startswith("│")] == ["1", "2"]
    assert [word for word in table.splitlines()[1].split("┃") if word.strip()] == [
        " step ", " success (avg@2)      ", " reward               ", " pass@2               "
    ]  # fmt: skip
