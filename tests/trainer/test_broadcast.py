"""Weights that are sent to vLLM: its routes in order, and its bytes, with gloo in the place of NCCL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests import moe
from tests.trainer.updates import train
from tests.trainer.vllm_double import GlooGroup, Gone, Vllm, serving

from silva.commands.serve import Builder
from silva.config.load import load
from silva.config.sections import PretrainedModel
from silva.errors import EngineError, PartLost
from silva.models.loading import LoadedModel, load_model
from silva.registries import REGISTRIES
from silva.trainer import broadcast
from silva.trainer.broadcast import Broadcast
from silva.trainer.learner import Learner
from silva.trainer.local import LocalTrainer
from silva.trainer.remote import Open
from silva.trainer.settings import LocalTrainerSettings
from silva.types import Sample
from silva.wire.transport import Peer

Tiny = Callable[..., LoadedModel]
UPDATE = [
    "/pause?mode=keep", "/start_weight_update", "/update_weights", "/finish_weight_update",
    "/reset_prefix_cache?reset_running_requests=true", "/resume",
]  # fmt: skip
JOIN = ["/shutdown_weight_transfer_engine", "/init_weight_transfer_engine"]


class Ends:
    """A trainer and servers."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def __call__(self, loaded: LoadedModel, *servers: Vllm, patience: float = 5.0) -> LocalTrainer:
        peers = [Peer(self._stack.enter_context(serving(each)), name="inference") for each in servers]
        transfer = Broadcast(peers, patience=patience, timeout=20.0, make=GlooGroup)
        self._stack.callback(transfer.close)
        return LocalTrainer(Learner(loaded, LocalTrainerSettings(), seed=0), transfer)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(broadcast, "CHUNK", 20_000)  # bytes: a few tensors
    with ExitStack() as stack:
        yield Ends(stack)


def weights(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in loaded.model.named_parameters()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == x.dtype and torch.equal(found[name], x) for name, x in expected.items()
    )


def test_every_worker_of_every_server_gets_the_bytes(
    ends: Ends, tiny: Tiny, make_samples: Callable[..., list[Sample]]
) -> None:
    loaded, servers = tiny(), [Vllm(2), Vllm()]
    trainer = ends(loaded, *servers)
    for version in (1, 2):
        train(trainer, make_samples([9, 14]))
        snapshot = asyncio.run(trainer.publish())
        assert snapshot.version == version and snapshot.folder is None
        assert [server.version for server in servers] == [
            snapshot.sent
        ] * 2 and f"-{version}" in snapshot.sent
        for server in servers:
            assert all(same(received, weights(loaded)) for received in server.received)
    assert trainer.capabilities.publishes == "sent"
    for server in servers:
        assert server.calls == [*JOIN, *UPDATE, *UPDATE]
    assert [server.info["rank_offset"] for server in servers] == [1, 3]
    assert servers[0].info["world_size"] == 4
    assert len(servers[1].chunks) > 4 and max(servers[1].chunks) > 1  # several tensors, several times


def test_a_mixture_of_experts_is_sent_as_its_checkpoint_names_it(ends: Ends, tmp_path: Path) -> None:
    folder = moe.folder(tmp_path / "model")
    server = Vllm()
    asyncio.run(ends(load_model(PretrainedModel(name=str(folder)), seed=0), server).publish())
    (file,) = folder.glob("*.safetensors")
    assert same(server.received[0], load_file(file))


def test_the_dtype_is_that_of_the_model_and_masters_stay_here(ends: Ends, tiny: Tiny) -> None:
    loaded, server = tiny(dtype="bfloat16"), Vllm()
    asyncio.run(ends(loaded, server).publish())
    assert {x.dtype for x in server.received[0].values()} == {torch.bfloat16}
    assert same(server.received[0], weights(loaded))


def test_a_server_that_was_started_again_joins_with_the_next_version(ends: Ends, tiny: Tiny) -> None:
    loaded, servers = tiny(), [Vllm(), Vllm()]
    trainer = ends(loaded, *servers)
    asyncio.run(trainer.publish())
    servers[1].version, servers[1].groups = "default", []
    asyncio.run(trainer.publish())
    assert servers[0].calls == [*JOIN, *UPDATE, *JOIN, *UPDATE]
    assert all(same(server.received[0], weights(loaded)) for server in servers)


def test_a_server_that_is_gone_is_left_out(ends: Ends, tiny: Tiny) -> None:
    loaded, server = tiny(), Vllm()
    trainer = ends(loaded, server)
    gone = Peer("http://127.0.0.1:9", name="inference")
    trainer._transfer._servers = [gone, *trainer._transfer._servers]  # type: ignore[attr-defined]
    asyncio.run(trainer.publish())
    assert server.info["world_size"] == 2 and same(server.received[0], weights(loaded))


def test_without_any_server_it_waits_and_then_says_so(ends: Ends, tiny: Tiny) -> None:
    trainer = ends(tiny(), patience=0.1)
    trainer._transfer._servers = [Peer("http://127.0.0.1:9", name="inference")]  # type: ignore[attr-defined]
    with pytest.raises(
        EngineError, match=r"no inference server for 0\.1 s: the inference at http://127\.0\.0\.1:9"
    ):
        asyncio.run(trainer.publish())


def test_an_update_that_another_trainer_never_ended_is_ended(ends: Ends, tiny: Tiny) -> None:
    loaded, server = tiny(), Vllm()
    server.updating = True
    asyncio.run(ends(loaded, server).publish())
    assert server.calls[3:6] == ["/start_weight_update", "/finish_weight_update", "/start_weight_update"]
    assert same(server.received[0], weights(loaded))


def test_a_server_without_the_backend_is_refused_and_stays_as_it_was(ends: Ends, tiny: Tiny) -> None:
    server = Vllm()
    server.fails["/init_weight_transfer_engine"] = "Weight transfer not configured."
    with pytest.raises(EngineError, match=r"not configured\. \(it needs --weight-transfer-config"):
        asyncio.run(ends(tiny(), server).publish())
    assert server.calls == JOIN


@pytest.mark.parametrize("path", ["/update_weights", "/finish_weight_update"])
def test_what_fails_on_the_way_is_an_error_and_the_next_publish_is_whole(
    ends: Ends, tiny: Tiny, path: str
) -> None:
    loaded, server = tiny(), Vllm()
    trainer = ends(loaded, server)
    server.fails[path] = "out of memory"
    with pytest.raises(EngineError, match=f"{path}: HTTP 500: out of memory"):
        asyncio.run(trainer.publish())
    assert server.calls[-1] == path and "/resume" not in server.calls  # its weights are incomplete
    server.fails.clear()
    asyncio.run(trainer.publish())
    assert server.calls[-1] == "/resume" and same(server.received[0], weights(loaded))


def test_a_server_that_is_lost_on_the_way_sends_the_run_to_its_checkpoint(ends: Ends, tiny: Tiny) -> None:
    server = Vllm()

    def lost(**_: Any) -> Any:
        raise Gone

    server.update_weights = lost  # type: ignore[method-assign]
    with pytest.raises(PartLost, match="while weights were sent to it"):
        asyncio.run(ends(tiny(), server).publish())


def test_a_trainer_in_a_process_of_its_own_sends_to_the_servers_that_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(Broadcast.__init__.__kwdefaults__, "make", GlooGroup)
    monkeypatch.setenv("SILVA_API_KEY", "k3y")
    values = {
        "output_dir": str(tmp_path), "name": "run", "model": {"type": "tiny"}, "engine": {"type": "vllm"},
        "trainer": {"transfer": "nccl"}, "environments": [{"type": "bandit"}],
        "placement": {"type": "services", "device": "cpu", "threads": 1},
    }  # fmt: skip
    config, server = load([], REGISTRIES, values=values, env={}).config, Vllm()
    with ExitStack() as stack:
        address = stack.enter_context(serving(server))
        data = config.model_dump(mode="json")
        asked = Open(data, False, str(tmp_path / "run"), publishes="sent", servers=(address,))
        trainer = asyncio.run(Builder(config, stack)(asked, print))
        stack.callback(lambda: asyncio.run(trainer.close()))
        snapshot = asyncio.run(trainer.publish())
    assert server.version == snapshot.sent and server.keys == {"Bearer k3y"}
    assert trainer.capabilities.publishes == "sent" and server.received[0]
