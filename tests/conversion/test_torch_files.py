"""Files of torch.save are read as torch.load reads them, and nothing that stands in one is run."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from silva.conversion.torch_files import TorchFile
from silva.errors import ModelError


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.parts = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


def archive(path: Path, program: bytes, **entries: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", program)
        for name, content in entries.items():
            file.writestr(f"x/data/{name}", content)
    return path


def test_every_dtype_and_layout_is_what_torch_load_gives(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    kinds = (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
    )
    state = {str(kind): base.to(kind) for kind in (*kinds, torch.bool)}
    state |= {"part": base[1:3, ::2], "turned": base.T, "empty": base[:0], "one": torch.tensor(3.5)}
    state["parameter"] = torch.nn.Parameter(base * 2)
    for protocol in (2, 4):
        path = tmp_path / f"{protocol}.pt"
        torch.save(state, path, pickle_protocol=protocol)
        file = TorchFile(path)
        assert [*file.content] == [*state]
        for name, expected in state.items():
            found = file.tensor(file.content[name])
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert torch.equal(found, expected)


def test_hostile_pickles_do_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    command = f"open({str(mark)!r}, 'w').close()"
    calls = {
        "posix.system": Payload(os.system, f"touch {mark}"),
        r"(builtins|__builtin__).exec": Payload(exec, command),
        r"(builtins|__builtin__).getattr": Payload(getattr, "x", "upper"),
        "torch.hub.load": Payload(torch.hub.load, "a/b", "c"),
    }
    for name, payload in calls.items():
        for protocol in (2, 4):
            buffer = io.BytesIO()
            torch.save({"w": torch.zeros(2), "x": payload}, buffer, pickle_protocol=protocol)
            path = tmp_path / "hostile.pt"
            path.write_bytes(buffer.getvalue())
            with pytest.raises(ModelError, match=rf"^[^(]*hostile.pt: refused: it names {name}"):
                TorchFile(path)
    assert not mark.exists()
    pickle.loads(pickle.dumps(calls[r"(builtins|__builtin__).exec"]))
    assert mark.exists()  # so the payload is a real one


PROGRAMS = {
    "an old instruction that calls": (b"(S'x'\nios\nsystem\n.", "refused: the instruction STRING"),
    "one that builds an instance": (b"(cos\nsystem\nX\x01\x00\x00\x00xo.", "refused: it names os.system"),
    "an extension code": (b"\x80\x02\x82\x01.", "refused: the instruction EXT1"),
    "a name with dots": (b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93.", "refused: it names torch.os.system"),
    "a near name": (b"ctorch.distributed.rpc\nremote\n.", "refused: it names torch.distributed.rpc.remote"),
    "state of a name": (b"\x80\x02ctorch\nSize\n}b.", "damaged"),
    "nothing on the stack": (b"\x80\x02R.", "damaged"),
    "no end": (b"\x80\x02}", "damaged"),
    "cut off": (b"\x80\x02X\xff\x00\x00\x00abc", "damaged"),
    "no dict": (b"\x80\x02K\x01.", "damaged"),
    "no such memo": (b"\x80\x02h\x07.", "damaged"),
    "a call of a text": (b"\x80\x02X\x01\x00\x00\x00a)R.", "damaged"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_broken_and_strange_programs_are_refused(name: str, tmp_path: Path) -> None:
    program, said = PROGRAMS[name]
    with pytest.raises(ModelError, match=rf"x.pt: {said}"):
        TorchFile(archive(tmp_path / "x.pt", program))


def test_a_tensor_cannot_reach_beyond_its_storage(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(4.0)}, buffer)
    with zipfile.ZipFile(buffer) as file:
        names = {each.partition("/")[2]: file.read(each) for each in file.namelist()}
    program = names["data.pkl"]
    far = program.replace(b"K\x00K\x04\x85", b"K\x02K\x04\x85")  # begins at number 2 of 4
    assert far != program
    path = archive(tmp_path / "far.pt", far, **{"0": names["data/0"]})
    opened = TorchFile(path)
    with pytest.raises(ModelError, match=r"far.pt: a tensor does not fit its storage"):
        opened.tensor(opened.content["w"])
    with pytest.raises(ModelError, match=r"storage 0 has 8 bytes, expected 4 numbers of torch.float32"):
        TorchFile(archive(tmp_path / "short.pt", program, **{"0": bytes(8)}))
    with pytest.raises(ModelError, match=r"x/data.pkl is compressed"):
        with zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("x/data.pkl", program)
        TorchFile(tmp_path / "packed.pt")
    torch.save({"w": torch.zeros(1)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ModelError, match=r"cannot be read as a file of torch.save"):
        TorchFile(tmp_path / "old.pt")
