"""`silva sft` from a file: rows that stand beside it, and what is said of those that were left out."""

from __future__ import annotations

import json
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
