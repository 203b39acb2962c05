"""Digests of the files that a configuration points at, so that a resumed run reads what it began with.

A value points at a file if there is one of that name: rows, corpora, models, programs, "file.py:name".
Folders stand for all files in them, Python files also for the modules that they import from beside them. Not
here: what a run writes itself (caches, its own folder), and Python packages.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from silva.config.field_types import Key, leaves

FILES_KEY = "(files)"  # in a run's config.json; no key of a configuration
WRITTEN = frozenset({"output_dir", "cache", "cache_path", "lock"})  # keys of what a run writes
WHOLE = 1 << 30  # bytes: of larger files, a sample of blocks is read
BLOCK, BLOCKS = 1 << 16, 1024


def input_files(data: Mapping[str, Any]) -> dict[str, str]:
    """Size and digest of every file that a resolved configuration (`Resolved.data`) points at, by path.

    Folders around the run, and what is in its own, are left out: they change by themselves.
    """
    own = [Path(data["output_dir"]).resolve() / data.get("name", ""), Path.cwd()]
    found: dict[str, str] = {}
    for key, value in leaves(dict(data)).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and key[-1] not in WRITTEN and "rows" not in key:
                found |= {str(file): digest(file) for file in _files(key, text, own)}
    return found


def saved_files(run: Path) -> dict[str, str]:
    """Those with which the run in a folder began; none if the folder does not say."""
    try:
        found: dict[str, str] = json.loads((run / "config.json").read_bytes()).get(FILES_KEY, {})
    except (OSError, ValueError):
        return {}
    return found


def _files(key: Key, text: str, own: list[Path]) -> Iterator[Path]:
    file = text.rpartition(":")[0] if ".py:" in text else text
    if not 0 < len(file) < 4096 or "\0" in file or "\n" in file:
        return
    path = Path(os.path.expanduser(file))
    model = key[0] in ("model", "algorithm") and key[-1] == "name"
    at = "*"
    if model and not path.exists() and "@" in path.name:  # a run at a step
        name, _, at = path.name.rpartition("@")
        path, at = path.with_name(name), at if at.startswith("step_") else "*"
    # Any other word may be the name of a folder by chance.
    folder = "/" in file or model or key[-1] == "corpus"
    try:
        if path.resolve().is_relative_to(own[0]):
            return
        if path.is_file():
            yield path
            if path.suffix == ".py":
                yield from _imported(path, path.parent, {path.resolve()})
        elif folder and path.is_dir() and not any(each.is_relative_to(path.resolve()) for each in own):
            run = model and (path / "ledger.jsonl").is_file()  # whose other files change by themselves
            for each in sorted(path.glob(f"*/{at}/**/*.safetensors" if run else "**/*")):
                inside = each.relative_to(path).parts
                if each.is_file() and not any(part[0] == "." or part == "__pycache__" for part in inside):
                    yield each
    except OSError:  # a text that is too long for a name, or what may not be read
        return


def _imported(file: Path, root: Path, seen: set[Path]) -> Iterator[Path]:
    """The modules beside a Python file, or in the working folder, that it imports, and those that they do."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # whoever imports it says so
        return
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = f"{node.module}." if node.module else ""
            names |= {module + alias.name for alias in node.names} | ({node.module} if node.module else set())
    for name in sorted(names):
        for folder in (file.parent, root, Path.cwd()):
            place = folder.joinpath(*name.split("."))
            for path in (place.with_suffix(".py"), place / "__init__.py"):
                if path.is_file() and path.resolve() not in seen:
                    seen.add(path.resolve())
                    yield path
                    yield from _imported(path, root, seen)


def digest(file: Path) -> str:
    """The digest of a file's size and content; beyond `WHOLE` bytes, of a sample of its blocks."""
    try:
        size, digest = file.stat().st_size, hashlib.sha256()
        with file.open("rb") as content:
            if size <= WHOLE:
                digest = hashlib.file_digest(content, "sha256")
            else:
                for number in range(BLOCKS):
                    content.seek((size - BLOCK) * number // (BLOCKS - 1))
                    digest.update(content.read(BLOCK))
    except OSError as error:  # a folder may hold files that nobody reads
        return f"not readable: {error.strerror or error}"
    return f"{size} bytes, sha256 {digest.hexdigest()[:16]}"
