"""What learners do together: the same as one alone, however many ranks share the work.

Ranks here are threads, each with a model of its own. Other kinds of meshes add themselves to `make`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from silva.errors import CapabilityError, NonFiniteError
from silva.models.loading import LoadedModel
from silva.models.snapshots import weight_folder
from silva.trainer.learner import Learner
from silva.trainer.parallel import Mesh
from silva.trainer.settings import LocalTrainerSettings
from silva.trainer.transfer import WeightFolders
from silva.types import LossSpec, OptimParams, Sample

pytestmark = pytest.mark.slow

LOSS = LossSpec("clipped", {"kl_coef": 0.1})
PARAMS = OptimParams(lr=1e-3)


class Threads(Mesh):
    """`slots` and `barrier` are those of all ranks."""

    def __init__(self, rank: int, slots: list[Any], barrier: Barrier) -> None:
        self.rank, self.size = rank, len(slots)
        self._slots, self._barrier = slots, barrier

    def gather(self, mine: Any) -> list[Any]:
        self._slots[self.rank] = mine
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()  # nobody overwrites what another has not read
        return found

    def sum(self, mine: Mapping[str, Any]) -> dict[str, Any]:
        parts = self.gather(dict(mine))
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: sum(part[name] for part in parts if name in part) for name in names}


class Ranks:
    """Learners of which each makes every call."""

    def __init__(self, learners: list[Learner], threads: ThreadPoolExecutor) -> None:
        self.learners, self._threads, self.said = learners, threads, list[list[str]]()

    def all(self, work: Callable[[Learner], Any]) -> list[Any]:
        calls = [self._threads.submit(work, learner) for learner in self.learners]
        return [call.result() for call in calls]

    def update(self, rows: list[Sample], params: OptimParams = PARAMS) -> dict[str, float]:
        """The metrics, which are the same on all ranks."""

        def update(learner: Learner) -> dict[str, float]:
            metrics = learner.forward_backward(rows, LOSS)
            return {**metrics, **learner.optim_step(params, params if learner.critic else None)}

        first, *others = self.all(update)
        for other in others:
            np.testing.assert_equal(other, first)  # to the bit, NaN included
        return first

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights, which are the same on all ranks."""
        first, *others = ({n: p.detach().clone() for n, p in each.loaded.model.named_parameters()}
                          for each in self.learners)  # fmt: skip
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=0)
        return first


Make = Callable[..., Ranks]


@pytest.fixture
def make(tiny: Callable[..., LoadedModel]) -> Iterator[Make]:
    with ExitStack() as stack:

        def make(ranks: int, *, seed: int = 0, critic: bool = False, budget: int = 40) -> Ranks:
            slots, barrier = [None] * ranks, Barrier(ranks, timeout=60)
            threads = stack.enter_context(ThreadPoolExecutor(ranks))
            settings = LocalTrainerSettings(micro_batch_tokens=budget, max_nonfinite=2)
            said: list[list[str]] = [[] for _ in range(ranks)]
            learners = [
                Learner(
                    tiny("float64", seed=seed),
                    settings,
                    seed=0,
                    reference=True,
                    critic=critic,
                    mesh=Threads(rank, slots, barrier) if ranks > 1 else Mesh(),
                    say=said[rank].append,
                )
                for rank in range(ranks)
            ]
            made = Ranks(learners, threads)
            made.said = said
            return made

        yield make


@pytest.fixture(params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest) -> int:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def rows(make_samples: Callable[..., list[Sample]]) -> list[Sample]:
    """Two rows that share what they begin with, and strangers; returns and values for a critic."""
    found = make_samples([30, 30, 9, 14, 21])
    shared = np.concatenate([found[0].tokens[:20], found[1].tokens[20:]])
    found[1] = found[1].replace(tokens=shared)
    return [s.replace(returns=np.ones(len(s)), values=np.zeros(len(s))) for s in found]


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("budget", [15, 40])
def test_an_update_is_that_of_one_rank(
    make: Make, rows: list[Sample], ranks: int, critic: bool, budget: int
) -> None:
    """Also where a trie is walked chunk by chunk, and where there are fewer rows than ranks."""
    ours, alone = make(ranks, critic=critic, budget=budget), make(1, critic=critic, budget=10_000)
    for batch in (rows, rows[:1]):
        expected = alone.update(batch)
        assert ours.update(batch) == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert expected["grad_norm"] > 0
    torch.testing.assert_close(ours.weights(), alone.weights(), rtol=0, atol=1e-9)


def test_scores_are_those_of_one_rank(make: Make, rows: list[Sample], ranks: int) -> None:
    needs = frozenset({"logprobs", "reference_logprobs", "values"})
    ours, alone = make(ranks, critic=True), make(1, critic=True, budget=10_000)
    (expected,) = alone.all(lambda learner: learner.score(rows, needs))
    for found in ours.all(lambda learner: learner.score(rows, needs)):
        for name in needs:
            for got, wanted in zip(getattr(found, name), getattr(expected, name), strict=True):
                np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-12)  # NaN at the same places


def test_all_ranks_check_the_trie_or_none(make: Make, rows: list[Sample], ranks: int) -> None:
    ours = make(ranks)
    ours.update(rows[2:])  # strangers: nothing to compare, for any rank
    before = [len(said) for said in ours.said]
    ours.update(rows)
    assert [len(said) for said in ours.said] == [1] * ranks and len(set(before)) == 1


def test_what_is_not_finite_on_one_rank_is_skipped_on_all(make: Make, rows: list[Sample], ranks: int) -> None:
    ours = make(ranks)
    before = ours.weights()
    bad = [rows[0].replace(advantages=np.full(30, np.inf)), *rows[1:]]
    assert ours.update(bad)["nonfinite"] == 1
    torch.testing.assert_close(ours.weights(), before, rtol=0, atol=0)

    def fail(learner: Learner) -> str:
        learner.forward_backward(bad, LOSS)
        with pytest.raises(NonFiniteError) as caught:
            learner.optim_step(PARAMS)
        return str(caught.value)

    first, *others = ours.all(fail)
    assert "update 1: loss or gradient of the policy" in first and "t0" in first
    assert all(other == first for other in others)


def test_a_critic_that_has_learnt_anywhere_needs_numbers(make: Make, rows: list[Sample], ranks: int) -> None:
    """With one row only one of the ranks has its gradient."""

    def fail(learner: Learner) -> None:
        learner.forward_backward(rows[:1], LOSS)
        with pytest.raises(CapabilityError, match="got no numbers for the critic"):
            learner.optim_step(PARAMS)

    make(ranks, critic=True).all(fail)


def test_what_was_saved_goes_on_bit_for_bit(
    make: Make, rows: list[Sample], ranks: int, tmp_path: Path
) -> None:
    """Whatever number of ranks wrote it, and whatever number goes on."""
    ours = make(ranks, critic=True)
    ours.update(rows)
    ours.all(lambda learner: learner.save(tmp_path / f"by_{learner.mesh.rank}"))
    (written,) = tmp_path.iterdir()  # by one of them
    for others in {1, ranks}:
        again = make(others, critic=True, seed=3)
        again.all(lambda learner: learner.load(written))
        torch.testing.assert_close(again.weights(), ours.weights(), rtol=0, atol=0)
    expected = ours.update(rows)
    assert again.update(rows) == (expected if others == ranks else pytest.approx(expected, rel=1e-9))


def test_weights_are_those_of_one_rank(make: Make, rows: list[Sample], ranks: int, tmp_path: Path) -> None:
    ours = make(ranks)
    ours.update(rows)
    weights = ours.weights()
    ours.all(lambda learner: learner.export(tmp_path / "plain"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float64)
    assert all(torch.equal(p, weights[name]) for name, p in plain.named_parameters())
    transfers = {id(each): WeightFolders(tmp_path / "versions", "parameters") for each in ours.learners}
    first, *others = ours.all(lambda learner: transfers[id(learner)].publish(learner))
    assert all(other == first for other in others)
    assert first.folder == weight_folder(tmp_path / "versions" / "version_0")
    written = load_file(tmp_path / "versions" / "version_0" / "model.safetensors")
    torch.testing.assert_close(written, weights, rtol=0, atol=0)
