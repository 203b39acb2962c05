"""`silva serve tinker`: a base model behind the API that the Tinker SDK speaks, with LoRA runs of many
clients."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from silva import process, signals
from silva.assembly import Assembly
from silva.commands.command import Given
from silva.commands.common import here, say, served
from silva.commands.serve import checked_bind, launched, served_name, threads_shared
from silva.config.schema import RunConfig
from silva.config.sections import Lora, PretrainedModel
from silva.errors import CapabilityError, ConfigError
from silva.models.loading import LoadedModel, copied, generation_stops, resolve
from silva.server.ranks import SharedCalls, follow, joined, place
from silva.server.tinker.adapters import FolderSampler, ServedSampler
from silva.server.tinker.whole_models import WholeModels
from silva.trainer.sharding.ranks import mesh_of
from silva.trainer.tenants.learner import Tenants
from silva.wire.transport import Peer

PLACES = 128  # samples in the engine, which decodes some of them and has the next ones at hand
PROBE = tuple(range(1, 17))  # tokens that every vocabulary has
QUOTAS = {"models": "--max-models", "waiting": "--max-waiting", "bytes": "--max-bytes"}
LAUNCHED_RANK = 64
"""Of the adapters at most that a server started here samples with; engine.arguments may say another one."""
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
        from silva.server.tinker.messages import MAX_BODY, TAKES
        from silva.server.tinker.quotas import Quotas
        from silva.server.tinker.ranks import following
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
        parts = Assembly(own, say=say, stored=_divided(own) > 1)
        stack.callback(parts.close, wait=False)
        calls = stack.enter_context(joined(own.ranks, parts.device, say))
        if calls and follows:
            follow(calls, following(_runs(parts)[0], parts.compute))
        if own.engine.launched:
            parts.engine = _launched_engine(parts, stack)
        name = given.options.get("--as") or served_name(config, None)
        server = _server(parts, name, given, quotas, calls)
        app = Guard(server.app, bind, key="", log=say, max_body=MAX_BODY,
                    takes=("application/json", TAKES), admits=server.admitting(keys))  # fmt: skip
        return served(app, bind, f"tinker: {name}", server.working())


def _launched_engine(parts: Assembly, stack: ExitStack) -> Any:
    """The client of a server that is started for the adapters of runs."""
    config = parts.config
    lora = Lora(rank=LAUNCHED_RANK)
    adapted = config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
    bind, key = launched(adapted, stack, say, several=True)
    return config.engine.client([Peer(bind.address, name="inference", key=key)], parts)


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
    parallel, usual = settings.parallel, type(settings.parallel)()
    others = [
        way for way in ("cp", "tp", "pp", "ep", "offload") if getattr(parallel, way) != getattr(usual, way)
    ]
    if others:
        raise CapabilityError(
            f"trainer.parallel.{others[0]}: ranks of a Tinker server share the data of a pass, and weights "
            "between passes; expected dp_shard and dp_replicate alone"
        )
    if (ranks := _divided(config)) > 1 and not config.engine.remote:
        raise CapabilityError(
            f'trainer.parallel: engine.type = "{config.engine.type}" samples from a whole model, which would '
            f"be divided among {ranks} ranks; expected trainer.parallel.dp_replicate = "
            f'{max(place()[1], config.ranks)}, or engine.type = "http" with engine.dialect = "vllm"'
        )


def _divided(config: RunConfig) -> int:
    """Among how many ranks the weights of a copy of the model are divided."""
    settings: Any = config.trainer
    size = max(place()[1], config.ranks)
    return size // int(settings.parallel.shape(size)["copies"])


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
    served = getattr(parts.engine, "folders", False)
    full = _full(given.options.get("--full", "0" if served else "1"), not served)
    own = None if served else _own_sampler(parts)  # of other modules than adapters are installed over
    runs, scores = _runs(parts)
    sampler = own or _served_sampler(parts, scores)
    for note in parts.engine.notes:
        say(note)
    shared = LeadingRuns(runs, calls) if calls else runs
    model = ServedModel(
        name,
        _tokenizer(config, parts, state),
        parts.model.model.config.model_type,
        sampler.context,
    )
    return TinkerServer(state, model, shared, parts.compute, sampler, PLACES, full, say, quotas, database)


def _runs(parts: Assembly) -> tuple[Tenants, np.ndarray]:
    """Those of this rank, and the log-probabilities of PROBE, which all ranks compute."""
    settings: Any = parts.config.trainer  # the budget of a pass, and how ranks share it
    mesh = mesh_of(settings.parallel, parts.device)
    head = not parts.config.engine.remote  # see docs/tinker.md
    runs = parts.compute.run(Tenants, parts.model, settings, head=head, mesh=mesh)
    return runs, parts.compute.run(_scores, runs.loaded)


def _served_sampler(parts: Assembly, scores: np.ndarray) -> ServedSampler:
    """Of an engine whose servers read folders. `scores`: log-probabilities of PROBE here."""
    engine: Any = parts.engine
    apart = max(abs(asyncio.run(_met(engine)) - scores))
    if not apart <= (most := engine.probe_tolerance):
        raise ConfigError(
            f"engine: the log-probabilities of its servers' model are {apart:.3g} from those of "
            f"{served_name(parts.config, None)}, expected at most {most:g} (engine.probe_tolerance); "
            "give both the same model"
        )
    return ServedSampler(engine, engine.capabilities.context, parts.renderer.vocabulary, _stops(parts))


def _stops(parts: Assembly) -> Sequence[int]:
    return generation_stops(parts.config.model) or parts.renderer.stop_token_ids


def _own_sampler(parts: Assembly) -> FolderSampler:
    """Of an engine in this process."""
    engine: Any = parts.engine
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
    context, vocabulary = engine.capabilities.context, parts.renderer.vocabulary
    return FolderSampler(engine, context, vocabulary, _stops(parts), whole)


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
    with torch.no_grad():  # what a divided model keeps of its first pass takes part in later ones
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
