"""A trainer that hands everything on to another one: what changes some of its methods begins here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from silva.protocols import Trainer, TrainerCapabilities
from silva.wire import rpc


class WrappedTrainer(rpc.proxy(Trainer)):  # type: ignore[misc]
    """Implements `protocols.Trainer` over `inner`."""

    def __init__(self, inner: Trainer) -> None:
        self.inner = inner
        self.capabilities: TrainerCapabilities = inner.capabilities

    def around(self, method: str) -> AbstractContextManager[None]:
        """Entered while a method of the inner trainer runs."""
        return nullcontext()

    @property
    def version(self) -> int:
        return self.inner.version

    @version.setter
    def version(self, version: int) -> None:
        self.inner.version = version

    async def close(self) -> None:
        await self.inner.close()

    async def _call(self, method: str, arguments: Sequence[Any]) -> Any:
        with self.around(method):
            return await getattr(self.inner, method)(*arguments)
