"""Workers of vLLM on a CPU that receive over gloo what NCCL would bring them: all else is vLLM's own code.

Runs in vLLM's environment, in the place of the extension of workers that it is derived from.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import silva_vllm  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer import nccl_engine, packed_tensor  # type: ignore[import-not-found]


class Gloo:
    """What vLLM needs of its PyNcclCommunicator."""

    def __init__(self, port: int, name: str, rank: int, size: int) -> None:
        patience = timedelta(seconds=60)
        store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, size, False, patience))
        self._group = dist.ProcessGroupGloo(store, rank, size, patience)
        self._group.allreduce([torch.zeros(1)], dist.AllreduceOptions()).wait()

    def broadcast(self, data: torch.Tensor, src: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([data], options).wait()

    def destroy(self) -> None:
        pass


def joined(info: Any, parallel: Any) -> Gloo:
    """The id of NCCL has 128 bytes; here they are a port and a name."""
    port, name = info.nccl_unique_id_bytes.decode().split()
    return Gloo(int(port), name, info.rank_offset + parallel.rank, info.world_size)


nccl_engine.worker_init_process_group = joined
stream = SimpleNamespace(synchronize=lambda: None)
packed_tensor._get_streams = lambda device, count: (stream,) * count
torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment]
torch.accelerator.current_device_index = lambda: 0  # type: ignore[assignment]
torch.accelerator.synchronize = lambda *_: None  # type: ignore[assignment]


class Extension(silva_vllm.Extension):  # type: ignore[misc]
    pass
