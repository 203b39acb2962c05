"""The smallest model that tests of loading need."""

from __future__ import annotations

from silva.config.sections import TinyModel

TINY = TinyModel(layers=1, width=16, heads=2, kv_heads=1, context=64)
