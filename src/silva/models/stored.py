"""Weights that are still in a model's files: it is made without them, and each process reads its parts.

    files ──names, shapes──> transformers ──> model on the device "meta"   what does not fit is said as ever
      └──read──> a part of a parameter        renamed, or made of several tensors, as transformers does

Buffers that no file holds are those of a model that is made from its configuration.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from silva.models.pieces import Box, Pieces
from silva.models.weight_files import INDEX, file_names


class _Made(NamedTuple):
    """Tensors of files that come to one parameter or several, of which `first` is the first; each with the
    pattern that it matches, None for one that is the parameter as it is."""

    first: str
    tensors: list[tuple[str, str | None]]


def files_of(source: str, options: Mapping[str, Any]) -> list[Path]:
    """The safetensors files of a folder or of a model of the hub, which are brought here first.

    Raises:
        OSError: there are none.
    """
    known = {name: value for name, value in options.items() if name != "trust_remote_code"}
    (only,) = file_names(1)
    if one := cached_file(source, only, _raise_exceptions_for_missing_entries=False, **known):
        return [Path(one)]
    if not (index := cached_file(source, INDEX, _raise_exceptions_for_missing_entries=False, **known)):
        raise OSError(f"{source} has no {only} and no {INDEX}")
    return [Path(each) for each in get_checkpoint_shard_files(source, index, **known)[0]]


class StoredWeights:
    """What the files of a folder or of a model of the hub hold.

    Args:
        options: of the hub, for transformers.

    Attributes:
        checked: a model with these weights has run as transformers runs it.

    Raises:
        CheckpointError: a file is missing or damaged.
        OSError: there are none.
    """

    def __init__(self, source: str, options: Mapping[str, Any]) -> None:
        self._source, self._options = source, options
        self._pieces, self._of, self.checked = Pieces(files_of(source, options)), dict[str, _Made](), False
        self._tensors = self._pieces.describe()

    def model(
        self, kind: type[PreTrainedModel], config: Any, dtype: torch.dtype, **taken: Any
    ) -> tuple[PreTrainedModel, Mapping[str, Any]]:
        """The model, its parameters on the device "meta", and what transformers reports about loading it.

        Args:
            taken: what `from_pretrained` takes.
        """
        model, report = kind.from_pretrained(
            None, config=config, dtype=dtype, state_dict=dict(self._tensors), device_map={"": "meta"}, **taken
        )
        model.config.name_or_path = self._source
        try:
            model.generation_config = GenerationConfig.from_pretrained(self._source, **self._options)
        except OSError:
            inside: Any = {"config_file_name": "config.json", "_from_model_config": True}
            model.generation_config = GenerationConfig.from_pretrained(
                self._source, **inside, **self._options
            )
        self._arrange(model)
        self._tie(model)
        self._fill_buffers(model, dtype)
        return model, report

    def tensors(self, model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """What is there for a model that is made, by the names of its parameters and buffers."""
        self._arrange(model)
        return {name: self.read(name, whole(self.like(name))) for name in self._of}

    def _arrange(self, model: PreTrainedModel) -> None:
        mapping = get_model_conversion_mapping(model)
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self._converters = {pattern: each for each in converters for pattern in each.source_patterns}
        self._config, expected, prefix = model.config, model.state_dict(), model.base_model_prefix
        for key in sorted(self._tensors, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
            if name not in expected and key in expected:
                name, pattern = rename_source_key(key, [], [], prefix, expected)
            if name in expected:
                self._of.setdefault(name, _Made(name, [])).tensors.append((key, pattern))
        for made in [*self._of.values()]:
            if made.tensors[0][1] is not None:
                self._of |= dict.fromkeys(self._convert(made, self._tensors), made)

    def _convert(self, made: _Made, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What transformers makes of these tensors, by the names of parameters."""
        converter = copy.deepcopy(self._converters[made.tensors[0][1]])
        for key, pattern in made.tensors:
            if key in tensors:
                converter.add_tensor(made.first, key, pattern, tensors[key])
        found = converter.convert(made.first, config=self._config)
        return {name: each[0] if isinstance(each, list) else each for name, each in found.items()}

    def _tie(self, model: PreTrainedModel) -> None:
        """Where the files hold both of two tied weights: transformers ties them if they are equal."""
        for name, other in [*model.all_tied_weights_keys.items()]:
            if name not in self._of or other not in self._of:
                continue
            one, two = (self.read(each, whole(self.like(each))) for each in (name, other))
            if torch.equal(one, two):
                place(model, name, model.get_parameter(other))
            else:
                model.all_tied_weights_keys.pop(name)

    def _fill_buffers(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        with _default(dtype), init_empty_weights():
            made = type(model)(model.config)
        for name, buffer in made.named_buffers():
            if name in self._of:
                buffer = self.read(name, whole(buffer)).to(model.get_buffer(name).dtype)
            owner, _, own = name.rpartition(".")
            model.get_submodule(owner)._buffers[own] = buffer

    def like(self, name: str) -> torch.Tensor:
        """A parameter or buffer on the device "meta", in the type of the files."""
        made = self._of[name]
        key, pattern = made.tensors[0]
        return self._tensors[key] if pattern is None else self._convert(made, self._tensors)[name]

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A part of a parameter or buffer, in the type of the files.

        One that is made of several tensors is made whole, except for a run of experts.
        """
        made = self._of[name]
        if made.tensors[0][1] is None:
            return self._pieces.read(made.tensors[0][0], box)
        every = whole(self.like(name))
        if not box.size:
            return torch.empty(box.shape)
        operations = self._converters[made.tensors[0][1]].operations
        stacks = isinstance(operations[0], MergeModulelist) and operations[0].dim == 0
        if stacks and box.shape[1:] == every.shape[1:]:
            found = self._convert(made, self._read(self._run(made, box)))[name]
            if tuple(found.shape) == box.shape:
                return found
        return self._convert(made, self._read([key for key, _ in made.tensors]))[name][box.within(every)]

    def _read(self, keys: Sequence[str]) -> dict[str, torch.Tensor]:
        return {key: self._pieces.read(key, whole(self._tensors[key])) for key in keys}

    def _run(self, made: _Made, box: Box) -> list[str]:
        """The tensors of the experts in the box."""
        by_pattern: dict[str | None, list[str]] = {}
        for key, pattern in made.tensors:
            by_pattern.setdefault(pattern, []).append(key)
        start = box.offset[0]
        return [key for keys in by_pattern.values() for key in keys[start : start + box.shape[0]]]

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def file_of(self, name: str) -> Path:
        return self._pieces.file_of(self._of[name].tensors[0][0])


def whole(tensor: torch.Tensor) -> Box:
    return Box((0,) * tensor.dim(), tuple(tensor.shape))


def place(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put a parameter where another one is."""
    owner, _, own = name.rpartition(".")
    model.get_submodule(owner).register_parameter(own, parameter)


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """What tensors are that are made within."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def without_numbers(model: nn.Module) -> Iterator[None]:
    """Within, parameters on the device "meta" are on the CPU and take no memory there.

    Adapters that PEFT adds are then made, and drawn, where they are.
    """
    hollow = {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.is_meta}
    of = {
        id(p): nn.Parameter(torch.zeros((), dtype=p.dtype).expand(p.shape), p.requires_grad)
        for p in hollow.values()
    }
    for name, parameter in hollow.items():
        place(model, name, of[id(parameter)])
    try:
        yield
    finally:
        back = {id(of[id(p)]): p for p in hollow.values()}
        for name, parameter in [*model.named_parameters(remove_duplicate=False)]:
            if (original := back.get(id(parameter))) is not None:
                original.requires_grad_(parameter.requires_grad)
                place(model, name, original)
