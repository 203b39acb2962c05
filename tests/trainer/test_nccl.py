"""How NCCL is called, with a library that has the functions of nccl.h and writes down what they are given."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from silva.errors import CapabilityError, EngineError
from silva.trainer.nccl import Nccl

CUDA = torch.device("cuda", 0)
SOURCE = r"""
#include <stdio.h>
#include <string.h>
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct ncclComm* ncclComm_t;
static char told[4096];
static int fails;
#define TELL(...) (snprintf(told + strlen(told), sizeof told - strlen(told), __VA_ARGS__), fails)
const char* what_it_was_told(void) { return told; }
void fail_from_now_on(void) { fails = 5; }
int ncclGetUniqueId(ncclUniqueId* id) { for (int i = 0; i < 128; i++) id->internal[i] = i; return 0; }
int ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  int same = 1;
  for (int i = 0; i < 128; i++) same &= id.internal[i] == (char)i;
  *comm = (ncclComm_t)0x123456789abc;
  return TELL("init %d of %d, id %s\n", rank, ranks, same ? "whole" : "torn");
}
int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, ncclComm_t comm, void* stream)
{
  return TELL("all_reduce %d x %zu, type %d, op %d, %p, %p\n", from == to, count, type, op, (void*)comm,
              stream);
}
int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, ncclComm_t comm, void* stream)
{
  return TELL("broadcast %d x %zu, type %d, root %d, %p, %p\n", *(const char*)from + (from != to), count,
              type, root, (void*)comm, stream);
}
int ncclCommAbort(ncclComm_t comm) { return TELL("abort %p\n", (void*)comm); }
const char* ncclGetErrorString(int code) { return code == 5 ? "invalid usage" : "?"; }
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """It stands for libnccl.so.2, and the memory of the CPU for that of a GPU."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "nccl.c").write_text(SOURCE)
    path = tmp_path / "libnccl.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, tmp_path / "nccl.c"], check=True)
    made = ctypes.CDLL(str(path))
    made.what_it_was_told.restype = ctypes.c_char_p
    stream = SimpleNamespace(cuda_stream=0xFEDCBA987654, synchronize=lambda: None)
    event = SimpleNamespace(record=lambda: None, query=lambda: True)
    monkeypatch.setattr(ctypes, "CDLL", {"libnccl.so.2": made}.__getitem__)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda size, device: zeros(size))
    return made


def test_each_call_gets_what_nccl_declares(library: Any) -> None:
    group = Nccl(5, CUDA)
    assert base64.b64decode(group.invitation["nccl_unique_id_b64"]) == bytes(range(128))
    group.join()
    data = torch.full((3,), 7, dtype=torch.uint8)
    group.broadcast(data)
    group.wait(lambda: pytest.fail("it has gone out"))
    group.abort()
    group.abort()
    assert library.what_it_was_told().decode().splitlines() == [
        "init 0 of 5, id whole",
        "all_reduce 1 x 1, type 7, op 0, 0x123456789abc, 0xfedcba987654",  # float32, sum
        "broadcast 7 x 3, type 1, root 0, 0x123456789abc, 0xfedcba987654",  # uint8
        "abort 0x123456789abc",
    ]


def test_more_bytes_than_an_int_holds_are_sent_at_once(library: Any) -> None:
    group, count = Nccl(2, CUDA), 3 << 30
    first = torch.zeros(1, device=CUDA).to(torch.uint8)
    group.broadcast(first.expand(count))
    assert f"broadcast 0 x {count}, " in library.what_it_was_told().decode()


def test_what_nccl_refuses_is_an_error_with_its_words(library: Any) -> None:
    group = Nccl(2, CUDA)
    library.fail_from_now_on()
    with pytest.raises(EngineError, match="ncclCommInitRank failed: invalid usage"):
        group.join()


def test_others_that_are_lost_end_the_wait(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(query=lambda: False))

    def check() -> None:
        raise EngineError("gone")

    with pytest.raises(EngineError, match="gone"):
        Nccl(2, CUDA).wait(check)


def test_without_a_gpu_or_the_library_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CapabilityError, match="the trainer computes on cpu, expected a GPU"):
        Nccl(2, torch.device("cpu"))

    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(CapabilityError, match=r"there is no NCCL here \(libnccl\.so\.2: cannot open"):
        Nccl(2, CUDA)
