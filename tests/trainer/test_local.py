"""The trainer in one process: gradients, metrics, steps, versions, threads."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.updates import (
    REINFORCE,
    Make,
    Rows,
    gradients,
    make_trainer,
    naive_gradients,
    optim_step,
    relative_error,
    train,
)

from silva.config.sections import CriticSettings, Optimizer
from silva.errors import CapabilityError, RecordError
from silva.models.flops import flop_of
from silva.models.loading import LoadedModel, copied
from silva.models.trie import Trie
from silva.models.trie_attention import Chunk
from silva.trainer import learner, policy
from silva.trainer.learner import Learner
from silva.trainer.local import LocalTrainer
from silva.trainer.settings import LocalTrainerSettings
from silva.types import LossSpec, OptimParams, Sample, Snapshot


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 25, 60, 10_000])
def test_gradient_does_not_depend_on_the_cut(tiny: Make, make_samples: Rows, budget: int) -> None:
    """The float64 tiny model keeps float64 in its norms; with HF's own this would show 1e-8 at best."""
    loaded, samples = tiny("float64"), make_samples([9, 30, 4, 17, 12, 5])
    expected = naive_gradients(loaded, samples)
    asyncio.run(make_trainer(loaded, micro_batch_tokens=budget).forward_backward(samples, REINFORCE))
    assert relative_error(gradients(loaded), expected) < 1e-10


def shared_rows(make_samples: Rows) -> list[Sample]:
    """Four rows of 40 tokens that begin with the same 20."""
    first, *others = make_samples([40] * 4)
    beginnings = [np.concatenate([first.tokens[:20], other.tokens[20:]]) for other in others]
    return [first, *(o.replace(tokens=tokens) for o, tokens in zip(others, beginnings, strict=True))]


def test_a_step_counts_as_a_change_of_every_weight(tiny: Make, make_samples: Rows) -> None:
    """Copies made for sampling are told apart from the weights by torch's count."""
    loaded = tiny()
    trainer = make_trainer(loaded)
    before = [p._version for p in loaded.model.parameters()]
    train(trainer, make_samples([9]))
    assert all(p._version > b for p, b in zip(loaded.model.parameters(), before, strict=True))


def test_the_first_update_is_checked_against_flat_rows(tiny: Make, make_samples: Rows) -> None:
    loaded, samples, said = tiny(), shared_rows(make_samples), []
    trainer = make_trainer(loaded, say=said.append)
    train(trainer, [s.replace(advantages=np.zeros(40)) for s in samples])  # nothing to compare yet
    assert said == []
    expected = naive_gradients(loaded, samples)
    asyncio.run(trainer.forward_backward(samples, REINFORCE))
    assert relative_error(gradients(loaded), expected) < 1e-5  # the check leaves nothing behind
    asyncio.run(trainer.forward_backward(samples, REINFORCE))
    assert len(said) == 1 and said[0].startswith(
        "checked: the gradient of 4 rows on their trie and one by one"
    )


def test_a_trie_that_is_wrong_is_not_used(
    tiny: Make, make_samples: Rows, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As if a row did not see what it shares with others."""
    true = policy.chunks

    def wrong(trie: Trie, budget: int | None = None) -> list[Chunk]:
        (chunk,) = true(trie, budget)
        return [Chunk([replace(piece, above=()) for piece in chunk.pieces], chunk.first, chunk.last)]

    monkeypatch.setattr(policy, "chunks", wrong)
    loaded, samples, said = tiny("float64"), shared_rows(make_samples), []
    expected = naive_gradients(loaded, samples)
    first = make_trainer(loaded, say=said.append)
    asyncio.run(first.forward_backward(samples, REINFORCE))
    assert len(said) == 1 and "more than 1e-08: nothing is shared from here on" in said[0]
    assert relative_error(gradients(loaded), expected) < 1e-10
    asyncio.run(first.save(tmp_path))
    asyncio.run(first.restart())
    needs = frozenset({"logprobs"})
    known = [asyncio.run(first.score(samples, needs)).logprobs]
    resumed = make_trainer(loaded, say=said.append)
    asyncio.run(resumed.load(tmp_path))  # it scores before its first update, and may not share then
    known.append(asyncio.run(resumed.score(samples, needs)).logprobs)
    np.testing.assert_array_equal(*map(np.concatenate, known))
    asyncio.run(resumed.forward_backward(samples, REINFORCE))
    assert len(said) == 1  # nor has it anything to check
    unchecked = make_trainer(loaded, self_check=False, say=said.append)
    asyncio.run(optim_step(unchecked))
    asyncio.run(unchecked.forward_backward(samples, REINFORCE))
    assert relative_error(gradients(loaded), expected) > 1e-3 and len(said) == 1


@pytest.mark.parametrize("lora", [False, True])
def test_gradient_checkpointing_changes_nothing(tiny: Make, make_samples: Rows, lora: bool) -> None:
    samples = make_samples([9, 30, 4])
    results: list[dict[str, torch.Tensor]] = []
    runs: list[int] = []
    for checkpointing in (False, True):
        loaded = tiny("float64", lora=lora)
        trainer = make_trainer(loaded, gradient_checkpointing=checkpointing, self_check=False)

        def count(*_: Any) -> None:
            runs[-1] += 1

        loaded.model.get_submodule("model.layers.1.self_attn").register_forward_hook(count)
        runs.append(0)
        asyncio.run(trainer.forward_backward(samples, REINFORCE))
        results.append(gradients(loaded))
    assert relative_error(results[1], results[0]) < 1e-10
    assert runs == [1, 2]  # forward, and once more during backward


@pytest.mark.slow
def test_metrics_are_token_means_of_the_whole_update(tiny: Make, make_samples: Rows) -> None:
    loaded, samples = tiny("float64"), make_samples([9, 30, 4, 17])
    masks = [sample.loss_weights > 0 for sample in samples]
    reports = []
    for budget in (1, 10_000):
        trainer = make_trainer(loaded, micro_batch_tokens=budget)
        signals = asyncio.run(trainer.score(samples, frozenset({"logprobs"})))
        reports.append(asyncio.run(trainer.forward_backward(samples, REINFORCE)))
    assert signals.logprobs is not None and signals.reference_logprobs is None
    logprobs = np.concatenate([row[mask] for row, mask in zip(signals.logprobs, masks, strict=True)])
    old = np.concatenate([s.logprobs[mask] for s, mask in zip(samples, masks, strict=True)])
    advantages = np.concatenate([s.advantages[mask] for s, mask in zip(samples, masks, strict=True)])
    for report in reports:
        assert report["trained_tokens"] == len(old)
        assert report["ratio"] == pytest.approx(np.exp(logprobs - old).mean(), rel=1e-10)
        assert report["loss"] == pytest.approx(-(advantages * logprobs).mean(), rel=1e-6)  # float32 weights
        assert report["entropy"] == pytest.approx(reports[0]["entropy"], rel=1e-12)
    assert 5 < reports[0]["entropy"] < np.log(262) + 1e-9  # an untrained model is nearly uniform


def test_seconds_at_peak_count_each_token_of_the_trie_once_however_it_goes_through(
    tiny: Make, make_samples: Rows
) -> None:
    loaded, samples = tiny(), make_samples([60, 60])
    samples[1] = samples[1].replace(tokens=np.concatenate([samples[0].tokens[:40], samples[1].tokens[40:]]))
    trained = {(s.tokens[:i].tobytes(), s.tokens[i]) for s in samples for i in np.flatnonzero(s.loss_weights)}
    flop = flop_of(loaded.model).training(80, 60 * 61 / 2 + sum(range(41, 61)), len(trained))
    for budget in (30, 1000):  # in several passes, and in one
        trainer = make_trainer(loaded, micro_batch_tokens=budget, peak_flops=1e6, self_check=False)
        assert train(trainer, samples)["perf/seconds_at_peak"] == pytest.approx(flop / 1e6)


def test_rows_without_loss_give_no_gradient(tiny: Make, make_samples: Rows) -> None:
    loaded, (sample,) = tiny(), make_samples([9])
    before = {n: p.clone() for n, p in loaded.model.named_parameters()}
    metrics = train(make_trainer(loaded), [sample.replace(loss_weights=np.zeros(9))])
    assert metrics == {"loss": 0.0, "trained_tokens": 0.0, "grad_norm": 0.0, "lr": 1e-2, "nonfinite": 0.0}
    assert all(torch.equal(before[n], p) for n, p in loaded.model.named_parameters())


@pytest.mark.parametrize("fault", ["token", "reference"])
def test_samples_that_are_refused_leave_no_gradients(tiny: Make, make_samples: Rows, fault: str) -> None:
    """Also those of calls before, which are parts of the same update."""
    trainer, samples = make_trainer(tiny()), make_samples([9, 5])
    asyncio.run(trainer.forward_backward(samples, REINFORCE))
    strange = samples[0].replace(tokens=np.full(9, 1000))
    rows, loss = (
        ([strange], REINFORCE) if fault == "token" else (samples, LossSpec("clipped", {"kl_coef": 0.1}))
    )
    with pytest.raises((RecordError, CapabilityError)):
        asyncio.run(trainer.forward_backward(rows, loss))
    assert not trainer.learner.stepper.gradients


def test_entropy_bonus_is_part_of_the_gradient(tiny: Make, make_samples: Rows) -> None:
    """With advantages of 0 only the bonus acts: the update makes the policy more uniform."""
    loaded, samples = tiny(), make_samples([30, 30])
    with torch.no_grad():
        loaded.model.get_output_embeddings().weight *= 10  # far from uniform
    flat = [s.replace(advantages=np.zeros(len(s))) for s in samples]
    trainer = make_trainer(loaded, optimizer=Optimizer(lr=1e-3))
    spec = LossSpec("reinforce", {"entropy_coef": 1.0})
    entropies = [train(trainer, flat, spec)["entropy"] for _ in range(3)]
    assert entropies[0] + 0.01 < entropies[1] < entropies[2] - 0.01


def test_one_step_equals_torch_adamw_on_clipped_naive_gradients(tiny: Make, make_samples: Rows) -> None:
    loaded, twin = tiny("float64"), tiny("float64")
    samples = make_samples([9, 30, 4])
    optimizer = Optimizer(lr=1e-2, weight_decay=0.1, max_grad_norm=0.05, warmup=1)
    reference = torch.optim.AdamW(twin.model.parameters(), weight_decay=0.1, foreach=False)
    trainer = make_trainer(loaded, optimizer=optimizer)
    for lr in (0.5e-2, 1e-2):
        metrics = train(trainer, samples)
        for name, gradient in naive_gradients(twin, samples).items():
            twin.model.get_parameter(name).grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(twin.model.parameters(), 0.05)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        assert metrics["lr"] == lr and metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-6)
    assert float(norm) > 0.05
    for name, parameter in loaded.model.named_parameters():
        torch.testing.assert_close(parameter, twin.model.get_parameter(name), rtol=0, atol=1e-7)


def test_training_raises_what_was_rewarded(tiny: Make, make_samples: Rows) -> None:
    loaded, samples = tiny(), make_samples([12, 12], temperature=1.0)
    signed = [samples[0].replace(advantages=np.ones(12)), samples[1].replace(advantages=-np.ones(12))]
    trainer = make_trainer(loaded)
    before = asyncio.run(trainer.score(signed, frozenset({"logprobs"}))).logprobs
    for _ in range(3):
        train(trainer, signed)
    after = asyncio.run(trainer.score(signed, frozenset({"logprobs"}))).logprobs
    assert before is not None and after is not None
    assert np.nanmean(after[0]) > np.nanmean(before[0]) + 0.2
    assert np.nanmean(after[1]) < np.nanmean(before[1]) - 0.2
    assert not loaded.model.training


def test_lora_trains_adapters_only(tiny: Make, make_samples: Rows) -> None:
    loaded, samples = tiny(lora=True), make_samples([9, 30])
    before = {n: p.clone() for n, p in loaded.model.named_parameters()}
    trainer = make_trainer(loaded)
    asyncio.run(trainer.forward_backward(samples, REINFORCE))
    assert gradients(loaded).keys() == {n for n in before if "lora_" in n}
    asyncio.run(optim_step(trainer))
    changed = {n for n, p in loaded.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if "lora_B" in n}  # A moves from the second step on: B starts at 0


def test_metrics_are_told_by_age_once_a_token_is_older_than_the_policy(
    tiny: Make, make_samples: Rows
) -> None:
    trainer, rows = make_trainer(tiny()), make_samples([9])
    for version in (0, 1):
        told = asyncio.run(trainer.forward_backward(rows, REINFORCE))
        assert {name: value for name, value in told.items() if name.startswith("share/") and value} == (
            {"share/age1": 1.0} if version else {}
        )
        asyncio.run(trainer.publish())


def test_expert_tokens_need_no_advantages(tiny: Make, make_samples: Rows) -> None:
    loaded, (sample,) = tiny(), make_samples([20], temperature=1.0)
    expert = sample.replace(advantages=None, logprobs=np.full(20, np.nan))
    trainer = make_trainer(loaded)
    with pytest.raises(RecordError, match="advantages of the sample of t0"):
        asyncio.run(trainer.forward_backward([expert], REINFORCE))
    losses = [train(trainer, [expert], LossSpec("cross_entropy"))["loss"] for _ in range(4)]
    assert losses[0] == pytest.approx(np.log(262), abs=0.3)
    assert losses[3] < losses[0] - 0.5


def test_crash_points_stand_after_each_micro_batch_and_before_the_step(
    tiny: Make, make_samples: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = tiny()
    weight = loaded.model.get_parameter("model.norm.weight")
    before, seen = weight.clone(), []
    monkeypatch.setattr(learner, "crash_point", lambda name: seen.append((name, torch.equal(weight, before))))
    train(make_trainer(loaded, micro_batch_tokens=30), make_samples([30, 29, 28]))
    assert seen == [("backward", True)] * 3 + [("optim", True)]
    assert not torch.equal(weight, before)


def test_work_runs_on_the_compute_thread(tiny: Make, make_samples: Rows) -> None:
    loaded, threads = tiny(), set()
    with ThreadPoolExecutor(1) as compute:
        trainer = make_trainer(loaded, compute=compute)
        loaded.model.get_decoder().register_forward_hook(lambda *_: threads.add(threading.current_thread()))
        metrics = train(trainer, make_samples([9, 30]))
        assert threads == {compute.submit(threading.current_thread).result()}
    assert metrics == train(make_trainer(tiny()), make_samples([9, 30]))


@pytest.mark.slow
@pytest.mark.parametrize("trunk", ["own", "policy"])
def test_after_a_restart_a_trainer_is_as_new(tiny: Make, make_samples: Rows, trunk: Any) -> None:
    loaded = tiny(lora=True)
    rows = [
        sample.replace(returns=np.ones(len(sample)), values=np.zeros(len(sample)))
        for sample in make_samples([9, 30])
    ]
    settings = LocalTrainerSettings(optimizer=Optimizer(lr=1e-2), critic=CriticSettings(trunk=trunk))

    def made(model: LoadedModel) -> LocalTrainer:
        return LocalTrainer(Learner(model, settings, seed=0, reference=True, critic=True))

    trainer, spec = made(loaded), LossSpec("clipped", {"kl_coef": 0.1})
    plain = [row.replace(returns=None, values=None) for row in rows]
    asyncio.run(trainer.forward_backward(plain, LossSpec("cross_entropy")))
    asyncio.run(trainer.optim_step(OptimParams(lr=1e-2)))  # a warm start: the critic has nothing to learn
    asyncio.run(trainer.publish())
    asyncio.run(trainer.restart())
    twin = copied(loaded, [])
    assert asyncio.run(trainer.snapshot()) == Snapshot(0)
    expected = made(twin)
    for _ in range(2):
        assert train(trainer, rows, spec) == train(expected, rows, spec)
    for (name, got), wanted in zip(loaded.model.named_parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(got, wanted), name
    asyncio.run(trainer.forward_backward(rows, spec))
    with pytest.raises(CapabilityError, match="got no numbers for the critic"):
        asyncio.run(trainer.optim_step(OptimParams(lr=1e-2)))
