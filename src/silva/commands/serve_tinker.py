"""`silva serve tinker`: a base model behind the API that the Tinker SDK speaks, with LoRA runs of many
clients."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from silva import process, signals
from silva.assembly import Assembly
from silva.commands.command import Given
from silva.commands.common import here, say, served
from silva.commands.serve import checked_bind, served_name, threads_shared
from silva.config.schema import RunConfig
from silva.config.sections import PretrainedModel
from silva.errors import CapabilityError, ConfigError
from silva.models.loading import LoadedModel, copied, generation_stops, resolve
from silva.server.ranks import SharedCalls, follow, joined, place
from silva.server.tinker.adapters import FolderSampler, ServedSampler
from silva.server.tinker.whole_models import WholeModels
from silva.trainer.sharding.ranks import mesh_of
from silva.trainer.tenants.learner import Tenants

PLACES = 128  # samples in the engine, which decodes some of them and has the next ones at hand
PROBE = tuple(range(1, 17))  # tokens that every vocabulary has
QUOTAS = {"models": "--max-models", "waiting": "--max-waiting", "bytes": "--max-bytes"}
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
        from silva.server.tinker.quotas import Quotas
        from silva.server.tinker.ranks import following
        from silva.server.tinker.server import MAX_BODY
        from silva.wire.guard import Guard
    except ModuleNotFoundError as error:
        raise CapabilityError(f"silva serve tinker needs {error.name}: {EXTRA}") from error
    _check(config)
    follows, own = place()[0] > 0, threads_shared(here(config))
    quotas = Quotas(**{name: _number(given.options, flag) for name, flag in QUOTAS.items()})
    if not follows:  # the first rank listens for all
        keys = ApiKeys([key.strip() for key in config.placement.key.split(",") if key.strip()])
        bind, _ = checked_bind(config, "tinker", given.options)
    process.prepare()
    with ExitStack() as stack:
        parts = Assembly(own, say=say)
        stack.callback(parts.close, wait=False)
        calls = stack.enter_context(joined(own.ranks, parts.device, say))
        if calls and follows:
            follow(calls, following(_runs(parts), parts.compute))
        name = given.options.get("--as") or served_name(config, None)
        server = _server(parts, name, given, quotas, calls)
        app = Guard(server.app, bind, key="", log=say, max_body=MAX_BODY,
                    takes=("application/json", TAKES), admits=server.admitting(keys))  # fmt: skip
        return served(app, bind, f"tinker: {name}", server.working())


def _number(options: Mapping[str, str], flag: str) -> int | None:
    text = options.get(flag)
    if text is not None and not (text.isdecimal() and int(text)):
        raise ConfigError(f"{flag}: got {text!r}, expected a whole number, 1 or more")
    return None if text is None else int(text)


def _check(config: RunConfig) -> None:
    if config.model.lora is not None:
        raise ConfigError("model.lora: a Tinker service gives every run its own adapters; leave it out")
    settings: Any = config.trainer
    if settings.remote:
        raise ConfigError(
            f'trainer.type: a Tinker service trains here; got "{settings.type}", expected "local"'
        )
    size = max(place()[1], config.ranks)
    if size > 1 and (settings.parallel.shape(size)["copies"] < size or settings.parallel.offload):
        raise CapabilityError(
            f"trainer.parallel: each of the {size} ranks of a Tinker server has the whole model; expected "
            f"dp_replicate = {size}, and nothing else"
        )


def _server(parts: Assembly, name: str, given: Given, quotas: Any, calls: SharedCalls | None = None) -> Any:
    """`calls`: of several ranks, of which this is the first."""
    from silva.server.tinker.postgres import check_url
    from silva.server.tinker.ranks import LeadingRuns
    from silva.server.tinker.routes import ServedModel
    from silva.server.tinker.server import TinkerServer

    config = parts.config
    state = Path(given.options.get("--state", "tinker")).absolute()
    if database := given.options.get("--database", ""):
        check_url(database)
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--state: {error}; expected a folder, or a place for one") from error
    sampler = _sampler(parts)  # before adapters are installed: an engine here has modules of its own
    for note in parts.engine.notes:
        say(note)
    own = isinstance(sampler, FolderSampler)
    full = _full(given.options.get("--full", "1" if own else "0"), own)
    runs = _runs(parts)
    shared = LeadingRuns(runs, calls) if calls else runs
    model = ServedModel(
        name,
        _tokenizer(config, parts, state),
        parts.model.model.config.model_type,
        sampler.context,
    )
    return TinkerServer(state, model, shared, parts.compute, sampler, PLACES, full, say, quotas, database)


def _runs(parts: Assembly) -> Tenants:
    """Those of this rank."""
    settings: Any = parts.config.trainer  # the budget of a pass, and how ranks share it
    mesh = mesh_of(settings.parallel, parts.device)
    head = not parts.config.engine.remote  # see docs/tinker.md
    return parts.compute.run(Tenants, parts.model, settings, head=head, mesh=mesh)


def _sampler(parts: Assembly) -> FolderSampler | ServedSampler:
    """Of the engine that the configuration names."""
    engine: Any = parts.engine
    stops = generation_stops(parts.config.model) or parts.renderer.stop_token_ids
    vocabulary = parts.renderer.vocabulary
    if getattr(engine, "folders", False):
        scores = asyncio.run(_met(engine))
        apart = max(abs(scores - parts.compute.run(_scores, parts.model)))
        if not apart <= (most := engine.probe_tolerance):
            raise ConfigError(
                f"engine: the log-probabilities of its servers' model are {apart:.3g} from those of "
                f"{served_name(parts.config, None)}, expected at most {most:g} (engine.probe_tolerance); "
                "give both the same model"
            )
        return ServedSampler(engine, engine.capabilities.context, vocabulary, stops)
    if not hasattr(engine, "load_adapter"):
        raise CapabilityError(
            "silva serve tinker: expected an engine that takes adapters: "
            'engine.type = "local", or "http" with engine.dialect = "vllm"'
        )
    weights = parts.model.model
    plain = copied(parts.model, [*weights.parameters(), *weights.buffers()])

    def engine_of_whole_models() -> Any:
        others = Assembly(parts.config, compute=parts.compute)
        others.model = copied(plain, [])
        return others.engine

    whole = WholeModels(engine_of_whole_models)
    return FolderSampler(engine, engine.capabilities.context, vocabulary, stops, whole)


async def _met(engine: Any) -> np.ndarray:
    """Servers are asked what they can do, and for log-probabilities; another event loop is theirs then."""
    try:
        await engine.connect()
        return np.array((await engine.score(PROBE, 1)).logprobs)
    finally:
        await engine.close()


def _scores(loaded: LoadedModel) -> np.ndarray:
    """Log-probabilities of the same tokens here."""
    tokens = torch.tensor([PROBE], device=loaded.device)
    with torch.inference_mode():
        rows = loaded.model(tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return rows.gather(1, tokens[0, 1:, None])[:, 0].cpu().numpy()  # type: ignore[no-any-return]


def _full(given: str, own: bool) -> int:
    if not given.isdecimal():
        raise ConfigError(f"--full: got {given!r}, expected a number, 0 or more")
    if int(given) and not own:
        raise CapabilityError(
            f"--full {given}: the engine's servers have one model and adapters; expected 0, or "
            'engine.type = "local"'
        )
    return int(given)


def _tokenizer(config: RunConfig, parts: Assembly, state: Path) -> str:
    """What clients load the tokenizer by: a hub id, or a folder for those on this machine."""
    if isinstance(config.model, PretrainedModel):
        return resolve(config.model.name)
    folder = state / "tokenizer"
    parts.model.tokenizer.save_pretrained(folder)
    return str(folder)
