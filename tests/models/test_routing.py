"""Routers of transformers: what they choose is recorded and replayed, or they are refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.moe import config, folder
from transformers import AutoModelForCausalLM as Auto
from transformers import DeepseekV3Config, LlamaConfig

from silva.config.sections import PretrainedModel
from silva.errors import ModelError, RecordError
from silva.models.loading import LoadedModel, load_model
from silva.models.routing import ReplayedRoutes, Routing

FAMILIES = ["qwen3_moe", "qwen2_moe", "olmoe", "mixtral"]
TOKENS = torch.tensor([[5, 200, 31, 7, 90, 12]])


@pytest.fixture
def loaded(tmp_path: Path, request: pytest.FixtureRequest) -> LoadedModel:
    family = getattr(request, "param", "qwen3_moe")
    return load_model(PretrainedModel(name=str(folder(tmp_path / "m", family))), seed=0)


def by_hand(loaded: LoadedModel, chosen: torch.Tensor) -> torch.Tensor:
    """Last states [T, H] with these experts [layers][T, k], of the loop of experts that transformers began
    with: a token's output is the sum over its experts of p_e / sum(p) times what the expert says."""
    model, normalise = loaded.model, getattr(loaded.model.config, "norm_topk_prob", True)
    handles = []
    for layer, block in enumerate(model.model.layers):

        def forward(module, given, output, layer=layer, mlp=block.mlp):  # type: ignore[no-untyped-def]
            (x,) = given
            x, experts = x[0], mlp.experts
            p = (x @ mlp.gate.weight.T).softmax(-1)
            rows = []
            for token, mine in enumerate(chosen[layer]):
                total = p[token, mine].sum() if normalise else 1.0
                said = torch.zeros_like(x[token])
                for e in mine.tolist():
                    gate, up = (experts.gate_up_proj[e] @ x[token]).chunk(2)
                    said = said + p[token, e] / total * (
                        experts.down_proj[e] @ (torch.nn.functional.silu(gate) * up)
                    )
                rows.append(said)
            found = torch.stack(rows)
            if hasattr(mlp, "shared_expert"):
                found = found + (mlp.shared_expert_gate(x)).sigmoid() * mlp.shared_expert(x)
            return found[None]

        handles.append(block.mlp.register_forward_hook(forward))
    states: torch.Tensor = model.model(input_ids=TOKENS, use_cache=False).last_hidden_state[0]
    for handle in handles:
        handle.remove()
    return states


@pytest.mark.slow
@pytest.mark.parametrize("loaded", FAMILIES, indirect=True)
def test_replayed_experts_are_those_of_a_loop_over_them(loaded: LoadedModel) -> None:
    routing, model = Routing(loaded.model), loaded.model.model
    assert (routing.experts, routing.k, routing.layers) == (4, 2, (0, 1))
    with torch.no_grad():
        with routing.recorded() as own:
            alone = model(input_ids=TOKENS, use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(by_hand(loaded, torch.stack(own)), alone, atol=2e-5, rtol=0)
        told = torch.stack([(own[0] + 1) % 4, own[1]], 1)  # [T, layers, k]: others in the first layer
        told[2] = -1  # the third token goes where its router sends it
        with ReplayedRoutes(routing, told).applied(), routing.recorded() as chosen:
            replayed = model(input_ids=TOKENS, use_cache=False).last_hidden_state[0]
        expected = torch.stack(chosen)
        known = torch.arange(6) != 2
        assert torch.equal(expected[0][known], told[known, 0])
        assert torch.equal(expected[0][2], own[0][2])
        torch.testing.assert_close(replayed, by_hand(loaded, expected), atol=2e-5, rtol=0)
        assert (replayed - alone).abs().max() > 0.1
        again = model(input_ids=TOKENS, use_cache=False).last_hidden_state[0]
    assert torch.equal(again, alone)  # and nothing of it stays


def test_the_gradient_of_replayed_routers_is_that_of_the_loop(loaded: LoadedModel) -> None:
    routing, model = Routing(loaded.model), loaded.model.model
    told = torch.tensor([[[0, 3], [2, 1]]]).expand(6, 2, 2)
    direction = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    gradients = []
    for replays in (True, False):
        loaded.model.zero_grad()
        if replays:
            with ReplayedRoutes(routing, told).applied():
                states = model(input_ids=TOKENS, use_cache=False).last_hidden_state[0]
        else:
            states = by_hand(loaded, told.transpose(0, 1))
        (states * direction).sum().backward()
        gradients.append([layer.mlp.gate.weight.grad.clone() for layer in model.layers])
    for mine, theirs in zip(*gradients, strict=True):
        assert theirs.norm() > 1
        assert (mine - theirs).norm() < 1e-5 * theirs.norm()


def test_routes_that_are_not_this_model_s_are_refused(loaded: LoadedModel) -> None:
    routing = Routing(loaded.model)
    routes = np.array([[[255, 255], [255, 255]], [[0, 3], [2, 1]]], np.uint8)
    assert routing.known(routes, 2, "x").tolist() == [[[-1, -1], [-1, -1]], [[0, 3], [2, 1]]]
    assert routing.known(None, 1, "x").tolist() == [[[-1, -1], [-1, -1]]]
    with pytest.raises(RecordError, match=r"routes of t1: got \[2, 2, 2\], expected \[3, 2, 2\]"):
        routing.known(routes, 3, "t1")
    with pytest.raises(RecordError, match=r"routes of t1: got \[2, 1, 2\], expected \[2, 2, 2\]"):
        routing.known(routes[:, :1], 2, "t1")
    routes[1, 0, 0] = 4
    with pytest.raises(RecordError, match="routes of t1: got expert 4, expected 0 to 3"):
        routing.known(routes, 2, "t1")


def test_layers_without_experts_are_left_out() -> None:
    """vLLM gives routes of all layers."""
    torch.manual_seed(0)
    routing = Routing(Auto.from_config(config("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1])))
    assert routing.layers == (0, 2)
    routes = np.arange(6, dtype=np.uint8).reshape(1, 3, 2) % 4
    assert routing.known(routes, 1, "x").tolist() == [[[0, 1], [0, 1]]]


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "olmoe", "mixtral"])
def test_routers_without_their_numbers_are_of_the_same_kind(family: str) -> None:
    model = Auto.from_config(config(family))
    kinds = [[router.normalised for router in Routing(each).routers] for each in (model, model.to("meta"))]
    assert kinds[0] == kinds[1] == [family in ("qwen3_moe", "mixtral")] * 2


def test_models_without_such_routers_are_refused_by_name() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
             "num_attention_heads": 2}  # fmt: skip
    with pytest.raises(ModelError, match=r"family llama has no experts .*trainer\.replay_routing = false"):
        Routing(Auto.from_config(LlamaConfig(**sizes)))
    deepseek = DeepseekV3Config(
        **sizes, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
        moe_intermediate_size=8, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=8, n_shared_experts=1,
    )  # fmt: skip
    with pytest.raises(ModelError, match=r"family deepseek_v3 has routers \(\w+ at model\.layers\.1\.mlp\)"):
        Routing(Auto.from_config(deepseek))
