"""Tensors of all ranks in files that any number of ranks can read: safetensors, one file a rank, no pickle.

    weights.safetensors     of the first rank      a tensor, or a part of one
    weights.1.safetensors   of the second          the other part; where it lies is in the file's metadata

torch's own distributed checkpoint would do, but its ranks send each other pickled plans.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from silva.errors import CheckpointError

OF = "silva_pieces"
"""Key of a file's metadata: {name: [offset, shape of the whole]} of tensors that are a part."""


@dataclass(frozen=True)
class Box:
    """Where a part lies in the whole tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def shared(self, other: Box) -> Box:
        starts = [max(pair) for pair in zip(self.offset, other.offset, strict=True)]
        stops = [min(a + n, b + m) for a, n, b, m in
                 zip(self.offset, self.shape, other.offset, other.shape, strict=True)]  # fmt: skip
        return Box(tuple(starts), tuple(max(0, b - a) for a, b in zip(starts, stops, strict=True)))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """As an index into the part `outer`."""
        begins = [a - b for a, b in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(a, a + n) for a, n in zip(begins, self.shape, strict=True))

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def box_of(tensor: torch.Tensor) -> Box:
    """The part of a tensor that is on this rank; all of it where it is not divided."""
    if isinstance(tensor, DTensor):
        local, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        return Box(tuple(offset), tuple(local))
    return Box((0,) * tensor.dim(), tuple(tensor.shape))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of it, on every rank that has a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def divided_like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """`part` as this rank's part of a tensor that is divided as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return part
    return DTensor.from_local(part, tensor.device_mesh, tensor.placements, run_check=False,
                              shape=tensor.shape, stride=tensor.stride())  # fmt: skip


def _is_first_copy(tensor: torch.Tensor, rank: int) -> bool:
    if not isinstance(tensor, DTensor):
        return rank == 0
    placed = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
    return all(place == 0 for place, placement in placed if placement.is_replicate())


def write(path: Path, name: str, tensors: Mapping[str, torch.Tensor], rank: int) -> None:
    """Write this rank's parts, and what it has first of all copies, into the folder `path`.

    Raises:
        CheckpointError: the file cannot be written (a full disk, for one).
    """
    mine = {each: tensor for each, tensor in tensors.items() if _is_first_copy(tensor, rank)}
    boxes = {each: box_of(tensor) for each, tensor in mine.items()}
    parts = {each: [box.offset, tuple(mine[each].shape)] for each, box in boxes.items()
             if box.shape != tuple(mine[each].shape)}  # fmt: skip
    # by the library, which streams: as bytes the moments of a large model would need a second copy
    content = {each: local(tensor).detach().cpu().contiguous() for each, tensor in mine.items()
               if boxes[each].size or each not in parts}  # fmt: skip
    file = _file(path, name, rank)
    try:
        save_file(content, file, metadata={OF: json.dumps(parts)} if parts else None)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be written: {error}") from error


def _file(path: Path, name: str, rank: int) -> Path:
    return path / (f"{name}.{rank}.safetensors" if rank else f"{name}.safetensors")


def written(path: Path, name: str) -> list[Path]:
    """The files that ranks have written into the folder `path` under one name, the first rank's first."""
    return [_file(path, name, 0), *sorted(path.glob(f"{name}.*.safetensors"))]


class Pieces:
    """The tensors of some files, whole or divided.

    Raises:
        CheckpointError: a file is missing or unreadable, or the parts of a tensor are not all there.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files, self.path = files, files[0]
        self._files: list[Any] = []
        self._parts: dict[str, list[tuple[int, Box]]] = {}
        self._whole: dict[str, tuple[str, tuple[int, ...]]] = {}  # type and shape
        with ExitStack() as stack:
            for file in files:
                self._open(file, stack)
            self._stack = stack.pop_all()
        for each, parts in self._parts.items():
            shape = self._whole[each][1]
            if sum(box.size for _, box in parts) != math.prod(shape):
                raise CheckpointError(f"{self.path}: {each}: parts of {list(shape)} are missing")

    def _open(self, file: Path, stack: ExitStack) -> None:
        try:
            opened = stack.enter_context(safe_open(file, "pt"))
            parts = json.loads((opened.metadata() or {}).get(OF, "{}"))
            for name in opened.keys():  # noqa: SIM118
                found = opened.get_slice(name)
                shape = tuple(found.get_shape())
                offset, whole = parts.get(name, ((0,) * len(shape), shape))
                self._parts.setdefault(name, []).append((len(self._files), Box(tuple(offset), shape)))
                self._whole[name] = found.get_dtype(), tuple(whole)
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(f"{file}: cannot be read as safetensors: {error}") from error
        self._files.append(opened)

    def __enter__(self) -> Pieces:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def check(self, expected: Mapping[str, torch.Tensor], others: Collection[str] = ()) -> None:
        """Raise CheckpointError if names, shapes or types are not those of `expected`.

        Args:
            others: names that may be there too.
        """
        wanted = {name: _words(x.dtype, x.shape) for name, x in expected.items()}
        got = {name: _words(_TYPES.get(kind, kind), shape) for name, (kind, shape) in self._whole.items()}
        differing = [f"{name}: got {got[name]}, expected {wanted[name]}"
                     for name in sorted(wanted.keys() & got.keys()) if got[name] != wanted[name]]  # fmt: skip
        faults = [
            *_list("missing", sorted(wanted.keys() - got.keys())),
            *_list("unexpected", sorted(got.keys() - wanted.keys() - set(others))),
            *_list("different", differing),
        ]
        if faults:
            text = "; ".join(faults)
            raise CheckpointError(f"{self.path} does not belong to this model or these settings: {text}")

    def like(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of this name, divided as `tensor` is, on its device."""
        return divided_like(tensor, self.read(name, box_of(tensor)).to(tensor.device))

    def describe(self) -> dict[str, torch.Tensor]:
        """Every tensor, on the device "meta".

        Raises:
            CheckpointError: torch has no such type.
        """
        if strange := [name for name, (kind, _) in self._whole.items() if kind not in _TYPES]:
            raise CheckpointError(
                f"{self.path}: {strange[0]} is of the type {self._whole[strange[0]][0]}, expected one of "
                f"{', '.join(_TYPES)}"
            )
        return {name: torch.empty(shape, dtype=_TYPES[kind], device="meta")
                for name, (kind, shape) in self._whole.items()}  # fmt: skip

    def file_of(self, name: str) -> Path:
        """The first one that holds the tensor or a part of it."""
        return self.files[self._parts[name][0][0]]

    def all(self) -> dict[str, torch.Tensor]:
        """Every tensor, whole."""
        return {n: self.read(n, Box((0,) * len(shape), shape)) for n, (_, shape) in self._whole.items()}

    def read(self, name: str, wanted: Box) -> torch.Tensor:
        """What lies there of the tensor of this name."""
        try:
            (file, box), *others = self._parts[name]
            if box == wanted and not others:
                return self._files[file].get_tensor(name)  # type: ignore[no-any-return]
            found = torch.empty(wanted.shape, dtype=_TYPES[self._whole[name][0]])
            for file, box in self._parts[name]:
                if (shared := wanted.shared(box)).size:
                    found[shared.within(wanted)] = self._files[file].get_slice(name)[shared.within(box)]
            return found
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path}: cannot be read as safetensors: {error}") from error


_TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
          "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool,
          "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}  # fmt: skip


def _words(dtype: torch.dtype | str, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _list(kind: str, names: list[str]) -> list[str]:
    """At most three of each kind, since a wrong model differs everywhere."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"{kind}: {', '.join(itertools.islice(names, 3))}{more}"] if names else []
