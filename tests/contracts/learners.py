"""Learners that make every call together: ranks that are threads with a whole model each, or processes that
divide one, and their models and rows.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests import moe
from tests.contracts.rank import PARALLEL, WORLD
from tests.test_families import SIZES
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from silva.config.sections import Lora, PretrainedModel
from silva.models import attention
from silva.models.adapters import inject
from silva.models.loading import LoadedModel, _keep_float64_norms, load_model
from silva.models.tiny import tiny_tokenizer
from silva.trainer.learner import Learner
from silva.trainer.settings import LocalTrainerSettings
from silva.trainer.sharding.parallel import Mesh
from silva.trainer.sharding.ranks import mesh_of
from silva.types import LossSpec, OptimParams, Sample

DTYPE = os.environ.get("SILVA_TEST_DTYPE", "float64")
"""Of the models of all tests that do not name one: every_division.py chooses it."""
LOSS = LossSpec("clipped", {"kl_coef": 0.1})
PARAMS = OptimParams(lr=1e-2, eps=1e-2)
"""`eps` is as large as gradients: with a smaller one AdamW's first step is nearly the sign of a gradient, and
roundings decide the sign of one that is nearly zero."""
ROUNDINGS = 2 * 2 * (2 + 7 + 1 + 1 + 1 + 2)
"""That a gradient goes through one after another: forward and back in two layers, each of two norms, seven
products, rotation, attention, gate and two sums."""
TOLERANCES = {"float64": 1e-12, "float32": 1e-6, "bfloat16": math.sqrt(2 * ROUNDINGS) * 2**-8}
"""How far ranks may be from one rank, relative to the largest number of a kind (weights, gradients, scores);
for metrics, which are means of numbers around 1, to 1.

Not relative to each number or tensor: what is left of a sum that cancels is off by the roundings of what was
added up. In bfloat16 a rounding is off by up to 2^-8, and those of two computations add up as a random walk.
"""

STAGES = PARALLEL.pp > 1
"""Which neither have a critic nor walk."""
INTERLEAVED = PARALLEL.pp_schedule == "interleaved_1f1b"
LAYERS = 4 if INTERLEAVED else 2
UNTIED = STAGES and (PARALLEL.tp > 1 or INTERLEAVED)
"""Embeddings that are the head too cannot be divided in this way."""
KIND = "experts" if PARALLEL.ep > 1 or (INTERLEAVED and PARALLEL.tp == 1) else "untied" if UNTIED else ""
"""Of the models that are divided."""
EXPERTS = 8 if PARALLEL.ep == 4 else 6
"""Of six, ranks that share three have a part of each."""
LOOSE = 3.0 if INTERLEAVED or EXPERTS == 8 else 1.0
"""How many times as far as usual models of twice the layers or eight experts may be apart in float32: what
one rank computes of them is up to 2.9e-6 from float64."""


class Threads(Mesh):
    """`slots` and `barrier` are those of all ranks."""

    def __init__(self, rank: int, slots: list[Any], barrier: Barrier) -> None:
        self.rank, self.size = rank, len(slots)
        self._slots, self._barrier = slots, barrier

    def gather(self, mine: Any, kind: Any = None) -> list[Any]:
        self._slots[self.rank] = mine
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()  # nobody overwrites what another has not read
        return found

    def reduce(self, parameters: Mapping[str, torch.Tensor]) -> None:
        parts = self.gather({name: p.grad for name, p in parameters.items() if p.grad is not None})
        for name in dict.fromkeys(name for part in parts for name in part):
            parameters[name].grad = sum(part[name] for part in parts if name in part)


class Ranks:
    """Learners of which each makes every call."""

    def __init__(self, learners: list[Learner], threads: ThreadPoolExecutor) -> None:
        self.learners, self._threads, self.said = learners, threads, list[list[str]]()

    def all(self, work: Callable[[Learner], Any]) -> list[Any]:
        calls = [self._threads.submit(work, learner) for learner in self.learners]
        return [call.result() for call in calls]

    def update(self, rows: list[Sample], params: OptimParams = PARAMS) -> dict[str, float]:
        """The metrics, which are the same on all ranks; without those of speed."""

        def update(learner: Learner) -> dict[str, float]:
            metrics = learner.forward_backward(rows, LOSS)
            assert ("imbalance" in metrics) == (learner.mesh.shares > 1)
            assert metrics.pop("imbalance", 1.0) >= 1.0
            metrics = {name: value for name, value in metrics.items() if not name.startswith("perf/")}
            return {**metrics, **learner.optim_step(params, params if learner.critic else None)}

        first, *others = self.all(update)
        for other in others:
            np.testing.assert_equal(other, first)  # to the bit, NaN included
        return first

    def weights(self) -> dict[str, torch.Tensor]:
        return self._whole([dict(each.loaded.model.named_parameters()) for each in self.learners])

    def learnt(self) -> dict[str, dict[str, torch.Tensor]]:
        """What `learnt` says of a learner."""
        found = [learnt(each) for each in self.learners]
        return {kind: self._whole([each[kind] for each in found]) for kind in found[0]}

    def _whole(self, tensors: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Of each learner, by name: those of all ranks, which are the same on each."""
        first, *others = ({name: whole(tensor).clone() for name, tensor in each.items()} for each in tensors)
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=0)
        if not STAGES:
            return first
        named = {name: tensor.detach().numpy() for name, tensor in first.items()}
        stages = self.learners[0].mesh.gather(named, Mapping[str, np.ndarray])
        return {name: torch.from_numpy(array) for stage in stages for name, array in stage.items()}


def learnt(learner: Learner) -> dict[str, dict[str, torch.Tensor]]:
    """Masters, and AdamW's first moments (sums of clipped gradients), by kind and name; of a critic too."""
    found = {}
    for of in (learner, learner.critic) if learner.critic else (learner,):
        masters, states = of.stepper.masters, of.stepper.optimizer.state
        found[f"masters of {type(of).__name__}"] = masters
        found[f"moments of {type(of).__name__}"] = {
            name: states[master]["exp_avg"] if states.get(master) else torch.zeros_like(master)
            for name, master in masters.items()
        }
    return found


def assert_alike(
    ours: Ranks, alone: Ranks, rows: list[Sample], dtype: str = DTYPE, *, loose: float = 1.0
) -> None:
    """Metrics, gradients and weights of an update are those of one rank, up to rounding, and what is clipped.

    Args:
        loose: how many times as far as usual they may be apart.
    """
    loose = max(loose, LOOSE if dtype == "float32" else 1.0)
    most, expected = loose * TOLERANCES[dtype], alone.update(rows)
    assert ours.update(rows) == pytest.approx(expected, rel=most, abs=most)
    assert expected["grad_norm"] > 0
    of_one = [flags.tolist() for flags in alone.learners[0].clipped]
    assert all([flags.tolist() for flags in each.clipped] == of_one for each in ours.learners)
    found = ours.learnt()
    for kind, wanted in alone.learnt().items():
        close(found[kind], wanted, dtype, loose)


def close(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], dtype: str, loose: float = 1.0
) -> None:
    """With NaN at the same places."""
    largest = max(float(tensor.nan_to_num().abs().max()) for tensor in expected.values())
    most = loose * TOLERANCES[dtype] * largest
    torch.testing.assert_close(found, expected, rtol=0, atol=most, equal_nan=True)


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


Make = Callable[..., Ranks]


def meshes(ranks: int) -> list[Mesh]:
    """Of the learners in this process."""
    if ranks == 1:
        return [Mesh()]
    if WORLD:
        return [mesh_of(PARALLEL, "cpu")]
    slots, barrier = [None] * ranks, Barrier(ranks, timeout=60)
    return [Threads(rank, slots, barrier) for rank in range(ranks)]


@pytest.fixture
def make(tiny: Callable[..., LoadedModel]) -> Iterator[Make]:
    with ExitStack() as stack:

        def make(
            ranks: int, *, seed: int = 0, critic: bool = False, budget: int = 40, kind: str = KIND,
            dtype: str = DTYPE, model: Callable[[], LoadedModel] | None = None, **keys: Any,
        ) -> Ranks:  # fmt: skip
            threads = stack.enter_context(ThreadPoolExecutor(ranks))
            budget, critic = (max(budget, 40), False) if STAGES else (budget, critic)
            settings = LocalTrainerSettings(micro_batch_tokens=budget, max_nonfinite=2, **keys)
            said: list[list[str]] = [[] for _ in range(ranks)]
            learners = [
                Learner(
                    model() if model else model_of(kind, tiny, seed, dtype),
                    settings,
                    seed=0,
                    reference=True,
                    critic=critic,
                    mesh=mesh,
                    say=lines.append,
                )
                for mesh, lines in zip(meshes(ranks), said, strict=False)
            ]
            made = Ranks(learners, threads)
            made.said = said[: len(learners)]
            return made

        yield make


def model_of(kind: str, tiny: Callable[..., LoadedModel], seed: int, dtype: str) -> LoadedModel:
    loaded = tiny(dtype, seed=seed, lora=kind == "lora", layers=LAYERS)
    grow(loaded)
    if kind == "experts" or (kind == "lora" and PARALLEL.ep > 1):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            config = moe.config("qwen3_moe", experts=EXPERTS, num_hidden_layers=LAYERS)
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
            if kind == "lora":
                inject(model, Lora(rank=4, alpha=8.0))
        if dtype == "float64":
            _keep_float64_norms(model)
        model.set_experts_implementation("eager")  # the others have no float64
        for module in model.modules():
            if isinstance(module, Qwen3MoeTopKRouter):
                module.__class__ = WideRouter
        model.to(loaded.dtype).eval()
        grow(loaded := replace(loaded, model=model))
        return loaded
    if kind == "qwen3":
        with tempfile.TemporaryDirectory() as folder:
            config = Qwen3Config(
                **SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS}
            )
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)  # whose save_pretrained writes on one rank alone
            save_file(model.state_dict(), f"{folder}/model.safetensors", metadata={"format": "pt"})
            Path(folder, "config.json").write_text(model.config.to_json_string())
            tiny_tokenizer().save_pretrained(folder)
            settings = PretrainedModel(name=folder).model_copy(update={"dtype": dtype})
            return load_model(settings, seed=seed)
    if kind == "untied" or (kind == "lora" and UNTIED):
        head: Any = loaded.model.lm_head
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), kind == "untied")
        loaded.model.config.tie_word_embeddings = False
    return loaded


class WideRouter(Qwen3MoeTopKRouter):  # type: ignore[misc]
    """The same in float64: sums over ranks are then those of one rank in almost all of their digits."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden @ self.weight.T
        weights, chosen = logits.softmax(-1).topk(self.top_k)
        return logits, weights / weights.sum(-1, keepdim=True), chosen


def grow(loaded: LoadedModel) -> None:
    """Fresh adapters are the identity."""
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))


@pytest.fixture(params=[WORLD] if WORLD else [1, 2, 3])
def ranks(request: pytest.FixtureRequest) -> int:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def rows(make_samples: Callable[..., list[Sample]]) -> list[Sample]:
    """Two rows that share what they begin with, and strangers; returns and values for a critic."""
    found = make_samples([30, 30, 9, 14, 21])
    shared = np.concatenate([found[0].tokens[:20], found[1].tokens[20:]])
    found[1] = found[1].replace(tokens=shared)
    return [s.replace(returns=np.ones(len(s)), values=np.zeros(len(s))) for s in found]
