"""What `torch.save` wrote, read without running a pickle: nothing that stands in the file is ever called.

A .pt file is a zip archive: `*/data.pkl` is a pickle program, `*/data/KEY` are the bytes of the storages.
`TorchFile` steps through the program itself and keeps each call as a record (`Called`) with its name, its
arguments and its state. Only names of tensors, dtypes, storages and DTensor's metadata may stand there; any
other name, and any instruction that torch.save does not write, is refused before anything of it is used.
Tensors are views of the mapped file.
"""

from __future__ import annotations

import mmap
import pickletools
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from silva.errors import ModelError

_STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}
_DTYPES = {str(dtype) for dtype in _STORAGES.values()}
TENSOR, PARAMETER = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"
SUBCLASS, WRAPPER = "torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_wrapper_subclass"
ORDERED = "collections.OrderedDict"
_NAMES = {TENSOR, PARAMETER, SUBCLASS, WRAPPER, ORDERED, "torch.Size", "torch.device", "torch.Tensor",
          "torch.nn.parameter.Parameter", "torch.serialization._get_layout", *_STORAGES,
          *_DTYPES}  # fmt: skip
_METADATA = {"DTensor", "DTensorSpec", "TensorMeta", "DeviceMesh", "_MeshLayout", "_FlatLayout", "Shard",
             "_StridedShard", "Replicate", "Partial", "_Partial", "ShardOrderEntry"}  # fmt: skip
"""Names in modules below torch.distributed, which have moved between versions."""
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"}
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True)
class Name:
    """A class, a function or a constant, as text."""

    name: str


@dataclass(eq=False)
class Called:
    """A call that a pickle asks for and that was not made; `items` are what it would put into the result."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Storage:
    """`start`: of its bytes in the file; `dtype`: None if it is untyped."""

    dtype: torch.dtype | None
    start: int
    bytes: int


class TorchFile:
    """A file of `torch.save`: `content` holds records in place of tensors, `tensor` reads one.

    Raises:
        ModelError: it is damaged, of another format, or holds a name that is not of a tensor; it names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._records, program = _records(path)
            self.content: Mapping[Any, Any] = self._run(program)
        except ModelError:  # which is an OSError
            raise
        except (OSError, zipfile.BadZipFile, struct.error) as error:
            raise ModelError(f"{path}: cannot be read as a file of torch.save ({error})") from error
        except (ValueError, IndexError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise ModelError(f"{path}: damaged ({type(error).__name__}: {error})") from error

    def tensor(self, called: Any) -> torch.Tensor:
        """The tensor that `_rebuild_tensor_v2` or `_rebuild_parameter` would make: a view of the file.

        Raises:
            ModelError: the call is another one, or reaches beyond its storage.
        """
        if isinstance(called, Called) and called.name == PARAMETER and called.arguments:
            called = called.arguments[0]
        name = getattr(called, "name", type(called).__name__)
        if not isinstance(called, Called) or name != TENSOR:
            raise ModelError(f"{self.path}: got {name} in place of a tensor, expected {TENSOR}")
        try:
            storage, offset, size, stride = called.arguments[:4]
            return torch.as_strided(self._storage(storage), ints(size), ints(stride), int(offset))
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise ModelError(f"{self.path}: a tensor does not fit its storage ({error})") from error

    @cached_property
    def _mapped(self) -> mmap.mmap:
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch warns of read-only memory

    def _storage(self, storage: Storage) -> torch.Tensor:
        assert storage.dtype is not None
        if not storage.bytes:
            return torch.empty(0, dtype=storage.dtype)
        count = storage.bytes // storage.dtype.itemsize
        return torch.frombuffer(self._mapped, dtype=storage.dtype, count=count, offset=storage.start)

    def _run(self, program: bytes) -> Mapping[Any, Any]:
        stack, marks, memo = list[Any](), list[int](), dict[Any, Any]()
        for opcode, argument, _ in pickletools.genops(program):
            name = opcode.name
            if name in _VALUES:
                stack.append(argument)
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name in _EMPTY:
                stack.append(_EMPTY[name]())
            elif name in _TUPLES:
                stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name == "MARK":
                marks.append(len(stack))
            elif name in ("TUPLE", "SETITEMS", "APPENDS"):
                begin = marks.pop()
                rest = stack[begin:]
                del stack[begin:]
                if name == "TUPLE":
                    stack.append(tuple(rest))
                elif name == "APPENDS":
                    stack[-1].extend(rest)
                else:
                    _items(stack[-1]).update(zip(rest[::2], rest[1::2], strict=True))
            elif name == "SETITEM":
                value, key = stack.pop(), stack.pop()
                _items(stack[-1])[key] = value
            elif name == "APPEND":
                value = stack.pop()
                stack[-1].append(value)
            elif name in ("GLOBAL", "STACK_GLOBAL"):
                if name == "STACK_GLOBAL":
                    last = stack.pop()
                    argument = f"{stack.pop()} {last}"
                stack.append(self._name(str(argument).replace(" ", ".")))
            elif name in ("REDUCE", "NEWOBJ"):
                arguments = stack.pop()
                stack[-1] = self._called(stack[-1], arguments)
            elif name == "BUILD":
                state = stack.pop()
                stack[-1].state = state
            elif name == "BINPERSID":
                stack[-1] = self._persistent(stack[-1])
            elif name == "STOP":
                return _items(stack.pop())
            elif name not in ("PROTO", "FRAME"):
                raise ModelError(
                    f"{self.path}: refused: the instruction {name}, which torch.save does not write"
                )
        raise ValueError("the program has no end")

    def _name(self, name: str) -> Name:
        module, _, last = name.rpartition(".")
        if name in _NAMES or (module.startswith("torch.distributed.") and last in _METADATA):
            return Name(name)
        raise ModelError(
            f"{self.path}: refused: it names {name}, and a file of weights needs only tensors and DTensors. "
            "Nothing of it was run"
        )

    def _called(self, name: Any, arguments: Any) -> Called:
        if not isinstance(name, Name) or not isinstance(arguments, tuple):
            raise ValueError(f"a call of {type(name).__name__}")
        return Called(name.name, arguments)

    def _persistent(self, id: Any) -> Storage:
        kind, of, key, _, count = id
        if kind != "storage" or not isinstance(of, Name) or of.name not in _STORAGES:
            raise ModelError(
                f"{self.path}: refused: a reference to {id!r:.80}, expected a storage of numbers"
            )
        start, size = self._records[f"data/{key}"]
        dtype = _STORAGES[of.name]
        if size < int(count) * dtype.itemsize:
            raise ValueError(f"storage {key} has {size} bytes, expected {count} numbers of {dtype}")
        return Storage(dtype, start, int(count) * dtype.itemsize)


def _items(value: Any) -> dict[Any, Any]:
    """A dict, or what an OrderedDict would hold."""
    if isinstance(value, Called) and value.name == ORDERED:
        return value.items
    if not isinstance(value, dict):
        raise ValueError(f"items for {type(value).__name__}, expected a dict")
    return value


def ints(values: Any) -> tuple[int, ...]:
    given = values.arguments[0] if isinstance(values, Called) and values.name == "torch.Size" else values
    return tuple(int(each) for each in given)


def _records(path: Path) -> tuple[dict[str, tuple[int, int]], bytes]:
    """(start, size) of each record's bytes, by its name without the archive's folder; and the program."""
    found = dict[str, tuple[int, int]]()
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        programs = [each for each in archive.infolist() if each.filename.endswith("/data.pkl")]
        if len(programs) != 1:
            raise zipfile.BadZipFile(f"{len(programs)} entries data.pkl, expected 1")
        prefix = programs[0].filename.removesuffix("data.pkl")
        for each in archive.infolist():
            if each.compress_type != zipfile.ZIP_STORED or each.flag_bits & 1:
                raise zipfile.BadZipFile(
                    f"{each.filename} is compressed or encrypted; torch.save does neither"
                )
            file.seek(each.header_offset)
            header = file.read(30)
            if header[:4] != b"PK\x03\x04":
                raise zipfile.BadZipFile(f"{each.filename} has no header")
            name, extra = struct.unpack("<HH", header[26:30])
            found[each.filename.removeprefix(prefix)] = (
                each.header_offset + 30 + name + extra,
                each.file_size,
            )
        order = archive.read(f"{prefix}byteorder") if "byteorder" in found else b"little"
        if order != b"little":
            raise zipfile.BadZipFile(f"byte order {order!r:.20}, expected little")
        return found, archive.read(programs[0])
