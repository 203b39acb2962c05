"""What of sharded training goes together is refused by one table, which the page shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.moe import config as mixture
from tests.test_families import SIZES
from transformers import AutoModelForCausalLM, Qwen3Config

from silva.errors import CapabilityError
from silva.models.loading import LoadedModel
from silva.trainer.learner import Learner
from silva.trainer.settings import LocalTrainerSettings, Parallel
from silva.trainer.sharding import combinations
from silva.trainer.sharding.parallel import Mesh

SERVICES = (Path(__file__).parents[2] / "docs" / "services.md").read_text()


def test_the_page_shows_the_table() -> None:
    assert combinations.table() in SERVICES


@pytest.mark.parametrize("names", combinations.REFUSED, ids=str)
def test_what_does_not_go_together_is_refused_by_key(names: tuple[str, ...]) -> None:
    """And each of them alone is taken."""
    ways = {name: 2 for name in names if name in combinations.WAYS}
    beside = [name for name in names if name not in ways and name != combinations.INTERLEAVED]
    schedule: Any = "interleaved_1f1b" if combinations.INTERLEAVED in names else "1f1b"
    keys = " with ".join(f"trainer.parallel.{name} = 2" if name in ways else name for name in names)
    with pytest.raises(CapabilityError) as caught:
        combinations.refuse(Parallel(**ways, pp_schedule=schedule), beside)
    assert f"{keys}: {combinations.REFUSED[names]}; expected trainer.parallel.{names[0]} = 1" == str(
        caught.value
    )
    combinations.refuse(Parallel(), beside)
    for way in ways:
        combinations.refuse(Parallel(**{way: 2}))


def test_what_a_model_is_it_says_without_its_numbers() -> None:
    with torch.device("meta"):
        dense, mixed = (
            AutoModelForCausalLM.from_config(config)
            for config in (Qwen3Config(**SIZES, tie_word_embeddings=True), mixture("qwen3_moe"))
        )
    assert combinations.of_model(dense) == [combinations.TIED]
    assert combinations.of_model(mixed) == [combinations.EXPERTS]


class InStages(Mesh):
    def refuse(self, beside: Iterable[str]) -> None:
        combinations.refuse(Parallel(pp=2), beside)


def test_a_trainer_refuses_it_too(tiny: Callable[..., LoadedModel]) -> None:
    with pytest.raises(CapabilityError, match=r"parallel\.pp = 2 with a critic"):
        Learner(tiny(), LocalTrainerSettings(), seed=0, critic=True, mesh=InStages())
