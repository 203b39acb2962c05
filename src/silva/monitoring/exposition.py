"""Numbers as Prometheus reads them (exposition format 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterable

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[tuple[str, str], ...]


def sample(name: str, value: float, labels: Iterable[tuple[str, str]] = ()) -> str:
    """One line. Labels may hold any text."""
    pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
    return f"{name}{f'{{{pairs}}}' if pairs else ''} {value:.17g}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
