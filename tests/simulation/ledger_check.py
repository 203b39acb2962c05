"""An independent reader of a run's folder, written from docs/files.md: is every group trained exactly once?

Of supervised training, whose ledger has no groups: is every row trained once an epoch?

It shares no code with silva.storage: what that writes and reads wrongly in the same way is found here.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from silva.types import Sample

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Facts:
    """What a finished run came to; nothing in it depends on time."""

    weights: str
    updates: list[Any]
    metrics: list[dict[str, Any]]
    trained: list[Any]
    summary: dict[str, Any]


def facts_of(run: Path) -> Facts:
    policy = _policy(run)
    rows = [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in _rows(run)]
    trained = [[e["step"], e["update"], e["groups"]] for e in lasting(read_lines(run / "ledger.jsonl"))
               if e["event"] == "trained"]  # fmt: skip
    summary = json.loads((run / "summary.json").read_bytes())
    kept = {k: v for k, v in summary.items() if k.startswith(("eval", "steps", "tokens"))}
    return Facts(policy["weights"], policy["updates"], rows, trained, kept)


def check(run: Path, level: int, *, finished: bool) -> list[str]:
    """What is wrong, one line each."""
    path = run / "ledger.jsonl"
    if not path.exists():
        return ["there is no ledger"] if finished else []
    try:
        lines = read_lines(path)
    except ValueError as error:
        return [str(error)]
    book = _Book(level)
    problems = [problem for line in lasting(lines) for problem in book.take(line)]
    if finished and "data" in config_of(run):
        problems += _epochs(run)
    elif finished:
        problems += book.left()
        problems += _metrics(run, book)
        problems += _lineage(run, book)
    return problems


def read_lines(path: Path) -> list[Line]:
    """Every whole line: JSON with a running `seq`, and last the crc32 of the object without it.

    Raises:
        ValueError: names the line that is not so.
    """
    *whole, _torn = path.read_bytes().split(b"\n")
    found = []
    for number, raw in enumerate(whole):
        head, comma, tail = raw.rpartition(b', "crc": "')
        if not comma or tail != f'{zlib.crc32(head + b"}"):08x}"}}'.encode():
            raise ValueError(f"ledger line {number + 1}: the checksum is wrong")
        line = json.loads(head + b"}")
        if line["seq"] != number:
            raise ValueError(f"ledger line {number + 1}: seq {line['seq']}")
        found.append(line)
    return found


def lasting(lines: Sequence[Line]) -> list[Line]:
    """What counts: `rolled_back` undoes everything from `to` on, and stays as a mark of the restart."""
    kept: list[Line] = []
    for line in lines:
        if line["event"] == "rolled_back":
            kept = [each for each in kept if each["seq"] < line["to"]]
        kept.append(line)
    return kept


@dataclass
class _Book:
    """What is known of work and groups at a line of the ledger."""

    level: int
    version: int = 0
    work: dict[str, str] = field(default_factory=dict)  # its last event
    began: dict[str, int] = field(default_factory=dict)  # of work: versions published when it was begun last
    group: dict[str, str] = field(default_factory=dict)
    step_of: dict[str, int] = field(default_factory=dict)
    work_of: dict[str, str] = field(default_factory=dict)
    rewards: dict[str, list[Any]] = field(default_factory=dict)
    reasons: dict[int, Counter[str]] = field(default_factory=dict)
    updates: dict[tuple[int, int], list[str]] = field(default_factory=dict)  # replayed ones too
    trained: dict[int, list[str]] = field(default_factory=dict)
    restarted: bool = False

    def take(self, line: Line) -> list[str]:
        handler = getattr(self, f"_{line['event']}", None)
        return [f"seq {line['seq']}: {problem}" for problem in handler(line)] if handler else []

    def _rolled_back(self, line: Line) -> list[str]:
        for work, event in self.work.items():
            if event == "issued":
                self.work[work] = "lost"
        return []

    def _issued(self, line: Line) -> list[str]:
        work, before = line["work"], self.work.get(line["work"], "")
        self.work[work], self.began[work] = "issued", self.version
        return [f"{work} is issued again after {before}"] if before not in ("", "lost") else []

    def _restarted(self, line: Line) -> list[str]:
        work, before = line["work"], self.work.get(line["work"], "")
        self.began[work] = self.version
        return [f"{work} is restarted after {before or 'nothing'}"] if before != "issued" else []

    def _sealed(self, line: Line) -> list[str]:
        work, before = line["work"], self.work.get(line["work"], "")
        self.work[work] = "sealed"
        problems = [f"{work} is sealed after {before or 'nothing'}"] if before != "issued" else []
        for group, result in line["groups"].items():
            problems += [f"group {group} is sealed twice"] if group in self.group else []
            self.group[group], self.step_of[group] = "sealed", line["step"]
            self.work_of[group], self.rewards[group] = work, result["rewards"]
        return problems

    def _dropped(self, line: Line) -> list[str]:
        group = line["group"]
        self.reasons.setdefault(self.step_of.get(group, -1), Counter())[line["reason"]] += 1
        return self._ended(group, "dropped")

    def _trained(self, line: Line) -> list[str]:
        place, problems = (line["step"], line["update"]), []
        if self.updates and place <= max(self.updates):
            problems.append(f"step {place[0]}, update {place[1]} comes after {max(self.updates)}")
        self.updates[place] = list(line["groups"])
        self.trained.setdefault(line["step"], []).extend(line["groups"])
        for group in line["groups"]:
            problems += self._ended(group, "trained")
            if self.step_of.get(group) != line["step"]:
                problems.append(
                    f"group {group} of step {self.step_of.get(group)} is trained in {line['step']}"
                )
            age = self.version - self.began.get(self.work_of.get(group, ""), self.version)
            if age > self.level:
                problems.append(f"group {group} is {age} versions old, expected at most {self.level}")
        return problems

    def _replayed(self, line: Line) -> list[str]:
        self.updates.setdefault((line["step"], line["update"]), []).extend(line["groups"])
        return [
            f"group {group} is replayed, but {self.group.get(group, 'never sealed')}"
            for group in line["groups"]
            if self.group.get(group) != "trained" or self.step_of[group] >= line["step"]
        ]

    def _published(self, line: Line) -> list[str]:
        before, self.version = self.version, line["version"]
        return [f"version {line['version']} follows {before}"] if line["version"] != before + 1 else []

    def _ended(self, group: str, how: str) -> list[str]:
        before = self.group.get(group, "")
        self.group[group] = how
        return [f"group {group} is {how} after {before or 'nothing'}"] if before != "sealed" else []

    def left(self) -> list[str]:
        """What a finished run has left behind."""
        return [f"work {w} was {e}, and no more" for w, e in self.work.items() if e != "sealed"] + [
            f"group {g} was sealed, and neither trained nor dropped"
            for g, e in self.group.items()
            if e == "sealed"
        ]


def _metrics(run: Path, book: _Book) -> list[str]:
    """Counts in metrics.jsonl and summary.json against the ledger."""
    rows = _rows(run)
    problems = _steps(rows, 0, config_of(run)["steps"])
    if problems:
        return problems
    for row in rows[1:]:
        step = row["step"]
        groups = [group for group, meant in book.step_of.items() if meant == step]
        rewards = [reward for group in groups for reward in book.rewards[group]]
        usable = [reward for reward in rewards if reward is not None]
        counted = {
            "groups/trained": len(book.trained.get(step, ())),
            "trajectories/played": len(rewards),
            "trajectories/failed": len(rewards) - len(usable),
            **{f"groups/{reason}": n for reason, n in book.reasons.get(step, {}).items()},
        }
        problems += [
            f"metrics of step {step}: {name} is {row.get(name)}, the ledger has {number}"
            for name, number in counted.items()
            if row.get(name) != number
        ]
        mean = sum(usable) / len(usable) if usable else math.nan
        if usable and not math.isclose(row["reward/raw"], mean, rel_tol=1e-9, abs_tol=1e-12):
            problems.append(
                f"metrics of step {step}: reward/raw is {row['reward/raw']}, the ledger has {mean}"
            )
    return problems


def _lineage(run: Path, book: _Book) -> list[str]:
    """What the weights themselves were trained on."""
    updates = _policy(run)["updates"]
    problems = []
    if len(updates) != len(book.updates):
        problems.append(f"the weights have {len(updates)} updates, the ledger {len(book.updates)}")
    for got, (place, groups) in zip(updates, sorted(book.updates.items()), strict=False):
        if sorted(got["groups"]) != sorted(groups):
            problems.append(
                f"update {place}: the weights were trained on {got['groups']}, the ledger has {groups}"
            )
    return problems + _tokens(run, updates)


def _epochs(run: Path) -> list[str]:
    """Supervised training: each row once an epoch, whatever befell the run."""
    data, updates, rows = config_of(run)["data"], _policy(run)["updates"], _rows(run)
    dialogues = sum(len(source["rows"]) for source in data["sources"])
    batch, epochs = data["dialogues_per_step"], int(data["epochs"])
    count = dialogues * epochs // batch
    problems = _steps([row for row in rows if row["step"]], 1, count)
    if [len(update["rows"]) for update in updates] != [batch] * count:
        problems.append(f"the weights have updates of {[len(u['rows']) for u in updates]} rows, "
                        f"expected {count} of {batch}")  # fmt: skip
    for epoch in range(epochs):
        per_epoch = dialogues // batch
        seen = Counter(row for u in updates[epoch * per_epoch : (epoch + 1) * per_epoch] for row in u["rows"])
        if len(seen) != dialogues or {*seen.values()} != {1}:
            problems.append(f"epoch {epoch}: its {dialogues} rows were trained {sorted(seen.values())} times")
    return problems + _tokens(run, updates)


def _steps(rows: Sequence[Mapping[str, Any]], first: int, last: int) -> list[str]:
    found = [row["step"] for row in rows]
    if found == list(range(first, last + 1)):
        return []
    return [f"metrics.jsonl has steps {found}, expected {first} to {last}"]


def _tokens(run: Path, updates: Sequence[Mapping[str, Any]]) -> list[str]:
    summary, total = json.loads((run / "summary.json").read_bytes()), sum(u["tokens"] for u in updates)
    if summary["tokens_trained"] == total:
        return []
    return [f"summary.json: {summary['tokens_trained']} trained tokens, the trainer saw {total}"]


def config_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "config.json").read_bytes())
    return {name: value for name, value in found.items() if value is not None}


def _policy(run: Path) -> dict[str, Any]:
    (path,) = (run / "weights").glob("step_*/model.safetensors")
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def _rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def of_update(ledger: Path, samples: Sequence[Sample], version: int, level: int, durable: bool) -> list[str]:
    """The trainer is asked for an update: does the disk know (`durable`), and are the rows fresh?"""
    last = [json.loads(line) for line in ledger.read_bytes().splitlines()[-2:]]
    known = [line for line in last if line["event"] in ("trained", "replayed")]
    groups = {group for line in known for group in line["groups"]}
    replayed = {group for line in known if line["event"] == "replayed" for group in line["groups"]}
    wanted, problems = {sample.group for sample in samples}, list[str]()
    if not wanted <= groups or not durable:
        problems.append(f"{sorted(wanted)} are trained, and the ledger on disk does not know")
    for sample in samples:
        sampled = sample.versions[sample.versions >= 0]
        if sample.group in replayed or not len(sampled):
            continue
        if not version - level <= sampled.min() <= sampled.max() <= version:
            problems.append(
                f"{sample.trajectory}: tokens of versions {sampled.min()} to {sampled.max()}, trained at "
                f"version {version}, level {level}"
            )
    return problems
