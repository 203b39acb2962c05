"""What a server counts, and its text for Prometheus (exposition format 0.0.4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

PREFIX = "silva_"
Labels = tuple[tuple[str, str], ...]


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
            lines += [f"{PREFIX}{name}_total{_braced(labels)} {value:.17g}" for labels, value in sums.items()]
        for name, value in engine.items():
            name = f"{PREFIX}engine_{name}_total"
            lines += [f"# TYPE {name} counter", f"{name} {value:.17g}"]
        for name, value in gauges.items():
            lines += [f"# TYPE {PREFIX}{name} gauge", f"{PREFIX}{name} {value:.17g}"]
        return "\n".join(lines) + "\n"


def _braced(labels: Labels) -> str:
    pairs = ",".join(f'{name}="{value}"' for name, value in labels)
    return f"{{{pairs}}}" if pairs else ""
