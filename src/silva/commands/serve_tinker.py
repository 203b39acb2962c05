"""`silva serve tinker`: a base model behind the API that the Tinker SDK speaks, with LoRA runs of many
clients."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from silva import process, signals
from silva.assembly import Assembly
from silva.commands.command import Given
from silva.commands.common import here
from silva.commands.serve import checked_bind, say, served, served_name
from silva.config.schema import RunConfig
from silva.config.sections import PretrainedModel
from silva.errors import CapabilityError, ConfigError
from silva.models.loading import generation_stops, resolve

PLACES = 128  # samples in the engine, which decodes some of them and has the next ones at hand
EXTRA = 'pip install "silva[services]"'


def run(given: Given) -> int:
    if given.first("service; expected tinker") != "tinker":
        raise ConfigError(
            f"silva serve: got {given.rest[0]!r}, expected tinker; silva inference serves OpenAI's clients"
        )
    model = [f"--model.name={given.options['--model']}"] if "--model" in given else []
    env = {"SILVA_ENVIRONMENTS": '[{"type": "bandit"}]', **os.environ}
    config = given.resolve([*given.rest[1:], *model], env).config
    signals.be_caught()
    return serve_tinker(config, given)


def serve_tinker(config: RunConfig, given: Given) -> int:
    """Serve the model of a configuration until the process is told to end."""
    try:
        from silva.server.tinker.keys import ApiKeys
        from silva.server.tinker.messages import TAKES
        from silva.server.tinker.server import MAX_BODY
        from silva.wire.guard import Guard
    except ModuleNotFoundError as error:
        raise CapabilityError(f"silva serve tinker needs {error.name}: {EXTRA}") from error
    keys = ApiKeys([key.strip() for key in config.placement.key.split(",") if key.strip()])
    bind, _ = checked_bind(config, "tinker", given.options)
    full = _full(given.options.get("--full", "1"))
    process.prepare()
    with ExitStack() as stack:
        server = _server(here(config), Path(given.options.get("--state", "tinker")).absolute(), full, stack)
        app = Guard(server.app, bind, key="", log=say, max_body=MAX_BODY,
                    takes=("application/json", TAKES), admits=keys)  # fmt: skip
        return served(app, bind, f"tinker: {served_name(config, None)}", server.working())


def _full(given: str) -> int:
    if not given.isdecimal():
        raise ConfigError(f"--full: got {given!r}, expected a number, 0 or more")
    return int(given)


def _server(config: RunConfig, state: Path, full: int, stack: ExitStack) -> Any:
    from silva.models.loading import copied
    from silva.server.tinker.adapters import FolderSampler
    from silva.server.tinker.routes import ServedModel
    from silva.server.tinker.server import TinkerServer
    from silva.server.tinker.whole_models import WholeModels
    from silva.trainer.tenants.learner import Tenants

    if config.model.lora is not None:
        raise ConfigError("model.lora: a Tinker service gives every run its own adapters; leave it out")
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--state: {error}; expected a folder, or a place for one") from error
    parts = Assembly(config)
    stack.callback(parts.close, wait=False)
    engine: Any = parts.engine  # before adapters are installed: it has modules of its own
    if not hasattr(engine, "load_adapter"):
        raise CapabilityError("silva serve tinker: expected an engine that takes adapters, such as local")
    for note in engine.notes:
        say(note)
    settings: Any = config.trainer  # the budget of a pass
    weights = parts.model.model
    plain = copied(parts.model, [*weights.parameters(), *weights.buffers()])

    def engine_of_whole_models() -> Any:
        others = Assembly(config, compute=parts.compute)
        others.model = copied(plain, [])
        return others.engine

    runs = parts.compute.run(Tenants, parts.model, settings)
    stops = generation_stops(config.model) or parts.renderer.stop_token_ids
    context = engine.capabilities.context
    whole = WholeModels(engine_of_whole_models)
    sampler = FolderSampler(engine, context, parts.renderer.vocabulary, stops, whole)
    model = ServedModel(
        served_name(config, None),
        _tokenizer(config, parts, state),
        parts.model.model.config.model_type,
        context,
    )
    return TinkerServer(state, model, runs, parts.compute, sampler, PLACES, full, say)


def _tokenizer(config: RunConfig, parts: Assembly, state: Path) -> str:
    """What clients load the tokenizer by: a hub id, or a folder for those on this machine."""
    if isinstance(config.model, PretrainedModel):
        return resolve(config.model.name)
    folder = state / "tokenizer"
    parts.model.tokenizer.save_pretrained(folder)
    return str(folder)
