"""Parts in other processes: their addresses, their key, and what the trainer there is asked to build."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from silva.commands import supervise
from silva.commands.serve import bind_of, checked_bind, here
from silva.commands.supervise import OwnRun, parts_of
from silva.config.load import Resolved, load
from silva.config.sections import Lora
from silva.engines.remote.engine import HttpEngine
from silva.errors import CapabilityError, ConfigError
from silva.placement.here import Here
from silva.placement.processes import Processes
from silva.placement.settings import ADDRESSES, LocalPlacementSettings, ServicesPlacementSettings
from silva.protocols import EngineCapabilities
from silva.registries import REGISTRIES
from silva.signals import STOP_PART
from silva.storage import replaced
from silva.storage.layout import Layout
from silva.wire.listening import Bind
from silva.wire.transport import Peer

TRAINER, INFERENCE = "unix:/run/trainer.sock", ("http://127.0.0.1:8000", "unix:/run/i.sock")
CONTEXT: Any = None  # what builds nothing asks nothing of it


def settings(**given: Any) -> ServicesPlacementSettings:
    return ServicesPlacementSettings(device="cpu", threads=1, **given)


VALUES = {"model": {"type": "tiny"}, "environments": [{"type": "bandit"}]}


def resolved(*argv: str, **placement: Any) -> Resolved:
    values = {**VALUES, "placement": {"type": "services", **placement}}
    return load(argv, REGISTRIES, values=values, env={})


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ADDRESSES, "SILVA_API_KEY", "SILVA_CRASH", "SILVA_CRASH_PROOF"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("given", [{}, {"trainer": TRAINER}, {"inference": INFERENCE}])
def test_without_all_addresses_it_starts_some_and_other_commands_are_local(given: dict[str, Any]) -> None:
    made = settings(**given)
    assert made.starts
    assert isinstance(made.build(CONTEXT), Here)  # of `silva eval`, for one
    assert made.local == LocalPlacementSettings(device="cpu", threads=1)


def test_the_orchestrator_is_told_the_addresses_of_what_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESSES, json.dumps({"trainer": TRAINER, "inference": INFERENCE}))
    placed = settings(patience=7.0).addressed()
    assert (placed.trainer, placed.inference, placed.patience) == (TRAINER, INFERENCE, 7.0)
    assert not placed.starts and isinstance(settings().build(CONTEXT), Processes)


def test_addresses_are_checked_and_trimmed() -> None:
    made = settings(trainer="http://a:1/", inference=("http://b:2//", "unix:x"))
    assert (made.trainer, made.inference) == ("http://a:1", ("http://b:2", "unix:x"))
    for field, wrong in (("trainer", "a:1"), ("inference", ("http://b:2", "ftp://x")), ("trainer", "unix:")):
        with pytest.raises(ValidationError, match="expected http://HOST:PORT, https://HOST or unix:PATH"):
            settings(**{field: wrong})


@pytest.mark.parametrize(
    ("loads", "publishes", "lora"),
    [
        ({"parameters", "folder"}, "parameters", None),
        ({"folder"}, "folder", Lora()),
        ({"folder", "adapter"}, "folder", None),
        ({"folder", "adapter"}, "adapter", Lora()),
    ],
)
def test_the_trainer_is_asked_for_what_the_engine_loads(
    loads: set[str],
    publishes: str,
    lora: Lora | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    config = resolved("--name", "lake", "--output_dir", "runs").config
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
    engine = SimpleNamespace(capabilities=EngineCapabilities(context=64, loads=frozenset(loads)))
    context: Any = SimpleNamespace(
        config=config, engine=engine, say=print, run_layout=Layout(tmp_path / "runs" / "lake")
    )
    host: Any = settings(trainer=TRAINER, inference=INFERENCE, patience=7.0).build(context)
    trainer: Any = host.trainer(recipe=True)
    asked = trainer._asked
    assert (asked.folder, asked.recipe, asked.publishes) == (str(tmp_path / "runs" / "lake"), True, publishes)
    assert trainer.capabilities.publishes == publishes and trainer._patience == 7.0
    assert "environments" not in asked.config and asked.config["model"]["type"] == "tiny"
    assert not host.trainer()._asked.recipe


@pytest.mark.parametrize("kind", ["services", "ray"])
def test_a_trainer_that_sends_weights_is_told_where_to(kind: str, tmp_path: Path) -> None:
    config = resolved().config
    placed = load([], REGISTRIES, values={**VALUES, "placement": {"type": kind}}, env={}).config.placement
    trainer = config.trainer.model_copy(update={"transfer": "nccl"})
    engine = SimpleNamespace(capabilities=EngineCapabilities(context=64, loads=frozenset({"folder", "sent"})))
    context: Any = SimpleNamespace(
        config=config.model_copy(update={"trainer": trainer, "placement": placed}), engine=engine, say=print,
        run_layout=Layout(tmp_path),
    )  # fmt: skip
    peers = [Peer(each, name="inference") for each in INFERENCE]
    host: Any = Processes(settings(), context, Peer(TRAINER, name="trainer"), peers)
    if kind == "ray":
        with pytest.raises(CapabilityError, match=r'placement\.type = "ray" has no addresses of servers'):
            host.trainer()
        return
    asked = host.trainer()._asked
    assert (asked.publishes, asked.servers) == ("sent", INFERENCE)


def test_what_the_trainer_is_told_makes_the_same_configuration_there() -> None:
    config = resolved("--algorithm.type", "ppo", "--trainer.optimizer.lr", "3e-3", "--seed", "5").config
    sent = json.loads(
        json.dumps({k: v for k, v in config.model_dump(mode="json").items() if k != "environments"})
    )
    there = load([], REGISTRIES, values={**sent, "environments": [{"type": "bandit"}]}, env={}).config
    assert there.model_dump() == config.model_dump()


def test_the_engine_knows_all_servers_and_the_key_is_in_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_KEY", "k3y")
    config = resolved(key_variable="OTHER_KEY").config
    made = settings(trainer=TRAINER, inference=INFERENCE, key_variable="OTHER_KEY")
    context: Any = SimpleNamespace(config=config, say=print, run_layout=Layout(Path("/run")))
    engine: Any = made.build(context).engine()
    assert isinstance(engine, HttpEngine)
    peers = [server.peer for server in engine._servers.all]
    assert [peer.address for peer in peers] == [*INFERENCE]
    assert {peer._key for peer in peers} == {"k3y"} == {checked_bind(config, "inference", {})[1]}


@pytest.mark.parametrize(("dtype", "expected"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_servers_may_differ_by_more_in_16_bits(dtype: str, expected: float) -> None:
    model = {"type": "tiny", "dtype": dtype}
    config = load(
        (), REGISTRIES, values={"model": model, "environments": [{"type": "bandit"}]}, env={}
    ).config
    context: Any = SimpleNamespace(config=config, say=print, run_layout=Layout(Path("/run")))
    engine: Any = settings(trainer=TRAINER, inference=INFERENCE).build(context).engine()
    assert engine._settings.probe_tolerance == expected


def test_a_part_has_everything_in_its_own_process() -> None:
    config = resolved(device="cpu", threads=2, trainer=TRAINER, inference=list(INFERENCE)).config
    assert here(config).placement == LocalPlacementSettings(device="cpu", threads=2)


TLS = {"--tls-cert": "c.pem", "--tls-key": "k.pem"}


@pytest.mark.parametrize(
    ("part", "flags", "placement", "expected"),
    [
        ("trainer", {}, {}, Bind()),
        ("trainer", {"--unix": "a.sock"}, {"trainer": TRAINER}, Bind(unix="a.sock")),
        ("trainer", {"--port": "80"}, {"trainer": TRAINER}, Bind(port=80)),
        ("trainer", {"--host": "::1"}, {}, Bind(host="::1")),
        ("trainer", {}, {"trainer": TRAINER}, Bind(unix="/run/trainer.sock")),
        ("trainer", {}, {"trainer": "http://10.0.0.2:81"}, Bind("10.0.0.2", 81)),
        ("trainer", {}, {"trainer": "http://[::1]:81"}, Bind("::1", 81)),
        ("inference", {}, {"inference": ["http://127.0.0.1:82", "unix:b"]}, Bind("127.0.0.1", 82)),
        ("inference", {}, {"trainer": TRAINER}, Bind()),
        ("trainer", TLS, {"trainer": "https://10.0.0.2:81"}, Bind("10.0.0.2", 81, "", "c.pem", "k.pem")),
        ("inference", {"--port": "80", **TLS}, {}, Bind(port=80, certificate="c.pem", private_key="k.pem")),
    ],
)
def test_where_a_part_listens(
    part: str, flags: dict[str, str], placement: dict[str, Any], expected: Bind
) -> None:
    assert bind_of(resolved(**placement).config, part, flags) == expected


@pytest.mark.parametrize(
    ("flags", "placement", "said"),
    [
        ({"--port": "many"}, {}, "--port: got 'many', expected a number"),
        (
            {},
            {"trainer": "https://gpu.example"},
            "no address to listen at; give --host and --port, or --unix",
        ),
        ({}, {"trainer": "http://gpu.example"}, "no address to listen at"),
        ({}, {"trainer": "https://10.0.0.2:81"}, "https:// needs --tls-cert and --tls-key"),
        (TLS, {"trainer": "http://10.0.0.2:81"}, "they need https://"),
    ],
)
def test_where_a_part_cannot_listen(flags: dict[str, str], placement: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        bind_of(resolved(**placement).config, "trainer", flags)
    assert said in str(refused.value)


def test_the_parts_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SILVA_CRASH", "seal:2")
    monkeypatch.setenv("SILVA_CRASH_TRAINER", "backward:3")
    monkeypatch.setenv("SILVA_CRASH_PROOF", "/tmp/proof")
    argv = ["@", "run.toml", "--steps", "4"]
    config = resolved("--placement.type", "services", "--placement.servers", "2").config
    flags = iter([["--overwrite"], ["--resume"]])
    parts = parts_of(config, Path("/tmp/s"), argv, lambda: next(flags), "k3y")
    silva = [sys.executable, "-m", "silva"]
    assert [part.name for part in parts] == ["inference", "inference1", "trainer", "orchestrator"]
    assert parts[0].argv == [*silva, "inference", *argv, "--unix", "/tmp/s/inference.sock"]
    assert parts[2].argv == [*silva, "trainer", *argv, "--unix", "/tmp/s/trainer.sock"]
    assert parts[3].argv == [*silva, "orchestrator", *argv, "--overwrite"]
    assert parts[3].again is not None
    assert parts[3].again() == [*silva, "orchestrator", *argv, "--resume"]
    sockets = [f"unix:/tmp/s/{name}.sock" for name in ("inference", "inference1", "trainer")]
    assert [part.address for part in parts] == [*sockets, ""]
    assert json.loads(parts[3].env[ADDRESSES]) == {"trainer": sockets[2], "inference": sockets[:2]}
    assert {part.env["SILVA_API_KEY"] for part in parts} == {"k3y"}
    assert [part.once["SILVA_CRASH"] for part in parts] == ["", "", "backward:3", "seal:2"]
    # The next start of a part inherits nothing of that.
    assert {part.env["SILVA_CRASH"] for part in parts} == {""}
    assert not any("k3y" in word for part in parts for word in part.argv)


def test_the_core_of_a_server_that_is_launched_is_watched_too() -> None:
    config = resolved("--engine.type", "vllm", "--engine.patience", "80").config
    inference, trainer, orchestrator = parts_of(config, Path("/tmp/s"), [], list, "k")
    assert (inference.core, inference.core_patience, inference.told) == ("/is_paused", 40.0, signal.SIGINT)
    assert trainer.core == orchestrator.core == "" and trainer.told == STOP_PART


@pytest.mark.parametrize("own", ["", "my-own-key"])
def test_parts_that_run_already_have_the_users_key(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Recorded:
        def __init__(self, parts: Any, *, key: str, **_: Any) -> None:
            made.append((parts, key))

        async def run(self) -> int:
            return 7

    monkeypatch.setattr(supervise, "Supervisor", Recorded)
    monkeypatch.setenv("SILVA_API_KEY", own)
    assert supervise.supervise(resolved(trainer="http://127.0.0.1:81"), [], []) == 7
    parts, key = made[0]
    assert {part.env["SILVA_API_KEY"] for part in parts} == {key}
    assert key == own if own else len(key) >= 32
    folder = Path(parts[0].address.removeprefix("unix:")).parent
    assert folder.name.startswith("silva-") and not folder.exists()


def test_what_has_an_address_is_not_started() -> None:
    parts = parts_of(resolved(trainer=TRAINER).config, Path("/tmp/s"), [], list, "k")
    assert [part.name for part in parts] == ["inference", "orchestrator"]
    assert json.loads(parts[1].env[ADDRESSES])["trainer"] == TRAINER
    parts = parts_of(resolved(inference=INFERENCE).config, Path("/tmp/s"), [], list, "k")
    assert [part.name for part in parts] == ["trainer", "orchestrator"]
    assert json.loads(parts[1].env[ADDRESSES])["inference"] == [*INFERENCE]


def test_an_orchestrator_that_probes_is_not_started_again_as_a_run() -> None:
    *_, probe = parts_of(resolved().config, Path("/tmp/s"), [], lambda: ["--probe=5"], "k")
    *_, run = parts_of(resolved().config, Path("/tmp/s"), [], lambda: ["--resume"], "k")
    assert (probe.lasting, run.lasting) == (False, True)


def begin(run: Layout) -> None:
    """What an orchestrator does first."""
    run.ledger.touch()
    run.config_toml.touch()


FOLDERS: dict[str, tuple[Callable[[Layout], object], str]] = {
    "the earlier run is not touched yet": (lambda run: None, "same"),
    "it is being put aside": (lambda run: _made(run.path / ".replacing"), "same"),
    "it is aside": (lambda run: replaced.put_aside(run.path, ()), "same"),
    "the new run has begun": (lambda run: (replaced.put_aside(run.path, ()), begin(run)), "same"),
    "it has a checkpoint": (
        lambda run: (replaced.put_aside(run.path, ()), begin(run), _made(run.checkpoints / "step_0")),
        "--resume",
    ),
    "the earlier run is removed": (
        lambda run: (replaced.put_aside(run.path, ()), begin(run), replaced.remove(run.path)), "--resume",
    ),
}  # fmt: skip


def _made(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


@pytest.mark.parametrize("flags", [[], ["--overwrite"], ["--resume"]])
@pytest.mark.parametrize("found", FOLDERS)
def test_an_orchestrator_that_is_started_again_resumes_only_the_run_of_its_command(
    tmp_path: Path, found: str, flags: list[str]
) -> None:
    run = Layout(tmp_path)
    begin(run)
    own = OwnRun(run, flags)
    assert own.flags() == flags
    happens, then = FOLDERS[found]
    happens(run)
    assert own.flags() == (["--resume"] if then == "--resume" else flags)


def test_an_orchestrator_that_is_started_again_resumes_a_run_in_a_new_folder(tmp_path: Path) -> None:
    own = OwnRun(Layout(tmp_path), [])
    assert own.flags() == [] and not own.exists()
    begin(Layout(tmp_path))
    assert own.flags() == ["--resume"] and own.exists()
    assert OwnRun(Layout(tmp_path), ["--accept-files", "--resume"]).flags() == ["--resume", "--accept-files"]
