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
        from silva.commands.plan import describe, plan_run
        from silva.config.saved import to_toml

        signals.be_caught()
        try:
            plan = describe(plan_run(config))
        except signals.Interrupted:  # in the probe's warm start
            raise KeyboardInterrupt from None
        print(to_toml(resolved))
        put("\n".join(f"# {line}" for line in plan.splitlines()))  # so that all of it is TOML
        return 0
    if config.placement.starts:
        from silva.commands.supervise import supervise

        run = Layout(Path(config.output_dir) / config.name)
        own = [f"@{run.config_toml}"] if saved else []  # of a resumed run, which services read too
        return supervise(resolved, [*own, *given.rest], tuple(given.options))
    from silva.commands.train import train

    return _trained(train, resolved, given)


def _rl_of_seeds(given: Given) -> int:
    from silva.commands.seeds import resolved_seeds, train_seeds

    if "--dry-run" in given:
        raise ConfigError(
            "--seeds and --dry-run: got both; expected --dry-run with --seed, a plan of one run"
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


def evaluate(given: Given) -> int:
    if "--list" in given:
        from silva.commands.suites import list_suites

        return list_suites(given)
    if given.rest[:1] == ["compare"]:
        from silva.commands.compare import run as compare

        return compare(given)
    if given.rest[:1] == ["export"]:
        from silva.commands.export_log import run as export

        return export(given)
    if "--regrade" in given:
        from silva.commands.regrade import run as regrade

        return regrade(given)
    from silva.commands.asked import asked
    from silva.commands.evaluate import evaluate, report

    what = asked(given)
    signals.be_caught()
    return report(evaluate(what), what, as_json="--json" in given)


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
