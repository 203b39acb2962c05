"""The page of a comparison of evaluations: one file, as safe as that of a run (report.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from silva.errors import ConfigError
from silva.monitoring.report import page
from silva.ports import FILES


def write_comparison(path: Path, found: Mapping[str, Any]) -> Path:
    """Write the page (atomic) and return its path.

    Args:
        found: what `silva.evaluation.comparison.compare` gives.

    Raises:
        ConfigError: it cannot be written there.
    """
    name = " and ".join(each["name"] for each in found["contenders"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        FILES.write_atomic(path, page({"name": name, **found}, "comparison").encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}; expected a file") from error
    return path
