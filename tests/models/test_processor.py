"""What is read of /proc/cpuinfo, as it says it on several processors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from silva.models import processor

ZEN_3 = "processor\t: 0\nmodel name\t: AMD EPYC 7763\nflags\t\t: fpu avx2 fma\n"
ZEN_5 = ZEN_3.replace("avx2", "avx2 avx512f avx512_bf16")
XEON = ZEN_3.replace("avx2", "avx2 avx512f amx_bf16 amx_tile")
ARM = "processor\t: 0\nFeatures\t: fp asimd {}\nCPU part\t: 0xd40\n"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    processor.multiplies_bfloat16.cache_clear()
    yield
    processor.multiplies_bfloat16.cache_clear()


@pytest.mark.parametrize(
    ("text", "expected"),
    [(ZEN_3, False), (ZEN_5, True), (XEON, True), (ARM.format("bf16"), True), (ARM.format("sve"), False)],
    ids=["Zen 3", "Zen 5", "Xeon", "Arm with", "Arm without"],
)
def test_products_of_bfloat16(monkeypatch: pytest.MonkeyPatch, text: str, expected: bool) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert processor.multiplies_bfloat16() is expected


def test_without_the_file_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", lambda path: ZEN_3)
    assert processor.processor() == "AMD EPYC 7763"
    monkeypatch.setattr(Path, "read_text", missing)
    assert not processor.multiplies_bfloat16() and processor.processor()
