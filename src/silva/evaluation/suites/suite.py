"""What a suite of the field is: a preset of one `[[environments]]` entry, and where its rows come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from silva.data.rows import READERS
from silva.errors import ConfigError

Metric = Literal[
    "mathematical equality", "token F1", "exact match", "letter", "judge", "tests", "instructions", "calls",
    "score", "success",
]  # fmt: skip
OTHERS = ("train", "corpus")  # in names of files that are no test split


@dataclass(frozen=True, kw_only=True)
class Suite:
    r"""One row of the table.

    Attributes:
        hub, subset, split: the data set on the Hugging Face hub; `hub` is empty if none can be read there.
        files: names under which the rows are looked for in a folder: NAME/test.jsonl, NAME.jsonl, ...
        url: where people get the rows.
        gate: the step that comes before a download; empty if there is none.
        columns: of prompt and answer in the published rows.
        rows: rows of the published split.
        instructions: what stands before a question.
        tools: what agents are offered in the literature; a suite is plain unless tools are asked for.
        calls: the most calls of each tool in one episode; none if the environment has tools of its own.
        metric: what its headline number measures.
        reward: settings of the reward that measures it; a judge needs the keys of a model besides.
        keys: other keys of the environment.
        place: the keys of the environment that take a file and the id of the data set on the hub.
        beside: further files of a folder that are used if they are there: names by key of the environment.
        packages: modules that rows or graders are in -> the command that installs them.
        inside: the file of rows in the first of them; empty if the environment finds them.
        turns, tokens: room for an episode, so that limits of the suite's own end it, such as `calls`.
    """

    title: str
    citation: str
    licence: str
    metric: Metric
    rows: int
    columns: tuple[str, str]
    hub: str = ""
    subset: str = ""
    split: str = "test"
    files: tuple[str, ...] = ()
    url: str = ""
    gate: str = ""
    instructions: str = ""
    tools: tuple[str, ...] = ()
    calls: Mapping[str, int] = field(default_factory=dict)
    reward: Mapping[str, Any] = field(default_factory=dict)
    type: str = "dataset"
    keys: Mapping[str, Any] = field(default_factory=dict)
    place: tuple[str, str] = ("path", "hub")
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    inside: str = ""
    turns: int = 64
    tokens: int = 8192

    @property
    def judged(self) -> bool:
        """Whether a model grades, so that the settings of one must be given."""
        return self.metric == "judge"

    @property
    def source(self) -> str:
        """In words: the data set on the hub, a package, or an address."""
        if self.packages and not self.hub:
            return f"package {next(iter(self.packages))}"
        return " ".join(filter(None, (self.hub, self.subset, self.split))) if self.hub else self.url

    def where(self) -> str:
        """The part of a message that says how to get the rows and where to put them."""
        known = f" ({self.licence}{'; ' + self.gate if self.gate else ''})"
        return f"get them from {self.url}{known} and put them in DIR/{self.files[0]}/test.jsonl (--data DIR)"


def found(name: str, suite: Suite, names: Sequence[str], data: Path) -> Path | None:
    """The file of these names in a folder; None if there is none.

    Raises:
        ConfigError: several files fit equally well.
    """
    for each in names:
        for pattern in _patterns(each, suite.split):
            files = [
                path
                for path in sorted(data.glob(pattern))
                if path.suffix.lower() in READERS
                and not path.name.startswith(".")
                and not any(other in path.name and other not in each for other in OTHERS)
            ]
            if len(files) > 1:
                shown = ", ".join(str(path.relative_to(data)) for path in files[:4])
                raise ConfigError(
                    f"suite {name}: {data}: got {len(files)} files that may be its rows ({shown}), expected "
                    f"one; give it by its own name, --data {data}/FILE, or as {names[0]}/test.jsonl"
                )
            if files:
                return files[0]
    return None


def _patterns(name: str, split: str) -> list[str]:
    """From the clearest to the vaguest. `math` must not find `math500.jsonl`."""
    whole = [f"{name}/test.*", f"{name}/{split}.*", f"{name}/**/{split}-*", f"{name}.*"]
    return [*whole, f"{name}[-_]test*.*", f"{name}[-_]{split}*.*", f"{name}/*.*", f"{name}[-_]*.*"]
