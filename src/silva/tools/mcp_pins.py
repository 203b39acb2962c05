"""Hashes of the definitions of an MCP server's tools, and the lock file that keeps them.

{"python server.py": {"hash": "sha256:...", "tools": {"add": "sha256:..."}}}
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from silva.errors import ConfigError
from silva.ports import FILES
from silva.tools.mcp import McpSettings

Definitions = Mapping[str, Any]  # by the name of the tool: all of it that a model may read


def digest(definition: Any) -> str:
    text = json.dumps(definition, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def check(settings: McpSettings, definitions: Definitions) -> None:
    """Compares with the pin or, without one, with the lock file; what is not in there is added.

    Raises:
        ConfigError: the definitions are others; it says which.
    """
    name, found = identity(settings), digest(definitions)
    if settings.pin:
        if found != settings.pin:
            raise ConfigError(
                f"mcp server {name}: its tools ({', '.join(sorted(definitions))}) have the hash {found}, "
                f"expected pin = {settings.pin}. Read their definitions before you change the pin"
            )
        return
    path = Path(settings.lock).expanduser()
    try:
        with open(path.with_name(f".{path.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            pins = _read(path)
            if name not in pins:
                tools = {tool: digest(definition) for tool, definition in sorted(definitions.items())}
                pins[name] = {"hash": found, "tools": tools}
                FILES.write_atomic(path, (json.dumps(pins, indent=1, sort_keys=True) + "\n").encode())
                logging.getLogger(__name__).warning(
                    "mcp server %s: its tools (%s) are pinned in %s as %s at their first use; read them.",
                    name, ", ".join(tools), path, found,
                )  # fmt: skip
                return
    except OSError as error:
        raise ConfigError(f"mcp: lock = {path}: {error.strerror or error}") from error
    if pins[name]["hash"] != found:
        raise ConfigError(
            f"mcp server {name}: {_difference(pins[name]['tools'], definitions)} since {path} was written. "
            "Read the new definitions; to accept them, remove the server's entry from that file"
        )


def identity(settings: McpSettings) -> str:
    """Names the server, and the choice among its tools, in the lock file."""
    name = settings.url or " ".join(settings.command)
    return f"{name} [{', '.join(sorted(settings.tools))}]" if settings.tools else name


def _difference(pinned: Mapping[str, str], definitions: Definitions) -> str:
    changed = [name for name in sorted(definitions) if pinned.get(name, "") != digest(definitions[name])]
    parts = [
        ("changed", [name for name in changed if name in pinned]),
        ("new", [name for name in changed if name not in pinned]),
        ("gone", sorted(set(pinned) - set(definitions))),
    ]
    return "tools " + "; ".join(f"{what}: {', '.join(names)}" for what, names in parts if names)


def _read(path: Path) -> dict[str, Any]:
    try:
        pins = json.loads(path.read_bytes()) if path.is_file() else {}
        for entry in pins.values():
            if not isinstance(entry["hash"], str) or not isinstance(entry["tools"], dict):
                raise ValueError("an entry without hash and tools")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"mcp: lock = {path}: not a file of pins ({error})") from error
    return pins
