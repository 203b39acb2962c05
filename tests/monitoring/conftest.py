"""One made-up run, with its report, for all tests that only read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from silva.monitoring.report import write_report

from .fake_run import decode, make_run


@pytest.fixture(scope="session")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 steps of 16 rollouts, 9 evaluations; `report.html` has token views."""
    directory = make_run(tmp_path_factory.mktemp("run") / "forest_walk")
    write_report(directory, decode)
    return directory
