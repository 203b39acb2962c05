"""What the pages of the viewer show, as plain JSON: `Pages.answer(path, parameters)`, the same for a server
and an export.

Every number comes from the reader of its file: metrics and charts as in report.html, means over seeds from
`evaluation.over_seeds`, differences of configurations from `config.diff`, forests and dialogues from the
report's own modules, lists from query.py. Nothing is computed in a second place, and nothing is written.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from silva.config.diff import diff
from silva.config.schema import Registries
from silva.errors import ConfigError, LedgerError, RecordError
from silva.evaluation.over_seeds import over_seeds
from silva.monitoring.report import charts, overview
from silva.monitoring.report_forests import forest_of
from silva.monitoring.report_rollouts import details
from silva.storage.layout import Layout
from silva.storage.ledger import Record, history, read
from silva.storage.metrics import read_metrics
from silva.storage.rollouts import LearnedTurn, read_columns, read_rollouts, said_in, work_of
from silva.types import Segment, Turn
from silva.viewer.catalogue import Catalogue, FoundRun
from silva.viewer.query import KINDS, MOST, NAMED, SORTS, Query

Decode = Callable[[Sequence[int]], str]
T = TypeVar("T")
Parameters = Mapping[str, Sequence[str]]
CHARACTERS = 4_000_000  # of the texts of a forest
NUMBERS = ("logprobs", "raw_logprobs", "entropies", "versions")  # of a token
TOKENS = 400_000  # of the rollouts of a forest
COMPARED = 4_000  # words of each of two texts
WORKS = 80  # named in a filter
ABOUT = {
    "failed": "an episode gave no usable result",
    "zero_variance": "all raw rewards of the group are equal, so it teaches nothing",
    "low_variance": "its rewards vary less than those of the groups that were kept",
    "too_easy": "the group solved it more often than the filter allows",
    "too_hard": "the group solved it less often than the filter allows",
    "surplus": "more groups were played than a step trains",
    "truncated": "the environment cut the episode short",
    "max_turns": "it reached the limit of turns",
    "max_tokens": "it reached the limit of tokens",
    "context_overflow": "the prompt left no room for a reply",
    "timeout": "it ran out of time",
    "stale": "its oldest token was sampled by a policy that many versions before the one that was trained",
    "restarted": "it still ran after more updates than rollout.max_off_policy_steps allows: what it had said "
    "was too old to be trained, so it was thrown away, and the work began again with the new policy",
}
"""Reasons in words."""


class Pages:
    """Answers of the viewer.

    Args:
        registries: what a configuration may name.
        decode_of: what turns tokens of a run into text; None if its tokenizer is not here.
    """

    def __init__(
        self, catalogue: Catalogue, registries: Registries, decode_of: Callable[[Layout], Decode | None]
    ) -> None:
        self._catalogue, self._registries, self._decode_of = catalogue, registries, decode_of
        self._query = Query()
        self._decoders: dict[Path, Decode | None] = {}
        self._decoding = threading.Lock()
        self._thrown: dict[Path, tuple[int, list[str], dict[str, int]]] = {}

    def answer(self, path: str, given: Parameters) -> dict[str, Any]:
        """Raises ConfigError for what does not exist or is not understood, RecordError for a damaged file."""
        if path not in PAGES:
            raise ConfigError(f"no page {path!r}, expected one of {', '.join(PAGES)}")
        answer: dict[str, Any] = PAGES[path](self, given)
        return answer

    def runs(self, given: Parameters) -> dict[str, Any]:
        """All runs, those that changed last first."""
        found = [self._catalogue.status(run) for run in self._catalogue.runs().values()]
        return {"runs": sorted(found, key=lambda run: (-(run["changed"] or 0), run["run"]))}

    def run(self, given: Parameters) -> dict[str, Any]:
        """Results, warnings and configuration."""
        run = self._run(given)
        return {
            **overview(run.layout.path, []),
            "status": self._catalogue.status(run),
            "steps": [*run.rollouts()],
        }

    def steps(self, given: Parameters) -> dict[str, Any]:
        """Those that have rollouts."""
        return {"steps": [*self._run(given).rollouts()]}

    def curves(self, given: Parameters) -> dict[str, Any]:
        """Of a run; of several, means over them with intervals."""
        runs = [self._catalogue.run(name) for name in given.get("run", ())]
        rows = [read_metrics(run.layout.metrics) for run in runs]
        return {"charts": charts(rows[0] if len(rows) == 1 else over_seeds(rows))}

    def diff(self, given: Parameters) -> dict[str, Any]:
        """Differences of two configurations, with origins."""
        a, b = (self._catalogue.run(_one(given, name)) for name in "ab")
        return {"rows": [asdict(each) for each in diff(a.layout.path, b.layout.path, self._registries)]}

    def rollouts(self, given: Parameters) -> dict[str, Any]:
        """A page of the list."""
        run = self._run(given)
        after = _json(given, "after", [])
        limit = _number(given, "limit", 100)
        found = self._query.page(
            self._files(run, given), _maybe(given, "filter"), _maybe(given, "sort") or "-step",
            after if isinstance(after, list) else [], min(limit, MOST),
        )  # fmt: skip
        return {**found, "about": _about(found["rows"])}

    def all(self, given: Parameters, most: int, characters: int) -> dict[str, Any] | None:
        """All rows of a run for filters in an export; None if there are more than `most`.

        Args:
            characters: of all texts together; if they have more, the rows have no text.
        """
        run = self._run(given)
        files = [*run.rollouts().values()]
        if self._query.count(files)["count"] > most:
            return None
        rows, names = self._query.everything(files, characters) if files else ([], [*KINDS])
        return {"rows": rows, "about": _about(rows), "named": NAMED, "by_step": not run.evaluation,
                "columns": {name: KINDS[name] for name in names}}  # fmt: skip

    def count(self, given: Parameters) -> dict[str, Any]:
        return self._query.count([*self._files(self._run(given), given).values()], _maybe(given, "filter"))

    def groups(self, given: Parameters) -> dict[str, Any]:
        """Of a step."""
        rows = self._query.groups(self._file(given))
        return {"rows": [{**row, "about": ABOUT.get(row["reason"] or "", "")} for row in rows]}

    def forest(self, given: Parameters) -> dict[str, Any]:
        """What a piece of work became: the tree of its turns, and its members."""
        file, work = self._file(given), work_of(_one(given, "group"))
        members = self._query.members(file, work)
        if not members:
            raise ConfigError(f"no group {work!r} in step {_one(given, 'step')}")
        drawn = _within(members)
        forest = forest_of(work, read_rollouts(file, [row["at"] for row in drawn]), [CHARACTERS])
        if forest is not None:
            forest["left_out"] += len(members) - len(drawn)
        return {"forest": forest, "members": members}

    def rollout(self, given: Parameters) -> dict[str, Any]:
        """A dialogue."""
        run = self._run(given)
        file, at = self._place(run, _number(given, "step", 0), _number(given, "at", 0))
        problems: list[str] = []
        rows = list(details([(file, at)], None, problems).values())
        if problems:
            raise RecordError(problems[0])
        found = rows[0]
        about = ABOUT.get(found.get("reason", ""), "") or ABOUT.get(found["stop_reason"], "")
        (age,) = read_columns(file, ("version", "oldest_version"), [at])
        behind = None if None in age.values() else age["version"] - age["oldest_version"]
        return {**found, "at": at, "about": about, "staleness": behind, "run": run.name}

    def tokens(self, given: Parameters) -> dict[str, Any]:
        """One turn of a rollout, token by token."""
        run = self._run(given)
        file, at = self._place(run, _number(given, "step", 0), _number(given, "at", 0))
        (row,) = read_rollouts(file, [at])
        turns, turn = row.trajectory.turns, _number(given, "turn", 0)
        if not 0 <= turn < len(turns):
            raise ConfigError(f"turn: got {turn}, expected 0 to {len(turns) - 1}")
        decode = self._decode(run)
        learned = next((each for each in row.learned if each.turn == turns[turn].id), None)
        shown = _segments(turns[turn], learned, decode)
        counts = [sum(s.count for s in each.segments) for each in turns]
        return {"turn": turn, "counts": counts, "segments": shown, "text": decode is not None,
                "advantage": row.advantage}  # fmt: skip

    def texts(self, given: Parameters) -> dict[str, Any]:
        """Two rollouts of a task word by word: parts in both, only in the first, only in the second."""
        run = self._run(given)
        sides = list[dict[str, Any]]()
        for side in "ab":
            step, _, at = _one(given, side).partition(":")
            if not step.isdecimal() or not at.isdecimal():
                raise ConfigError(f"{side}: got {_one(given, side)!r}, expected STEP:ROW")
            file, place = self._place(run, int(step[:18]), int(at[:18]))
            (row,) = read_rollouts(file, [place], tokens=False)
            played = row.trajectory
            said = [turn.messages[-1] for turn in played.turns if turn.messages]
            text = "\n\n".join("\n".join(filter(None, said_in(message))) for message in said)
            reward = None if played.failure else played.raw_reward
            sides.append({"step": row.step, "trajectory": played.id, "text": text, "reward": reward})
        a, b = (re.findall(r"\s+|\S+\s*", side.pop("text"))[:COMPARED] for side in sides)
        parts = [
            {"kind": kind, "a": "".join(a[i:j]), "b": "".join(b[k:m])}
            for kind, i, j, k, m in difflib.SequenceMatcher(None, a, b).get_opcodes()
        ]
        return {"a": sides[0], "b": sides[1], "parts": parts}

    def outcomes(self, given: Parameters) -> dict[str, Any]:
        """What was dropped, failed, cut or stale, by kind, with the reason in words."""
        run = self._run(given)
        rows = self._query.outcomes([*run.rollouts().values()]) + self._restarted(run)
        stale = {"stale": ABOUT["stale"]}
        return {
            "rows": [{"about": ABOUT.get(row["kind"]) or stale.get(row["what"], ""), **row} for row in rows]
        }

    def _restarted(self, run: FoundRun) -> list[dict[str, Any]]:
        """Work that was thrown away as too old, as one kind; its place is where the newest one ended up."""
        begun, steps = self._restarts(run.layout.ledger)
        if not begun:
            return []
        files, works = run.rollouts(), [*dict.fromkeys(reversed(begun))]
        newest = next((work for work in works if steps[work] in files), works[0])
        rows = self._query.members(files[steps[newest]], newest) if steps[newest] in files else []
        about = f"{ABOUT['restarted']}. The number counts restarts (pieces of work: {len(works)})"
        if len(works) > WORKS:
            about += f"; the link finds the {WORKS} that were restarted last"
        return [{"kind": "restarted", "what": "stale", "about": about, "count": len(begun),
                 "works": works[:WORKS], "first": min(steps.values()), "step": steps[newest],
                 "at": rows[0]["at"] if rows else None}]  # fmt: skip

    def _restarts(self, ledger: Path) -> tuple[list[str], dict[str, int]]:
        """The work of each restart, and the last step of each such work. To verify a ledger takes seconds, so
        it is read only if the word stands in it, and again only if its size is another. A damaged one
        has none: the rest of the page does not need it."""
        size = ledger.stat().st_size if ledger.is_file() else 0
        known, begun, steps = self._thrown.get(ledger, (-1, [], {}))
        if known != size:
            found = list[Record]()
            with suppress(OSError, LedgerError):
                found = history(read(ledger)) if b'"restarted"' in ledger.read_bytes() else []
            begun = [record.fields["work"] for record in found if record.event == "restarted"]
            of, placed = {*begun}, [each for each in found if each.event in ("issued", "sealed")]
            steps = {r.fields["work"]: r.fields["step"] for r in placed if r.fields["work"] in of}
            self._thrown[ledger] = size, begun, steps
        return begun, steps

    def columns(self, given: Parameters) -> dict[str, Any]:
        """What a filter and an order may name."""
        return {"columns": KINDS, "named": NAMED, "sorts": SORTS}

    def _run(self, given: Parameters) -> FoundRun:
        return self._catalogue.run(_one(given, "run"))

    def _files(self, run: FoundRun, given: Parameters) -> dict[int, Path]:
        """Those of all steps, or of the one that is given."""
        if run.evaluation or not _maybe(given, "step"):
            return run.rollouts()
        step = _number(given, "step", 0)
        return {step: self._step(run, step)}

    def _file(self, given: Parameters) -> Path:
        return self._step(self._run(given), _number(given, "step", 0))

    def _step(self, run: FoundRun, step: int) -> Path:
        files = run.rollouts()
        if run.evaluation:
            return files[0]
        if step not in files:
            raise ConfigError(f"run {run.name} has no rollouts of step {step}")
        return files[step]

    def _place(self, run: FoundRun, step: int, at: int) -> tuple[Path, int]:
        """A row of the file of a step that is there."""
        file = self._step(run, step)
        if at >= (rows := self._query.count([file])["count"]):
            raise ConfigError(f"at: got {at}, expected 0 to {rows - 1}, a row of step {step}")
        return file, at

    def _decode(self, run: FoundRun) -> Decode | None:
        with self._decoding:
            if run.layout.path not in self._decoders:
                self._decoders[run.layout.path] = self._decode_of(run.layout)
            return self._decoders[run.layout.path]


PAGES: Mapping[str, Callable[[Pages, Parameters], dict[str, Any]]] = {
    "runs": Pages.runs, "run": Pages.run, "steps": Pages.steps, "curves": Pages.curves, "diff": Pages.diff,
    "rollouts": Pages.rollouts, "count": Pages.count, "groups": Pages.groups, "forest": Pages.forest,
    "rollout": Pages.rollout, "tokens": Pages.tokens, "texts": Pages.texts, "outcomes": Pages.outcomes,
    "columns": Pages.columns,
}  # fmt: skip


def _about(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Reasons of rows in words."""
    return {row["reason"]: ABOUT.get(row["reason"], "") for row in rows}


def _within(members: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """As many as have TOKENS together, at least one."""
    total = list(accumulate(row["tokens"] for row in members))
    return [row for row, tokens in zip(members, total, strict=True) if tokens <= TOKENS] or [members[0]]


def _segments(turn: Turn, learned: LearnedTurn | None, decode: Decode | None) -> list[dict[str, Any]]:
    found, start, read = [], 0, len(turn.segments[0].tokens)
    for segment in turn.segments:
        tokens = segment.tokens
        shown: dict[str, Any] = {
            "source": segment.source,
            "temperature": segment.temperature,
            "tokens": [decode([token]) for token in tokens] if decode else [f"[{token}]" for token in tokens],
            "ids": tokens,
            **{name: list(map(_short, getattr(segment, name))) for name in NUMBERS},
        }
        if learned is not None:
            shown |= _learned(learned, segment, start, read, sum(len(s.tokens) for s in turn.segments))
        start += len(tokens)
        found.append(shown)
    return found


def _learned(learned: LearnedTurn, segment: Segment, start: int, read: int, all_: int) -> dict[str, Any]:
    """What training knew of a segment, `start` tokens after its turn began; the first `read` are no reply."""
    span = slice(start - read, start - read + len(segment.tokens))
    shown: dict[str, Any] = {}
    if start >= read:
        advantages, weights, trainer = (
            _whole(values, all_ - read)[span]
            for values in (learned.advantages, learned.weights, learned.logprobs)
        )
        shown = {"advantages": [*map(_short, advantages)], "weights": [*map(_short, weights)],
                 "trainer_logprobs": [*map(_short, trainer)]}  # fmt: skip
        if trainer and segment.logprobs:
            pairs = zip(trainer, segment.logprobs, strict=True)
            shown["ratios"] = [_short(math.exp(min(new - old, 50.0))) for new, old in pairs]
        if learned.clipped:
            shown["clipped"] = [int(each) for each in _whole(learned.clipped, all_ - read)[span]]
    streams = {name: _whole(values, all_) for name, values in learned.streams.items()}
    if streams:
        names = [
            ", ".join(n for n, weights in streams.items() if weights[start + i])
            for i in range(len(segment.tokens))
        ]
        shown["streams"] = names
    return shown


def _whole(values: tuple[T, ...], count: int) -> tuple[T, ...]:
    return values * count if len(values) == 1 else values


def _short(value: float) -> float | None:
    return round(value, 5) if math.isfinite(value) else None


def _one(given: Parameters, name: str) -> str:
    values = given.get(name, ())
    if len(values) != 1:
        raise ConfigError(f"{name}: got {len(values)} values, expected one")
    return values[0]


def _maybe(given: Parameters, name: str) -> str:
    return _one(given, name) if name in given else ""


def _number(given: Parameters, name: str, default: int) -> int:
    text = _maybe(given, name)
    if text and not text.isdecimal():
        raise ConfigError(f"{name}: got {text!r}, expected a whole number, 0 or more")
    return int(text[:18]) if text else default


def _json(given: Parameters, name: str, default: Any) -> Any:
    text = _maybe(given, name)
    try:
        return json.loads(text) if text else default
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: got {text[:80]!r}, expected JSON") from error
