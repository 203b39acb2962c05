"""The local engine samples from the trainer's own weights, and gives memory back when they change."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.engines.local.test_engine import TINY, Make, Stepped, answer, ask, prompt
from tests.trainer.updates import optim_step

from silva.config.sections import Lora, Optimizer, TinyModel
from silva.engines.local import engine as local
from silva.engines.local.engine import LocalEngine
from silva.engines.settings import LocalEngineSettings
from silva.errors import ModelError
from silva.models import prepacked
from silva.models.loading import LoadedModel, load_model
from silva.models.snapshots import read_weights, weight_folder
from silva.trainer.export import export_model
from silva.trainer.learner import Learner
from silva.trainer.local import LocalTrainer
from silva.trainer.settings import LocalTrainerSettings
from silva.types import Completion, LossSpec, Sample, Snapshot

WIDE = TinyModel(layers=1, width=512, heads=8, kv_heads=8)  # wide enough to pack


def sample_of(completion: Completion, tokens: Sequence[int]) -> Sample:
    mask = np.array([False] * len(tokens) + [True] * len(completion.tokens))
    return Sample(
        tokens=np.array([*tokens, *completion.tokens]),
        loss_weights=mask.astype(np.float32),
        logprobs=np.where(mask, [np.nan] * len(tokens) + list(completion.logprobs), np.nan),
        temperatures=np.ones(len(mask)),
        versions=np.where(mask, 0, -1),
        trajectory="t",
        group="g",
        advantages=np.ones(len(mask), np.float32),
    )


def test_the_engine_has_modules_of_its_own_over_the_model_s_weights(make_engine: Make) -> None:
    loaded = load_model(TINY.model_copy(update={"lora": Lora(rank=4)}), seed=0)
    before = {name: vars(module).copy() for name, module in loaded.model.named_modules()}
    engine = make_engine(loaded, prepack_weights=True)
    answer(engine, prompt(20))
    assert {name: vars(module) for name, module in loaded.model.named_modules()} == before
    theirs = dict(engine._loaded.model.named_parameters())
    assert all(theirs[name] is p for name, p in loaded.model.named_parameters())
    assert engine._loaded.model is not loaded.model


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, Lora(rank=4)])
def test_the_trainer_s_step_is_what_is_sampled_next(make_engine: Make, lora: Lora | None) -> None:
    """One storage: the step itself changes the engine's model, publishing only clears the cache."""
    loaded = load_model(TINY.model_copy(update={"lora": lora}), seed=0)
    engine = make_engine(loaded)
    trainer = LocalTrainer(Learner(loaded, LocalTrainerSettings(optimizer=Optimizer(lr=1e-2)), seed=0))
    first = answer(engine, prompt(20), 12)
    trained = {str(id(p)): p.data_ptr() for p in trainer.learner.stepper.parameters.values()}

    async def step() -> None:
        await trainer.forward_backward([sample_of(first, prompt(20))], LossSpec("reinforce"))
        await optim_step(trainer)
        await engine.load(await trainer.publish())

    asyncio.run(step())
    assert {str(id(p)): p.data_ptr() for p in trainer.learner.stepper.parameters.values()} == trained
    again = answer(engine, prompt(20), 12)
    assert again.versions == (1,) * 12 and again.cached_tokens == 0
    assert again.logprobs[0] != first.logprobs[0]
    with torch.no_grad():
        logits = loaded.model(input_ids=torch.tensor([prompt(20)])).logits[0, -1]
    assert again.logprobs[0] == pytest.approx(float(logits.log_softmax(-1)[again.tokens[0]]), abs=1e-5)


def test_requests_go_on_under_new_weights(stepped: Stepped) -> None:
    loaded = load_model(TINY, seed=0)
    other = load_model(TINY, seed=1)

    async def run() -> tuple[list[Completion], int]:
        engine, stepper = stepped(loaded, prefill_tokens=64)
        tasks = [ask(engine, prompt(30 + i, i), 8, seed=i) for i in range(3)]
        await stepper.tick(4)
        loaded.model.load_state_dict(other.model.state_dict())
        loading = asyncio.ensure_future(engine.load(Snapshot(7)))
        await stepper.tick(2)  # a step was queued before it
        assert loading.done()
        while not all(task.done() for task in tasks):
            await stepper.tick()
        return [task.result() for task in tasks], engine.version

    completions, version = asyncio.run(run())
    assert version == 7
    for i, completion in enumerate(completions):
        old = completion.versions.count(0)
        assert 3 <= old <= 5 and completion.versions == (0,) * old + (7,) * (8 - old)
        sequence = torch.tensor([[*prompt(30 + i, i), *completion.tokens]])
        with torch.no_grad():
            logits = other.model(input_ids=sequence).logits[0, 29 + i : -1].log_softmax(-1)
        new = logits.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs[old:], new[old:], atol=1e-5)
        assert np.abs(np.array(completion.logprobs[:old]) - new[:old].numpy()).min() > 1e-4


def test_new_weights_give_the_memory_back(
    tiny_model: LoadedModel, make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[None] = []
    monkeypatch.setattr(local, "give_freed_memory_back", lambda: freed.append(None))
    engine = make_engine(tiny_model)
    assert engine.cache.nbytes == 0
    answer(engine, prompt(100), 20)
    # 128 tokens a row: keys and values of 2 layers with 2 heads of 8 each, outputs of width 32, float32.
    assert engine.cache.nbytes == len(engine.cache.rows) * 128 * (2 * 2 * 2 * 8 + 32) * 4
    assert not freed
    asyncio.run(engine.load(Snapshot(1)))
    assert engine.cache.nbytes == 0 and len(freed) == 1  # what the trainer has left goes too


@pytest.mark.slow
def test_sleep_gives_the_memory_back_and_changes_no_answer(make_engine: Make) -> None:
    engine = make_engine(load_model(WIDE, seed=0), prepack_weights=True)
    assert engine._packed is not None
    first = answer(engine, prompt(100), 20)
    assert engine.cache.nbytes > 0
    asyncio.run(engine.sleep())
    assert engine.cache.nbytes == 0 and engine._packed.nbytes == 0
    again = answer(engine, prompt(100), 20)
    assert again.cached_tokens == 0
    assert (again.tokens, again.logprobs) == (first.tokens, first.logprobs)


def test_a_folder_of_weights_is_sampled_like_shared_ones(make_engine: Make, tmp_path: Path) -> None:
    trained, other = load_model(TINY, seed=1), load_model(TINY, seed=2)
    export_model(trained, tmp_path)
    engine = make_engine(other)
    before = answer(engine, prompt(20), 8)
    asyncio.run(engine.load(Snapshot(3, weight_folder(tmp_path))))
    after, expected = answer(engine, prompt(20), 8), answer(make_engine(trained), prompt(20), 8)
    assert (after.tokens, after.logprobs) == (expected.tokens, expected.logprobs)
    assert after.logprobs != before.logprobs
    assert after.versions == (3,) * 8


@pytest.mark.slow
def test_sampling_goes_on_while_a_folder_is_read_and_laid_out(
    make_engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = load_model(WIDE, seed=1)
    rounded = {name: x.detach().bfloat16() for name, x in trained.model.named_parameters()}
    trained.model.load_state_dict(rounded, strict=False)
    save_file(rounded, tmp_path / "model.safetensors")  # of another dtype than the model
    engine, goes_on = make_engine(load_model(WIDE, seed=2), prepack_weights=True), threading.Event()

    def slow(*given: Any) -> dict[str, torch.Tensor]:
        found = read_weights(*given)
        assert goes_on.wait(30)
        return found

    monkeypatch.setattr(local, "read_weights", slow)

    async def run() -> Completion:
        before = await ask(engine, prompt(20), 8)
        loading = asyncio.ensure_future(engine.load(Snapshot(3, weight_folder(tmp_path))))
        meanwhile = await ask(engine, prompt(20), 8)
        assert meanwhile.logprobs == before.logprobs and meanwhile.versions == (0,) * 8
        goes_on.set()
        await loading
        return await ask(engine, prompt(20), 8)

    after = asyncio.run(run())
    expected = answer(make_engine(trained, prepack_weights=True), prompt(20), 8)
    assert (after.logprobs, after.versions) == (expected.logprobs, (3,) * 8)


def test_a_folder_that_does_not_fit_changes_nothing(make_engine: Make, tmp_path: Path) -> None:
    wide = load_model(TINY.model_copy(update={"width": 64}), seed=1)
    export_model(wide, tmp_path)
    loaded = load_model(TINY, seed=2)
    engine = make_engine(loaded)
    expected = answer(engine, prompt(20), 8)
    folder = weight_folder(tmp_path)
    for wrong, message in (
        (folder, r"model.embed_tokens.weight, .* missing or of another shape"),
        (replace(folder, digest="0"), r"the weights have the digest [0-9a-f]{32}, expected 0"),
        (replace(folder, path=str(tmp_path / "no")), "no safetensors file"),
    ):
        with pytest.raises(ModelError, match=message):
            asyncio.run(engine.load(Snapshot(3, wrong)))
    assert replace(answer(engine, prompt(20), 8), cached_tokens=0) == expected and engine.version == 0


def stored(folder: Path, seed: int) -> Snapshot:
    folder.mkdir()
    save_file(dict(load_model(WIDE, seed=seed).model.named_parameters()), folder / "model.safetensors")
    return Snapshot(seed, weight_folder(folder))


class Stages(ThreadPoolExecutor):
    """A compute thread that holds its jobs from one on, until `goes_on`: that one begun, or queued."""

    def __init__(self) -> None:
        super().__init__(1)
        self.count, self.at, self.begun = 0, -1, False
        self.there, self.goes_on = threading.Event(), threading.Event()

    def hold(self, at: int, begun: bool) -> None:
        self.at, self.begun = self.count + at, begun

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        number, self.count = self.count, self.count + 1
        if number != self.at:
            return super().submit(work, *args, **kwargs)
        if not self.begun:
            super().submit(self._wait)
            return super().submit(work, *args, **kwargs)
        return super().submit(lambda: (self._wait(), work(*args, **kwargs))[1])

    def _wait(self) -> None:
        self.there.set()
        assert self.goes_on.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize("begun", [False, True])
def test_a_load_that_is_cancelled_leaves_old_weights_or_new_ones(
    begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each job that it gives to the compute thread, queued or begun; of an engine that has computed
    something, or nothing."""
    monkeypatch.setattr(prepacked, "_faster", lambda *_: True)  # whatever the processor
    monkeypatch.setattr(local, "PACK_FROM", 1)
    snapshots = [stored(tmp_path / str(seed), seed) for seed in (1, 2)]

    async def scores(engine: LocalEngine) -> tuple[int, tuple[float, ...]]:
        found = await engine.score(prompt(20), 1)
        return found.version, found.logprobs

    async def run() -> None:
        ends = set()
        with Stages() as compute:
            engine = LocalEngine(load_model(WIDE, seed=0), LocalEngineSettings(), compute)
            known = [await scores(engine)]
            for snapshot in snapshots:
                await engine.load(snapshot)
                known.append(await scores(engine))
        assert len(set(known)) == 3
        for stage in itertools.count():
            with Stages() as compute:
                engine = LocalEngine(load_model(WIDE, seed=0), LocalEngineSettings(), compute)
                if begun:
                    assert await scores(engine) == known[0]
                compute.hold(stage, begun)
                loading = asyncio.ensure_future(engine.load(snapshots[0]))
                while not (loading.done() or compute.there.is_set()):
                    await asyncio.sleep(0.001)
                if loading.done():
                    break
                loading.cancel()
                following = asyncio.ensure_future(engine.load(snapshots[1])) if stage % 2 else None
                await asyncio.sleep(0)
                compute.goes_on.set()
                await asyncio.wait([loading])
                if following is None:
                    found = await scores(engine)
                    assert found in known[:2], stage
                    ends.add(found[0])
                    await engine.load(snapshots[1])
                else:
                    await following
                assert await scores(engine) == known[2], stage
        assert stage > 1 and 0 in ends

    asyncio.run(run())


@pytest.mark.slow
def test_loads_at_once_are_done_in_their_order_and_nothing_is_sampled_from_two_at_a_time(
    make_engine: Make, tmp_path: Path
) -> None:
    snapshots = [stored(tmp_path / str(seed), seed) for seed in (1, 2, 3)]
    engine = make_engine(load_model(WIDE, seed=0))

    async def run() -> None:
        tasks = [ask(engine, prompt(20), 60, seed=seed) for seed in range(3)]
        await asyncio.gather(*(engine.load(snapshot) for snapshot in snapshots))
        assert engine.version == 3
        for done in await asyncio.gather(*tasks):
            assert list(done.versions) == sorted(done.versions)
            for seed in {*done.versions}:
                tokens = [*prompt(20), *done.tokens]
                with torch.no_grad():
                    model = load_model(WIDE, seed=seed).model
                    logits = model(input_ids=torch.tensor([tokens])).logits[0, 19:-1].log_softmax(-1)
                for token, version, logprob, row in zip(
                    done.tokens, done.versions, done.logprobs, logits, strict=True
                ):
                    assert version != seed or logprob == pytest.approx(float(row[token]), abs=1e-4)

    asyncio.run(run())


@pytest.mark.parametrize("damage", ["torn", "gone", "changed"])
def test_a_folder_whose_writer_has_died_changes_nothing(
    damage: str, make_engine: Make, tmp_path: Path
) -> None:
    snapshot = stored(tmp_path / "1", 1)
    file = tmp_path / "1" / "model.safetensors"
    engine, whole = make_engine(load_model(WIDE, seed=0)), file.read_bytes()
    before = asyncio.run(engine.score(prompt(20), 1))
    match damage:
        case "torn":
            file.write_bytes(whole[: len(whole) // 2])
        case "gone":
            file.unlink()
        case "changed":
            file.write_bytes(whole[:-4] + b"\0\0\0\1")
    with pytest.raises(ModelError):
        asyncio.run(engine.load(snapshot))
    assert asyncio.run(engine.score(prompt(20), 1)) == before
    if damage == "torn":  # its digest is right: the trainer has not seen that it is torn
        with pytest.raises(ModelError, match="cannot be read"):
            asyncio.run(engine.load(Snapshot(1, weight_folder(file.parent))))
        assert asyncio.run(engine.score(prompt(20), 1)) == before
    file.write_bytes(whole)
    asyncio.run(engine.load(snapshot))
    assert engine.version == 1 and asyncio.run(engine.score(prompt(20), 1)).logprobs != before.logprobs
