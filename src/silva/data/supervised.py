"""The rows that supervised training learns from, batch by batch.

    sources ──the furthest behind──> its next row, in the order of its epoch ──dialogue──> held out? left out
                                                                                  └──supervised_rows──> batch

A source is behind by its rows and weight, so that after an epoch each has come as often as it should. The
order of an epoch is a function of seed, source and epoch, and the state is how far each source has come: a
resumed stream gives the same batches. Not here: packing, losses, the loop.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from silva.data.dialogues import dialogue, shape_of
from silva.data.indexed import Rows, indexed, shuffled
from silva.data.row_shapes import Shape, value_at, wrong
from silva.data.settings import SupervisedData, SupervisedSource
from silva.errors import ConfigError, RenderingError, one_line
from silva.ports import derive
from silva.rendering.dialogue import Dialogue
from silva.rendering.renderer import Renderer
from silva.rendering.supervised import SupervisedRow, supervised_rows, trained_text

if TYPE_CHECKING:
    import numpy as np

LOOKED_AT = 10  # first rows of a source, for the example that is shown
SHOWN = 600  # characters of an example
BETWEEN = 200  # of these, for each stretch that is not trained: a long system message would hide what is

HEAVIEST = 1e30  # weight of a row: losses are float32, and sums of them need room


@dataclass
class _Source:
    """Attributes:
    size: its rows in an epoch of all sources: their number times its weight.
    position: rows visited so far.
    """

    label: str
    rows: Rows
    shape: Shape
    given: SupervisedSource
    seed: int
    position: int = 0
    _epoch: int = -1
    _order: np.ndarray | None = None

    @property
    def size(self) -> float:
        return len(self.rows) * self.given.weight

    def said(self, index: int) -> Dialogue:
        """What a row says.

        Raises:
            ConfigError: it cannot be read, or has no weight where one is asked for.
        """
        row, key = self.rows[index], self.given.weigh_by
        found = dialogue(row, self.shape)
        if not key:
            return found
        weight = value_at(row, key)
        weight = 0 if weight is None else weight
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= HEAVIEST:
            raise wrong(row, key, f"a number from 0 to {HEAVIEST:g} (data.sources.weigh_by)", weight)
        return replace(found, weight=float(weight))

    def next(self) -> int:
        """The number of its next row."""
        epoch, place = divmod(self.position, len(self.rows))
        if epoch != self._epoch or self._order is None:
            self._epoch, self._order = epoch, shuffled(self.rows.blocks, derive(self.seed, epoch))
        self.position += 1
        return int(self._order[place])


@dataclass
class RowCounts:
    """Rows that were not used as they are, up to now. `bad`: errors of those that cannot be read."""

    dialogues: int = 0
    rewritten: int = 0  # dialogues that became several rows
    truncated: int = 0
    dropped: int = 0  # too long
    untrained: int = 0  # dialogues without a word of the roles that are trained, or of weight 0
    bad: list[str] = field(default_factory=list)


class SupervisedStream:
    """An endless sequence of rows.

    Args:
        seed: of the order.

    Attributes:
        counts: since the beginning, as `state` has them.

    Raises:
        ConfigError: a source is empty, or its first row looks like no dialogue and may not be bad.
    """

    def __init__(self, settings: SupervisedData, renderer: Renderer, seed: int) -> None:
        self.settings, self.counts, self._renderer = settings, RowCounts(), renderer
        self._sources = [
            _opened(given, derive(seed, "source", i), settings.max_bad_rows)
            for i, given in enumerate(settings.sources)
        ]
        self._apart: _Source | None = None
        self._held_out: set[str] = set()
        if settings.validation_path:
            apart = SupervisedSource(path=settings.validation_path)
            self._apart = _opened(apart, 0, settings.max_bad_rows)
            self._held_out = {_digest(each) for each in self._dialogues(self._apart)}
        self._about = [note for source in self._sources for note in self._examples(source)]

    def draw(self, count: int) -> list[SupervisedRow]:
        """The rows of the next `count` dialogues: one each, or more if the template rewrites earlier turns.

        Raises:
            ConfigError: too many rows cannot be read, or there is nothing to train on.
        """
        found: list[SupervisedRow] = []
        drawn = in_vain = 0
        while drawn < count:
            source = min(self._sources, key=lambda s: (s.position + 1) / s.size)
            said = self._read(source, source.next())
            rows = [] if said is None or self._is_held_out(said) else self._rows(said)
            found += rows
            drawn += bool(rows)
            in_vain = 0 if rows else in_vain + 1
            if in_vain > 2 * sum(len(each.rows) + each.size for each in self._sources):
                raise ConfigError(f"data: no row is left to train on: {self.left_out or 'all are held out'}")
        self.counts.dialogues += drawn
        return found

    def validation(self) -> list[SupervisedRow]:
        """The rows of dialogues that are held out, the same every time; none if `[data]` asks for none.

        Raises:
            ConfigError: too many rows cannot be read, or none is held out.
        """
        settings, found, counts = self.settings, list[SupervisedRow](), self.counts
        if not (settings.validation or self._apart):
            return found
        total = sum(source.size for source in self._sources)
        for source in [self._apart] if self._apart else self._sources:
            most = math.ceil(settings.validation_rows * (1.0 if self._apart else source.size / total))
            self.counts = RowCounts(bad=counts.bad)  # what is held out does not count
            for said in self._dialogues(source):
                if most and self._is_held_out(said) and (rows := self._rows(said)):
                    found += rows
                    most -= 1
                if not most:
                    break
        self.counts = counts
        if not found and self._apart:
            raise ConfigError(
                f"{self._apart.label}: got no row that can be held out, expected dialogues with words of "
                f"{', '.join(settings.roles)} and at most {settings.max_tokens} tokens (data.validation_path)"
            )
        if not found:
            raise ConfigError(
                f"data: validation = {settings.validation:g} holds out none of {total:,.0f} rows; expected a "
                "larger share, or rows of their own in validation_path"
            )
        return found

    @property
    def epoch(self) -> float:
        """Dialogues of a pass over all sources, if no row is left out but those that are held out."""
        return sum(source.size for source in self._sources) * (1 - self.settings.validation)

    def steps(self, batch: int, epochs: float) -> int:
        """Batches of so many dialogues in `epochs`, if no row is left out but those that are held out."""
        rows = epochs * sum(source.size for source in self._sources)
        return max(1, math.ceil(round(rows) * (1 - self.settings.validation) / batch))

    @property
    def notes(self) -> tuple[str, ...]:
        """How rows are read, with an example, and what was left out so far."""
        return (*self._about, *([f"data: {self.left_out}"] if self.left_out else []))

    def state(self) -> dict[str, Any]:
        """Plain JSON."""
        positions = [source.position for source in self._sources]
        rows = [len(source.rows) for source in self._sources]
        return {
            "positions": positions,
            "rows": rows,
            "counts": {**vars(self.counts), "bad": [*self.counts.bad]},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`.

        Raises:
            ConfigError: the sources have other rows than they had.
        """
        for source, rows in zip(self._sources, state["rows"], strict=True):
            if len(source.rows) != rows:
                raise ConfigError(
                    f"{source.label}: got {len(source.rows):,} rows, expected {rows:,} as before"
                )
        for source, position in zip(self._sources, state["positions"], strict=True):
            source.position = position
        self.counts = RowCounts(**{**state["counts"], "bad": [*state["counts"]["bad"]]})

    def _read(self, source: _Source, index: int) -> Dialogue | None:
        """What a row says; None if it is bad and passes."""
        try:
            return source.said(index)
        except ConfigError as error:
            self._bad(error)
            return None

    def _dialogues(self, source: _Source) -> Iterator[Dialogue]:
        """The dialogues of all rows that can be read, in the order of the source."""
        return filter(None, (self._read(source, index) for index in range(len(source.rows))))

    def _rows(self, said: Dialogue) -> list[SupervisedRow]:
        """What is trained of a dialogue; none if it is bad, too long or says nothing that is trained."""
        settings, counts = self.settings, self.counts
        try:
            rows = supervised_rows(self._renderer, said, roles=settings.roles, turns=settings.turns)
        except RenderingError as error:
            self._bad(ConfigError(f"{said.where}: {error}"))
            return []
        rows = rows if said.weight else []
        counts.untrained += not rows
        counts.rewritten += len(rows) > 1
        kept = list[SupervisedRow]()
        for row in rows:
            if len(row) <= settings.max_tokens:
                kept.append(row)
            elif settings.too_long == "truncate" and (cut := row.first(settings.max_tokens)).count:
                counts.truncated += 1
                kept.append(cut)
            else:
                counts.dropped += 1
        return kept

    def _bad(self, error: ConfigError) -> None:
        bad, most = self.counts.bad, self.settings.max_bad_rows
        if str(error) in bad:  # in an earlier epoch
            return
        if len(bad) >= most:
            if not most:
                raise error
            raise ConfigError(f"{error}\ndata.max_bad_rows = {most}: so many rows were bad before this one")
        bad.append(str(error))

    def _is_held_out(self, said: Dialogue) -> bool:
        if self._held_out:
            return _digest(said) in self._held_out
        share = self.settings.validation
        return share > 0 and int(_digest(said)[:13], 16) < share * 16**13

    def _examples(self, source: _Source) -> Iterator[str]:
        """How a source is read, with a row; with one that became several, if there is one."""
        weight = f"{source.given.weight:g}"
        yield f"{source.label}: {len(source.rows):,} rows, weight {weight}, read as {source.shape}"
        shown = 0
        for index in range(min(LOOKED_AT, len(source.rows))):
            try:
                said = source.said(index)
                rows = supervised_rows(
                    self._renderer, said, roles=self.settings.roles, turns=self.settings.turns
                )
            except (ConfigError, RenderingError):  # counted if it is drawn
                continue
            if rows and (not shown or (shown == 1 < len(rows))):
                shown = len(rows)
                apart = (
                    f" becomes {shown} rows, as the chat template rewrites earlier turns" if shown > 1 else ""
                )
                yield f"{said.where}{apart}; what stands in ⟦ ⟧ is trained:"
                for row in rows:
                    yield f"  {one_line(trained_text(self._renderer, row, BETWEEN), SHOWN)}"
            if shown > 1 or (shown and not self._renderer.rebuilds_context):
                break

    @property
    def left_out(self) -> str:
        """What was not used as it is, up to now, for people; empty if all was."""
        counts, most, roles = self.counts, self.settings.max_tokens, ", ".join(self.settings.roles)
        told = [
            (counts.truncated, "row", f"cut at {most} tokens"),
            (counts.dropped, "row", f"left out, longer than {most} tokens"),
            (counts.untrained, "dialogue", f"left out, without words of {roles}, or of weight 0"),
            (len(counts.bad), "bad row", f"left out, such as {next(iter(counts.bad), '')}"),
        ]
        said = [f"{number:,} {what}{'s' * (number != 1)} {why}" for number, what, why in told if number]
        return "; ".join(said)


def _opened(given: SupervisedSource, seed: int, passes: int) -> _Source:
    """The rows of a source; the first that can be read decides their shape, so many may be bad before it."""
    label, rows = given.path or given.hub or "rows", indexed(given)
    if not len(rows):
        raise ConfigError(f"{label}: got no rows, expected dialogues")
    errors = list[ConfigError]()
    for index in range(min(passes + 1, len(rows))):
        try:
            shape = shape_of(rows[index], given.prompt, given.answer)
        except ConfigError as error:  # counted if it is drawn
            errors.append(error)
        else:
            return _Source(label, rows, shape, given, seed)
    raise errors[0]


def _digest(said: Dialogue) -> str:
    """The digest of the first question, so that two replies to the same one are on one side."""
    first: Sequence[str] = []
    for message in said.messages:
        if message.role == "assistant":
            break
        first = [*first, message.content] if message.role != "system" else first
    return hashlib.sha256(json.dumps(first).encode()).hexdigest()
