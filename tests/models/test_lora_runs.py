"""Adapters of many runs over one model: each is PEFT's LoRA, and none notices the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from silva.config.sections import Lora
from silva.errors import ModelError
from silva.models.adapters import inject
from silva.models.attention import NAME, SideBySide
from silva.models.loading import _keep_float64_norms
from silva.models.lora_runs import LoraRuns, Span
from silva.models.trie import build
from silva.models.trie_attention import TrieAttention, chunks

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZES = {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50, "pad_token_id": None}  # fmt: skip
CONFIGS = [LlamaConfig, Qwen3Config]
FILL = 8  # tokens of no run


def plain(config: type, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = Auto.from_config(config(**SIZES), dtype=dtype, attn_implementation=NAME)
    if dtype == torch.float64:
        _keep_float64_norms(model)
    return model.eval()


def with_runs(model: PreTrainedModel, **ranks: int) -> LoraRuns:
    """Runs with B drawn as well, as after some steps."""
    runs = LoraRuns(model, TARGETS)
    for number, (name, rank) in enumerate(ranks.items()):
        drawn = torch.Generator().manual_seed(number)
        for each, parameter in runs.add(name, rank, 16.0, seed=number).items():
            if "lora_B" in each:
                parameter.data.normal_(0, 0.1, generator=drawn)
    return runs


def rows_of(name: str) -> list[np.ndarray]:
    """Some rows that share a beginning, of other lengths for every run."""
    rng = np.random.default_rng(len(name) + ord(name[-1]))
    shared = rng.integers(0, 50, 17)
    return [np.concatenate([shared, rng.integers(0, 50, n)]) for n in rng.integers(1, 20, 3)]


def together(
    runs: LoraRuns, model: PreTrainedModel, names: Sequence[str | None]
) -> dict[str | None, tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """The last hidden states of each run's rows in one pass, and the gradient of a loss of its own."""
    tries = [build([np.zeros(FILL, np.int64)] if name is None else rows_of(name)) for name in names]
    sizes = [len(trie) for trie in tries]
    stops = np.cumsum(sizes).tolist()
    spans: list[Span] = [(n, stop - size, stop) for n, stop, size in zip(names, stops, sizes, strict=True)]
    parts = [
        TrieAttention(*chunks(trie), {}, dtype=model.dtype, device=torch.device("cpu")) for trie in tries
    ]
    with runs.rows(spans):
        hidden = model.get_decoder()(
            input_ids=torch.from_numpy(np.concatenate([trie.tokens for trie in tries]))[None],
            position_ids=torch.from_numpy(np.concatenate([trie.positions for trie in tries]))[None],
            use_cache=False,
            packed=SideBySide(list(zip(parts, sizes, strict=True))),
        ).last_hidden_state[0]
        losses = [hidden[start:stop].square().mean(1).sin().sum() for name, start, stop in spans if name]
        leaves = [p for name in names if name for p in runs.parameters(name).values()]
        gradients = iter(torch.autograd.grad(torch.stack(losses).sum(), leaves))
    return {
        name: (hidden[start:stop].detach(), {each: next(gradients) for each in runs.parameters(name)})
        for name, start, stop in spans
        if name
    }


@pytest.mark.parametrize("config", CONFIGS)
def test_each_run_is_the_lora_of_peft(config: type) -> None:
    model = plain(config, torch.float64)
    runs = with_runs(model, a=3, bb=8)
    found = together(runs, model, ["bb", "a"])
    for name in ("a", "bb"):
        theirs = plain(config, torch.float64)
        ranks = {"a": 3, "bb": 8}
        inject(theirs, Lora(rank=ranks[name], alpha=16.0, targets=TARGETS))
        parameters = {n.replace(".default", ""): p for n, p in theirs.named_parameters() if "lora_" in n}
        mine = runs.parameters(name)
        assert mine.keys() == parameters.keys()
        for each, parameter in parameters.items():
            parameter.data.copy_(mine[each])
        trie = build(rows_of(name))
        attention = TrieAttention(*chunks(trie), {}, dtype=model.dtype, device=torch.device("cpu"))
        expected = theirs.get_decoder()(
            input_ids=torch.from_numpy(trie.tokens)[None],
            position_ids=torch.from_numpy(trie.positions)[None],
            use_cache=False,
            packed=attention,
        ).last_hidden_state[0]
        expected.square().mean(1).sin().sum().backward()
        hidden, gradients = found[name]
        torch.testing.assert_close(hidden, expected.detach(), rtol=1e-12, atol=1e-12)
        for each, parameter in parameters.items():
            torch.testing.assert_close(gradients[each], parameter.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.same_bits
@pytest.mark.parametrize("config", CONFIGS)
def test_a_run_has_the_same_bits_in_any_company(config: type) -> None:
    model = plain(config)
    runs = with_runs(model, a=3, bb=8, ccc=1)
    alone = {name: together(runs, model, [name])[name] for name in ("a", "bb", "ccc")}
    for names in (["a", "bb", "ccc"], ["ccc", None, "bb"], [None, "a"], ["bb", "a"]):
        for name, (hidden, gradients) in together(runs, model, names).items():
            expected, expected_gradients = alone[name]
            assert hidden.numpy().tobytes() == expected.numpy().tobytes(), names
            for each, gradient in gradients.items():
                assert gradient.numpy().tobytes() == expected_gradients[each].numpy().tobytes(), each


def test_without_rows_and_for_tokens_of_no_run_the_model_is_plain() -> None:
    model, tokens = plain(LlamaConfig), torch.arange(12)[None]
    expected = model(tokens).logits
    runs = with_runs(model, a=4)
    assert torch.equal(model(tokens).logits, expected)
    with runs.rows([(None, 0, 12)]):
        assert torch.equal(model(tokens).logits, expected)
    with runs.rows([("a", 0, 12)]):
        assert not torch.equal(model(tokens).logits, expected)
    runs.remove("a")
    with pytest.raises(ModelError, match="runs a, which have no adapters"), runs.rows([("a", 0, 12)]):
        pass


def test_layers_are_chosen_by_what_they_are() -> None:
    runs = LoraRuns(plain(LlamaConfig), (*TARGETS, "lm_head"))
    kinds = {"attn": 4 * 2, "mlp": 3 * 2, "unembed": 1}
    for kind, count in kinds.items():
        chosen = {each: each == kind for each in kinds}
        assert len(runs.add(kind, 2, 4.0, 0, **chosen)) == 2 * count  # A and B
    assert [*runs.parameters("unembed")] == ["lm_head.lora_A.weight", "lm_head.lora_B.weight"]


def test_fresh_adapters_depend_on_the_seed_alone_and_change_nothing() -> None:
    first, second = (LoraRuns(plain(LlamaConfig), TARGETS) for _ in range(2))
    second.add("other", 7, 4.0, 9)
    mine, theirs = (each.add("a", 4, 8.0, seed=5) for each in (first, second))
    other = first.add("b", 4, 8.0, seed=6)
    for name, parameter in mine.items():
        assert torch.equal(parameter, theirs[name])
        assert ("lora_B" in name) == (not parameter.any())
        assert "lora_B" in name or not torch.equal(parameter, other[name])
        if "lora_A" in name:  # uniform within 1 / sqrt(inputs), as nn.Linear and PEFT draw it
            bound = parameter.shape[1] ** -0.5
            assert 0.8 * bound < parameter.abs().max() <= bound


@pytest.mark.parametrize(("wrong", "says"), [
    (lambda runs: runs.add("a", 2, 4.0, 0), "it has adapters"),
    (lambda runs: runs.add("b", 0, 4.0, 0), "got rank 0"),
    (lambda runs: runs.add("b", 1, 4.0, 0, attn=False, mlp=False), "no layer to adapt"),
    (lambda runs: LoraRuns(plain(LlamaConfig), ["q_proj", "c_attn"]), "targets c_attn, expected linear"),
    (lambda runs: runs.rows([("a", 4, 8), ("a", 0, 4)]).__enter__(), "one after the other"),
])  # fmt: skip
def test_what_cannot_be_is_refused(wrong: Callable[[LoraRuns], object], says: str) -> None:
    runs = with_runs(plain(LlamaConfig), a=4)
    with pytest.raises(ModelError, match=says):
        wrong(runs)
