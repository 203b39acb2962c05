"""NCCL with processes that are not of this trainer: a communicator of its own, beside torch's process groups.

Whoever has the id can join: rank 0 makes it, the others are told. vLLM's workers (0.32) join by the id alone
and then add up one number, so rank 0 does the same. Calls are those of nccl.h, in the library that torch has
loaded.

No test has run this file on a GPU: tests put another `NcclGroup` in its place.
"""

from __future__ import annotations

import base64
import ctypes
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from silva.errors import CapabilityError, EngineError

UINT8, FLOAT32, SUM = 1, 7, 0  # of ncclDataType_t and ncclRedOp_t
TICK = 0.001  # seconds between two looks whether the others still take part


class NcclGroup(Protocol):
    """Rank 0 and the workers of engines."""

    @property
    def invitation(self) -> dict[str, Any]: ...  # what lets workers join
    def join(self) -> None: ...  # returns when all have joined
    def broadcast(self, data: torch.Tensor) -> None: ...  # [bytes] from here to all; it may go on afterwards
    def wait(
        self, check: Callable[[], None]
    ) -> None: ...  # for what was sent; `check` raises if that is in vain
    def abort(self) -> None: ...  # ends it here, whatever the others do


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class Nccl:
    """Implements `NcclGroup` on a GPU.

    Args:
        size: of all ranks.

    Raises:
        CapabilityError: there is no GPU, or no NCCL.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        if device.type != "cuda":
            raise CapabilityError(
                f'trainer.transfer = "nccl": the trainer computes on {device.type}, expected a GPU'
            )
        try:
            self._library = ctypes.CDLL("libnccl.so.2")
        except OSError as error:
            raise CapabilityError(f'trainer.transfer = "nccl": there is no NCCL here ({error})') from error
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._size, self._device = size, device
        self._id, self._comm = _Id(), ctypes.c_void_p()
        self._sent, self._held = torch.cuda.Event(), torch.empty(0)
        self._call("ncclGetUniqueId", ctypes.byref(self._id))

    @property
    def invitation(self) -> dict[str, Any]:
        return {"nccl_unique_id_b64": base64.b64encode(bytes(self._id)).decode()}

    def join(self) -> None:
        with torch.cuda.device(self._device):
            self._call("ncclCommInitRank", ctypes.byref(self._comm), self._size, self._id, 0)
            one = torch.zeros(1, device=self._device)
            self._collective("ncclAllReduce", one, 1, FLOAT32, SUM)
            torch.cuda.current_stream().synchronize()

    def broadcast(self, data: torch.Tensor) -> None:
        with torch.cuda.device(self._device):
            self._collective("ncclBroadcast", data, data.numel(), UINT8, 0)
            self._sent.record()
        self._held = data  # until it has gone out

    def wait(self, check: Callable[[], None]) -> None:
        while not self._sent.query():
            check()
            time.sleep(TICK)

    def abort(self) -> None:
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            self._library.ncclCommAbort(comm)

    def _collective(self, name: str, data: torch.Tensor, count: int, kind: int, root_or_sum: int) -> None:
        where, stream = (
            ctypes.c_void_p(data.data_ptr()),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        self._call(name, where, where, ctypes.c_size_t(count), kind, root_or_sum, self._comm, stream)

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, name)(*arguments):
            words = self._library.ncclGetErrorString(code).decode(errors="replace")
            raise EngineError(f'trainer.transfer = "nccl": {name} failed: {words}')
