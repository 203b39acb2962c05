"""Runs of several clients: each is what the learner of one model, or autograd, makes of the same data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.tenants.runs import (
    CLIENT,
    SHAPE,
    STEP,
    Client,
    data,
    gradient,
    passed,
    plain,
    tenants,
    weights,
)

from silva.algorithms import summed
from silva.config.sections import Lora, TinyModel
from silva.errors import CapabilityError, ModelError, NonFiniteError, RecordError
from silva.models.loading import load_model
from silva.trainer.learner import Learner
from silva.trainer.settings import LocalTrainerSettings
from silva.trainer.tenants import AdamParams, Datum, Pass
from silva.trainer.tenants.learner import Tenants
from silva.types import LossSpec, OptimParams, Sample

KINDS = {"float64": 1e-12, "float32": 1e-6}


def one_model(dtype: str, learner: Tenants, run: str) -> Learner:
    """The learner of one model, with the adapters of a run in PEFT's layers."""
    lora = Lora(rank=4, alpha=8.0)
    settings = TinyModel(layers=2, width=32, heads=4, kv_heads=2, context=128, dtype=dtype)
    loaded = load_model(settings, seed=0)
    peft = load_model(settings.model_copy(update={"lora": lora}), seed=0)
    for name, parameter in peft.model.named_parameters():
        source = learner.parameters(run) if "lora_" in name else dict(loaded.model.named_parameters())
        parameter.data.copy_(source[name.replace(".default", "").replace(".base_layer", "")])
    return Learner(peft, LocalTrainerSettings(self_check=False), seed=0)


def sample_of(datum: Datum) -> Sample:
    """The same as a row of the learner of one model: its first token is nobody's target."""
    n = len(datum.tokens)
    given = {name: np.concatenate([[0.0], array]) for name, array in datum.inputs.items()}
    return Sample(
        tokens=np.append(datum.tokens, datum.targets[-1]),
        loss_weights=given.get("weights", given.get("sequence_ratio_mask", np.append(0.0, np.ones(n)))),
        logprobs=given.get("logprobs", np.zeros(n + 1)),
        temperatures=np.ones(n + 1),
        versions=np.zeros(n + 1, np.int64),
        trajectory="t",
        group="g",
        advantages=given.get("advantages"),
    )


OF_SILVA = {
    "cross_entropy": LossSpec("cross_entropy"),
    "ppo": LossSpec("clipped"),
    "cispo": LossSpec("cispo"),
    "dro": LossSpec("dro"),
    "gspo": LossSpec("gspo"),
    "importance_sampling": LossSpec("clipped", {"clip_low": 1.0, "clip_high": 1e9}),  # it never clips
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("loss", OF_SILVA)
def test_losses_gradients_and_steps_are_those_of_one_model(loss: str, dtype: str) -> None:
    learner = tenants(dtype)
    learner.create("a", **CLIENT)
    learner.create("b", rank=2, **SHAPE)
    for parameter in learner.parameters("a").values():  # as after some steps
        parameter.data.add_(torch.linspace(-0.1, 0.1, parameter.numel()).view(parameter.shape))
    alone = one_model(dtype, learner, "a")
    tolerance: Any = {"rtol": KINDS[dtype], "atol": KINDS[dtype]}
    for step in range(2):
        mine = data(step, loss=loss)
        samples = [sample_of(datum) for datum in mine]
        metrics = alone.forward_backward(samples, OF_SILVA[loss])
        other = Pass("b", data(9), "ppo", {}, backward=True)
        found = passed(learner.passes([other, Pass("a", mine, loss, {}, backward=True)]))[1]
        assert found.metrics["loss:sum"] == pytest.approx(metrics["loss"], rel=10 * KINDS[dtype])
        scored = alone.score(samples, frozenset({"logprobs"})).logprobs
        for values, expected, sample in zip(found.logprobs, scored, samples, strict=True):
            known = sample.loss_weights[1:] > 0
            np.testing.assert_allclose(values[known], expected[1:][known], rtol=KINDS[dtype])
        theirs = {n.replace(".default", ""): p for n, p in alone.stepper.parameters.items()}
        for name, value in gradient(learner, "a").items():
            torch.testing.assert_close(value, theirs[name].grad, **tolerance)
        norm = learner.optim_step("a", AdamParams(1e-2, 0.9, 0.95, 1e-8, 0.1, grad_clip_norm=0.5))
        expected_norm = alone.optim_step(OptimParams(1e-2, (0.9, 0.95), 1e-8, 0.1, max_grad_norm=0.5))
        assert norm["grad_norm"] == pytest.approx(expected_norm["grad_norm"], rel=10 * KINDS[dtype])
        for name, value in learner.parameters("a").items():
            torch.testing.assert_close(value.data, theirs[name].data, **tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "k"), [("cross_entropy", 3), ("gspo", None), ("importance_sampling", None)])
def test_any_targets_are_those_of_plain_logits(loss: str, k: int | None) -> None:
    """Targets need not be the next tokens; the adapter of the head is tried as well."""
    learner = tenants("float64")
    learner.create("a", **{**CLIENT, "unembed": True})
    for parameter in learner.parameters("a").values():
        parameter.data.add_(torch.linspace(-0.1, 0.1, parameter.numel()).view(parameter.shape))
    mine = data(3, loss=loss, k=k)
    mine = [Datum(d.tokens, (d.targets * 5 + 1) % 256, d.inputs) for d in mine]
    (found,) = passed(learner.passes([Pass("a", mine, loss, {}, backward=True)]))
    totals, adapters = [], learner._adapters
    for datum, values in zip(mine, found.logprobs, strict=True):
        with adapters.rows([("a", 0, len(datum.tokens))]):
            logits = learner.loaded.model(torch.from_numpy(datum.tokens)[None], use_cache=False).logits[0]
            targets = torch.from_numpy(datum.targets.reshape(len(datum.tokens), -1))
            logprobs = logits.log_softmax(-1).gather(1, targets).view(datum.targets.shape)
        np.testing.assert_allclose(values, logprobs.detach(), rtol=1e-12)
        inputs = {name: torch.from_numpy(array).double() for name, array in datum.inputs.items()}
        rows = torch.zeros(len(datum.tokens), dtype=torch.int64)
        totals.append(summed.named(loss).total(logprobs, rows, inputs, {}))
    total = torch.stack(totals).sum()
    assert found.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-12)
    leaves = learner.parameters("a")
    with adapters.rows([("a", 0, 1)]):
        expected = torch.autograd.grad(total, [*leaves.values()])
    for value, other in zip(gradient(learner, "a").values(), expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    {"micro_batch_tokens": 30}, {"micro_batch_tokens": 1}, {"gradient_checkpointing": True},
])  # fmt: skip
def test_the_cut_and_what_is_computed_again_do_not_change_the_gradient(settings: dict[str, Any]) -> None:
    asked = [Pass(run, data(seed, 5, loss="gspo"), "gspo", {}, True) for seed, run in enumerate("ab")]
    found, gradients = [], []
    for given in ({}, settings):
        learner = tenants("float64", **given)
        for run in "ab":
            learner.create(run, **{**CLIENT, "unembed": True})
        found.append(passed(learner.passes(asked)))
        gradients.append(gradient(learner, "a") | {f"b/{n}": g for n, g in gradient(learner, "b").items()})
    for mine, theirs in zip(*found, strict=True):
        assert mine.metrics["loss:sum"] == pytest.approx(theirs.metrics["loss:sum"], rel=1e-12)
        for values, expected in zip(mine.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_allclose(values, expected, rtol=1e-12)
    for name, value in gradients[0].items():
        torch.testing.assert_close(value, gradients[1][name], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_gradients_of_several_passes_add_up_and_a_pass_forward_leaves_them() -> None:
    learner = tenants("float64")
    learner.create("a", **CLIENT)
    first, second = (Pass("a", data(seed), "ppo", {}, True) for seed in range(2))
    both = passed(learner.passes([first, second]))
    together = gradient(learner, "a")
    forward = Pass("a", first.data, "ppo", {}, backward=False)
    assert passed(learner.passes([forward]))[0].metrics == both[0].metrics
    assert all(torch.equal(value, together[name]) for name, value in gradient(learner, "a").items())
    learner.optim_step("a", AdamParams(lr=0.0))
    assert gradient(learner, "a") == {}
    learner.passes([second])
    learner.passes([first])
    for name, value in gradient(learner, "a").items():
        torch.testing.assert_close(value, together[name], rtol=1e-12, atol=1e-14)


def wrong(**changes: Any) -> Datum:
    """A datum of which something is not right."""
    (datum,) = data(1, 1)
    given = {"tokens": datum.tokens, "targets": datum.targets, "inputs": datum.inputs}
    return Datum(**{**given, **{k: v(given[k]) for k, v in changes.items()}})  # type: ignore[arg-type]


WRONG: dict[str, tuple[Datum, str]] = {
    "target": (wrong(targets=lambda x: x + 300), "got target [0-9]+, expected 0 to 261"),
    "token": (wrong(tokens=lambda x: x - 300), "got token -"),
    "float": (wrong(tokens=lambda x: x + 0.5), "expected whole numbers"),
    "long": (wrong(tokens=lambda x: np.tile(x, 10)), "expected 1 to 128"),
    "short": (wrong(targets=lambda x: x[1:]), "got targets of shape"),
    "wide": (wrong(targets=lambda x: np.stack([x, x], 1)), "which loss ppo has not"),
    "missing": (wrong(inputs=lambda x: {"logprobs": x["logprobs"]}), "got no advantages"),
    "unknown": (
        wrong(inputs=lambda x: x | {"mask": x["logprobs"]}),
        "got mask, which loss ppo does not",
    ),
    "shape": (wrong(inputs=lambda x: x | {"logprobs": x["logprobs"][1:]}), "got logprobs of shape"),
    "nan": (wrong(inputs=lambda x: x | {"logprobs": x["logprobs"] * np.nan}), "not finite"),
    "loss": (wrong(inputs=lambda x: x | {"advantages": x["advantages"] + 3e38}), "the loss ppo is"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_run_with_wrong_data_fails_alone(kind: str) -> None:
    datum, says = WRONG[kind]
    learner = tenants(micro_batch_tokens=30)  # the wrong one is in a part of its own, after good ones
    for run in "ab":
        learner.create(run, **CLIENT)
    good = [Pass(run, data(seed), "ppo", {}, True) for seed, run in enumerate("ab")]
    passed(learner.passes(good))
    before = {run: gradient(learner, run) for run in "ab"}
    found = learner.passes([Pass("a", [*data(5), datum], "ppo", {}, True), good[1]])
    assert isinstance(found[0], NonFiniteError if kind == "loss" else RecordError)
    with pytest.raises(type(found[0]), match=says):
        raise found[0]
    assert all(torch.equal(value, before["a"][name]) for name, value in gradient(learner, "a").items())
    assert passed(found[1:])[0].metrics["loss:sum"] == passed(learner.passes(good[1:]))[0].metrics["loss:sum"]
    assert not any(torch.equal(v, before["b"][n]) for n, v in gradient(learner, "b").items() if v.any())


@pytest.mark.parametrize(("asked", "says"), [
    (Pass("x", data(0), "ppo", {}, True), "run x: got no run of this name"),
    (Pass("a", [], "ppo", {}, True), "data: got none"),
    (Pass("a", data(0), "stable_reinforce", {}, True), "got 'stable_reinforce'"),
    (Pass("a", data(0), "ppo", {"beta": 1.0}, True), r"got parameters \['beta'\], expected clip_low_"),
    (Pass("a", data(0), "ppo", {"clip_low_threshold": np.inf}, True), "expected finite numbers"),
    (Pass("a", data(0, k=2, loss="cross_entropy") + data(0, loss="cross_entropy"), "cross_entropy", {}, True),
     "expected the same of each datum"),
])  # fmt: skip
def test_a_wrong_pass_fails(asked: Pass, says: str) -> None:
    learner = tenants()
    learner.create("a", **CLIENT)
    (error,) = learner.passes([asked])
    assert isinstance(error, RecordError)
    with pytest.raises(RecordError, match=says):
        raise error
    assert gradient(learner, "a") == {}


def test_a_step_that_is_not_finite_is_refused() -> None:
    learner = tenants()
    learner.create("a", **CLIENT)
    learner.passes([Pass("a", data(0), "ppo", {}, True)])
    learner.optim_step("a", STEP)
    learner.passes([Pass("a", data(1), "ppo", {}, True)])
    before = weights(learner, "a")
    for wrong_step in (
        AdamParams(lr=float("nan")),
        AdamParams(lr=0.1, beta2=1.0),
        AdamParams(0.1, grad_clip_norm=-1),
    ):
        with pytest.raises(RecordError, match="OptimParams"):
            learner.optim_step("a", wrong_step)
    assert gradient(learner, "a")
    next(iter(learner.parameters("a").values())).grad.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="run a: no step, as the norm of its gradient is nan"):
        learner.optim_step("a", STEP)
    assert weights(learner, "a") == before
    assert gradient(learner, "a") == {}
    learner.passes([Pass("a", data(1), "ppo", {}, True)])
    assert learner.optim_step("a", STEP)["grad_norm"] > 0


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(CapabilityError, match="got a model with adapters"):
        lora = TinyModel(layers=1, width=16, heads=2, kv_heads=1, context=64, lora=Lora(rank=2))
        Tenants(load_model(lora, seed=0), LocalTrainerSettings())
    learner = tenants()
    learner.create("a", **CLIENT)
    with pytest.raises(ModelError, match="run a: it has adapters"):
        learner.create("a", **CLIENT)
    learner.drop("a")
    learner.create("a", **CLIENT)
    with pytest.raises(RecordError, match="run b: got no run of this name"):
        learner.drop("b")


def test_the_base_stays_as_it_is() -> None:
    learner, before = tenants(), plain().model.state_dict()
    client = Client("a", 4, 1, unembed=True)
    client.begin(learner)
    learner.passes([client.ask(0)])
    learner.optim_step("a", STEP)
    assert all(torch.equal(value, before[name]) for name, value in learner.loaded.model.state_dict().items())
