"""What is sent to the Tinker service: losses by its names have the gradients of Silva's own, and what it
cannot do is refused. The service's own formulas stand in algorithms/summed.py."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from silva.algorithms.losses import LOSSES, Loss
from silva.algorithms.settings import Algorithm
from silva.algorithms.summed import SUMMED
from silva.assembly import Assembly
from silva.commands.checks import check, check_parts
from silva.config.load import load
from silva.config.sections import Optimizer
from silva.engines.tinker.engine import TinkerEngine
from silva.engines.tinker.settings import TinkerEngineSettings
from silva.errors import CapabilityError, CheckpointError, ConfigError, CostLimit, EngineError
from silva.protocols import EngineCapabilities
from silva.registries import REGISTRIES
from silva.trainer.loss_inputs import weighted_loss
from silva.trainer.policy import TokenLogprobs, trained
from silva.trainer.settings import TinkerTrainerSettings
from silva.trainer.tinker import ServiceAdapter, TinkerTrainer, _named
from silva.types import LossSpec, OptimParams, SamplingParams

NAMED = [
    (LossSpec("clipped", {"clip_low": 0.1, "clip_high": 0.3}), "ppo"),
    (LossSpec("cispo", {"clip_low": 0.2, "clip_high": 0.3}), "cispo"),
    (LossSpec("reinforce"), "cispo"),
    (LossSpec("gspo", {"clip_low": 0.05, "clip_high": 0.02}), "gspo"),
    (LossSpec("cross_entropy"), "cross_entropy"),
]
OTHERS = [
    LossSpec("clipped", {"clip_dual": 3.0}),
    LossSpec("clipped", {"balanced_clip_min_entropy": 0.0}),
    LossSpec("clipped", {"kl_coef": 0.1}),
    LossSpec("cispo", {"rollout_correction": {"reject": {"token": [0.5, 2.0]}}}),
    LossSpec("cross_entropy", {"weighting": "dft"}),
    LossSpec("aipo"),
    LossSpec("dro"),  # the pull is not weighted there
]


@pytest.fixture
def rows(make_samples):
    return make_samples([9, 5, 12], temperature=1.0)


@pytest.mark.parametrize(("loss", "expected"), NAMED, ids=[loss.name for loss, _ in NAMED])
def test_a_loss_by_its_name_at_the_service_has_the_gradient_of_ours(loss, expected, rows):
    masks = [trained(sample) for sample in rows]
    rng = np.random.default_rng(1)
    old = [torch.from_numpy(sample.logprobs[mask]) for sample, mask in zip(rows, masks, strict=True)]
    moved = torch.cat(old) + torch.from_numpy(rng.normal(0, 0.3, sum(map(len, old))))
    numbers = torch.cat([torch.full((len(each),), i) for i, each in enumerate(old)])

    ours = moved.clone().requires_grad_()
    weighted_loss(TokenLogprobs(ours, None, numbers), rows, None, loss, 0, False)[0].backward()

    name, inputs, params = _named(rows, loss)
    assert name == expected
    theirs = moved.clone().requires_grad_()
    given = {
        key: torch.from_numpy(np.concatenate([row[key][m] for row, m in zip(inputs, masks, strict=True)]))
        for key in inputs[0]
    }
    SUMMED[name].total(theirs, numbers, given, params).backward()
    assert ours.grad.abs().max() > 0
    torch.testing.assert_close(theirs.grad, ours.grad, rtol=1e-6, atol=1e-9)
    # What carries no loss has no weight there either.
    key = "weights" if name == "cross_entropy" else "advantages"
    assert all((row[key][~mask] == 0).all() for row, mask in zip(inputs, masks, strict=True))


@pytest.mark.parametrize("loss", OTHERS, ids=str)
def test_any_other_loss_is_computed_here(loss, rows):
    assert _named(rows, loss) is None


def test_streams_and_tokens_that_nobody_sampled_are_computed_here(rows):
    streams = {"observations": np.float32(rows[0].loss_weights == 0) * (np.arange(len(rows[0])) > 0)}
    assert _named([rows[0].replace(streams=streams)], LossSpec("clipped")) is None
    unsampled = rows[0].replace(logprobs=np.full(len(rows[0]), np.nan))
    assert _named([unsampled], LossSpec("clipped")) is None


def made() -> TinkerTrainer:
    return TinkerTrainer(None, ServiceAdapter("base", 8, 0, frozenset({"attn"})), "run")


def test_a_temperature_other_than_1_is_refused(make_samples):
    with pytest.raises(CapabilityError, match=r"sampled at temperature 0.7.*expected 1"):
        asyncio.run(made().score(make_samples([4], temperature=0.7), frozenset({"logprobs"})))


@pytest.mark.parametrize("text", ["", "{}", '{"path": 1}', "[]"])
def test_a_checkpoint_of_another_trainer_is_refused(text, tmp_path):
    (tmp_path / "tinker.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"no checkpoint of trainer.type"):
        asyncio.run(made().load(tmp_path))


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    (tmp_path / "tinker.json").write_text('{"path": "tinker://a", "version": 2, "model": "other"}')
    with pytest.raises(CheckpointError, match="weights of other, expected those of base"):
        asyncio.run(made().load(tmp_path))


def test_a_text_of_another_form_is_refused_with_the_form(tmp_path):
    with pytest.raises(ConfigError, match=r'weights = "v4"\n +expected a string that matches \^\(tinker://'):
        config(tmp_path, "--engine.weights=v4")


def test_an_update_reads_each_token_once_for_each_pass_beside_the_gradient():
    found = [
        made().usage(frozenset(needs), LossSpec("clipped", params))
        for needs, params in (
            ((), {}), (("logprobs",), {}), (("logprobs", "reference_logprobs"), {"kl_coef": 0.1}),
        )
    ]  # fmt: skip
    # The reference of a KL term is scored once more, and its loss is computed here.
    assert [(each.input, each.output, each.trained) for each in found] == [(0, 0, 1), (1, 0, 1), (4, 0, 1)]


def test_passes_and_samples_have_one_limit_of_costs(rows):
    """What would exceed it is not sent: 3 passes of these rows cost 3 x 2, and 2 samples (8 + 9) x 0.5."""
    pytest.importorskip("tinker", reason="needs tinker: pip install tinker")
    tokens = sum(map(len, rows))
    prices = {"input_price": 5e5, "output_price": 5e5, "train_price": 2e6 / tokens, "max_cost": 23.0}
    sent = []

    class Service:
        def forward_backward(self, data, name, params):
            sent.append("passed")
            outputs = [{"logprobs": SimpleNamespace(data=[-1.0] * (len(row) - 1))} for row in rows]
            found = asyncio.get_running_loop().create_future()
            found.set_result(SimpleNamespace(loss_fn_outputs=outputs))
            return found

        async def sample(self, prompt, count, params):
            sent.append("sampled")
            found = SimpleNamespace(tokens=[7] * 9, logprobs=[-1.0] * 9, stop_reason="length")
            return SimpleNamespace(sequences=[found], prompt_cache_hit_tokens=0)

    engine = TinkerEngine(TinkerEngineSettings(**prices), "base", lambda ids: "")
    engine._known = EngineCapabilities(256, entropies=False, loads=frozenset({"sampler"}))
    adapter = ServiceAdapter("base", 8, 0, frozenset({"attn"}))
    trainer = TinkerTrainer(None, adapter, "run", requests=engine.requests)
    engine._sampler = trainer._client = Service()

    async def play() -> None:
        for _ in range(2):
            await trainer.forward_backward(rows, LossSpec("clipped"))
            await engine.sample([1] * 8, SamplingParams(max_tokens=9, stop_token_ids=(0,)))
        assert engine.counts()["cost"] == pytest.approx(2 * 2 + 2 * 8.5)
        await trainer.forward_backward(rows, LossSpec("clipped"))
        for late in (
            trainer.forward_backward(rows, LossSpec("clipped")),
            engine.sample([1] * 8, SamplingParams(max_tokens=9, stop_token_ids=(0,))),
        ):
            with pytest.raises(CostLimit, match=r"engine.max_cost = 23 would be exceeded: 23 spent so far"):
                await late

    asyncio.run(play())
    assert sent == ["passed", "sampled"] * 2 + ["passed"]


BASE = """
[model]
type = "tiny"
lora.rank = 4
[engine]
type = "tinker"
[trainer]
type = "tinker"
[[environments]]
type = "bandit"
"""


def config(tmp_path, *more: str):
    (tmp_path / "run.toml").write_text(BASE)
    return load([f"@{tmp_path}/run.toml", *more], REGISTRIES, env={}, cwd=tmp_path).config


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--model.lora", "null"], r"model.lora: got none.*expected model.lora.rank"),
        (["--model.lora.alpha", "16"], r"model.lora.alpha: the service decides it"),
        (["--model.lora.dropout", "0.1"], r"model.lora.dropout: the service decides it"),
    ],
)
def test_what_the_service_decides_is_refused_with_the_key(more, words, tmp_path):
    found = config(tmp_path, *more)
    check(found)
    with pytest.raises(CapabilityError, match=words):
        found.trainer.build(Assembly(found))


def test_without_a_key_the_variable_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"engine.key_variable: TINKER_API_KEY is not set"):
        _ = config(tmp_path).engine.key


def test_a_key_that_the_sdk_would_not_send_is_told_at_once():
    pytest.importorskip("tinker", reason="needs tinker: pip install tinker")
    from silva.wire import tinker

    with pytest.raises(ConfigError, match=r"engine.key_variable: got a key of another form"):
        tinker.service("", "foo")


def test_nobody_at_the_address_is_told_at_once(monkeypatch):
    pytest.importorskip("tinker", reason="needs tinker: pip install tinker")
    from silva.wire import tinker

    monkeypatch.setattr(tinker, "PATIENCE", 0.1)
    monkeypatch.setattr(tinker.time, "sleep", lambda seconds: None)
    with pytest.raises(EngineError, match=r"engine.url: got no answer from http://127.0.0.1:9 .*refused"):
        tinker.service("http://127.0.0.1:9", "tml-me")


def test_a_model_at_a_service_is_loaded_nowhere(tmp_path):
    assert not Assembly(config(tmp_path)).host.holds_model
    assert Assembly(config(tmp_path, "--trainer.type", "local", "--engine.type", "local")).host.holds_model


def test_the_weights_never_leave_the_service(tmp_path):
    found = config(tmp_path, "--engine.type", "local")
    with pytest.raises(CapabilityError, match=r'expected engine.type = "tinker"'):
        found.trainer.build(Assembly(found))


ENGINE = SimpleNamespace(capabilities=EngineCapabilities(256, entropies=False, loads=frozenset({"sampler"})))
# What the service has no way to honour, and what does without.
BEYOND = {
    "--rollout.sampling.temperature=0.7": "got 0.7, expected 1 .*of no other distribution",
    "--rollout.sampling.top_p=0.9": "got 0.9, expected 1 ",
    "--rollout.sampling.top_k=5": "got 5, expected 0 ",
    "--algorithm.adaptive_temperature.low=0.7": "adaptive_temperature: got a table, expected null",
    "--algorithm.type=ppo": 'algorithm.credit: got .gae., expected "trajectory" or "turn" .*has no critic',
    "--algorithm.entropy_coef=0.01": "entropy_coef: got 0.01, expected 0 .*get no entropies",
    "--algorithm.adaptive_entropy.target=0.1": "adaptive_entropy: got a table, expected null",
    "--algorithm.loss.balanced_clip_min_entropy=0.2": "min_entropy: got 0.2, expected 0 or null",
    "--algorithm.entropy_advantage=0.2": "entropy_advantage = 0.2: engine.type = .tinker. gives no ",
    "--algorithm.reference.name=other --algorithm.kl_coef=0.1": "reference: got .other., expected null ",
    "--algorithm.reference_refresh=3 --algorithm.kl_coef=0.1": "reference_refresh: got 3, expected 0 ",
    "--warm_start.steps=3 --algorithm.kl_coef=0.1": "warm_start: got a table, expected null, or kl_coef = 0",
    "--algorithm.kl_coef=0.1 --algorithm.entropy_coef=1 --algorithm.reference_refresh=3":
        "entropy_coef: got 1.0, expected 0; algorithm.reference_refresh: got 3, .*: its losses .*; its ref",
}  # fmt: skip
# The same keys as far as the service goes, and all others that change what a trainer is asked for.
WITHIN = [
    "",
    "--algorithm.loss.balanced_clip_min_entropy=0",
    "--algorithm.kl_coef=0.1 --algorithm.adaptive_kl.target=0.1 --algorithm.kl_estimator=k1",
    "--algorithm.kl_reward_coef=0.1 --algorithm.drop_zero_variance=false --algorithm.kl_reward_gamma=0.5",
    "--algorithm.rollout_correction.weight=mask",
    "--algorithm.replay.groups=2 --algorithm.oversample=2 --algorithm.whiten=tokens",
    "--algorithm.aggregation=constant --algorithm.overlong_buffer=0.2 --algorithm.length_penalty=0.1",
    "--warm_start.steps=3",
]


# What is done to groups and rows before the trainer has them, or to the numbers that it is given.
IN_THE_LOOP = {
    "advantage", "advantage_over", "credit", "gamma", "lam", "turn_gamma", "turn_lam", "bootstrap",
    "tree_credit", "advantage_clip", "use_rewards", "difficulty_range", "difficulty_pools",
    "variance_filter", "early_stop",
    "max_refills", "kl_bias_correction", "aggregation_constant",
}  # fmt: skip


def test_of_every_key_of_a_recipe_it_is_known_whether_the_service_honours_it():
    named = set(re.findall(r"algorithm\.(\w+)", " ".join([*BEYOND, *WITHIN])))
    assert named | IN_THE_LOOP == {"type", *Algorithm.model_fields}
    assert {"type", "optimizer", "updates_per_step", "modules"} == set(TinkerTrainerSettings.model_fields)
    sent = {"lr", "betas", "eps", "weight_decay", "max_grad_norm"}
    assert sent == set(OptimParams.__dataclass_fields__)
    assert sent | {"schedule", "warmup", "min_lr_ratio"} == set(Optimizer.model_fields)


@pytest.mark.parametrize("keys", BEYOND)
def test_what_the_service_cannot_honour_is_refused_before_anything_is_played(keys, tmp_path):
    with pytest.raises(CapabilityError, match=BEYOND[keys]):
        check_parts(config(tmp_path, *keys.split()), ENGINE, made())


@pytest.mark.parametrize("keys", WITHIN)
def test_what_the_service_can_honour_is_not_refused(keys, tmp_path):
    check_parts(config(tmp_path, *keys.split()), ENGINE, made())


def test_a_loss_of_a_user_s_own_that_reads_entropies_is_refused(tmp_path, monkeypatch):
    real = LOSSES["clipped"]
    reading = Loss(real.settings, lambda *, logprobs, entropies: (logprobs, {}))
    monkeypatch.setitem(LOSSES, "clipped", reading)
    with pytest.raises(CapabilityError, match=r"loss.type: got .clipped., expected a loss without entropies"):
        check_parts(config(tmp_path, "--algorithm.drop_zero_variance=true"), ENGINE, made())


@pytest.mark.parametrize("section", ["rollout", "eval"])
def test_a_way_of_sampling_that_the_service_has_not_is_refused_at_the_start(section, tmp_path):
    found = config(tmp_path, f"--{section}.sampling.min_p=0.1")
    with pytest.raises(CapabilityError, match=rf"{section}.sampling.min_p = 0.1: .*expected 0"):
        found.engine.build(Assembly(found))


@pytest.mark.parametrize(
    ("stop", "expected", "reason"),
    [
        (("ab",), 2, "stop_string"),
        (("q", "cd"), 4, "stop_string"),
        (("d",), 4, "stop_string"),
        (("ac",), 5, "stop_token"),
        ((), 5, "stop_token"),
    ],
)
def test_stop_strings_beside_tokens_that_end_a_turn_are_found_here(stop, expected, reason):
    """The service takes one of the two: without it, thoughts could not end at their tag."""
    pytest.importorskip("tinker", reason="needs tinker: pip install tinker")
    asked, tokens = [], [*b"abcd", 0]

    class Sampler:
        async def sample(self, prompt, count, params):
            asked.append(params.stop)
            found = SimpleNamespace(
                tokens=tokens, logprobs=[-1.0, -2.0, -3.0, -4.0, -5.0], stop_reason="stop"
            )
            return SimpleNamespace(sequences=[found], prompt_cache_hit_tokens=0)

    engine = TinkerEngine(TinkerEngineSettings(), "base", lambda ids: bytes(ids).decode())
    engine._known = EngineCapabilities(256, entropies=False, loads=frozenset({"sampler"}))
    engine._sampler = Sampler()
    params = SamplingParams(max_tokens=9, stop=stop, stop_token_ids=(0,))
    found = asyncio.run(engine.sample([1, 2], params))
    assert asked == [[0]]
    assert (found.tokens, found.stop_reason) == (tuple(tokens[:expected]), reason)
    assert found.logprobs == found.raw_logprobs == (-1.0, -2.0, -3.0, -4.0, -5.0)[:expected]
    assert len(found.versions) == len(found.entropies) == expected
    assert engine.counts()["sampled_tokens"] == 5  # what is paid for
