"""What tests of whole runs share: one server for all of them, and one run that was left alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runs import Server, differences, end_state


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("runs"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def alone(server: Server) -> Path:
    """The folder of a run that nothing befell."""
    ended = server.rl("alone")
    assert ended.status == 0, ended.output
    assert differences(ended.path, end_state(ended.path)) == []
    return ended.path


@pytest.fixture(scope="session")
def undisturbed(alone: Path) -> dict[str, Any]:
    """Its end state."""
    return end_state(alone)
