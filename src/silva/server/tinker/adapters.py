"""Samples with adapters that are folders, as PEFT stores them: each is loaded when it is first asked for.

The engine drops the one that was used longest ago when it has too many; it is then loaded again. Servers of
vLLM read folders themselves. Folders of whole models are whole_models.py's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from safetensors.torch import load_file

from silva.engines.one_adapter import ManyAdapters
from silva.errors import CapabilityError, CheckpointError
from silva.protocols import ReadLogits
from silva.server.tinker.whole_models import WholeModels
from silva.types import Completion, SamplingParams, TokenScores

PEFT = "base_model.model."  # before every name in a file
WHOLE = "config.json"  # of a folder of a whole model
T = TypeVar("T")


class FolderEngine(Protocol):
    """An engine whose requests name the folder of an adapter each."""

    async def sample(
        self, tokens: Sequence[int], params: SamplingParams, *, session: str = "", adapter: Path | None = None
    ) -> Completion: ...
    async def score(
        self, tokens: Sequence[int], start: int, *, adapter: Path | None = None, top: int = 0
    ) -> TokenScores: ...


class ServedSampler:
    """Servers that read folders themselves; arguments as of `FolderSampler`."""

    def __init__(self, engine: FolderEngine, context: int, vocabulary: int, ends: Sequence[int]) -> None:
        self._engine = engine
        self.context, self.vocabulary, self.ends = context, vocabulary, tuple(ends)

    async def sample(self, tokens: Sequence[int], params: SamplingParams, adapter: Path | None) -> Completion:
        return await self._engine.sample(tokens, params, adapter=adapter)

    async def score(
        self,
        tokens: Sequence[int],
        start: int,
        adapter: Path | None,
        top: int,
        read: ReadLogits | None = None,
    ) -> TokenScores:
        """Raises CapabilityError if whole distributions are asked for, which these servers do not send."""
        if read is not None:
            raise CapabilityError(
                "target_prompt_logprobs, prompt_alt_tokens_k: this server samples from vLLM, which tells "
                "the likeliest tokens alone; expected topk_prompt_logprobs"
            )
        return await self._engine.score(tokens, start, adapter=adapter, top=top)


class FolderSampler:
    """An engine that finds adapters by their folders, whose names are their own for ever.

    Args:
        context, vocabulary, ends: of the model: tokens of prompt and answer, tokens that it knows, and those
            that end an answer.
        whole: samples from folders of whole models.
    """

    def __init__(
        self,
        engine: ManyAdapters,
        context: int,
        vocabulary: int,
        ends: Sequence[int],
        whole: WholeModels | None = None,
    ) -> None:
        self._engine, self._whole = engine, whole
        self.context, self.vocabulary, self.ends = context, vocabulary, tuple(ends)
        self._loading = asyncio.Lock()

    async def sample(self, tokens: Sequence[int], params: SamplingParams, adapter: Path | None) -> Completion:
        if self._whole and adapter and (adapter / WHOLE).exists():
            return await self._whole.ask(adapter, lambda engine: engine.sample(tokens, params))
        return await self._with(adapter, lambda name: self._engine.sample(tokens, params, adapter=name))

    async def score(
        self,
        tokens: Sequence[int],
        start: int,
        adapter: Path | None,
        top: int,
        read: ReadLogits | None = None,
    ) -> TokenScores:
        if self._whole and adapter and (adapter / WHOLE).exists():
            return await self._whole.ask(
                adapter, lambda engine: engine.score(tokens, start, top=top, read=read)
            )
        return await self._with(
            adapter, lambda name: self._engine.score(tokens, start, adapter=name, top=top, read=read)
        )

    async def _with(self, adapter: Path | None, ask: Callable[[str | None], Awaitable[T]]) -> T:
        if adapter is None:
            return await ask(None)
        if adapter.name not in self._engine.adapters:
            async with self._loading:
                if adapter.name not in self._engine.adapters:
                    parameters, scale = await asyncio.to_thread(_read, adapter)
                    await self._engine.load_adapter(adapter.name, parameters, scale=scale)
                # The request begins before another adapter can take the place of this one.
                answer = asyncio.ensure_future(ask(adapter.name))
                await asyncio.sleep(0)
            return await answer
        return await ask(adapter.name)


def _read(folder: Path) -> tuple[dict[str, Any], float]:
    """Tensors by the names of the plain model, and what their product is scaled by."""
    try:
        tensors = load_file(folder / "adapter_model.safetensors")
        config = json.loads((folder / "adapter_config.json").read_text())
    except OSError as error:
        raise CheckpointError(f"the weights of this sampling session are gone ({folder.name})") from error
    named = {name.removeprefix(PEFT): tensor for name, tensor in tensors.items()}
    return named, config["lora_alpha"] / config["r"]
