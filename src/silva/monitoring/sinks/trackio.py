"""A run at trackio: SQLite on this machine, and a space of the Hugging Face hub if one is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from silva.monitoring.sinks.outlet import Tracked
from silva.monitoring.sinks.settings import TrackioSettings, plain
from silva.monitoring.sinks.table import COLUMNS, table
from silva.storage.rollouts import RolloutRow


class Trackio:
    """A `Sink`."""

    def __init__(self, settings: TrackioSettings, run: Tracked) -> None:
        import trackio

        self._trackio = trackio
        self._run = trackio.init(
            project=settings.project,
            name=f"{run.name}-{run.id}",
            space_id=settings.space,
            config=plain(dict(run.config)),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Sequence[RolloutRow]) -> None:
        import pandas

        frame = pandas.DataFrame(table(rows), columns=[*COLUMNS])
        self._run.log({"samples": self._trackio.Table(dataframe=frame)}, step=step)

    def message(self, level: str, text: str) -> None:
        if level in ("warning", "error"):
            self._run.alert(title=text.partition("\n")[0][:100], text=text[:1000])

    def close(self, finished: bool) -> None:
        self._run.finish()
