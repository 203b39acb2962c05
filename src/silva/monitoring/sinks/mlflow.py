"""A run at MLflow: metrics by step, the configuration as parameters, rollouts as tables (artifacts)."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from silva.monitoring.sinks.outlet import Tracked
from silva.monitoring.sinks.settings import MlflowSettings, plain
from silva.monitoring.sinks.table import COLUMNS, table
from silva.storage.rollouts import RolloutRow

TAG = "silva.run"
BATCH = 100  # parameters, and half of the metrics, that one request may hold
LONGEST = 6000  # characters of a parameter


class Mlflow:
    """A `Sink`. It uses no global state of MLflow, so that it leaves the user's own runs alone."""

    def __init__(self, settings: MlflowSettings, run: Tracked) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=settings.uri or None)
        found = self._client.get_experiment_by_name(settings.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(settings.experiment)
        same = self._client.search_runs([experiment], f"tags.`{TAG}` = '{run.id}'", max_results=1)
        if same:
            self.id = same[0].info.run_id
            self._client.update_run(self.id, status="RUNNING")
        else:
            self.id = self._client.create_run(experiment, tags={TAG: run.id}, run_name=run.name).info.run_id
            pairs = [Param(named(k), str(v)[:LONGEST]) for k, v in plain(dict(run.config)).items()]
            for batch in _batches(pairs):
                self._client.log_batch(self.id, params=batch)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        rows = [self._metric(named(key), float(value), now, step) for key, value in metrics.items()]
        for batch in _batches(rows):
            self._client.log_batch(self.id, metrics=batch)

    def samples(self, step: int, rows: Sequence[RolloutRow]) -> None:
        columns = zip(*table(rows), strict=True)
        data = {name: list(values) for name, values in zip(COLUMNS, columns, strict=True)}
        self._client.log_table(self.id, data, f"samples/step_{step}.json")

    def message(self, level: str, text: str) -> None:
        if level in ("warning", "error"):
            self._client.set_tag(self.id, "silva.warning", text[:LONGEST])

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self.id, "FINISHED" if finished else "KILLED")


def named(key: str) -> str:
    """A key with the characters that MLflow lets through: pass@4 becomes pass_at_4."""
    return re.sub(r"[^\w\-. :/]", "_", key.replace("@", "_at_"))


def _batches(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (items[i : i + BATCH] for i in range(0, len(items), BATCH))
