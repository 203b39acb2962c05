"""What a command is: a record from which its help is written, its options are read and it is called."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from silva.errors import ConfigError

if TYPE_CHECKING:
    from silva.config.load import Resolved

WIDTH = 110
CONFIGURED = "[@ file.toml ...] [--section.key value ...]"


@dataclass(frozen=True)
class Option:
    """`value`: how help calls what follows it, and `expected` how an error does; "" for a flag alone."""

    flag: str
    about: str
    value: str = ""
    expected: str = ""


@dataclass(frozen=True)
class Command:
    """`run`: the "module:function" that takes `Given` and returns an exit code, imported when it is called.
    `usage` and `example` follow "silva NAME"; `words`: what else stands in the usage, and its meaning."""

    summary: str
    example: str
    run: str
    options: tuple[Option, ...] = ()
    usage: tuple[str, ...] = (CONFIGURED,)
    words: Mapping[str, str] = field(default_factory=dict)
    details: str = ""

    def help(self, name: str) -> str:
        options = {f"{each.flag} {each.value}".rstrip(): each.about for each in self.options}
        rows = {**self.words, **options}
        width = max(map(len, rows), default=0) + 2
        usage = "\n         ".join(f"silva {name} {form}".rstrip() for form in self.usage)
        parts = [
            f"silva {name}: {self.summary}",
            f"usage:   {usage}\nexample: silva {name} {self.example}",
            "\n".join(
                textwrap.fill(f"  {word:<{width}}{about}", WIDTH, subsequent_indent=" " * (width + 2))
                for word, about in rows.items()
            ),
            self.details,
        ]
        return "\n\n".join(filter(None, parts))

    def read(self, name: str, arguments: Sequence[str]) -> Given:
        known = {each.flag: each for each in self.options}
        found, rest, waiting = dict[str, str](), list[str](), list(arguments)
        while waiting:
            argument = waiting.pop(0)
            flag, equals, value = argument.partition("=")
            option = known.get(flag)
            if option is None or (equals and not option.value):
                rest.append(argument)
                continue
            if option.value and not equals:
                if not waiting or waiting[0].startswith("--"):
                    raise ConfigError(f"{flag}: got no value; expected {option.expected}")
                value = waiting.pop(0)
            found[flag] = value
        return Given(name, self, found, rest)


@dataclass(frozen=True)
class Given:
    """A command line: the command's own options, with their values, and everything else in order."""

    name: str
    command: Command
    options: Mapping[str, str]
    rest: list[str]

    def __contains__(self, flag: str) -> bool:
        return flag in self.options

    def only(self, most: int, expected: str) -> None:
        """Refuse flags, files and more than so many words."""
        if len(self.rest) > most or any(each.startswith(("-", "@")) for each in self.rest):
            raise ConfigError(f"silva {self.name}: got {' '.join(self.rest)!r}, expected {expected}")

    def first(self, missing: str) -> str:
        """The word that the command is about."""
        if not self.rest or self.rest[0].startswith("-"):
            raise ConfigError(f"silva {self.name}: got no {missing}")
        return self.rest[0]

    def resolve(self, arguments: Sequence[str], env: Mapping[str, str] | None = None) -> Resolved:
        """The configuration that the arguments give."""
        from silva.config.load import load
        from silva.config.schema import RunConfig
        from silva.registries import REGISTRIES

        if not arguments and self.name not in ("inference", "serve"):
            raise ConfigError(
                f"silva {self.name}: got no configuration; expected one, as in "
                f"silva {self.name} {self.command.example}"
            )
        own = [each.flag for each in self.command.options]
        for argument in arguments:
            near = difflib.get_close_matches(argument.partition("=")[0], own, 1, 0.8)
            key = re.split(r"[.=]", argument.removeprefix("--"))[0].replace("-", "_")
            if near and argument.startswith("--") and key not in RunConfig.model_fields:
                raise ConfigError(
                    f"silva {self.name}: got {argument}, an unknown option; did you mean {near[0]}?"
                )
        return load(arguments, REGISTRIES, env=env)
