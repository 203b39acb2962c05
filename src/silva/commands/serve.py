"""`silva inference` and `silva trainer`: one part of a run behind HTTP or a Unix socket."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import subprocess
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from silva import process
from silva.assembly import Assembly
from silva.commands.checks import check_division
from silva.commands.common import here, say, served
from silva.config.load import Resolved, load
from silva.config.schema import RunConfig
from silva.config.sections import PretrainedModel
from silva.errors import CapabilityError, ConfigError
from silva.models.loading import below, name_of, resolve
from silva.models.snapshots import weight_folder
from silva.models.sources import find, pinned, run_of
from silva.placement.carrier import die_with_parent
from silva.protocols import Engine, Trainer
from silva.registries import REGISTRIES
from silva.storage.layout import Layout
from silva.trainer.remote import Open
from silva.trainer.sharding.parallel import Mesh
from silva.trainer.sharding.ranks import mesh_of
from silva.trainer.transfer import transfer_of
from silva.types import Snapshot
from silva.wire.transport import UNIX, Peer

NO_ENVIRONMENT = [{"type": "bandit"}]  # a trainer plays nothing, and a configuration has at least one


def bind_of(config: RunConfig, part: str, given: Mapping[str, str]) -> Any:
    """Where to listen: what the flags say, else the address in the configuration, else any free port."""
    certificate, private_key = given.get("--tls-cert", ""), given.get("--tls-key", "")
    bind = _place(config, part, given, "https://" if certificate else "http://")
    return replace(bind, certificate=certificate, private_key=private_key)


def _place(config: RunConfig, part: str, given: Mapping[str, str], scheme: str) -> Any:
    from silva.wire.listening import Bind

    if "--unix" in given:
        return Bind(unix=given["--unix"])
    if "--host" in given or "--port" in given:
        port = given.get("--port", "0")
        if not port.isdecimal():
            raise ConfigError(f"--port: got {port!r}, expected a number")
        return Bind(host=given.get("--host", "127.0.0.1"), port=int(port))
    named = config.placement.address_of(part)
    if named.startswith(UNIX):
        return Bind(unix=named.removeprefix(UNIX))
    if named.startswith(scheme):
        host, _, port = named.removeprefix(scheme).rpartition(":")
        if host and port.isdecimal():
            return Bind(host=host.strip("[]"), port=int(port))
    if named:
        raise ConfigError(
            f"placement.{part} = {named!r}: no address to listen at; give --host and --port, or --unix "
            "(https:// needs --tls-cert and --tls-key, and they need https://)"
        )
    return Bind()


def checked_bind(config: RunConfig, part: str, given: Mapping[str, str]) -> tuple[Any, str]:
    """Where to listen and the key, before a model is loaded.

    Raises:
        ConfigError: nobody can listen there, others could use it without a key, or TLS cannot be had.
    """
    from silva.wire.listening import check_bind, check_free

    bind, key = bind_of(config, part, given), config.placement.key
    check_bind(bind, key)
    check_free(bind)
    return bind, key


def serve_inference(resolved: Resolved, given: Mapping[str, str]) -> int:
    """Serve the model of a configuration until the process is told to end."""
    from silva.wire.guard import Guard

    config, weights = here(resolved.config), given.get("--weights")
    if weights is not None:
        config = config.model_copy(update={"model": PretrainedModel(name=pinned(weights))})
    bind, key = checked_bind(resolved.config, "inference", given)
    if config.engine.launched:
        become_launched(config, bind, key)
    process.prepare()
    with ExitStack() as stack:
        app, name = inference_part(config, stack, say, weights)
        return served(Guard(app, bind, key=key, log=say), bind, f"inference: {name}")


def inference_part(
    config: RunConfig, stack: ExitStack, say: Callable[[str], None], weights: str | None = None
) -> tuple[Any, str]:
    """The routes of the model of a configuration, and its name. What is loaded ends with `stack`."""
    from silva.server.engine import ServerLimits
    from silva.server.inference import inference_app

    assembly = Assembly(config)
    stack.callback(assembly.close, wait=False)
    engine, renderer = assembly.engine, assembly.renderer
    for note in engine.notes:
        say(note)
    output = Path(config.output_dir)  # a run's folder may be a link to another disk
    limits = ServerLimits(folders=(output.resolve(), (output / config.name).resolve()))
    name, reload = served_name(config, weights), initial_weights(config, engine)
    app = inference_app(engine, renderer, model=name, limits=limits, reload=reload, log=say)
    stack.enter_context(process.loaded())
    return app, name


def carried(part: str, values: Mapping[str, Any], stack: ExitStack, say: Callable[[str], None]) -> Any:
    """A part in a process that others have started and bring requests to: the client that asks it; None for a
    rank of a trainer that follows the first one.

    Nobody listens, so there is no key. The ranks of a trainer are known by the environment, as with torchrun.

    Args:
        part: "trainer" or "inference".
        values: the configuration as plain data.
        stack: what ends the part.
    """
    import httpx2

    from silva.server.ranks import answering, joined
    from silva.wire.guard import Guard
    from silva.wire.listening import Bind

    config = here(load([], REGISTRIES, values={**values, "environments": NO_ENVIRONMENT}, env={}).config)
    if part == "inference" and config.engine.launched:
        return _launched(config, stack, say)
    process.prepare()
    if part == "trainer":
        builder = Builder(config, stack)
        calls = stack.enter_context(joined(config.ranks, builder.device, say))
        if calls and calls.rank:
            threading.Thread(
                target=asyncio.run, args=(calls.follow(answering(builder)),), daemon=True
            ).start()
            return None
        app = trainer_part(config, builder, calls, Bind(unix=part), "", say)
    else:
        app = Guard(inference_part(config, stack, say)[0], Bind(unix=part), key="", log=say)
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost",
                              trust_env=False)  # fmt: skip


def served_name(config: RunConfig, weights: str | None) -> str:
    """What clients call the model: the name of a run or folder, without its path."""
    name = weights or name_of(config.model)
    path, (run, at) = Path(name).expanduser(), run_of(name)
    if run is not None and at:
        return f"{run.resolve().name}@{at}"
    return path.resolve().name if path.exists() else name


def initial_weights(config: RunConfig, engine: Engine) -> Callable[[], Awaitable[None]] | None:
    """What loads the weights of `[model]` again; None if they are no folder of the whole model."""
    model = config.model
    if not isinstance(model, PretrainedModel) or model.lora or not isinstance(find(model.name), str):
        return None
    source = Path(resolve(model.name))
    if not source.is_dir():
        return None

    async def load() -> None:
        await engine.load(Snapshot(engine.version + 1, await asyncio.to_thread(weight_folder, source)))

    return load


def become_launched(config: RunConfig, bind: Any, key: str) -> NoReturn:
    """Let the engine's server take the place of this process."""
    argv, env = _launching(config, bind, key)
    say(f"inference: {config.engine.type} with {name_of(config.model)} at {bind.address}")
    os.execve(argv[0], argv, env)


def _launching(config: RunConfig, bind: Any, key: str, **needs: Any) -> tuple[list[str], Mapping[str, str]]:
    """The program of the engine's server, its arguments and its environment.

    Args:
        needs: more of what `engine.command` takes.

    Raises:
        CapabilityError: a model or an address that it cannot take.
        ConfigError: there is no such interpreter.
    """
    model, engine = config.model, f'engine.type = "{config.engine.type}"'
    source = Path(resolve(model.name)) if isinstance(model, PretrainedModel) else None
    if source is None or not source.is_dir():
        raise CapabilityError(f"{engine}: got model {name_of(model)!r}, expected a model's folder")
    if bind.unix or not bind.port:
        raise CapabilityError(f"{engine}: expected --host and --port, or http://HOST:PORT")
    if bind.certificate:
        raise CapabilityError(f"{engine}: got --tls-cert, expected engine.arguments with --ssl-certfile")
    routes, lora = config.replays_routing, model.lora
    sent = config.trainer.transfer == "nccl"
    argv, added = config.engine.command(
        str(source), bind.host, bind.port, key, routes=routes, lora=lora, sent=sent, **needs
    )
    python = shutil.which(argv[0])
    if python is None:
        raise ConfigError(f"engine.python = {argv[0]!r}: no such program, expected the Python with vLLM")
    return [python, *argv[1:]], {**os.environ, **added}


def launched(
    config: RunConfig, stack: ExitStack, say: Callable[[str], None], **needs: Any
) -> tuple[Any, str]:
    """Start the engine's server as a child of this process. If it ends, so does this one.

    Args:
        needs: as of `_launching`.

    Returns:
        Where it will listen, and its key.
    """
    from silva.wire.listening import Bind

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        bind, key = Bind(port=probe.getsockname()[1]), secrets.token_urlsafe(24)
    argv, env = _launching(config, bind, key, **needs)
    child = subprocess.Popen(
        argv, env=env, text=True, errors="replace", preexec_fn=die_with_parent,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    ended = threading.Event()
    stack.callback(child.kill)
    stack.callback(ended.set)

    def read() -> None:
        for line in child.stdout or ():
            say(line.rstrip())
        child.wait()
        if not ended.wait(1.0):  # until its last lines have been told
            os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    return bind, key


def _launched(config: RunConfig, stack: ExitStack, say: Callable[[str], None]) -> Any:
    """A client of the engine's server, which listens."""
    import httpx2

    bind, key = launched(config, stack, say)
    while True:
        try:
            socket.create_connection((bind.host, bind.port), 1.0).close()
        except OSError:
            threading.Event().wait(0.2)
        else:
            break
    return httpx2.AsyncClient(
        base_url=bind.address, headers={"authorization": f"Bearer {key}"}, timeout=None, trust_env=False
    )


def serve_trainer(resolved: Resolved, given: Mapping[str, str]) -> int:
    """Serve a trainer, which orchestrators open, until the process is told to end."""
    from silva.server.ranks import answering, follow, joined, place

    follows, own = place()[0] > 0, here(resolved.config)
    if not follows:  # the first rank listens for all
        bind, key = checked_bind(resolved.config, "trainer", given)
        if not key and not bind.unix:
            raise ConfigError(
                f"{bind.address}: everybody on this machine could use this trainer without a key, and write "
                "files with your rights. Set the environment variable SILVA_API_KEY, or listen at a Unix "
                'socket (--unix, or placement.trainer = "unix:PATH")'
            )
        check_division(own, max(own.ranks, place()[1]))
    process.prepare()
    with ExitStack() as stack:
        builder = Builder(own, stack)
        calls = stack.enter_context(joined(own.ranks, builder.device, say))
        if calls and follows:
            follow(calls, answering(builder))
        return served(trainer_part(own, builder, calls, bind, key, say), bind, "trainer")


def trainer_part(
    config: RunConfig, builder: Builder, calls: Any, bind: Any, key: str, say: Callable[[str], None]
) -> Any:
    """A trainer behind its guard. `calls`: of the first of several ranks; None if it is alone."""
    from silva.server.ranks import leading
    from silva.server.trainer import BODY_SECONDS, MAX_BODY, TAKES, TrainerServer
    from silva.wire.guard import Guard

    server = TrainerServer(leading(builder, calls) if calls else builder, Path(config.output_dir))
    return Guard(server.app(), bind, key=key, log=say, max_body=MAX_BODY, body_seconds=BODY_SECONDS,
                 takes=(TAKES,))  # fmt: skip


class Builder:
    """Makes the trainer that an orchestrator asks for, where this process computes."""

    def __init__(self, own: RunConfig, stack: ExitStack) -> None:
        own = threads_shared(own)
        parts = Assembly(own)
        self._placement, self._compute, self.device = own.placement, parts.compute, parts.device
        stack.callback(parts.close, wait=False)

    async def __call__(self, asked: Open, say: Callable[[str], None]) -> Trainer:
        return await asyncio.to_thread(self._build, asked, say)

    def _build(self, asked: Open, say: Callable[[str], None]) -> Trainer:
        values = {**asked.config, "environments": NO_ENVIRONMENT}
        config = load([], REGISTRIES, values=values, env={}, own_code=False).config
        process.forget()  # the model of the session before
        config = config.model_copy(update={"placement": self._placement})
        mesh = mesh_of(config.trainer.parallel, self.device)
        _bring(config, mesh)
        assembly = Assembly(config, say=say, compute=self._compute, stored=mesh.size > 1)
        folder = Layout(Path(asked.folder)).broadcast
        own = self._placement
        servers = [Peer(each, name="inference", key=own.key) for each in asked.servers]
        limits = {"patience": own.patience, "timeout": own.timeout} if servers else {}
        transfer = transfer_of(
            asked.publishes, config.trainer.transfer, folder, servers=servers, first=mesh.rank == 0, **limits
        )
        algorithm = config.algorithm if asked.recipe else None
        trainer: Trainer = config.trainer.build(assembly, algorithm, transfer=transfer, mesh=mesh)
        return trainer


def threads_shared(own: RunConfig) -> RunConfig:
    """With the threads of this rank, of those of the machine, if nobody has set them."""
    placement = own.placement
    here = max(own.ranks, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))  # ranks on this machine
    if here == 1 or placement.threads:
        return own
    threads = max(1, (os.cpu_count() or 1) // here)
    return own.model_copy(update={"placement": placement.model_copy(update={"threads": threads})})


def _bring(config: RunConfig, mesh: Mesh) -> None:
    """One rank of each machine converts a GGUF file before all read what it comes to."""
    with mesh.agreed():
        plain = below(config.model)
        if isinstance(plain, PretrainedModel) and int(os.environ.get("LOCAL_RANK", mesh.rank)) == 0:
            resolve(plain.name)
