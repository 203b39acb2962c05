"""Numbers that other libraries computed; the scripts beside this one made them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read(name: str) -> dict[str, Any]:
    return json.loads((Path(__file__).parent / f"{name}.json").read_text())
