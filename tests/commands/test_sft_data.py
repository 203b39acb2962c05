"""`silva sft` from a file: rows that stand beside it, and what is said of those that were left out."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from silva.cli import main

CONFIG = """
name = "t"
steps = 2
[model]
type = "tiny"
layers = 1
width = 16
heads = 1
kv_heads = 1
[[data.sources]]
path = "rows/d.jsonl"
[data]
max_bad_rows = 1
max_tokens = 20
dialogues_per_step = 4
[monitoring]
report = false
"""


def test_an_early_stop_that_nothing_decides_is_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / "sft.toml").write_text(CONFIG.replace("max_bad_rows = 1", "early_stop = 2"))
    assert main(["sft", "@", str(tmp_path / "sft.toml")]) == 2
    assert "data.early_stop = 2: counts evaluations" in capsys.readouterr().err
    assert main(["sft", "@", str(tmp_path / "sft.toml"), "--data.validation", "2"]) == 2
    assert "[[environments]]" not in capsys.readouterr().err  # [data] is there, and wrong


@pytest.mark.slow
def test_rows_beside_the_configuration_are_learned_and_bad_ones_counted(tmp_path: Path, capsys) -> None:
    (tmp_path / "there" / "rows").mkdir(parents=True)
    (tmp_path / "there" / "sft.toml").write_text(CONFIG)
    row = json.dumps({"prompt": "a", "completion": "b" * 50})
    (tmp_path / "there" / "rows" / "d.jsonl").write_text(f"{row}\n{{\n{row}\n")
    assert main(["sft", "@", str(tmp_path / "there" / "sft.toml"), "--output-dir", str(tmp_path)]) == 0
    said = capsys.readouterr()
    lines = (said.out + said.err).replace(str(tmp_path), "")
    assert "rollout.limits" not in lines  # nothing is played
    assert (
        "rows/d.jsonl: 3 rows, weight 1, read as table: prompt in `prompt`, answer in `completion`" in lines
    )
    shown = next(line for line in lines.splitlines() if line.startswith("data: "))
    assert shown.startswith(
        "data: 8 rows cut at 20 tokens; 1 bad row left out, such as /there/rows/d.jsonl:2: not"
    )
    steps = [json.loads(line) for line in (tmp_path / "t" / "metrics.jsonl").read_text().splitlines()]
    assert [{name: value for name, value in row.items() if name.startswith("data/")} for row in steps] == [
        {"data/dialogues": 4 * n, "data/rows_cut": 4 * n, "data/rows_too_long": 0,
         "data/dialogues_untrained": 0, "data/rows_bad": 1}
        for n in (1, 2)
    ]  # fmt: skip


WORDS = [{"prompt": f"{n}?", "completion": "b" * (1 + n % 30)} for n in range(40)]


@pytest.mark.slow
def test_a_dry_run_says_what_the_run_then_does(tmp_path: Path, monkeypatch, capsys) -> None:
    """The batches of a plan are those of the run, so that the numbers of the first ones are equal."""
    monkeypatch.chdir(tmp_path)
    Path("rows").mkdir()
    Path("sft.toml").write_text(CONFIG)
    Path("rows/d.jsonl").write_text("\n".join(map(json.dumps, WORDS)))
    keys = ["--data.validation", "0.2", "--data.epochs", "0.5", "--eval.every", "1"]
    command = ["sft", "@", "sft.toml", *keys]
    assert main([*command, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"sft.toml", "rows"}
    assert tomllib.loads(text)["data"]["epochs"] == 0.5
    assert main([*command, "--output-dir", "."]) == 0
    rows = [json.loads(line) for line in Path("t/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/rows" in row]
    assert len(steps) == 4  # 20 of 40 rows, of which a fifth is held out, 4 a step
    tokens, count = (sum(row[f"train/{name}"] for row in steps) for name in ("tokens", "rows"))
    trained = json.loads(Path("t/summary.json").read_text())["tokens_trained"]
    lines = text.splitlines()
    plan = [line.removeprefix("#   ") for line in lines[lines.index("# plan:") + 1 :]]
    assert plan[0] == "4 steps, each an update on 4 dialogues: 0.5 epochs of 32"
    assert (
        plan[1].startswith("rows of the first 16 dialogues were counted: ") and "cut at 20 tokens" in plan[1]
    )
    assert plan[3].startswith(f"a step: about {count / 4:.0f} rows of {tokens / 4:.0f} tokens, ")
    assert plan[4].startswith(f"in all: about {tokens:.0f} tokens in rows, {trained} of them trained")
    held_out = next(row["eval/validation/nll"] for row in rows if "eval/validation/nll" in row)
    assert held_out > 0 and plan[2].startswith("held out: ")
    assert plan[5] == "5 evaluations, of the loss on held-out rows"
    assert plan[6].startswith("memory: about ") and plan[7].startswith("disk: checkpoints of about ")
    assert plan[8].endswith("ledger.jsonl, checkpoints/, weights/, summary.json, report.html}")


@pytest.mark.slow
def test_a_dry_run_plans_scripted_play_and_refuses_what_a_run_would(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = CONFIG.splitlines()
    model = "\n".join(lines[: lines.index("[[data.sources]]")])
    Path("play.toml").write_text(f"{model}\n[warm_start]\nsteps = 3\n[[environments]]\ntype = 'bandit'\n")
    assert main(["sft", "@", "play.toml", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "#   up to 3 steps on scripted play" in text and " held-out episodes" in text
    assert "rollouts/" in text and sorted(path.name for path in tmp_path.iterdir()) == ["play.toml"]
    assert main(["sft", "@", "play.toml", "--no-warm_start", "--dry-run"]) == 2
    assert "got neither of [data] and [warm_start]" in capsys.readouterr().err
    Path("rows").mkdir()
    Path("rows/d.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{\n')
    Path("sft.toml").write_text(CONFIG)
    assert main(["sft", "@", "sft.toml", "--data.max_bad_rows", "0", "--dry-run"]) == 2
    assert "rows/d.jsonl:2: " in capsys.readouterr().err
