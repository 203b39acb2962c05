"""`silva eval` where nothing can be measured: no numbers are printed, and the exit code says so."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from silva.cli import main
from silva.commands.evaluate import print_table

CONFIG = f"""
model = {{type = "tiny", layers = 1, width = 32, context = 64}}
environments = [{{type = "{Path(__file__).parents[1] / "worlds.py"}:Parity", fails = "reset", share = 1.0}}]
rollout = {{limits = {{max_turn_tokens = 4}}}}
eval = {{tasks = 3}}
"""


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_every_episode_left_out_is_exit_code_3(tmp_path, monkeypatch, capsys, form):
    monkeypatch.chdir(tmp_path)
    Path("broken.toml").write_text(CONFIG)
    assert main(["eval", "@", "broken.toml", *form]) == 3
    out = capsys.readouterr().out
    if form:
        (row,) = json.loads(out)
        assert (row["mean"], row["n"], row["left_out"]) == (None, 0, 3)
    else:
        text = " ".join(out.split())
        assert (
            "parity: 3 of 3 held-out episodes gave no usable result and are left out: 3 x reset: ValueError"
            in text
        )


@pytest.mark.slow
def test_weights_are_played_here_and_never_by_servers_that_have_others(tmp_path, monkeypatch, capsys):
    """Nobody listens at the addresses: whoever asked there would wait or fail."""
    monkeypatch.chdir(tmp_path)
    played = CONFIG.replace(', fails = "reset", share = 1.0', "")
    Path("run.toml").write_text(played)
    placed = ["--placement.type=services", "--placement.trainer=unix:no", '--placement.inference=["unix:no"]']
    assert main(["eval", "@", "run.toml", "--json", *placed]) == 0
    here = json.loads(capsys.readouterr().out)
    assert main(["eval", "@", "run.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == here
    http = ["--engine.type=http", '--engine.urls=["unix:no"]', "--weights", str(tmp_path)]
    assert main(["eval", "@", "run.toml", *http]) == 2
    assert "its servers have weights of their own" in capsys.readouterr().err


def test_the_table_fits_80_columns_and_has_no_empty_one():
    row = {"environment": "frozen_lake", "metric": "pass@8", "mean": -12.5, "ci_low": -13.125,
           "ci_high": -11.875, "n": 1024, "left_out": 0, "bound_low": None, "bound_high": None}  # fmt: skip
    console = Console(file=io.StringIO(), width=80)
    print_table([row, row | {"left_out": 12, "bound_low": -20.5, "bound_high": -10.25}], console)
    lines = console.file.getvalue().splitlines()
    assert [line.split() for line in lines[3:5]] == [
        ["│", "frozen_lake", "│", "pass@8", "│", "-12.500", "│", "[-13.125,", "-11.875]", "│", "1024", "│"]
    ] * 2  # one line a row
    assert lines[6:] == ["frozen_lake pass@8: [-20.500, -10.250] with the 12 left out"]
    assert max(map(len, lines)) <= 80
