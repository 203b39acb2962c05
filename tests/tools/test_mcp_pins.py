"""Hashes of definitions, and the file that keeps them."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from silva.errors import ConfigError
from silva.tools.mcp import McpSettings
from silva.tools.mcp_pins import check, digest

SERVER = ("server",)


@pytest.fixture
def lock(tmp_path) -> str:
    return str(tmp_path / "mcp.lock.json")


def test_hashes_cover_every_part_of_a_definition(lock) -> None:
    tool = {
        "name": "a",
        "description": "d",
        "inputSchema": {"type": "object", "properties": {"x": {"enum": [1]}}},
    }
    made = McpSettings(command=SERVER, lock=lock)
    check(made, {"a": tool})
    check(made, {"a": json.loads(json.dumps(tool))})
    nested = json.loads(json.dumps(tool))
    nested["inputSchema"]["properties"]["x"]["enum"] = [1, 2]
    for other in (tool | {"description": "e"}, tool | {"annotations": {"readOnlyHint": True}}, nested):
        with pytest.raises(ConfigError, match="tools changed: a"):
            check(made, {"a": other})
    assert digest({"b": 1, "a": [2]}) == digest({"a": [2], "b": 1})
    assert digest({}) == "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


@pytest.mark.parametrize("content", ["[]", "{", '{"a": {"hash": 1, "tools": {}}}', '{"a": 1}'])
def test_a_damaged_lock_file_is_no_first_use(lock, content) -> None:
    Path(lock).write_text(content)
    with pytest.raises(ConfigError, match="not a file of pins"):
        check(McpSettings(command=SERVER, lock=lock), {"a": {}})
    assert Path(lock).read_text() == content


def test_a_file_that_cannot_be_written_is_named() -> None:
    with pytest.raises(ConfigError, match="mcp: lock = /nowhere/x: No such file or directory"):
        check(McpSettings(command=SERVER, lock="/nowhere/x"), {"a": {}})


def pin(lock: str, number: int) -> None:
    check(McpSettings(command=(f"server {number}",), lock=lock), {"a": {"n": number}})


@pytest.mark.slow
def test_processes_that_pin_at_once_lose_none(lock) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=pin, args=(lock, number), daemon=True) for number in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 6
    assert sorted(json.loads(Path(lock).read_text())) == [f"server {number}" for number in range(6)]
