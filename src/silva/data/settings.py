"""Settings of rows, for environments that read them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from pydantic import model_validator

from silva.config.sections import Positive, Section
from silva.data.rows import Row, read_rows


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
        if self.rows:
            return (Row(f"rows[{i}]", values) for i, values in enumerate(self.rows))
        return read_rows(self.path or self.hub, split=self.split, subset=self.subset)


class FirstRows(HubRows):
    """The first rows of a file, folder or data set on the hub, in place of tasks that are made up."""

    path: str = ""
    rows: Positive = 20_000
    """The first rows of it that are used."""

    def read(self) -> Iterator[Row]:
        return itertools.islice(read_rows(self.path, split=self.split, subset=self.subset), self.rows)
