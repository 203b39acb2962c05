"""What the report knows from run.log: when and how the run was started, and its warnings."""

import sys

from silva.monitoring.monitor import Monitor
from silva.monitoring.run_log import read_log
from silva.monitoring.settings import Monitoring
from silva.storage.layout import Layout


def test_starts_and_warnings_come_back(tmp_path, monkeypatch):
    settings = Monitoring(terminal="off", tensorboard=False)
    for name, *command in (["silva", "rl", "@", "a b.toml"], ["__main__.py", "rl", "--resume"]):
        monkeypatch.setattr(sys, "argv", [f"/usr/bin/{name}", *command])
        with Monitor(tmp_path, settings, name="x", total_steps=1) as monitor:
            monitor.message("nothing to see")
            monitor.message(
                "evaluation at step 1: 12.5% were cut\na stack\n2026: warning: no line", "warning"
            )
            monitor.message("evaluation at step 2: 25.0% were cut", "warning")
            monitor.log("the disk is full", "error")
    log = read_log(Layout(tmp_path).log)
    assert log.started["command"] == "silva rl --resume" and log.started["host"]
    assert log.began <= log.ended
    assert log.warnings == [
        ("warning", "evaluation at step 2: 25.0% were cut", 4),
        ("error", "the disk is full", 2),
    ]
    assert "silva rl @ 'a b.toml'" in Layout(tmp_path).log.read_text()


def test_a_log_without_a_message_says_nothing(tmp_path):
    (tmp_path / "run.log").write_bytes(b"\xff cut off")
    assert read_log(tmp_path / "run.log") is None
