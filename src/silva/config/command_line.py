"""The command line as a list of files and one layer of values. Knows no keys: checking comes later."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from silva.config.layers import Layer, Text, insert, read_text, split_path
from silva.errors import ConfigError


def split_options(argv: Sequence[str], flags: Collection[str]) -> tuple[set[str], list[str]]:
    """Take a command's own flags out: (those of `flags` that were given, everything else in order).

    Args:
        flags: as typed, dashes included: {"--resume", "--dry-run", "-h"}.
    """
    found = {argument for argument in argv if argument in flags}
    return found, [argument for argument in argv if argument not in flags]


def parse_arguments(argv: Sequence[str]) -> tuple[list[str], Layer]:
    """Read `@ a.toml @b.toml --a.b value --a.b=value --flag --no-flag`.

    Returns:
        the files in order, and one layer in which later arguments win over earlier ones.
    """
    files: list[str] = []
    layer = Layer()
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if argument.startswith("@"):
            file = argument[1:] or (rest.pop(0) if rest and _is_value(rest[0]) else "")
            if not file:
                raise ConfigError("@ needs a file name, as in @ run.toml")
            files.append(file)
        elif argument.startswith("--") and len(argument) > 2:
            flag, equals, text = argument.partition("=")
            _check_flag(flag)
            path = split_path(flag[2:])
            if equals:
                value = read_text(text)
            elif rest and _is_value(rest[0]) and not flag.startswith("--no-"):
                value = read_text(rest.pop(0))
            else:
                value = Text("true", True, bare=True)
                if flag.startswith("--no-"):
                    path, value = split_path(flag[5:]), Text("false", False, bare=True)
            insert(layer, path, value, flag)
        else:
            hint = f"; a file is given as @ {argument}" if argument.endswith(".toml") else ""
            raise ConfigError(f"unexpected argument {argument!r}: expected @ file.toml or --key value{hint}")
    return files, layer


def _is_value(argument: str) -> bool:
    return not argument.startswith(("--", "@"))


def _check_flag(flag: str) -> None:
    if any(not part for part in flag[2:].split(".")):
        raise ConfigError(f"{flag}: not a key; expected a form like --trainer.optimizer.lr")
