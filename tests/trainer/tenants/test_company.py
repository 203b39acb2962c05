"""A run has, byte for byte, the weights that it would have alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.trainer.tenants.runs import CLIENT, Client, data, gradient, passed, plain, tenants, weights
from transformers import AutoModelForCausalLM, Qwen3Config

from silva.models.attention import NAME
from silva.models.loading import LoadedModel
from silva.trainer.settings import LocalTrainerSettings
from silva.trainer.tenants import Datum, Pass
from silva.trainer.tenants.learner import Tenants

pytestmark = pytest.mark.same_bits
CLIENTS = (
    Client("a", 4, 1, "ppo"),
    Client("bb", 8, 2, "cross_entropy", unembed=True),
    Client("ccc", 1, 3, "gspo"),
    Client("d", 16, 4, "dro"),
)


def train(learner: Tenants, calls: Sequence[dict[str, int]]) -> dict[str, bytes]:
    """Each call: the clients whose passes are computed together, and which of their steps it is."""
    for call in calls:
        now = [client for client in CLIENTS if client.name in call]
        for client in now:
            if call[client.name] == 0:
                client.begin(learner)
        passed(learner.passes([client.ask(call[client.name]) for client in now]))
        for client in reversed(now):
            learner.optim_step(client.name, client.adam(call[client.name]))
    return {run: weights(learner, run) for run in learner.runs}


ALL = [{client.name: step for client in CLIENTS} for step in range(3)]
JOIN_AND_LEAVE = [
    {"a": 0}, {"a": 1, "bb": 0}, {"bb": 1, "ccc": 0, "d": 0}, {"d": 1}, {"a": 2, "ccc": 1, "d": 2},
    {"ccc": 2, "bb": 2},
]  # fmt: skip


def alone(client: Client, **settings: int) -> bytes:
    return train(tenants(**settings), [{client.name: step} for step in range(3)])[client.name]


@pytest.mark.slow
@pytest.mark.parametrize("budget", [4096, 60, 30])
@pytest.mark.parametrize("calls", [ALL, JOIN_AND_LEAVE], ids=["together", "come and go"])
def test_runs_trained_together_have_the_weights_of_each_alone(
    calls: list[dict[str, int]], budget: int
) -> None:
    learner = tenants(micro_batch_tokens=budget)
    assert learner.rule is not None
    found = train(learner, calls)
    for client in CLIENTS:
        assert found[client.name] == alone(client, micro_batch_tokens=budget), client.name


def watched(learner: Tenants) -> list[int]:
    """Fills with the number of tokens of each pass through the model."""
    seen: list[int] = []
    decoder = learner.loaded.model.get_decoder()
    decoder.register_forward_pre_hook(
        lambda *given: seen.append(given[2]["input_ids"].shape[1]), with_kwargs=True
    )
    return seen


def test_parts_of_several_runs_go_through_the_model_at_once() -> None:
    """And the first step of one of them is what it is alone."""
    learner = tenants()
    seen = watched(learner)
    found = train(learner, ALL[:1])
    assert len(seen) == 1
    assert found["ccc"] == train(tenants(), [{"ccc": 0}])["ccc"]
    learner.rule = None  # as on a machine where no number of rows gives the same bits
    passed(learner.passes([client.ask(1) for client in CLIENTS]))
    assert len(seen) == 5


def test_a_pass_holds_no_more_than_the_budget() -> None:
    sizes = []
    for budget in (4096, 60, 24):
        learner = tenants(micro_batch_tokens=budget)
        seen = watched(learner)
        train(learner, ALL[:1])
        assert max(seen) <= budget
        sizes.append(len(seen))
    assert sizes[0] == 1 < sizes[1] < sizes[2]


def test_passes_with_and_without_a_gradient_do_not_mix() -> None:
    learner, alone = tenants(), tenants()
    for each in (learner, alone):
        for client in CLIENTS[:2]:
            client.begin(each)
    seen, (first, second) = watched(learner), (client.ask(0) for client in CLIENTS[:2])
    forward = dataclasses.replace(first, backward=False)
    passed(learner.passes([forward, second, forward]))
    passed(alone.passes([second]))
    assert len(seen) == 3  # the third is of the first one's run, after it
    assert gradient(learner, "a") == {}
    expected = gradient(alone, "bb")
    assert all(torch.equal(value, expected[name]) for name, value in gradient(learner, "bb").items())


@pytest.mark.slow
def test_log_probabilities_forward_are_those_of_training_and_of_each_alone() -> None:
    learner = tenants()
    train(learner, ALL[:2])
    asked = [client.ask(7) for client in CLIENTS]
    forward = [Pass(each.run, each.data, each.loss, each.params, backward=False) for each in asked]
    together = passed(learner.passes(forward))
    trained = passed(learner.passes(asked))
    for number, each in enumerate(forward):
        (single,) = passed(learner.passes([each]))
        for of_company, of_training, values in zip(
            together[number].logprobs, trained[number].logprobs, single.logprobs, strict=True
        ):
            assert of_company.tobytes() == of_training.tobytes() == values.tobytes()
        assert single.metrics == together[number].metrics


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_another_family_with_gradient_checkpointing(dtype: str) -> None:
    """Qwen3 of odd sizes: few tokens, and layers computed again."""
    config = Qwen3Config(hidden_size=36, intermediate_size=100, num_hidden_layers=2, num_attention_heads=3,
                         num_key_value_heads=1, head_dim=12, vocab_size=262, pad_token_id=None)  # fmt: skip
    kind = getattr(torch, dtype)

    def made() -> Tenants:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=kind, attn_implementation=NAME).eval()
        tokenizer = plain().tokenizer
        loaded = LoadedModel(model, tokenizer, "qwen3", torch.device("cpu"), kind, 128, lora=False)
        return Tenants(loaded, LocalTrainerSettings(gradient_checkpointing=True))

    learner = made()
    assert learner.rule is not None
    found = train(learner, ALL)
    for client in CLIENTS:
        assert found[client.name] == train(made(), [{client.name: step} for step in range(3)])[client.name]


def test_a_pass_of_fewer_tokens_than_the_rule_wants_is_filled_up() -> None:
    (whole,) = data(0, 1)
    one = Datum(whole.tokens[:1], whole.targets[:1], {name: x[:1] for name, x in whole.inputs.items()})
    asked = Pass("a", [one], "ppo", {}, True)
    found = []
    for company in (False, True):
        learner = tenants()
        for run in "ab":
            learner.create(run, **CLIENT)
        passes = [Pass("b", data(1), "ppo", {}, True), asked] if company else [asked]
        found.append(passed(learner.passes(passes))[-1])
        learner.optim_step("a", CLIENTS[0].adam(0))
        found.append(weights(learner, "a"))
    assert found[0].logprobs[0].tobytes() == found[2].logprobs[0].tobytes()
    assert found[1] == found[3]


@pytest.mark.slow
def test_runs_that_leave_memory_and_come_back_have_the_weights_of_each_alone(tmp_path: Path) -> None:
    """Also with a gradient that has not been stepped on."""
    learner = tenants()
    train(learner, ALL[:2])
    for step in (2, 3):
        for client in CLIENTS[::2]:
            learner.passes([client.ask(step)])
            learner.save(client.name, tmp_path / f"{client.name}{step}")
            learner.drop(client.name)
        others = CLIENTS[1::2]
        passed(learner.passes([client.ask(step) for client in others]))
        for client in CLIENTS[::2]:
            client.begin(learner)
            learner.load(client.name, tmp_path / f"{client.name}{step}", optimizer=True)
        for client in CLIENTS:
            learner.optim_step(client.name, client.adam(step))
    for client in CLIENTS:
        calls = [{client.name: step} for step in range(4)]
        assert weights(learner, client.name) == train(tenants(), calls)[client.name], client.name
