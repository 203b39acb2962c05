"""Samples with routes: on tries, in chunks, with checkpoints, against one row at a time in transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.moe import folder
from tests.trainer.updates import gradients, make_trainer, relative_error, train

from silva.config.sections import Lora, PretrainedModel
from silva.errors import ModelError, RecordError
from silva.models.loading import LoadedModel, load_model
from silva.models.routing import ReplayedRoutes, Routing
from silva.routes import after
from silva.trainer.policy import pack, token_logprobs
from silva.types import LossSpec, Sample

LOSS = LossSpec("reinforce")
EXPERTS = 4


def load(path: Path, lora: Lora | None = None) -> LoadedModel:
    loaded = load_model(PretrainedModel(name=str(path), lora=lora), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 5)
    return loaded


def sample(tokens: list[int], experts: np.ndarray | None, name: str = "t", trained: int = 8) -> Sample:
    """The last `trained` tokens were sampled. experts: [T, 2, 2], of each token."""
    count = len(tokens)
    new = np.arange(count) >= count - trained
    return Sample(
        tokens=np.array(tokens),
        loss_weights=new / 30,
        logprobs=np.where(new, -5.0, np.nan),
        temperatures=np.full(count, 0.8),
        versions=np.where(new, 0, -1),
        trajectory=name,
        group="g",
        advantages=np.linspace(-1, 2, count),
        routes=None if experts is None else after(experts[:-1]),
    )


def rows() -> list[Sample]:
    """Siblings after a prompt of 30 tokens with the same routes; then the same prompt, one token of which
    went elsewhere; then a row that nobody shares."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(1, 250, 30).tolist()

    def routes(count: int) -> np.ndarray:  # two different experts each, at random: not what routers choose
        first, step = rng.integers(0, EXPERTS, (2, count, 2))
        return np.stack([first, (first + 1 + step % 3) % EXPERTS], -1).astype(np.uint8)

    common = routes(30)
    other = common.copy()
    other[20, 1] = (other[20, 1] + 1) % EXPERTS
    made = []
    for n, experts in enumerate([common, common[..., ::-1], other]):  # the order of a token's experts is none
        reply = rng.integers(1, 250, 8).tolist()
        made.append(sample([*prompt, *reply], np.concatenate([experts, routes(8)]), f"t{n}"))
    made.append(sample(rng.integers(1, 250, 12).tolist(), routes(12), "t3"))
    return made


def one_by_one(loaded: LoadedModel, samples: list[Sample]) -> torch.Tensor:
    """Log-probabilities of trained tokens: each row through transformers' whole model, told its experts."""
    routing, found = Routing(loaded.model), []
    for each in samples:
        known = torch.from_numpy(routing.known(each.routes, len(each), "x")).long()
        told = torch.cat([known[1:], torch.full_like(known[:1], -1)])
        with ReplayedRoutes(routing, told).applied():
            logits = loaded.model(input_ids=torch.from_numpy(each.tokens)[None], use_cache=False).logits[0]
        logprobs = (logits[:-1] / 0.8).log_softmax(-1).gather(-1, torch.from_numpy(each.tokens[1:])[:, None])
        found.append(logprobs[torch.from_numpy(each.loss_weights[1:] > 0), 0])
    return torch.cat(found)


def test_rows_share_what_has_the_same_tokens_and_experts(tmp_path: Path) -> None:
    loaded, samples = load(folder(tmp_path / "m")), rows()
    routing = Routing(loaded.model)
    batch = pack(loaded, samples, routing=routing)
    assert (
        len(batch.trie) == 30 + 3 * 8 + (30 - 20) + 12
    )  # from token 20 on the third has a prompt of its own
    assert len(pack(loaded, samples).trie) == 30 + 3 * 8 + 12
    assert all(
        (batch.trie.tokens[p] == s.tokens).all() for p, s in zip(batch.trie.rows, samples, strict=True)
    )
    expected = one_by_one(loaded, samples).detach()
    with torch.no_grad():
        free = token_logprobs(loaded, batch).logprobs
        for budget in (None, 16):
            with batch.replayed():
                found = token_logprobs(loaded, batch, budget=budget).logprobs
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    assert (free - expected).abs().max() > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, Lora(rank=2, alpha=6.0)], ids=["full", "lora"])
@pytest.mark.parametrize("how", ["whole", "walked", "checkpoints"])
def test_an_update_is_that_of_rows_one_by_one(tmp_path: Path, lora: Lora | None, how: str) -> None:
    path, samples = folder(tmp_path / "m"), rows()
    loaded = load(path, lora)
    budget, said = (24 if how == "walked" else 4096), list[str]()
    trainer = make_trainer(
        loaded, replay_routing=True, micro_batch_tokens=budget, gradient_checkpointing=how == "checkpoints",
        say=said.append,
    )  # fmt: skip
    metrics = asyncio.run(trainer.forward_backward(samples, LOSS))
    assert said[0].startswith("checked: the gradient of") or how == "walked"
    mine = gradients(loaded)
    reference = load(path, lora)
    logprobs = one_by_one(reference, samples)
    weights = torch.cat([torch.from_numpy(s.loss_weights[s.loss_weights > 0]) for s in samples])
    advantages = torch.cat([torch.from_numpy(s.advantages[s.loss_weights > 0]) for s in samples])
    loss = -(weights * advantages * logprobs).sum()
    loss.backward()
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert any(".experts." in name and g.norm() > 0 for name, g in mine.items())
    assert relative_error(mine, gradients(reference)) < 1e-5


def test_a_score_replays_and_the_reference_does_not(tmp_path: Path) -> None:
    samples = rows()
    path = folder(tmp_path / "m")
    loaded = load(path)
    trainer = make_trainer(loaded, replay_routing=True, reference=load(path))
    needs = frozenset({"logprobs", "reference_logprobs"})
    signals = asyncio.run(trainer.score(samples, needs))
    assert signals.logprobs is not None and signals.reference_logprobs is not None
    found, reference = (
        torch.cat([torch.from_numpy(row[s.loss_weights > 0]) for row, s in zip(part, samples, strict=True)])
        for part in (signals.logprobs, signals.reference_logprobs)
    )
    torch.testing.assert_close(found, one_by_one(loaded, samples).detach(), atol=2e-5, rtol=0)
    free = one_by_one(loaded, [s.replace(routes=None) for s in samples]).detach()
    torch.testing.assert_close(reference, free, atol=2e-5, rtol=0)


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(load(folder(tmp_path / "m")), replay_routing=True)
    tokens = list(range(12))
    with pytest.raises(RecordError, match=r"sample of t: 8 tokens were sampled without .*replay_routing"):
        train(trainer, [sample(tokens, None)])
    with pytest.raises(RecordError, match="routes of the sample of t: got expert 9, expected 0 to 3"):
        train(trainer, [sample(tokens, np.full((12, 2, 2), 9, np.uint8))])
    given = sample(tokens, None).replace(versions=np.full(12, -1))  # of an expert: routers choose
    assert train(trainer, [given], LossSpec("cross_entropy"))["grad_norm"] > 0


def test_a_model_without_experts_is_refused(tiny) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ModelError, match=r"family llama has no experts"):
        make_trainer(tiny(), replay_routing=True)
