"""A run at Weights & Biases, or in files for `wandb sync`.

W&B's own counter of steps only rises, and nothing remembers it offline, so it is not used: each row holds the
run's step, which is the axis of all curves. A resumed run has the id that it had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from silva.monitoring.sinks.outlet import Tracked
from silva.monitoring.sinks.settings import WandbSettings
from silva.monitoring.sinks.table import COLUMNS, table
from silva.storage.rollouts import RolloutRow


class Wandb:
    """A `Sink`. Its process listens to no terminal, and writes to none."""

    def __init__(self, settings: WandbSettings, run: Tracked) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            group=settings.group,
            tags=settings.tags or None,
            name=run.name,
            id=run.id,
            config=dict(run.config),
            dir=str(run.folder.path),
            mode=settings.mode,
            resume="allow",
            reinit="create_new",  # several runs in one process are several here
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_code=True,
                disable_git=True,
                save_code=False,
                init_timeout=settings.patience,  # its process is waited for as Python exits
                finish_timeout=settings.patience,
                finish_timeout_raises=True,
            ),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if not self._run.offline:
            run.say(f"Weights & Biases: {self._run.url}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def samples(self, step: int, rows: Sequence[RolloutRow]) -> None:
        shown = self._wandb.Table(columns=[*COLUMNS], data=table(rows))
        self._run.log({"samples": shown, "step": step})

    def message(self, level: str, text: str) -> None:
        if level in ("warning", "error") and not self._run.offline:
            title = text.partition("\n")[0][:100]
            self._run.alert(title=title, text=text[:1000], level="ERROR" if level == "error" else "WARN")

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)
