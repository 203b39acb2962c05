"""vLLM's routes for weights, and workers behind them that receive over gloo what NCCL would bring them.

Written from vLLM 0.32: the bodies, the order of the calls, one number that all add up after they have joined,
and chunks that end with the tensor that makes them longer than the buffer.
"""

from __future__ import annotations

import base64
import math
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from email.message import Message
from typing import Any

import torch
import torch.distributed as dist
from tests.json_server import serving_json

PATIENCE = timedelta(seconds=5)
STORES: dict[int, dist.TCPStore] = {}
ABANDONED: list[Any] = []
"""Groups in which somebody still waits: torch waits for that before it lets go of them."""


def gloo(port: int, rank: int, size: int, name: str) -> Any:
    """A group; rank 0 has made the store."""
    store = STORES[port] if rank == 0 else dist.TCPStore("127.0.0.1", port, size, False, PATIENCE)
    group = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, PATIENCE)
    group.allreduce([torch.zeros(1)], dist.AllreduceOptions()).wait()
    return group


def broadcast(group: Any, data: torch.Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return group.broadcast([data], options)


class GlooGroup:
    """Implements `NcclGroup`, in place of `Nccl`."""

    made = 0

    def __init__(self, size: int, device: torch.device) -> None:
        GlooGroup.made += 1
        self._size, self._name, self._work = size, f"group-{GlooGroup.made}", list[Any]()
        self._group: Any = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            free.listen()
            self._port = free.getsockname()[1]
            STORES[self._port] = dist.TCPStore(
                "127.0.0.1", self._port, None, True, PATIENCE, wait_for_workers=False,
                master_listen_fd=free.detach(),
            )  # fmt: skip

    @property
    def invitation(self) -> dict[str, Any]:
        told = f"{self._port} {self._name}".ljust(128).encode()  # an id of NCCL has 128 bytes
        return {"nccl_unique_id_b64": base64.b64encode(told).decode()}

    def join(self) -> None:
        self._group = gloo(self._port, 0, self._size, self._name)

    def broadcast(self, data: torch.Tensor) -> None:
        self._work = [broadcast(self._group, data), data]

    def wait(self, check: Callable[[], None]) -> None:
        while self._work and not self._work[0].is_completed():
            check()
        self._work = []

    def abort(self) -> None:
        ABANDONED.append((self._group, self._work, STORES.pop(self._port, None)))


class Gone(Exception):
    """The process has ended: there is no answer."""


class Vllm:
    """A server with so many workers.

    Attributes:
        calls: paths so far, without what only tells.
        keys: what stood in the header of authorization.
        received: of each worker, by name, what came last.
        fails: paths that are answered with an error.
    """

    def __init__(self, workers: int = 1) -> None:
        self.workers, self.calls, self.fails = workers, list[str](), dict[str, str]()
        self.keys = set[str]()
        self.version, self.info, self.updating = "default", dict[str, Any](), False
        self.groups: list[Any] = []
        self.received: list[dict[str, torch.Tensor]] = [{} for _ in range(workers)]
        self.chunks = list[int]()

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        name = path.partition("?")[0].strip("/")
        if name not in ("weight_info", "get_world_size"):
            self.calls.append(path)
        if path in self.fails:
            raise RuntimeError(self.fails[path])
        return getattr(self, name)(**body)

    def weight_info(self) -> Any:
        return {"weight_version": self.version}

    def get_world_size(self) -> Any:
        return {"world_size": self.workers}

    def shutdown_weight_transfer_engine(self) -> Any:
        self.groups = []
        return {"message": ""}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> Any:
        self.info, first = init_info, init_info["rank_offset"]
        assert init_info["packed"] is True

        port, name = base64.b64decode(init_info["nccl_unique_id_b64"]).decode().split()

        def join(worker: int) -> Any:
            return gloo(int(port), first + worker, init_info["world_size"], name)

        self.groups = self.together(join)
        return {"message": ""}

    def together(self, work: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * self.workers

        def run(worker: int) -> None:
            results[worker] = work(worker)

        threads = [
            threading.Thread(target=run, args=(worker,), daemon=True) for worker in range(self.workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def pause(self) -> Any:
        return {"status": "paused"}

    def start_weight_update(self) -> Any:
        if self.updating:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self.updating = True
        return {"message": ""}

    def update_weights(self, update_info: dict[str, Any]) -> Any:
        assert self.updating
        described = list(
            zip(update_info["names"], update_info["dtype_names"], update_info["shapes"], strict=True)
        )
        self.received = self.together(lambda worker: self.receive(worker, described))
        return {"message": ""}

    def receive(self, worker: int, described: list[tuple[str, str, list[int]]]) -> dict[str, torch.Tensor]:
        found, left = dict[str, torch.Tensor](), list(described)
        while left:
            sizes, total = list[int](), 0
            for _, dtype, shape in left:
                sizes.append(math.prod(shape) * getattr(torch, dtype).itemsize)
                total += sizes[-1]
                if total > self.info["packed_buffer_size_bytes"]:
                    break
            data = torch.empty(total, dtype=torch.uint8)
            broadcast(self.groups[worker], data).wait()
            self.chunks.append(len(sizes))
            for part, (name, dtype, shape) in zip(data.split(sizes), left, strict=False):
                found[name] = part.clone().view(getattr(torch, dtype)).view(shape)
            left = left[len(sizes) :]
        return found

    def finish_weight_update(self, weight_version: str | None = None) -> Any:
        assert self.updating
        self.updating, self.version = False, weight_version or self.version
        return {"message": ""}

    def reset_prefix_cache(self) -> Any:
        return {"success": True}

    def resume(self) -> Any:
        return {"status": "resumed"}


def serving(vllm: Vllm) -> AbstractContextManager[str]:
    """Its address."""

    def answer(path: str, body: Any, headers: Message) -> tuple[int, Any] | None:
        vllm.keys.add(headers.get("authorization", ""))
        try:
            return 200, vllm.answer(path, body or {})
        except Gone:
            return None
        except Exception as error:
            return 500, {"error": {"message": str(error), "type": type(error).__name__}}

    return serving_json(answer)
