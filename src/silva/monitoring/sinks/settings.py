"""What `[[monitoring.sinks]]` may hold: where the numbers of a run go besides its own folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from silva.config.sections import Above0, Natural, Positive, Section
from silva.wire.requests import key_of

if TYPE_CHECKING:
    from silva.monitoring.sinks.outlet import Sink, Tracked


class SinkSettings(Section):
    """What a sink says of itself. Another one has `build(run)`, which makes a `Sink`; it is called in the
    thread of the sink and may take its time."""

    title: ClassVar[str]
    """What messages call it."""
    extra: ClassVar[str] = ""
    """Which extra of Silva installs what it needs."""

    samples: Natural = 16
    """Rollouts that are sent of a step; 0: none."""
    samples_every: Positive = 10
    """Steps between steps whose rollouts are sent; the first one is always sent."""
    patience: Above0 = 30.0
    """Seconds that the end of a run waits until everything is sent."""

    def build(self, run: Tracked) -> Sink:
        raise NotImplementedError


class WandbSettings(SinkSettings):
    """Weights & Biases; its key is in WANDB_API_KEY, or in what `wandb login` has written."""

    title: ClassVar[str] = "Weights & Biases"
    extra: ClassVar[str] = "wandb"

    type: Literal["wandb"] = "wandb"
    project: str = "silva"
    """The project at W&B."""
    entity: str | None = None
    """A user or a team; null: the usual one of the key."""
    group: str | None = None
    """Under which runs are shown together, such as seeds of one experiment."""
    tags: tuple[str, ...] = ()
    """Tags of the run there."""
    mode: Literal["online", "offline", "shared"] | None = None
    """`offline` writes to the folder of the run, for `wandb sync`; null: WANDB_MODE, else online."""

    def build(self, run: Tracked) -> Sink:
        from silva.monitoring.sinks.wandb import Wandb

        return Wandb(self, run)


class MlflowSettings(SinkSettings):
    """MLflow; keys are in the variables that MLflow reads."""

    title: ClassVar[str] = "MLflow"
    extra: ClassVar[str] = "mlflow"

    type: Literal["mlflow"] = "mlflow"
    uri: str = ""
    """A server (http://...), or a database (sqlite:////home/me/runs.db); "": MLFLOW_TRACKING_URI."""
    experiment: str = "silva"
    """The experiment at MLflow."""

    def build(self, run: Tracked) -> Sink:
        from silva.monitoring.sinks.mlflow import Mlflow

        return Mlflow(self, run)


class TrackioSettings(SinkSettings):
    """trackio, which keeps runs in SQLite on this machine; TRACKIO_DIR says where."""

    title: ClassVar[str] = "trackio"
    extra: ClassVar[str] = "trackio"

    type: Literal["trackio"] = "trackio"
    project: str = "silva"
    """The project at trackio."""
    space: str | None = None
    """A space of the Hugging Face hub that gets the numbers too (HF_TOKEN); null: none."""

    def build(self, run: Tracked) -> Sink:
        from silva.monitoring.sinks.trackio import Trackio

        return Trackio(self, run)


class PrometheusSettings(SinkSettings):
    """The newest numbers at http://HOST:PORT/metrics, for Prometheus to read; no text of rollouts."""

    title: ClassVar[str] = "Prometheus"
    extra: ClassVar[str] = "services"

    type: Literal["prometheus"] = "prometheus"
    host: str = "127.0.0.1"
    """Any other than one of this machine needs a key for its readers, in SILVA_API_KEY."""
    port: int = Field(default=9464, ge=0, le=65535)
    """0: any free one, which a message names."""

    def build(self, run: Tracked) -> Sink:
        from silva.monitoring.sinks.prometheus import Prometheus
        from silva.wire.listening import Bind

        return Prometheus(Bind(self.host, self.port), key_of("SILVA_API_KEY"), run)


class JsonLinesSettings(SinkSettings):
    """A line of JSON for each step, message and rollout, for programs that follow a run."""

    title: ClassVar[str] = "JSON lines"

    type: Literal["jsonl"] = "jsonl"
    file: str = ""
    """A file or a named pipe; "": events.jsonl in the folder of the run."""

    def build(self, run: Tracked) -> Sink:
        from silva.monitoring.sinks.jsonl import JsonLines

        return JsonLines(Path(self.file) if self.file else run.folder.events)


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration by dotted keys, for trackers that know no tables."""
    found: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict) and value:
            for key, each in value.items():
                walk(each, f"{path}.{key}" if path else key)
        elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
            for index, each in enumerate(value):
                walk(each, f"{path}.{index}")
        else:
            found[path] = value

    walk(config, "")
    return found
