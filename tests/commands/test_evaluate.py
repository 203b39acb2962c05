"""`silva eval` where nothing can be measured: no numbers are printed, and the exit code says so."""

import json
from pathlib import Path

import pytest

from silva.cli import main

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
