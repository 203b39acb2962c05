"""The command `silva`. Imports nothing heavy before a command needs it, so help is instant."""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from silva import __version__, signals
from silva.errors import ConfigError, Escaped, NoSignalError, SilvaError, contained
from silva.monitoring.printable import guard_logs, put
from silva.usage import COMMANDS, EXIT_CODES, MEANT, POLICIES, USAGE, VALUES

if TYPE_CHECKING:
    from silva.commands.outcome import Outcome
    from silva.config.load import Resolved
    from silva.config.schema import Registries
    from silva.environments.settings import EnvironmentSettings


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except SilvaError as error:
        put(f"silva: {error}{_place(error) if isinstance(error, Escaped) else ''}", error=True)
        return error.exit_code
    except KeyboardInterrupt as error:
        put(f"silva: interrupted{_place(error)}", error=True)
        return 130
    except BrokenPipeError:  # `silva envs | head -1`: nobody reads on, and nothing is left to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        put(_overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        put(f"silva {__version__}")
        return 0
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        near = [MEANT[command]] if command in MEANT else difflib.get_close_matches(command, COMMANDS, 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(f"unknown command {command!r}{meant}; expected {', '.join(COMMANDS)}")
    for argument, following in itertools.zip_longest(rest, rest[1:], fillvalue=""):
        if argument in ("-h", "--help"):
            put(_help(command, "" if following.startswith(("-", "@")) else following))
            return 0
    from silva.config.dotenv import load_dotenv

    load_dotenv(Path(".env"))
    guard_logs()
    with contained():  # exit(0) in somebody's code is no success of a run
        return _HANDLERS[command](rest)


def _place(error: BaseException) -> str:
    """Where code that is not Silva's ended the run, such as an environment's: " (game.py:12)"."""
    from silva.rollouts.faults import own_place

    place = own_place(error)
    return f" ({place})" if place else ""


def _overview() -> str:
    width = max(map(len, COMMANDS))
    commands = [f"  {name:<{width}}  {summary}" for name, (summary, _) in COMMANDS.items()]
    return "\n".join([
        "usage: silva COMMAND ...", "",
        "commands:", *commands, "",
        "silva COMMAND --help explains one; silva --version says which this is.",
        "example: silva rl @ configs/smoke.toml", "",
        EXIT_CODES,
    ])  # fmt: skip


def _help(command: str, topic: str) -> str:
    summary, example = COMMANDS[command]
    if command in ("rl", "orchestrator", "trainer", "inference", "sft", "eval"):
        from silva.config.help import help_text

        options = USAGE[command].partition("\n\n")[2]
        return help_text(f"silva {command}", summary, example, _registries(), options, topic).rstrip()
    usage = USAGE[command].replace("\nsilva", "\n         silva")
    return f"silva {command}: {summary}\n\nusage:   {usage}\n\nexample: {example}"


def _registries() -> Registries:
    from silva.registries import REGISTRIES

    return REGISTRIES


def _options(arguments: list[str], *flags: str) -> tuple[dict[str, str], list[str]]:
    """Take a command's own options out: (those that were given, everything else in order)."""
    found: dict[str, str] = {}
    rest: list[str] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        flag, equals, value = argument.partition("=")
        if flag not in flags or (equals and flag not in VALUES):
            rest.append(argument)
            continue
        if flag in VALUES and not equals:
            if not waiting or waiting[0].startswith("--"):
                raise ConfigError(f"{flag}: got no value; expected {VALUES[flag]}")
            value = waiting.pop(0)
        found[flag] = value
    return found, rest


def _nothing_more(command: str, rest: list[str], expected: str) -> None:
    if rest:
        raise ConfigError(f"silva {command}: got {' '.join(rest)!r}, expected {expected}")


def _resolve(command: str, arguments: list[str], env: Mapping[str, str] | None = None) -> Resolved:
    from silva.config.load import load

    if not arguments and command != "inference":
        raise ConfigError(
            f"silva {command}: got no configuration; expected one, as in {COMMANDS[command][1]}"
        )
    own = re.findall(r"--[a-z-]+", USAGE[command].partition("\n\n")[2])
    for argument in arguments:
        near = difflib.get_close_matches(argument.partition("=")[0], own, 1, 0.8)
        if near and argument.startswith("--"):
            raise ConfigError(f"silva {command}: got {argument}, an unknown option; did you mean {near[0]}?")
    return load(arguments, _registries(), env=env)


def _train(train: Callable[..., Outcome], resolved: Resolved, **options: bool) -> Outcome | None:
    """The outcome, or None after an interrupt, which says itself what it left behind."""
    from silva.orchestrator.interrupt import Interrupted

    signals.be_caught()
    try:
        return train(resolved, **options)
    except Interrupted:
        return None


def _check_crash_point() -> None:
    """Before anything is written, not at the first crash point the run comes to."""
    if "SILVA_CRASH" in os.environ:
        from silva.ports import crash_setting

        crash_setting()


def _rl(command: str, arguments: list[str]) -> int:
    """`rl` starts the services that the placement asks for; `orchestrator` uses those that run."""
    from silva.config.saved import load_saved, to_toml

    dry_run = ("--dry-run",) if command == "rl" else ()
    found, rest = _options(arguments, *dry_run, "--resume", "--overwrite", "--accept-files")
    if "--accept-files" in found and "--resume" not in found:
        raise ConfigError(
            "--accept-files: it takes files that changed since a run began; expected --resume too"
        )
    saved = load_saved(rest, _registries()) if "--resume" in found else None  # None: it names a file
    resolved = saved or _resolve(command, rest)
    _check_crash_point()
    if "--dry-run" in found:
        from silva.commands.plan import describe, plan_run

        signals.be_caught()
        from silva.orchestrator.interrupt import Interrupted

        try:
            plan = describe(plan_run(resolved.config))
        except Interrupted:  # in the probe's warm start
            raise KeyboardInterrupt from None
        print(to_toml(resolved))
        put("\n".join(f"# {line}" for line in plan.splitlines()))  # so that all of it is TOML
        return 0
    placement = resolved.config.placement
    if command == "rl" and getattr(placement, "starts", False):
        from silva.commands.supervise import supervise
        from silva.storage.layout import Layout

        run = Layout(Path(resolved.config.output_dir) / resolved.config.name)
        own = [] if saved is None else [f"@{run.config_toml}"]  # of a resumed run, which services read too
        return supervise(resolved, [*own, *rest], tuple(found))
    if command == "orchestrator":
        from silva.commands.checks import check_addresses

        check_addresses(placement)
    from silva.commands.train import train

    outcome = _train(
        train,
        resolved,
        resume="--resume" in found,
        overwrite="--overwrite" in found,
        accept_files="--accept-files" in found,
    )
    return 130 if outcome is None else 0 if outcome.trained else NoSignalError.exit_code


def _serve(command: str, arguments: list[str]) -> int:
    flags = ("--weights",) if command == "inference" else ()
    given, rest = _options(arguments, "--host", "--port", "--unix", *flags)
    # A server plays nothing, but a configuration needs an environment: this one is below all layers.
    served = {"SILVA_ENVIRONMENTS": '[{"type": "bandit"}]'} if command == "inference" else {}
    resolved = _resolve(command, _of_run(given.get("--weights"), rest), {**served, **os.environ})
    _check_crash_point()
    from silva.commands import serve as services

    signals.be_caught()
    serve = services.serve_trainer if command == "trainer" else services.serve_inference
    return serve(resolved, given)


def _of_run(weights: str | None, arguments: list[str]) -> list[str]:
    """The command line with the configuration of a run whose weights are given, if it names no file.

    Raises:
        ConfigError: nothing lies at the path.
    """
    if weights is None:
        return arguments
    if not Path(weights).expanduser().exists():
        raise ConfigError(f"--weights {weights}: no such file or folder; expected {VALUES['--weights']}")
    from silva.storage.layout import Layout

    saved = Layout(Path(weights).expanduser()).config_toml
    named = any(argument.startswith("@") for argument in arguments)
    return [f"@{saved}", *arguments] if saved.is_file() and not named else arguments


def _sft(arguments: list[str]) -> int:
    found, rest = _options(arguments, "--overwrite")
    resolved = _resolve("sft", rest)
    _check_crash_point()
    from silva.commands.sft import supervise

    return 130 if _train(supervise, resolved, overwrite="--overwrite" in found) is None else 0


def _eval(arguments: list[str]) -> int:
    found, rest = _options(arguments, "--json", "--weights", "--policy")
    weights, policy = found.get("--weights"), found.get("--policy", "model")
    if policy not in POLICIES:
        raise ConfigError(f"--policy: got {policy!r}, expected {VALUES['--policy']}")
    if weights is not None and policy != "model":
        raise ConfigError(
            f"--weights with --policy {policy}: scripted play uses no weights; give one of them"
        )
    config = _resolve("eval", _of_run(weights, rest)).config
    from silva.commands.evaluate import evaluate_config, print_table
    from silva.evaluation.evaluator import records

    signals.be_caught()
    evaluations = evaluate_config(config, policy=policy, weights=weights)
    rows = records(evaluations)
    code = 0 if any(e.estimates for e in evaluations) else NoSignalError.exit_code
    if "--json" in found:
        put(json.dumps(rows, indent=1))
        return code
    print_table(rows)
    for evaluation in evaluations:
        for note in evaluation.notes():
            put(note)
    return code


def _chat(arguments: list[str]) -> int:
    flags = any(argument.startswith(("-", "@")) for argument in arguments)
    _nothing_more("chat", arguments if flags or len(arguments) > 1 else [], "at most one path")
    from silva.commands.chat import chat

    signals.be_caught()
    return chat(arguments[0] if arguments else None)


def _envs(arguments: list[str]) -> int:
    found, rest = _options(arguments, "--json")
    if rest and rest[0] == "play":
        return _play(rest[1:])
    if rest and rest[0] == "check":
        return _check(rest[1:], as_json="--json" in found)
    _nothing_more("envs", rest, "nothing, --json, play NAME or check NAME")
    from silva.commands.environments import listed, table
    from silva.config.plugins import entry_points

    rows = listed({**entry_points(), **_registries().environments})
    put(json.dumps(rows, indent=1) if "--json" in found else table(rows))
    return 0


def _environment(command: str, arguments: list[str]) -> EnvironmentSettings:
    """The settings of an environment that is named on the command line, with its keys."""
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(f"silva envs {command}: got no name; `silva envs` lists them")
    options = [re.sub("^--(no-)?", r"--\1environments.0.", argument) for argument in arguments[1:]]
    try:
        config = _resolve("envs", [f"--environments.0.type={arguments[0]}", *options]).config
    except ConfigError as error:
        raise ConfigError(str(error).replace("environments.0.", "")) from None
    settings: EnvironmentSettings = config.environments[0]
    return settings


def _play(arguments: list[str]) -> int:
    from silva.commands.environments import play_here

    taskset = _environment("play", arguments).taskset()
    signals.be_caught()
    play_here(taskset)
    return 0


def _check(arguments: list[str], *, as_json: bool) -> int:
    from silva.commands.environments import as_data, shown, sole_environment
    from silva.environments.check.checks import examine

    settings = _environment("check", [*map(sole_environment, arguments[:1]), *arguments[1:]])
    signals.be_caught()
    checks = examine(settings)
    found = as_data(settings.label, checks)
    put(json.dumps(found, indent=1) if as_json else shown(settings.label, checks))
    return 0 if found["ok"] else 1


def _new(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] != "environment":
        raise ConfigError(f"silva new: got {' '.join(arguments)!r}, expected environment NAME")
    from silva.commands.new import write_environment

    for line in write_environment(arguments[1], Path.cwd()):
        put(line)
    return 0


def _demonstrations(arguments: list[str]) -> int:
    found, rest = _options(arguments, "--output", "--min-reward")
    if not rest or rest[0].startswith("-"):
        raise ConfigError("silva demonstrations: got no run; expected its folder")
    _nothing_more("demonstrations", rest[1:], "one folder of a run")
    least = found.get("--min-reward")
    try:
        number = None if least is None else float(least)
    except ValueError:
        raise ConfigError(f"--min-reward: got {least!r}, expected a number") from None
    from silva.commands.demonstrations import write_demonstrations

    output = Path(found["--output"]) if "--output" in found else None
    put(write_demonstrations(Path(rest[0]), output, number))
    return 0


def _attack(arguments: list[str]) -> int:
    found, rest = _options(arguments, "--json", "--data")
    if not rest or rest[0].startswith("-"):
        raise ConfigError(f"silva attack: got no reward; expected one, as in {COMMANDS['attack'][1]}")
    from silva.commands.attack import EXAMPLES, attack, examples_of, reward_of, show

    report = attack(reward_of(rest), examples_of(found["--data"]) if "--data" in found else EXAMPLES)
    put(json.dumps(report.plain(), indent=1) if "--json" in found else show(report))
    return 1 if report.holes else 0


def _doctor(arguments: list[str]) -> int:
    found, rest = _options(arguments, "--json")
    _nothing_more("doctor", rest, "nothing or --json")
    from silva.commands.doctor import examine, show

    findings = examine()
    put(json.dumps(findings, indent=1) if "--json" in found else show(findings))
    return 0


def _schema(arguments: list[str]) -> int:
    _nothing_more("schema", arguments, "no arguments")
    from silva.config.schema_json import json_schema

    put(json.dumps(json_schema(_registries()), indent=1))
    return 0


def _diff(arguments: list[str]) -> int:
    found, rest = _options(arguments, "--json")
    if len(rest) != 2:
        raise ConfigError(f"silva diff: got {len(rest)} folders, expected two runs to compare")
    from silva.config.diff import diff, format_diff

    a, b = (Path(each).expanduser() for each in rest)
    put(format_diff(diff(a, b, _registries()), rest[0], rest[1], as_json="--json" in found))
    return 0


_HANDLERS: dict[str, Callable[[list[str]], int]] = {
    "rl": partial(_rl, "rl"),
    "orchestrator": partial(_rl, "orchestrator"),
    "trainer": partial(_serve, "trainer"),
    "inference": partial(_serve, "inference"),
    "sft": _sft,
    "eval": _eval,
    "chat": _chat,
    "envs": _envs,
    "new": _new,
    "demonstrations": _demonstrations,
    "attack": _attack,
    "doctor": _doctor,
    "schema": _schema,
    "diff": _diff,
}
