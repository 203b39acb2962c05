"""Another run in the folder, which the simulated one is to replace."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from silva.storage import replaced


class Earlier:
    """
    Args:
        run: the folder.
        seed: that of the configuration that is simulated; an earlier run has another one.
        there: whether there is an earlier run.
    """

    def __init__(self, run: Path, seed: int, *, there: bool) -> None:
        self._run, self._seed, self._begun = run, seed, False
        self._files = _written(run) if there else {}

    def flags(self, life: int) -> dict[str, bool]:
        """As whoever looks into the folder would give them."""
        if self._files and (not self.is_replaced() or replaced.returns(self._run)):
            return {"overwrite": True}
        return {"resume": life > 1}

    def is_replaced(self) -> bool:
        """Whether the run in the folder is the simulated one."""
        try:
            seed = json.loads((self._run / "config.json").read_bytes())["seed"]
        except FileNotFoundError:
            return False
        return bool(seed == self._seed)

    def lost(self) -> list[str]:
        """The earlier run is whole, wherever in the folder, until the new one has something of its own."""
        run = self._run
        places = (run, *(run / name for name in replaced.FOLDERS))
        lost = [
            name
            for name, data in self._files.items()
            if data not in [(p / name).read_bytes() for p in places if (p / name).is_file()]
        ]
        ledger, metrics = run / "ledger.jsonl", run / "metrics.jsonl"
        played = ledger.exists() and b'"event": "sealed"' in ledger.read_bytes()
        trained = metrics.exists() and b'"step": 1' in metrics.read_bytes()
        if self.is_replaced() and (played or trained or any(run.glob("checkpoints/step_*"))):
            self._begun = True  # also if a supervised run without a checkpoint begins again
        if self._begun or not lost:
            return []
        return [f"of the earlier run {', '.join(lost)} is lost, and the new one has not begun"]


def _written(run: Path) -> dict[str, bytes]:
    """Its files by name."""
    event = b'{"seq": 0, "event": "published", "version": 1'
    ledger = event + b', "crc": "%08x"}\n' % zlib.crc32(event + b"}")
    files = {"config.json": b'{"seed": -1}', "ledger.jsonl": ledger, "metrics.jsonl": b'{"step": 0}\n',
             "checkpoints/step_1/state.json": b"{}", "summary.json": b'{"steps": 1}'}  # fmt: skip
    for name, data in files.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(data)
    return files
