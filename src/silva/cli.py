"""The command `silva`. Imports nothing heavy before a command needs it, so help is instant.

Exit codes: 0 done, 1 the run failed, 2 the input was wrong, 3 training gave up, 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from silva import __version__
from silva.errors import ConfigError, SilvaError

if TYPE_CHECKING:
    from silva.config.load import Resolved
    from silva.config.schema import Registries

COMMANDS: dict[str, tuple[str, str]] = {
    "rl": ("Train with reinforcement learning.", "silva rl @ configs/quickstart.toml --steps 20"),
    "sft": (
        "Only the supervised warm start of a configuration.",
        "silva sft @ configs/frozen_lake_tiny.toml",
    ),
    "eval": ("Evaluate on held-out tasks.", "silva eval @ configs/quickstart.toml --weights runs/quickstart"),
    "chat": ("Talk to a model or to a run's weights.", "silva chat runs/quickstart"),
    "envs": ("List environments, or play one yourself.", "silva envs play frozen_lake"),
    "doctor": ("Say what this machine has and what is missing.", "silva doctor"),
    "schema": ("Print the JSON Schema of configuration files.", "silva schema > silva.schema.json"),
    "diff": ("Compare the configurations of two runs.", "silva diff runs/a runs/b"),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except SilvaError as error:
        print(f"silva: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("silva: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"silva {__version__}")
        return 0
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(command, COMMANDS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown command {command!r}{hint} Commands: {', '.join(COMMANDS)}")
    if "-h" in rest or "--help" in rest:
        print(_help(command))
        return 0
    from silva.config.dotenv import load_dotenv

    load_dotenv(Path(".env"))
    return _HANDLERS[command](rest)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (summary, _) in COMMANDS.items()]
    return "\n".join(
        ["usage: silva COMMAND ...", "", __doc__.splitlines()[2], "", "commands:", *lines, "", "silva COMMAND --help explains one."]
    )  # fmt: skip


def _help(command: str) -> str:
    summary, example = COMMANDS[command]
    options = OPTIONS.get(command, "")
    if command in ("rl", "sft", "eval"):
        from silva.config.help import help_text

        return help_text(command, summary + options, example, _registries())
    return f"usage: silva {command} ...\n\n{summary}{options}\n\nexample: {example}"


OPTIONS = {
    "rl": """

options:
  --dry-run    print the resolved configuration and the plan in numbers, then stop
  --resume     go on with the run in output_dir/name from its last checkpoint
  --overwrite  remove the run in output_dir/name first""",
    "sft": "\n\noptions:\n  --overwrite  remove the run in output_dir/name first",
    "eval": """

options:
  --weights PATH   a run's folder or a model folder, in place of [model]
  --policy WHO     model (default), expert or random: who plays
  --json           print the result as JSON""",
    "envs": """

silva envs [--json]            list them
silva envs play NAME [--key value ...]   play an episode (NAME may be file.py:Class)""",
    "diff": "\n\nsilva diff RUN_A RUN_B [--json]",
    "doctor": "\n\nsilva doctor [--json]",
    "chat": """

silva chat [PATH]   a run's folder or a model folder; the packaged model where none is given""",
}


def _registries() -> Registries:
    from silva.registries import REGISTRIES

    return REGISTRIES


def _resolve(arguments: list[str]) -> Resolved:
    from silva.config.load import load

    return load(arguments, _registries())


def _take(arguments: list[str], *flags: str) -> tuple[set[str], list[str]]:
    from silva.config.command_line import split_options

    return split_options(arguments, set(flags))


def _take_value(arguments: list[str], flag: str) -> tuple[str | None, list[str]]:
    for i, argument in enumerate(arguments):
        if argument == flag:
            if i + 1 == len(arguments):
                raise ConfigError(f"{flag} needs a value")
            return arguments[i + 1], arguments[:i] + arguments[i + 2 :]
        if argument.startswith(flag + "="):
            return argument[len(flag) + 1 :], arguments[:i] + arguments[i + 1 :]
    return None, arguments


def _rl(arguments: list[str]) -> int:
    found, rest = _take(arguments, "--dry-run", "--resume", "--overwrite")
    resolved = _resolve(rest)
    if "--dry-run" in found:
        from silva.config.saved import to_toml
        from silva.plan import describe, plan_run

        print(to_toml(resolved))
        print(describe(plan_run(resolved.config)))
        return 0
    from silva.launch import train
    from silva.orchestrator.interrupt import Interrupted

    try:
        train(resolved, resume="--resume" in found, overwrite="--overwrite" in found)
    except Interrupted:
        return 130
    return 0


def _sft(arguments: list[str]) -> int:
    found, rest = _take(arguments, "--overwrite")
    from silva.launch import supervise
    from silva.orchestrator.interrupt import Interrupted

    try:
        supervise(_resolve(rest), overwrite="--overwrite" in found)
    except Interrupted:
        return 130
    return 0


def _eval(arguments: list[str]) -> int:
    found, rest = _take(arguments, "--json")
    weights, rest = _take_value(rest, "--weights")
    policy, rest = _take_value(rest, "--policy")
    from silva.launch import evaluate_config

    evaluations = evaluate_config(_resolve(rest).config, policy=policy or "model", weights=weights)
    rows = [row for e in evaluations for row in e.rows()]
    if "--json" in found:
        print(json.dumps(rows, indent=1))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("environment", "metric", "mean", "95 % interval", "n")
    for row in rows:
        table.add_row(row["environment"], row["metric"], f"{row['mean']:.3f}",
                      f"[{row['ci_low']:.3f}, {row['ci_high']:.3f}]", str(row["n"]))  # fmt: skip
    Console().print(table)
    for e in evaluations:
        if e.failed:
            print(f"{e.environment}: {e.failed} of {len(e.episodes)} episodes failed and are left out")
    return 0


def _chat(arguments: list[str]) -> int:
    from silva.chat import chat

    if len(arguments) > 1:
        raise ConfigError(f"silva chat takes one path at most, got {' '.join(arguments)}")
    return chat(arguments[0] if arguments else None)


def _envs(arguments: list[str]) -> int:
    found, rest = _take(arguments, "--json")
    if rest and rest[0] == "play":
        return _play(rest[1:])
    if rest:
        raise ConfigError(f"silva envs: got {' '.join(rest)!r}, expected nothing, --json, or play NAME")
    from silva.config.plugins import entry_points
    from silva.config.schema import import_settings

    targets = {**_registries().environments, **entry_points()}
    rows = []
    for name, target in targets.items():
        about = (import_settings(target).__doc__ or "").strip().splitlines()
        rows.append({"name": name, "about": about[0] if about else "", "settings": target})
    if "--json" in found:
        print(json.dumps(rows, indent=1))
        return 0
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:<{width}}  {row['about']}")
    return 0


def _play(arguments: list[str]) -> int:
    import asyncio
    from random import randrange

    if not arguments:
        raise ConfigError("silva envs play: got no name; `silva envs` lists them")
    from silva.environments.play import play

    options = [a.replace("--", "--environments.0.", 1) if a.startswith("--") else a for a in arguments[1:]]
    config = _resolve([f"--environments.0.type={arguments[0]}", *options]).config
    taskset = config.environments[0].taskset()
    tasks = taskset.tasks("train")
    try:
        asyncio.run(play(taskset, tasks[randrange(len(tasks))], input, print))
    except EOFError:
        print()
    return 0


def _doctor(arguments: list[str]) -> int:
    found, rest = _take(arguments, "--json")
    if rest:
        raise ConfigError(f"silva doctor: got {' '.join(rest)!r}, expected nothing or --json")
    from silva.doctor import examine, show

    findings = examine()
    print(json.dumps(findings, indent=1) if "--json" in found else show(findings))
    return 0


def _schema(arguments: list[str]) -> int:
    if arguments:
        raise ConfigError(f"silva schema takes no arguments, got {' '.join(arguments)}")
    from silva.config.schema_json import json_schema

    print(json.dumps(json_schema(_registries()), indent=1))
    return 0


def _diff(arguments: list[str]) -> int:
    found, rest = _take(arguments, "--json")
    if len(rest) != 2:
        raise ConfigError(f"silva diff takes two run folders, got {len(rest)}")
    from silva.config.diff import diff, format_diff

    a, b = map(Path, rest)
    print(format_diff(diff(a, b), rest[0], rest[1], as_json="--json" in found))
    return 0


_HANDLERS: dict[str, Callable[[list[str]], int]] = {
    "rl": _rl,
    "sft": _sft,
    "eval": _eval,
    "chat": _chat,
    "envs": _envs,
    "doctor": _doctor,
    "schema": _schema,
    "diff": _diff,
}

if __name__ == "__main__":
    sys.exit(main())
