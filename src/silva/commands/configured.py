"""Commands that take a configuration: each reads it and then imports what it needs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from silva import signals
from silva.commands.command import Given
from silva.commands.common import existing, run_config
from silva.config.load import Resolved
from silva.errors import ConfigError, NoSignalError
from silva.monitoring.printable import put
from silva.registries import REGISTRIES
from silva.storage.layout import Layout


def rl(given: Given) -> int:
    """Starts the services that the placement asks for; `orchestrator` uses those that run."""
    if "--seeds" in given:
        return _rl_of_seeds(given)
    resolved, saved = _begun_or_new(given)
    config = resolved.config
    if "--dry-run" in given:
        return _rl_planned(resolved, given)
    if "--probe" in given:
        raise ConfigError("--probe: got no --dry-run; expected both, a plan with what a step will take")
    if config.placement.starts:
        from silva.commands.supervise import supervise

        run = Layout(Path(config.output_dir) / config.name)
        own = [f"@{run.config_toml}"] if saved else []  # of a resumed run, which services read too
        return supervise(resolved, [*own, *given.rest], tuple(given.options))
    from silva.commands.train import train

    return _trained(train, resolved, given)


def _rl_planned(resolved: Resolved, given: Given) -> int:
    from silva.commands.plan import describe, plan_run

    def plan() -> tuple[Resolved, str]:
        if "--probe" not in given:
            return resolved, describe(plan_run(resolved.config))
        from silva.commands.foretelling.probe import foretell, planned

        foretold = foretell(resolved.config, _seconds(given))
        return planned(resolved, foretold), describe(plan_run(resolved.config), foretold)

    return _planned(plan)


def _seconds(given: Given) -> float:
    text = given.options["--probe"]
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"--probe: got {text}, expected a number of seconds above 0")
    return seconds


def _planned(plan: Callable[[], tuple[Resolved, str]]) -> int:
    """Print the configuration that a plan gives, and its words; nothing is written."""
    from silva.config.saved import to_toml

    signals.be_caught()
    try:
        resolved, said = plan()
    except signals.Interrupted:  # in the probe's warm start
        raise KeyboardInterrupt from None
    print(to_toml(resolved))
    put("\n".join(f"# {line}" for line in said.splitlines()))  # so that all of it is TOML
    return 0


def _rl_of_seeds(given: Given) -> int:
    from silva.commands.seeds import resolved_seeds, train_seeds

    for flag in ("--dry-run", "--probe"):
        if flag in given:
            raise ConfigError(
                f"--seeds and {flag}: got both; expected --dry-run with --seed, a plan of one run"
            )
    runs = resolved_seeds(given, lambda one: _begun_or_new(one)[0])
    signals.be_caught()
    outcomes = train_seeds(runs, **_flags(given))
    return 0 if all(each.trained for each in outcomes) else NoSignalError.exit_code


def orchestrator(given: Given) -> int:
    from silva.commands.checks import check_addresses
    from silva.commands.train import train

    resolved, _ = _begun_or_new(given)
    check_addresses(resolved.config.placement)
    if "--probe" in given:
        from silva.commands.foretelling.probe import play

        signals.be_caught()
        play(resolved, _seconds(given))
        return 0
    return _trained(train, resolved, given)


def _begun_or_new(given: Given) -> tuple[Resolved, bool]:
    """The configuration, and whether it is the one that a run was saved with."""
    from silva.config.saved import load_saved

    if "--accept-files" in given and "--resume" not in given:
        raise ConfigError(
            "--accept-files: it takes files that changed since a run began; expected --resume too"
        )
    saved = load_saved(given.rest, REGISTRIES) if "--resume" in given else None  # None: it names a file
    return saved or given.resolve(given.rest), saved is not None


def _trained(train: Callable[..., Any], resolved: Resolved, given: Given) -> int:
    signals.be_caught()
    outcome = train(resolved, **_flags(given))
    return 0 if outcome.trained else NoSignalError.exit_code


def _flags(given: Given) -> dict[str, Any]:
    return {flag: f"--{flag.replace('_', '-')}" in given for flag in ("resume", "overwrite", "accept_files")}


def sft(given: Given) -> int:
    if "--max-bad-rows" in given:
        given.rest.append(f"--data.max_bad_rows={given.options['--max-bad-rows']}")
    resolved, _ = _begun_or_new(given)
    if "--dry-run" in given:
        from silva.commands.plan_sft import describe, plan_supervised

        return _planned(lambda: (resolved, describe(plan_supervised(resolved.config))))
    from silva.commands.sft import supervise

    return _trained(supervise, resolved, given)


def trainer(given: Given) -> int:
    resolved = given.resolve(given.rest)
    from silva.commands.serve import serve_trainer

    signals.be_caught()
    return serve_trainer(resolved, given.options)


def inference(given: Given) -> int:
    # A server plays nothing, but a configuration needs an environment: this one is below all layers.
    env = {"SILVA_ENVIRONMENTS": '[{"type": "bandit"}]', **os.environ}
    weights = given.options.get("--weights")
    own = run_config(existing("--weights", weights), given.rest) if weights is not None else []
    resolved = given.resolve([*own, *given.rest], env)
    from silva.commands.serve import serve_inference

    signals.be_caught()
    return serve_inference(resolved, given.options)


_PLAY, _REGRADE = "", "--regrade"
_FORMS = {
    "--list": ("--list",),
    "--shared": ("compare",),
    "--to": ("export",),
    "--output": ("compare", "export"),
    "--json": (_PLAY, "--list", "compare", _REGRADE),
    "--reward": (_REGRADE,),
    "--split": (_REGRADE,),
}
"""Forms of `silva eval` that have an option, if these are not `_PLAYED`."""
_PLAYED = (_PLAY, _REGRADE)  # where it may be a key of a reward


def evaluate(given: Given) -> int:
    word = given.rest[0] if given.rest[:1] in (["compare"], ["export"]) else _PLAY
    form = word or next((flag for flag in ("--list", _REGRADE) if flag in given), _PLAY)
    for flag in given.options:
        forms = _FORMS.get(flag, _PLAYED)
        if form not in forms:
            expected = " or ".join(
                "a model that plays" if each == _PLAY else f"silva eval {each}" for each in forms
            )
            raise ConfigError(f"{flag}: no option of {f'silva eval {form}'.strip()}; expected {expected}")
    if form == "--list":
        return _list_suites(given)
    if form == "compare":
        from silva.commands.compare import run as compare

        return compare(given)
    if form == "export":
        from silva.commands.export_log import run as export

        return export(given)
    if form == _REGRADE:
        from silva.commands.regrade import run as regrade

        return regrade(given)
    from silva.commands.asked import asked
    from silva.commands.evaluate import evaluate, report

    what = asked(given)
    signals.be_caught()
    return report(evaluate(what), what, as_json="--json" in given)


def _list_suites(given: Given) -> int:
    from silva.evaluation.suites import rows

    given.only(0, "no more than --list and --json")
    found = rows()
    if "--json" in given:
        put(json.dumps(found, indent=1))
        return 0
    width = max(len(row["name"]) for row in found)
    for row in found:
        gate = f"; {row['gate']}" if row["gate"] else ""
        put(f"{row['name']:<{width}}  {row['rows']:>6,} rows  {row['metric']}, {row['licence']}{gate}")
        put(f"{'':<{width}}  {row['title']}: {row['source']}")
    return 0


def synthesize(given: Given) -> int:
    from silva.commands.asked import asked
    from silva.commands.synth import report, synthesize

    what = asked(given)
    signals.be_caught()
    return report(synthesize(what), what, as_json="--json" in given)


def schema(given: Given) -> int:
    given.only(0, "no arguments")
    from silva.config.schema_json import json_schema

    put(json.dumps(json_schema(REGISTRIES), indent=1))
    return 0


def diff(given: Given) -> int:
    if len(given.rest) != 2:
        raise ConfigError(f"silva diff: got {len(given.rest)} folders, expected two runs to compare")
    from silva.config.diff import diff, format_diff

    a, b = (Path(each).expanduser() for each in given.rest)
    put(format_diff(diff(a, b, REGISTRIES), *given.rest, as_json="--json" in given))
    return 0
