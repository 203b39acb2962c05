"""What a server counts, and its text for Prometheus (exposition format 0.0.4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from silva.monitoring.exposition import Labels, sample

PREFIX = "silva_"


class ServerCounts:
    """Sums since the server was started, by name and labels."""

    def __init__(self) -> None:
        self._sums: dict[str, Counter[Labels]] = {}

    def add(self, name: str, value: float = 1, /, **labels: str) -> None:
        """Values are never negative; the labels are few and the server's own words."""
        self._sums.setdefault(name, Counter())[tuple(sorted(labels.items()))] += value  # type: ignore[assignment]

    def total(self, name: str) -> float:
        return sum(self._sums.get(name, {}).values())

    def text(self, gauges: Mapping[str, float], engine: Mapping[str, float]) -> str:
        """All sums; those of the `engine`; and `gauges`, which are read now."""
        lines = []
        for name, sums in sorted(self._sums.items()):
            lines.append(f"# TYPE {PREFIX}{name}_total counter")
            lines += [sample(f"{PREFIX}{name}_total", value, labels) for labels, value in sums.items()]
        for name, value in engine.items():
            name = f"{PREFIX}engine_{name}_total"
            lines += [f"# TYPE {name} counter", sample(name, value)]
        for name, value in gauges.items():
            lines += [f"# TYPE {PREFIX}{name} gauge", sample(f"{PREFIX}{name}", value)]
        return "\n".join(lines) + "\n"
