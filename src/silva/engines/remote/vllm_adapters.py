"""Adapters that servers of vLLM read from folders, each by the name of its folder, which is its own for ever.

vLLM keeps the newest in memory (--max-cpu-loras) and reads an older one again from its folder. Here are the
names that each server knows: one is told before the first request that needs it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from silva.engines.remote.wire import read_answer
from silva.errors import CapabilityError
from silva.wire.transport import Peer, Refused

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
KNOWN = 256  # names that a server is left with


class FolderAdapters:
    """Which servers know which names."""

    def __init__(self) -> None:
        self._known = defaultdict[str, dict[str, None]](dict)  # by address; those used last come last
        self._loading = defaultdict[str, asyncio.Lock](asyncio.Lock)

    def forget(self, peer: Peer, name: str = "") -> None:
        """A server knows a name no more, or none."""
        if name:
            self._known[peer.address].pop(name, None)
        else:
            self._known.pop(peer.address, None)

    async def named(self, peer: Peer, folder: Path) -> str:
        """What requests to this server call the adapter.

        Raises:
            CapabilityError: the server takes no adapters while it runs, or cannot see the folder.
            Refused: it does not take this one.
        """
        name, known = folder.name, self._known[peer.address]
        if name not in known:
            async with self._loading[peer.address]:
                if name not in known:
                    await self._load(peer, name, folder)
        known[name] = known.pop(name, None)
        while len(known) > KNOWN:
            oldest = next(iter(known))
            del known[oldest]
            with suppress(Refused):  # it does not know it any more
                await peer.tell(UNLOAD, {"lora_name": oldest})
        return name

    async def _load(self, peer: Peer, name: str, folder: Path) -> None:
        answer = await peer.get("/v1/models")
        if name not in read_answer(peer, "/v1/models", answer, lambda a: [each["id"] for each in a["data"]]):
            try:
                await peer.tell(LOAD, {"lora_name": name, "lora_path": str(folder.absolute())})
            except Refused as refused:
                if refused.status not in (404, 405):
                    raise
                raise CapabilityError(
                    f"the {peer.name} at {peer.address} has not loaded the adapter {folder} ({refused}); "
                    "expected vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 that sees this "
                    "folder"
                ) from refused
        self._known[peer.address][name] = None
