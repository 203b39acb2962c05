"""The critic: its values and gradient against one row at a time, what it may touch, what it learns."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.forests import MODELS, forests
from tests.trainer.updates import REINFORCE, optim_step
from tests.trainer.updates import train as update
from transformers import AutoModelForCausalLM, LlamaConfig

from silva.algorithms.values import value_loss
from silva.config.sections import CriticSettings as CriticSettings
from silva.config.sections import Optimizer
from silva.errors import NonFiniteError, RecordError
from silva.models.loading import LoadedModel
from silva.trainer.critic import Critic
from silva.trainer.learner import Learner
from silva.trainer.local import LocalTrainer
from silva.trainer.policy import pack
from silva.trainer.settings import LocalTrainerSettings
from silva.types import LossSpec, Sample

Make = Callable[..., LoadedModel]
Rows = Callable[..., list[Sample]]
Trunk = Literal["own", "policy"]
HEAD = "value_head.linear.weight", "value_head.linear.bias"
CLIP = 0.5


def make_critic(loaded: LoadedModel, trunk: Trunk) -> Critic:
    return Critic(loaded, CriticSettings(trunk=trunk, clip=CLIP), max_nonfinite=3)


def make_trainer(loaded: LoadedModel, critic: CriticSettings, **changes: Any) -> LocalTrainer:
    made = LocalTrainerSettings(**{"optimizer": Optimizer(lr=1e-2), "critic": critic, **changes})
    return LocalTrainer(Learner(loaded, made, seed=0, critic=True))


def some_head(critic: Critic, seed: int = 0) -> None:
    """Another head than the zeros it begins with, through which no gradient would come."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in HEAD:
            critic.stepper.parameters[name].normal_(std=0.5, generator=generator)


def with_returns(samples: Sequence[Sample], *, seed: int = 1) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [s.replace(values=rng.normal(size=len(s)), returns=rng.normal(size=len(s))) for s in samples]


def flat(samples: Sequence[Sample], name: str) -> torch.Tensor:
    """[N] float64 over trained tokens."""
    return torch.from_numpy(
        np.concatenate([getattr(s, name)[s.loss_weights > 0] for s in samples]).astype(np.float64)
    )


def naive_values(model: torch.nn.Module, critic: Critic, samples: Sequence[Sample]) -> torch.Tensor:
    """[N]: w h + b of the hidden state before each trained token, one unpadded row after the other."""
    weight, bias = (critic.stepper.parameters[name] for name in HEAD)
    values = []
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens)[None]
        hidden = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state[0, :-1]
        values.append((hidden[torch.from_numpy(sample.loss_weights[1:] > 0)] * weight).sum(-1) + bias)
    return torch.cat(values)


def naive_loss(values: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    old, returns, weights = (flat(samples, name) for name in ("values", "returns", "loss_weights"))
    bounded = torch.minimum(torch.maximum(values, old - CLIP), old + CLIP)
    worst = torch.where((bounded - returns).abs() > (values - returns).abs(), bounded, values)
    return (weights * (worst - returns) ** 2 / 2).sum()


def backward(
    critic: Critic, loaded: LoadedModel, samples: Sequence[Sample], budget: int
) -> dict[str, torch.Tensor]:
    rows = (flat(samples, name) for name in ("returns", "values", "loss_weights"))
    return critic.backward(pack(loaded, samples, least=1), budget, *rows)


def scored(trainer: LocalTrainer, samples: Sequence[Sample]) -> list[Sample]:
    """The samples with the values of the moment."""
    values = asyncio.run(trainer.score(samples, frozenset({"values"}))).values
    assert values is not None
    return [sample.replace(values=row) for sample, row in zip(samples, values, strict=True)]


def weights_of(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.clone() for name, parameter in loaded.model.named_parameters()}


# The loss.


def test_value_loss_by_hand() -> None:
    """Old values 0, clip 0.5. v 1 to 3: error 4, from 0.5 it is 6.25, which has no gradient. v 0.25 to 3 is
    within: 2.75 squared. v 2 to 0: error 4, from 0.5 only 0.25. v -1 to 0.25: 1.5625, from -0.5 0.5625."""
    values = torch.tensor([1.0, 0.25, 2.0, -1.0], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([3.0, 3.0, 0.0, 0.25], dtype=torch.float64)
    loss, metrics = value_loss(values, torch.zeros(4, dtype=torch.float64), returns, clip=0.5)
    loss.sum().backward()
    assert loss.tolist() == metrics["critic/loss"].tolist() == [3.125, 3.78125, 2.0, 0.78125]
    assert metrics["critic/clipped"].tolist() == [1, 0, 0, 0]
    assert values.grad is not None and values.grad.tolist() == [0, -2.75, 2, -1.25]
    plain, metrics = value_loss(values, torch.zeros(4, dtype=torch.float64), returns, clip=None)
    assert plain.tolist() == [2.0, 3.78125, 2.0, 0.78125] and not metrics["critic/clipped"].any()
    assert not metrics["critic/loss"].requires_grad


@pytest.mark.parametrize("fails", [False, True])
def test_its_own_trunk_is_in_train_mode_for_the_gradient_alone(
    monkeypatch: pytest.MonkeyPatch, tiny: Make, fails: bool
) -> None:
    """So that dropout of adapters reaches it, and values stay what they are."""
    policy = tiny(lora=True, dropout=0.3)
    critic, modes = Critic(policy, CriticSettings(), max_nonfinite=3), []

    def through(trunk: LoadedModel, *_: object) -> tuple[torch.Tensor]:
        dropouts = [module for module in trunk.model.modules() if isinstance(module, torch.nn.Dropout)]
        modes.append(all(module.training for module in dropouts) and len(dropouts) == 14)
        if fails and len(modes) == 2:
            raise MemoryError
        return (torch.zeros(2, requires_grad=True),)

    monkeypatch.setattr("silva.trainer.critic.through", through)
    batch: Any = None
    critic.values(batch, 9)
    with pytest.raises(MemoryError) if fails else contextlib.nullcontext():
        critic.backward(batch, 9, torch.ones(2), torch.zeros(2), torch.ones(2))
    critic.values(batch, 9)
    assert modes == [False, True, False]
    assert not any(module.training for module in policy.model.modules())


# On the trie.


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(
    samples=forests(),
    name=st.sampled_from(sorted(MODELS)),
    trunk=st.sampled_from(["own", "policy"]),
    budget=st.integers(1, 20) | st.just(10_000),
)
def test_values_and_gradient_are_those_of_one_row_at_a_time(
    models: dict[str, LoadedModel], samples: list[Sample], name: str, trunk: Trunk, budget: int
) -> None:
    """Whole, or in chunks that end anywhere."""
    loaded, samples = models[name], with_returns(samples)
    critic = make_critic(loaded, trunk)
    some_head(critic)
    twin = copy.deepcopy(loaded.model)  # gradients of its own
    true = naive_values(twin, critic, samples)
    mine = critic.values(pack(loaded, samples, least=1), budget)
    torch.testing.assert_close(mine, true.detach(), rtol=0, atol=1e-11)

    naive_loss(true, samples).backward()
    expected = {name: critic.stepper.parameters[name].grad.clone() for name in HEAD}  # type: ignore[union-attr]
    if trunk == "own":
        grads = {n: p.grad for n, p in twin.named_parameters() if p.requires_grad}
        expected |= {n: g for n, g in grads.items() if g is not None}
    critic.stepper.drop_gradients()
    backward(critic, loaded, samples, budget)
    got = {n: p.grad for n, p in critic.stepper.parameters.items() if p.grad is not None}
    assert got.keys() == expected.keys()
    gap = torch.stack([(got[n] - expected[n]).norm() for n in expected]).norm()
    size = torch.stack([g.norm() for g in expected.values()]).norm()
    assert gap <= 1e-10 * size  # both are 0 where every token is clipped
    assert all(p.grad is None for p in loaded.model.parameters())  # the policy is not the critic's to change


def test_metrics_are_means_over_the_trained_tokens(tiny: Make, make_samples: Rows) -> None:
    """From values of 0, as they are at the start: R^2 / 2."""
    samples = with_returns(make_samples([9, 30, 4]))
    zeros = [s.replace(values=np.zeros(len(s))) for s in samples]
    metrics = update(make_trainer(tiny("float64"), CriticSettings()), zeros)
    returns = flat(samples, "returns")
    assert metrics["critic/loss"] == pytest.approx(float((returns**2).mean() / 2), rel=1e-12)
    assert metrics["critic/clipped"] == 0


# What it may touch.


@pytest.mark.parametrize("trunk", ["own", "policy"])
def test_an_untrained_critic_says_0(tiny: Make, make_samples: Rows, trunk: Trunk) -> None:
    samples = make_samples([9, 30])
    assert flat(scored(make_trainer(tiny(), CriticSettings(trunk=trunk)), samples), "values").tolist() == (
        [0.0] * sum(int((s.loss_weights > 0).sum()) for s in samples)
    )


@pytest.mark.slow
@pytest.mark.parametrize("trunk", ["own", "policy"])
def test_the_policy_learns_as_it_would_without_a_critic(tiny: Make, make_samples: Rows, trunk: Trunk) -> None:
    samples = with_returns(make_samples([9, 30, 4]))
    alone, beside = tiny(), tiny()
    trainer = make_trainer(beside, CriticSettings(trunk=trunk, optimizer=Optimizer(lr=0.1)))
    plain = LocalTrainer(Learner(alone, trainer.learner.settings, seed=0))
    for _ in range(3):
        with_critic, without = update(trainer, samples), update(plain, samples)
        assert {name: with_critic[name] for name in without} == without
    expected = weights_of(alone)
    assert all(torch.equal(p, expected[n]) for n, p in beside.model.named_parameters())
    assert flat(scored(trainer, samples), "values").abs().min() > 1e-3  # it did learn


def test_a_head_on_the_policy_is_all_there_is_to_train(tiny: Make) -> None:
    assert set(make_critic(tiny(), "policy").stepper.parameters) == {*HEAD}
    assert {n for n in make_critic(tiny(lora=True), "own").stepper.parameters if n not in HEAD} == {
        n for n, _ in tiny(lora=True).model.named_parameters() if "lora_" in n
    }


@pytest.mark.parametrize("tied", [True, False])
def test_the_language_model_s_head_is_trained_only_where_it_is_the_input_s_too(
    tiny: Make, make_samples: Rows, tied: bool
) -> None:
    config = LlamaConfig(vocab_size=262, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                         num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="silva").eval()
    loaded = LoadedModel(model, None, "t", torch.device("cpu"), torch.float32, 128, False)  # type: ignore[arg-type]
    critic = make_critic(loaded, "own")
    assert set(critic.stepper.parameters) == {
        n for n, _ in model.named_parameters() if n != "lm_head.weight"
    } | {*HEAD}
    some_head(critic)
    backward(critic, loaded, with_returns(make_samples([9])), 10_000)
    assert all(p.grad is not None for p in critic.stepper.parameters.values())


# What it learns.


@pytest.mark.parametrize("trunk", ["own", "policy"])
def test_the_policy_waits_while_the_critic_warms_up(tiny: Make, make_samples: Rows, trunk: Trunk) -> None:
    loaded, samples = tiny(), with_returns(make_samples([9, 30, 4]))
    settings = CriticSettings(trunk=trunk, warmup=2, optimizer=Optimizer(lr=1e-2))
    optimizer = Optimizer(lr=1e-2, weight_decay=0.1)
    trainer = make_trainer(loaded, settings, optimizer=optimizer)
    before, said = weights_of(loaded), [flat(scored(trainer, samples), "values")]
    for _ in range(2):
        metrics = update(trainer, samples)
        assert metrics["grad_norm"] == 0 and "ratio" not in metrics and metrics["critic/grad_norm"] > 0
        assert all(torch.equal(p, before[n]) for n, p in loaded.model.named_parameters())
        said.append(flat(scored(trainer, samples), "values"))
    assert not torch.equal(said[0], said[1]) and not torch.equal(said[1], said[2])
    assert "ratio" in update(trainer, samples)
    assert not any(torch.equal(p, before[n]) for n, p in loaded.model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("trunk", ["own", "policy"])
def test_it_explains_more_and_more_of_a_fixed_batch(tiny: Make, make_samples: Rows, trunk: Trunk) -> None:
    """1 - var(R - V) / var(R), by numpy; 0 at the start. Without a clip, which is for one update."""
    rng, samples = np.random.default_rng(0), make_samples([12, 20, 9])
    samples = [s.replace(returns=rng.normal(size=len(s)), advantages=np.zeros(len(s))) for s in samples]
    settings = CriticSettings(
        trunk=trunk, clip=None, optimizer=Optimizer(lr=2e-3 if trunk == "own" else 0.01)
    )
    trainer = make_trainer(tiny(), settings)
    explained = []
    for _ in range(4):
        for _ in range(6):
            samples = scored(trainer, samples)
            update(trainer, samples)
        returns, values = flat(samples, "returns").numpy(), flat(samples, "values").numpy()
        explained.append(1 - np.var(returns - values) / np.var(returns))
    assert explained == sorted(explained) and explained[0] > 0 and explained[-1] > 0.9


def test_it_has_a_schedule_and_a_limit_of_its_own(tiny: Make, make_samples: Rows) -> None:
    """Against torch's AdamW on clipped naive gradients, with a warm-up of one update."""
    loaded, samples = tiny("float64"), with_returns(make_samples([9, 30]))
    optimizer = Optimizer(lr=1e-2, warmup=1, weight_decay=0.1, max_grad_norm=1e-3)
    trainer = make_trainer(loaded, CriticSettings(trunk="policy", clip=CLIP, optimizer=optimizer))
    critic, policy = trainer.learner.critic, copy.deepcopy(loaded.model)
    assert critic is not None
    head = copy.deepcopy(critic)
    reference = torch.optim.AdamW([head.stepper.parameters[n] for n in HEAD], weight_decay=0.1, foreach=False)
    for lr in (0.5e-2, 1e-2):
        naive_loss(naive_values(policy.requires_grad_(False), head, samples), samples).backward()
        norm = torch.nn.utils.clip_grad_norm_([head.stepper.parameters[n] for n in HEAD], 1e-3)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        reference.zero_grad()
        metrics = update(trainer, [s.replace(advantages=np.zeros(len(s))) for s in samples])
        assert (metrics["critic/lr"], metrics["lr"]) == (lr, 1e-2)
        assert metrics["critic/grad_norm"] == pytest.approx(float(norm), rel=1e-9) and norm > 1e-3
    for name in HEAD:
        torch.testing.assert_close(
            critic.stepper.parameters[name], head.stepper.parameters[name], rtol=0, atol=1e-9
        )


def test_an_update_that_is_not_finite_is_skipped_and_the_policy_s_is_not(
    tiny: Make, make_samples: Rows
) -> None:
    loaded, samples = tiny(), with_returns(make_samples([9, 30]))
    trainer = make_trainer(loaded, CriticSettings(clip=None))
    before = weights_of(loaded)
    bad = [s.replace(returns=np.full(len(s), np.inf)) for s in samples]
    metrics = update(trainer, bad)
    assert (metrics["critic/nonfinite"], metrics["nonfinite"]) == (1, 0)
    assert not flat(scored(trainer, samples), "values").any()
    assert not any(torch.equal(p, before[n]) for n, p in loaded.model.named_parameters())
    assert update(trainer, samples)["critic/nonfinite"] == 0


def test_a_critic_that_is_never_finite_ends_the_run(tiny: Make, make_samples: Rows) -> None:
    """After max_nonfinite updates in a row; a good one in between starts the count again."""
    samples = with_returns(make_samples([9, 5]))
    trainer = make_trainer(tiny(), CriticSettings(clip=None, optimizer=Optimizer(lr=0.125)), max_nonfinite=2)
    bad = [s.replace(returns=np.full(len(s), np.inf)) for s in samples]
    skipped = [update(trainer, rows)["critic/nonfinite"] for rows in (bad, samples, bad)]
    assert skipped == [1, 0, 1]
    asyncio.run(trainer.forward_backward(bad, REINFORCE))
    with pytest.raises(NonFiniteError) as caught:
        asyncio.run(optim_step(trainer))
    for words in ("update 3: loss or gradient of the critic was not finite for 2 updates in a row", "t0, t1",
                  "the gradient of", "Lower trainer.critic.optimizer.lr (now 0.125)"):  # fmt: skip
        assert words in str(caught.value)
    assert all(p.grad is None for p in trainer.learner.loaded.model.parameters())


def test_a_critic_whose_loss_alone_is_not_finite_is_not_stepped(tiny: Make, make_samples: Rows) -> None:
    """1e20 squared is beyond float32, its slope is not."""
    samples = with_returns(make_samples([9]))
    trainer = make_trainer(tiny(), CriticSettings(clip=None, trunk="policy"), max_nonfinite=2)
    far = [s.replace(returns=np.full(len(s), 1e20), loss_weights=s.loss_weights * 1e-10) for s in samples]
    metrics = update(trainer, far)
    assert metrics["critic/nonfinite"] == 1 and np.isfinite(metrics["critic/grad_norm"])
    assert not flat(scored(trainer, samples), "values").any()


def test_imitation_teaches_a_critic_only_by_rows_with_returns(tiny: Make, make_samples: Rows) -> None:
    trainer, plain = make_trainer(tiny(), CriticSettings()), make_samples([9, 5])
    assert trainer.learner.critic is not None
    for rows, learns in ((plain, False), (with_returns(plain), True)):
        asyncio.run(trainer.forward_backward(rows, LossSpec("cross_entropy")))
        assert bool(trainer.learner.critic.stepper.gradients) == learns


# What is missing.


@pytest.mark.parametrize("name", ["values", "returns"])
@pytest.mark.parametrize("missing", [0, 2])
def test_what_a_critic_cannot_do_without_is_named(
    tiny: Make, make_samples: Rows, name: str, missing: int
) -> None:
    """Also in a later micro-batch, and then nothing is left of what the ones before it did."""
    loaded = tiny()
    trainer = make_trainer(loaded, CriticSettings(), micro_batch_tokens=9)
    rows = with_returns(make_samples([9, 9, 9]))
    rows[missing] = rows[missing].replace(**{name: None})
    words = f"{name} of the sample of t{missing}, which the critic learns from: got None"
    with pytest.raises(RecordError, match=words):
        asyncio.run(trainer.forward_backward(rows, REINFORCE))
    assert all(p.grad is None for p in loaded.model.parameters())
    assert asyncio.run(optim_step(trainer))["critic/grad_norm"] == 0
