"""What differs between two configurations, and which keys may change when a run is resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from silva.config.load import leaves
from silva.config.saved import read_saved
from silva.config.shape import Key, dotted, show

MAY_CHANGE = frozenset(
    {
        "steps",
        "output_dir",
        "checkpoint",
        "monitoring",
        "eval.every",
        "placement.threads",
        "placement.device",
        # Memory and speed, to go on after running out of memory: the gradient does not depend on the cut.
        "trainer.micro_batch_tokens",
        "trainer.gradient_checkpointing",
        "trainer.max_nonfinite",
        "engine.max_concurrent",
        "engine.cached_sequences",
        "engine.prefill_tokens",
    }
)
"""Prefixes of keys that leave what the run learns from as it is. Threads, device and the cuts change
rounding: a run resumed with others is valid, but not bit-identical to the uninterrupted one."""

_ABSENT: Any = object()


def may_change(path: str) -> bool:
    """Whether a resumed run may have another value at this dotted path."""
    return any(path == prefix or path.startswith(prefix + ".") for prefix in MAY_CHANGE)


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Dotted paths that differ between two resolved configurations (`Resolved.data`), sorted."""
    return sorted(dotted(path) for path in _differing(dict(old), dict(new)))


def _differing(old: Any, new: Any, path: Key = ()) -> list[Key]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(dict.fromkeys([*old, *new]))
        return [
            found
            for key in keys
            for found in _differing(old.get(key, _ABSENT), new.get(key, _ABSENT), (*path, key))
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        found = [
            each for i, pair in enumerate(zip(old, new, strict=True)) for each in _differing(*pair, (i,))
        ]
        whole = any(len(each) == 1 for each in found)  # plain elements: the list is one value
        return [path] if whole else [(*path, *each) for each in found]
    return [] if _same(old, new) else [path]


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, bool) or isinstance(new, bool):
        return old is new
    return bool(old == new) or (old != old and new != new)  # nan is nan here


@dataclass(frozen=True)
class Difference:
    """One key in two runs. A side that lacks the key has value None and origin ""; a value nobody gave
    has origin "default"."""

    path: str
    a: Any
    origin_a: str
    b: Any
    origin_b: str


def diff(run_a: Path, run_b: Path) -> list[Difference]:
    """What differs between the saved configurations of two runs, sorted by key.

    Raises:
        ConfigError: one of them cannot be read.
    """
    (a, origins_a), (b, origins_b) = read_saved(run_a), read_saved(run_b)
    values_a = {path: _at(a, path) for path in leaves(a)}
    values_b = {path: _at(b, path) for path in leaves(b)}
    found = []
    for path in sorted({*values_a, *values_b}, key=dotted):
        left, right = values_a.get(path, _ABSENT), values_b.get(path, _ABSENT)
        if _differing(left, right):
            found.append(Difference(
                dotted(path), *_side(left, origins_a.get(path)), *_side(right, origins_b.get(path))
            ))  # fmt: skip
    return found


def _side(value: Any, origin: str | None) -> tuple[Any, str]:
    return (None, "") if value is _ABSENT else (value, origin or "default")


def _at(data: Any, path: Key) -> Any:
    for part in path:
        data = data[part]
    return data


def format_diff(differences: Sequence[Difference], name_a: str, name_b: str, *, as_json: bool = False) -> str:
    """The differences as text for people, or as a JSON list of objects."""
    if as_json:
        return json.dumps([asdict(each) for each in differences], indent=2)
    if not differences:
        return f"{name_a} and {name_b} have the same configuration."
    width = max(len(name_a), len(name_b))
    lines = []
    for each in differences:
        lines.append(each.path)
        for name, value, origin in ((name_a, each.a, each.origin_a), (name_b, each.b, each.origin_b)):
            lines.append(f"  {name:<{width}}  {f'{show(value)}  ({origin})' if origin else 'not set'}")
    return "\n".join(lines)
