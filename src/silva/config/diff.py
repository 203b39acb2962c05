"""What differs between two configurations, and which keys may change when a run is resumed."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from silva.config.field_types import Key, dotted, leaves, show
from silva.config.inputs import input_files, saved_files
from silva.config.load import load
from silva.config.saved import read_saved, saved_values
from silva.config.schema import Registries

MAY_CHANGE = frozenset(
    {
        "steps",  # unless a schedule depends on it: see `forbidden_changes`
        "output_dir",
        "checkpoint",
        "monitoring",
        "plan",
        "synth",
        "eval.every",
        # Where the parts are: a machine may be lost, and others take its place.
        "placement",
        "trainer.transfer",
        "trainer.ranks",
        "trainer.parallel",
        "engine.urls",
        "engine.key_variable",
        "engine.timeout",
        "engine.retries",
        "engine.check_every",
        "engine.dead_after",
        "engine.patience",
        "engine.probe_tolerance",
        "engine.max_wait",
        "engine.requests_per_minute",
        "engine.input_price",
        "engine.cached_price",
        "engine.output_price",
        "engine.train_price",
        "engine.max_cost",
        "engine.python",
        "engine.tensor_parallel",
        "engine.data_parallel",
        "engine.gpu_memory",
        "engine.kv_cache_gib",
        # Memory and speed, to go on after running out of memory: the gradient does not depend on the cut.
        "trainer.micro_batch_tokens",
        "trainer.gradient_checkpointing",
        "trainer.max_nonfinite",
        "rollout.max_failed",
        "engine.drafts",
        "engine.max_concurrent",
        "engine.cached_sequences",
        "engine.prefill_tokens",
        "engine.max_adapters",
    }
)
"""Prefixes of keys that leave what the run learns from as it is. Placement, parallelism and the cuts change
rounding: a run resumed with others is valid, but not bit-identical to the uninterrupted one."""

_ABSENT: Any = object()


def may_change(path: str) -> bool:
    """Whether a resumed run may have another value at this dotted path."""
    return any(path == prefix or path.startswith(prefix + ".") for prefix in MAY_CHANGE)


def forbidden_changes(
    old: Mapping[str, Any], new: Mapping[str, Any], given: Collection[str] = ()
) -> dict[str, str]:
    """Dotted paths that differ but must not in a resumed run, each with its specific reason, or "".

    A key that is not in `old` is newer than the run, which did what its default does.

    Args:
        old: what the run was started with, as `Resolved.data`.
        new: what it is resumed with.
        given: dotted paths in `new` that are no defaults.
    """
    known = {*map(dotted, leaves(dict(old))), *given}
    known |= {key[:i] for key in known for i, character in enumerate(key) if character == "."}
    changed = [path for path in changed_keys(old, new) if path in known]
    found = {path: "" for path in changed if not may_change(path)}
    if "steps" in changed and (schedule := _scheduled(new)):
        found["steps"] = f"{schedule} ends with the last step and would not fit the steps already done"
    return found


def _scheduled(config: Mapping[str, Any]) -> str:
    """The first schedule that depends on `steps`; "" if none does. A warm start has steps of its own."""
    used = ["trainer.optimizer"]
    if config["algorithm"].get("credit") in ("gae", "bi_level_gae"):
        used.append("trainer.critic.optimizer")
    values = leaves(dict(config))
    for path, kind in ((f"{name}.schedule", values.get((*name.split("."), "schedule"))) for name in used):
        if kind not in (None, "constant"):
            return f'{path} = "{kind}"'
    return ""


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Dotted paths that differ between two resolved configurations (`Resolved.data`), sorted."""
    return sorted(dotted(path) for path in _differing(dict(old), dict(new)))


def _differing(old: Any, new: Any, path: Key = ()) -> list[Key]:
    pairs: Iterable[tuple[Any, Any, Any]]
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = [(key, old.get(key, _ABSENT), new.get(key, _ABSENT)) for key in {**old, **new}]
    elif _tables(old) and _tables(new) and len(old) == len(new):
        pairs = zip(range(len(old)), old, new, strict=True)
    else:
        return [] if _same(old, new) else [path]
    return [found for key, a, b in pairs for found in _differing(a, b, (*path, key))]


def _tables(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_same, old, new))
    if isinstance(old, bool) or isinstance(new, bool):
        return old is new
    return bool(old == new) or (old != old and new != new)  # nan is nan here


@dataclass(frozen=True)
class ConfigDifference:
    """One key in two runs, or one file that they read. A side that lacks it has value None and origin ""; a
    value nobody gave has origin "default"."""

    path: str
    a: Any
    origin_a: str
    b: Any
    origin_b: str


def diff(run_a: Path, run_b: Path, registries: Registries) -> list[ConfigDifference]:
    """What differs between two configurations, sorted by key, and between the files that they point at.

    Args:
        run_a, run_b: folders of runs, which hold their whole configuration, or TOML files, which are resolved
            as for a run: with the files they extend and with defaults, but without environment variables.

    Raises:
        ConfigError: one of them cannot be read or is wrong.
    """
    (a, origins_a, files_a), (b, origins_b, files_b) = _read(run_a, registries), _read(run_b, registries)
    found = []
    for path in sorted({**a, **b}, key=dotted):
        left, right = a.get(path, _ABSENT), b.get(path, _ABSENT)
        if not _same(left, right):
            name = dotted(path)
            sides = (*_side(left, origins_a.get(name)), *_side(right, origins_b.get(name)))
            found.append(ConfigDifference(name, *sides))
    for file in sorted({**files_a, **files_b}):
        if files_a.get(file) != files_b.get(file):
            sides = (*_side(files_a.get(file, _ABSENT), "file"), *_side(files_b.get(file, _ABSENT), "file"))
            found.append(ConfigDifference(file, *sides))
    return found


def _read(path: Path, registries: Registries) -> tuple[dict[Key, Any], Mapping[str, str], dict[str, str]]:
    """All values by path, the origins of those that are no defaults by dotted path, and the files."""
    if path.is_dir() or not path.is_file() or (path.parent / "config.json").is_file():
        data, origins = read_saved(path)
        folder = path if path.is_dir() else path.parent
        return leaves(data), {dotted(key): origin for key, origin in origins.items()}, saved_files(folder)
    resolved = load([f"@{path}"], registries, env={})
    return leaves(saved_values(resolved.config)), resolved.provenance, input_files(resolved.data)


def _side(value: Any, origin: str | None) -> tuple[Any, str]:
    return (None, "") if value is _ABSENT else (value, origin or "default")


def format_diff(
    differences: Sequence[ConfigDifference], name_a: str, name_b: str, *, as_json: bool = False
) -> str:
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
