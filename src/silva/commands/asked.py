"""What a command line of `silva eval` or `silva synth` asks for: a configuration, models, a folder.

    @ FILE.toml, a run's own config.toml, suites        -> the configuration
    --weights RUN@step_200, --weights-dir DIR, --model  -> the models, by step
    --api deepseek --model deepseek-chat                -> [engine]

What stands on the command line as --section.key overrides all of it. Not here: playing, and what is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from silva.commands import POLICIES
from silva.commands.command import Given
from silva.commands.common import existing, run_config
from silva.commands.kept import folder_name
from silva.config.field_types import plain
from silva.config.inputs import digest, input_files
from silva.config.load import Resolved
from silva.config.schema import RunConfig
from silva.config.sections import Model, PretrainedModel
from silva.errors import ConfigError
from silva.models.loading import name_of
from silva.models.sources import pinned, run_of, series, weight_files

APIS: Mapping[str, Mapping[str, str]] = {
    "openai": {"type": "openai", "base_url": "https://api.openai.com/v1", "key_variable": "OPENAI_API_KEY"},
    "anthropic": {"type": "anthropic"},
    "deepseek": {"type": "openai", "base_url": "https://api.deepseek.com/v1",
                 "key_variable": "DEEPSEEK_API_KEY", "limit_name": "max_tokens"},
    "together": {"type": "openai", "base_url": "https://api.together.xyz/v1",
                 "key_variable": "TOGETHER_API_KEY", "limit_name": "max_tokens"},
    "openrouter": {"type": "openai", "base_url": "https://openrouter.ai/api/v1",
                   "key_variable": "OPENROUTER_API_KEY", "limit_name": "max_tokens"},
}  # fmt: skip
"""Keys of [engine] for the APIs that `--api` knows by name."""
TURN_TOKENS = 1024
"""Room for a reply to a suite, which is longer than those of the small worlds."""
WITH_TOOLS = 32_768
"""Room for an episode with tools: 15 results of 2,000 characters, and a reply after each."""


@dataclass(frozen=True)
class EvalRequest:
    """One evaluation.

    models: what plays, by step of its weights; 0 if these belong to no step.
    names: what people call these models, by step.
    run: the folder of the run that made the weights.
    name: the given name of the folder of the results; "" if models and tasks make it.
    """

    resolved: Resolved
    models: Mapping[int, Model]
    names: Mapping[int, str]
    policy: str = "model"
    run: Path | None = None
    name: str = ""
    overwrite: bool = False

    @property
    def config(self) -> RunConfig:
        return self.resolved.config

    def config_of(self, step: int) -> RunConfig:
        return self.config.model_copy(update={"model": self.models[step]})

    @property
    def _loads(self) -> bool:
        """Whether a model of [model] plays."""
        return self.policy == "model" and not self.config.engine.remote

    @property
    def model(self) -> dict[str, Any]:
        """Keys of [model] beside its name: sizes of a random model, the type that it computes in."""
        keys = self.resolved.data["model"] if self._loads else {}
        return {key: value for key, value in keys.items() if key != "name"}

    @property
    def weights(self) -> dict[str, str]:
        """Digests of the files of the models."""
        if not self._loads:
            return {}
        names = {getattr(model, "name", "") for model in self.models.values()}
        return {str(file): digest(file) for name in sorted(names) for file in weight_files(name)}

    @property
    def files(self) -> dict[str, str]:
        """Digests of the other files that the configuration points at."""
        return input_files({**self.resolved.data, "model": {}, "algorithm": {}, "synth": {}})

    @property
    def usual_name(self) -> str:
        """The name of the folder: who played what."""
        labels = [environment.label for environment in self.config.environments]
        tasks = "+".join(labels) if len(labels) < 4 else f"{len(labels)}-environments"
        return re.sub(r"[^\w.+@-]+", "-", f"{self._who}-{tasks}").strip("-.")[:150]

    @property
    def _who(self) -> str:
        if len(self.models) > 1:
            steps = list(self.models)
            return f"{self.run.resolve().name if self.run else 'series'}-step_{steps[0]}-{steps[-1]}"
        (name,) = self.names.values()
        path = Path(name).expanduser()
        return path.resolve().name if path.exists() else path.name.removesuffix(".gguf")


def asked(given: Given) -> EvalRequest:
    """Raises ConfigError, in words, for options that contradict each other or name nothing."""
    policy = given.options.get("--policy", "model")
    if policy not in POLICIES:
        raise ConfigError(f"--policy: got {policy!r}, expected {', '.join(POLICIES)}")
    weights = _weights(given, policy)
    name = folder_name(given)
    words, rest = _suites(given)
    front = [*words, *_engine(given), *_counts(given)]
    own = run_config(weights, rest) if weights is not None else []
    found = given.resolve([*own, *front, *rest])
    return _of(given, found, policy, weights, name)


def _of(given: Given, found: Resolved, policy: str, weights: str | None, name: str) -> EvalRequest:
    engine, overwrite = found.config.engine, "--overwrite" in given
    if weights is not None and engine.remote:
        raise ConfigError(
            f'--weights with engine.type = "{engine.type}": its servers have weights of their own; expected '
            'engine.type = "local"'
        )
    if weights is None:
        who = engine.model if engine.only_evaluates else name_of(found.config.model)
        names = {0: who if policy == "model" else policy}
        return EvalRequest(found, {0: found.config.model}, names, policy, None, name, overwrite)
    run, _ = run_of(weights)
    if "--weights-dir" in given:
        names = series(weights, _steps(given.options.get("--steps", "all")))
        run = run or (Path(weights).parent if run_of(str(Path(weights).parent))[0] else None)
    else:
        exact = pinned(weights)
        names = {int(exact.rpartition("@step_")[2]) if run else 0: exact}
    dtype: Any = found.config.model.dtype
    dtype = dtype if dtype in ("float32", "bfloat16") else "float32"
    models = {step: PretrainedModel(name=each, dtype=dtype) for step, each in names.items()}
    last = [*models.values()][-1]
    data = {**found.data, "model": plain(last)}
    config = found.config.model_copy(update={"model": last})
    return EvalRequest(replace(found, config=config, data=data), models, names, policy, run, name, overwrite)


def _weights(given: Given, policy: str) -> str | None:
    """What is loaded in place of [model], or the folder of a series."""
    api = "--api" in given
    flags = [flag for flag in ("--weights", "--weights-dir", "--model") if flag in given]
    flags = [flag for flag in flags if not (api and flag == "--model")]
    if len(flags) + api > 1:
        raise ConfigError(
            f"{' and '.join([*flags, *['--api'] * api])}: give one of them, they all say who plays"
        )
    if "--steps" in given and "--weights-dir" not in given:
        raise ConfigError("--steps: it chooses weights of a series; expected --weights-dir too")
    if (flags or api) and policy != "model":
        what = (flags or ["--api"])[0]
        raise ConfigError(f"{what} with --policy {policy}: scripted play uses no weights; give one of them")
    if not flags:
        return None
    name = given.options[flags[0]]
    return name if flags[0] == "--model" else existing(flags[0], name)


def _suites(given: Given) -> tuple[list[str], list[str]]:
    """The environments of the suites that are named first, and the rest of the command line."""
    count = next((i for i, each in enumerate(given.rest) if each.startswith(("-", "@"))), len(given.rest))
    words, rest = given.rest[:count], given.rest[count:]
    if words and given.name == "synth":
        raise ConfigError(
            f"silva synth: got {words[0]!r}, expected a configuration (@ FILE) or keys: suites are held out, "
            "and rows to train on come from training tasks"
        )
    if not words:
        if given_flags := [flag for flag in ("--data", "--tools") if flag in given]:
            raise ConfigError(f"{given_flags[0]}: it is about suites; expected the name of a suite too")
        return [], rest
    from silva.evaluation.suites import SUITES, environment

    data = Path(given.options["--data"]) if "--data" in given else None
    tools = [{"type": name} for name in given.options.get("--tools", "").split(",") if name]
    found = [environment(word, data=data, tools=tools) for word in words]
    suites = [SUITES[word] for word in words]
    room = {
        "max_turn_tokens": TURN_TOKENS,
        "max_turns": max(each.turns for each in suites),
        "max_episode_tokens": max(WITH_TOOLS if tools else 0, *(each.tokens for each in suites)),
    }
    limits = [f"--rollout.limits.{key}={value}" for key, value in room.items()]
    return [f"--environments={json.dumps(found)}", *limits], rest


def _engine(given: Given) -> list[str]:
    if "--api" not in given:
        return []
    name = given.options["--api"]
    if name not in APIS:
        raise ConfigError(
            f"--api: got {name!r}, expected {', '.join(APIS)}; for another server of OpenAI's form: "
            '--engine.type=openai --engine.base_url=URL --engine.model=NAME --engine.key_variable=""'
        )
    if "--model" not in given:
        raise ConfigError(f"--api {name}: which model? expected --model NAME too")
    keys = {**APIS[name], "model": given.options["--model"]}
    return [f"--engine.{key}={value}" for key, value in keys.items()]


def _counts(given: Given) -> list[str]:
    found, section = [], "synth" if given.name == "synth" else "eval"
    for flag, key in (("--samples", "samples_per_task"), ("--tasks", "tasks")):
        if (value := given.options.get(flag)) is not None:
            if not re.fullmatch(r"[1-9]\d*", value):
                raise ConfigError(f"{flag}: got {value!r}, expected a whole number above 0")
            found.append(f"--{section}.{key}={value}")
    return found


def _steps(text: str) -> list[int] | None:
    if text == "all":
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ConfigError(f"--steps: got {text!r}, expected numbers such as 100,200, or all")
    return sorted({int(each) for each in text.split(",")})
