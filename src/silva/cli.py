"""The command `silva`. Imports nothing heavy before a command needs it, so help is instant."""

from __future__ import annotations

import difflib
import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from silva import __version__
from silva.commands import COMMANDS
from silva.commands.command import CONFIGURED
from silva.errors import ConfigError, Escaped, SilvaError, contained
from silva.monitoring.printable import flush, guard_logs, put
from silva.signals import Interrupted

EXIT_CODES = (
    "Exit codes: 0 done, 1 the run failed, 2 the input was wrong, 3 training gave up or taught nothing, "
    "130 interrupted."
)
# What other tools call the commands.
ALIASES = {"synthesize": "synth"}
MEANT = {"train": "rl", "grpo": "rl", "evaluate": "eval", "play": "envs play"}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(arguments)
        flush()
        return code
    except SilvaError as error:
        put(f"silva: {error}{_place(error) if isinstance(error, Escaped) else ''}", error=True)
        return error.exit_code
    except Interrupted:  # which has said itself what it left behind
        return 130
    except KeyboardInterrupt as error:
        put(f"silva: interrupted{_place(error)}", error=True)
        return 130
    except BrokenPipeError:  # `silva envs | head -1`: nobody reads on
        return 0


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        put(_overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        put(f"silva {__version__}")
        return 0
    name, rest = ALIASES.get(arguments[0], arguments[0]), arguments[1:]
    if name not in COMMANDS:
        near = [MEANT[name]] if name in MEANT else difflib.get_close_matches(name, COMMANDS, 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(f"unknown command {name!r}{meant}; expected {', '.join(COMMANDS)}")
    for argument, following in itertools.zip_longest(rest, rest[1:], fillvalue=""):
        if argument in ("-h", "--help"):
            put(_help(name, "" if following.startswith(("-", "@")) else following))
            return 0
    from silva.config.dotenv import load_dotenv

    load_dotenv(Path(".env"))
    guard_logs()
    if "SILVA_CRASH" in os.environ:  # refused before anything is written, not at the first crash point
        from silva.ports import crash_setting

        crash_setting()
    command = COMMANDS[name]
    given = command.read(name, rest)
    module, _, function = command.run.partition(":")
    with contained():  # exit(0) in somebody's code is no success of a run
        code: int = getattr(importlib.import_module(module), function)(given)
    return code


def _place(error: BaseException) -> str:
    """Where code that is not Silva's ended the run, such as an environment's: " (game.py:12)"."""
    from silva.rollouts.faults import own_place

    place = own_place(error)
    return f" ({place})" if place else ""


def _overview() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join([
        "usage: silva COMMAND ...", "",
        "commands:", *(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()), "",
        "silva COMMAND --help explains one; silva --version says which this is.",
        "example: silva rl @ configs/smoke.toml", "",
        EXIT_CODES,
    ])  # fmt: skip


def _help(name: str, topic: str) -> str:
    command = COMMANDS[name]
    if CONFIGURED not in command.usage:
        return command.help(name)
    from silva.config.help import help_text
    from silva.registries import REGISTRIES

    return help_text(f"silva {name}", command.help(name), REGISTRIES, topic).rstrip()
