"""Where everything lies in the folder of a run, `runs/<name>/`.

Not here: what the files hold. Each format has a module of this package that writes and reads it.
"""

from __future__ import annotations

import re
from pathlib import Path


class Layout:
    """The paths in one run's folder, whether or not they exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_toml = path / "config.toml"
        self.config_json = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.ledger = path / "ledger.jsonl"
        self.held_out = path / "held_out.json"
        self.machine = path / "machine.json"
        self.summary = path / "summary.json"
        self.report = path / "report.html"
        self.log = path / "run.log"
        self.now = path / "now.json"  # while it runs
        self.rollouts = path / "rollouts"
        self.episodes = path / "episodes.parquet"  # of an evaluation
        self.journal = path / "journal.jsonl"
        self.dialogues = path / "dialogues.jsonl"  # of a synthesis
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights"
        self.broadcast = path / "broadcast"
        self.services = path / "services.log"
        self.trace = path / "trace.json"
        self.tensorboard = path / "tensorboard"
        self.tracking = path / "tracking.json"
        self.events = path / "events.jsonl"
        self.wandb = path / "wandb"


def step_path(folder: Path, step: int, suffix: str = "") -> Path:
    """`folder/step_N`: how rollouts, checkpoints and weights name what belongs to step N."""
    return folder / f"step_{step}{suffix}"


def steps_in(folder: Path, suffix: str = "") -> dict[int, Path]:
    """What `step_path` names in `folder`, by step, the first step first; empty if there is no such folder."""
    if not folder.is_dir():
        return {}
    names = [
        (entry, re.fullmatch(rf"step_(\d+){re.escape(suffix)}", entry.name)) for entry in folder.iterdir()
    ]
    return dict(sorted((int(name[1]), entry) for entry, name in names if name))
