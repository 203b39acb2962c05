"""Settings of rows: for environments that read them, and of supervised training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from silva.config.sections import Above0, Natural, NotNegative, Positive, Section
from silva.types import Role

if TYPE_CHECKING:
    from silva.data.rows import Row


class HubRows(Section):
    subset: str = ""
    """Of the data set on the hub."""
    split: str = "train"
    """Of the data set on the hub."""


class GivenRows(HubRows):
    """Rows from one source of three."""

    rows_needed: ClassVar[bool] = True

    path: str = ""
    """File of rows, or a folder of such files: .jsonl, .json, .csv, .tsv, .parquet."""
    hub: str = ""
    """Data set on the Hugging Face hub, in place of `path`: "openai/gsm8k"."""
    rows: tuple[Mapping[str, Any], ...] = ()
    """The rows themselves, in place of `path`."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        given = [key for key in ("path", "hub", "rows") if getattr(self, key)]
        if len(given) > 1 or (self.rows_needed and not given):
            raise ValueError(f"expected one of path, hub and rows, got {' and '.join(given) or 'none'}")
        return self

    def read(self) -> Iterator[Row]:
        from silva.data.rows import Row, read_rows

        if self.rows:
            return (Row(f"rows[{i}]", values) for i, values in enumerate(self.rows))
        return read_rows(self.path or self.hub, split=self.split, subset=self.subset)


class FirstRows(HubRows):
    """The first rows of a file, folder or data set on the hub, in place of tasks that are made up."""

    path: str = ""
    rows: Positive = 20_000
    """The first rows of it that are used."""

    def read(self) -> Iterator[Row]:
        from silva.data.rows import read_rows

        return itertools.islice(read_rows(self.path, split=self.split, subset=self.subset), self.rows)


class SupervisedSource(GivenRows):
    weight: Above0 = 1.0
    """How often each of its rows comes in an epoch: 2.0 twice, 0.5 in every second epoch."""
    prompt: str = ""
    """Where prompt or dialogue stand in a row: "question", or dotted "a.b"; recognised if empty."""
    answer: str = ""
    """Where the reply to it stands, if it is no part of it; recognised if empty."""
    weigh_by: str = ""
    """Where a number from 0 on stands by which the loss of a row is multiplied, such as "reward" or
    "advantage" of `silva convert RUN --to messages`; null counts as 0. If empty, all rows weigh the same."""


class SupervisedData(Section):
    """What supervised training learns from: docs/sft.md shows the shapes of rows."""

    sources: Annotated[tuple[SupervisedSource, ...], Field(min_length=1)]
    """Where the dialogues are: a list of tables, [[data.sources]]."""
    roles: Annotated[tuple[Role, ...], Field(min_length=1)] = ("assistant",)
    """The roles that are trained: "assistant", "user", "system", "tool"."""
    turns: Literal["all", "last"] = "all"
    """Train every reply of a dialogue, or its last one."""
    max_tokens: Positive = 4096
    """Tokens of the longest row."""
    too_long: Literal["truncate", "drop"] = "truncate"
    """What happens to longer rows: their end is cut off, or they are left out. Both are counted."""
    max_bad_rows: Natural = 0
    """So many rows that cannot be read are left out and counted; the next one ends the run."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the prompts that is held out. Rows with the same prompt are on one side."""
    validation_path: str = ""
    """File or folder of rows that are held out, in place of a share. Training rows with their prompts are
    left out."""
    validation_rows: Positive = 512
    """The most dialogues that a validation uses."""
    dialogues_per_step: Positive = 32
    """Dialogues of an update."""
    epochs: Above0 | None = None
    """Passes over all sources, which decide how many steps there are; null: `steps` of the run."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean"] = "token_mean"
    """What counts the same in an update: every token of the replies, or every row."""
    weighting: Literal["none", "dft"] = "none"
    """`dft`: each token of the replies weighs its own probability (arXiv:2508.05629)."""
    early_stop: Natural = 0
    """Evaluations in a row (`eval.every`) without a better one after which training ends; 0: never."""
    mix: NotNegative = 0.0
    """`silva rl`: the weight of the cross-entropy of a batch of these rows in every update; 0: without."""

    @model_validator(mode="after")
    def _holds_out_once(self) -> Self:
        if self.validation and self.validation_path:
            raise ValueError("expected one of validation and validation_path, got both")
        if len(set(self.roles)) < len(self.roles):
            raise ValueError(f"roles: got {', '.join(self.roles)}, expected each role once")
        return self
