"""What divisions of a model cost on paper, against numbers by hand and what Silva's own ranks exchange."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks
import scale
import torch
import torch.distributed as dist
import training_cost
from step_shapes import FP32, Machine, Model, Task
from tests import moe
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from silva.config.sections import PretrainedModel, TinyModel
from silva.models.loading import load_model
from silva.trainer.learner import Learner
from silva.trainer.settings import LocalTrainerSettings, Parallel
from silva.trainer.sharding.ranks import mesh_of
from silva.types import LossSpec

GPT3 = Model(175e9, 96, 12_288, 12_288, 12_288, 51_200)
H100 = Machine()


@pytest.mark.parametrize(
    ("stages", "micro_batches", "runs", "expected"),
    [(4, 8, 1, 3 / 8), (4, 8, 2, 3 / 16), (8, 64, 1, 7 / 64), (1, 5, 1, 0.0)],
)
def test_bubbles_over_the_time_without_are_those_of_megatron(
    stages: int, micro_batches: int, runs: int, expected: float
) -> None:
    """arXiv:2104.04473, section 2.2: (p - 1) / m, and a v-th of it interleaved."""
    found = training_cost.bubble(stages, micro_batches, runs)
    assert found / (1 - found) == pytest.approx(expected)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (4, 4), (8, 9)])
def test_a_schedule_of_1f1b_waits_as_long(stages: int, micro_batches: int) -> None:
    """Played: a pass begins when its stage is free and what it needs is there; back takes twice as long."""
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage, micro_batches)
        order = [("forward", i) for i in range(ahead)]
        for i in range(micro_batches):
            order += [("back", i)] + [("forward", i + ahead)] * (i + ahead < micro_batches)
        orders.append(order)
    ended: dict[tuple[int, str, int], float] = {(-1, "forward", i): 0.0 for i in range(micro_batches)}
    at, free = [0] * stages, [0.0] * stages
    while any(place < 2 * micro_batches for place in at):
        for stage in range(stages):
            if at[stage] == 2 * micro_batches:
                continue
            way, i = orders[stage][at[stage]]
            before = (stage - 1, way, i) if way == "forward" else (stage + 1, way, i)
            before = (stage, "forward", i) if before == (stages, "back", i) else before
            if before in ended:
                free[stage] = max(free[stage], ended[before]) + (1 if way == "forward" else 2)
                ended[stage, way, i] = free[stage]
                at[stage] += 1
    found = training_cost.bubble(stages, micro_batches)
    assert max(free) == pytest.approx(3 * micro_batches / (1 - found))


def test_activations_of_gpt3_by_hand() -> None:
    """arXiv:2205.05198, section 4.2.3: with 2 runs on 8 stages 1 + 7 / 16 times as much is held."""
    plain, interleaved = Parallel(pp=8, tp=8), Parallel(pp=8, tp=8, pp_schedule="interleaved_1f1b")
    tokens = 2048
    inputs = tokens * 12_288 * 2 * 96
    own = tokens * 12_288 * (10 + 24 / 8)
    fixed = 175e9 / 64 * (16 + 6)
    assert training_cost.memory(GPT3, 64, plain, tokens) == pytest.approx(fixed + inputs + own)
    found = training_cost.memory(GPT3, 64, interleaved, tokens)
    assert found == pytest.approx(fixed + inputs * (1 + 7 / 16) + own)


def test_the_last_stage_has_most_layers_and_the_head() -> None:
    """36 layers on 8 stages: 4 or 5, the last has 5; the head of 8B is as much as 3.2 layers."""
    model = scale.MODELS["8B"]
    layer, head = 2 * model.body / 36, 2 * model.head
    assert training_cost.stage_flop(model, 100, 100, 0, 8) == pytest.approx(100 * (5 * layer + head))
    assert training_cost.stage_flop(model, 100, 100, 0, 8, 2) == pytest.approx(100 * (6 * layer + head))
    assert training_cost.stage_flop(model, 100, 100, 7, 1) == training_cost.forward_flop(model, 100, 100, 7)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_last_rank_of_a_context_attends_to_most(n: int) -> None:
    tokens = 24 * n
    pairs = [sum(range(tokens // n * rank, tokens // n * (rank + 1))) for rank in range(n)]
    found = training_cost.late(Parallel(cp=n), n)
    assert found == pytest.approx(n * pairs[-1] / sum(pairs), rel=0.02)
    assert training_cost.late(Parallel(cp=n), 1) == 1
    assert training_cost.late(Parallel(cp=n, cp_style="ulysses"), n) == 1


def test_ulysses_sends_what_its_paper_says() -> None:
    """arXiv:2309.14509, section 3.2: a layer exchanges 4 N h / P numbers on each GPU, (P - 1) / P of which
    leave it. 96 layers, forward and back."""
    task = Task(groups=1, size=1, prompt=0, reply=8192, spread=0, scores=0)
    found = _exchanged(GPT3, task, 8, Parallel(cp=8, cp_style="ulysses"))
    assert found == pytest.approx(96 * 2 * 4 * 8192 * 12_288 / 8 * 7 / 8 * 2)


def test_keys_and_values_of_few_heads_are_less_than_tokens_for_heads() -> None:
    """Qwen3-30B-A3B, 8 ranks: for Ulysses its 4 heads of keys are repeated, 2 x 4096 + 2 x 1024 numbers a
    token, an eighth of the tokens each; without it 2 x 512 of every token."""
    model, task = scale.MODELS["30B-A3B"], Task(groups=1, size=1, prompt=0, reply=8192, spread=0, scores=0)
    ulysses = _exchanged(model, task, 8, Parallel(cp=8, cp_style="ulysses"))
    assert ulysses == pytest.approx(48 * 2 * 1024 * (2 * 4096 + 2 * 1024) * 2 * 7 / 8)
    every = _exchanged(model, task, 8, Parallel(cp=8))
    assert every == pytest.approx(48 * (1 + 2) * 8192 * 2 * 512 * 2 * 7 / 8)


def test_rows_for_experts_by_hand() -> None:
    """Qwen3-30B-A3B: 8 rows of 2,048 bfloat16 a token, there and back, three quarters to other ranks."""
    task = Task(groups=1, size=4, prompt=0, reply=1000, spread=0, scores=0)
    found = _exchanged(scale.MODELS["30B-A3B"], task, 4, Parallel(ep=4))
    assert found == pytest.approx(48 * 2 * 1000 * 8 * 2048 * 2 * 2 * 3 / 4)
    more = _exchanged(scale.MODELS["30B-A3B"], replace(task, scores=1), 4, Parallel(ep=4))
    assert more == pytest.approx(found * 3 / 2)


def _exchanged(model: Model, task: Task, ranks: int, way: Parallel) -> float:
    """Bytes of an update."""
    found = training_cost.training(model, _counting(ranks), task, ranks, way, micro=10**6, recompute=False)
    return found.exchanging


def _counting(ranks: int) -> Machine:
    """On which a byte takes a second, and nothing else takes any."""
    return replace(H100, flops=math.inf, bandwidth=math.inf, link=1, moved=1, hop=0, hidden=0, node=ranks)


WAYS = {
    "dp_shard": Parallel(),
    "dp_replicate": Parallel(dp_replicate=2),
    "tp": Parallel(tp=2),
    "pp": Parallel(pp=2),
    "cp": Parallel(cp=2),
    "ulysses": Parallel(cp=2, cp_style="ulysses"),
    "experts": Parallel(),
    "ep": Parallel(ep=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_bytes_are_those_that_ranks_exchange(name: str, tmp_path: Path) -> None:
    """Rank 0 of two in a group of torch's that sends nothing: what it gives to collectives is counted."""
    way, rows, length, budget = WAYS[name], 8, 64, 128
    with _of_two():
        if name in ("experts", "ep"):
            given: Any = PretrainedModel(name=str(moe.folder(tmp_path / "m")), dtype="float32")
        else:
            given = TinyModel(width=32)
        settings = LocalTrainerSettings(parallel=way, micro_batch_tokens=budget, self_check=False)
        loaded = load_model(given, seed=0)
        total = sum(p.numel() for p in loaded.model.parameters())
        learner = Learner(loaded, settings, seed=0, mesh=mesh_of(way, "cpu"))
        with Counted() as counted:
            learner.forward_backward([ranks.sample(i, length) for i in range(rows)], LossSpec("reinforce"))
    model = Model(total, 2, 32, 32, 16, 262, tied=True, of_head=8, width=FP32)
    if name in ("experts", "ep"):  # two of four of 3 x 32 x 16 numbers, in two layers; one head of keys
        experts = {"active": total - 2 * 2 * 3 * 32 * 16, "experts": 4, "chosen": 2, "of_head": 16}
        model = replace(model, tied=False, **experts)
    task = Task(groups=rows, size=1, prompt=0, reply=length, spread=0, scores=0)
    found = training_cost.training(model, _counting(2), task, 2, way, micro=budget // way.cp, recompute=False)
    assert counted.bytes == pytest.approx(found.gathering + found.exchanging, rel=0.01)


@contextmanager
def _of_two() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Counted(TorchDispatchMode):
    """Bytes that a rank of two exchanges in tensors: half of what is gathered, scattered or exchanged, all of
    what is summed, sent or received. It receives 1, which in torch's pipelines says that shapes are known."""

    bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, found = str(func), func(*args, **(kwargs or {}))
        if not name.startswith(("c10d.", "_c10d_functional.")):
            return found
        tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        sizes = [x.nbytes for x in tensors]
        if "recv" in name:
            tensors[0].fill_(1)
        if "allreduce" in name or "all_reduce" in name or "send" in name or "recv" in name:
            self.bytes += sum(sizes)
        elif name.startswith(("c10d.allgather_.", "_c10d_functional.all_gather")):
            self.bytes += sizes[-1]  # the part of this rank
        elif "gather" in name or "reduce_scatter" in name or "alltoall" in name:
            self.bytes += max(sizes) / 2
        return found


def test_divisions_are_those_that_go_together() -> None:
    """Expert and tensor parallel do not, and of 4 heads of keys tp is a divisor; all of them have room."""
    model, task = scale.MODELS["30B-A3B"], scale.TASKS["maths"]
    found = [way for _, way in training_cost.divided(model, H100, task, 64)]
    assert {way.ep for way in found} >= {1, 2, 8, 64} and {way.pp for way in found} > {1}
    assert not [
        way for way in found if way.tp > 1 or (way.ep > 1 and way.pp > 1) or (way.cp > 1 and way.pp > 1)
    ]
    dense = [way for _, way in training_cost.divided(scale.QWEN_7, H100, task, 64)]
    assert {way.tp for way in dense} == {1, 2, 4}
    assert not [
        way for way in dense if 16 * scale.QWEN_7.parameters / 64 * way.dp_replicate > 0.9 * H100.memory
    ]


def test_ranks_that_share_a_row_end_sooner() -> None:
    """One row of 64k tokens on 8 GPUs: alone it is computed on one of them."""
    task = Task(groups=1, size=1, prompt=0, reply=65_536, spread=0, scores=0)
    seconds, best = training_cost.divided(scale.QWEN_7, H100, task, 8)[0]
    assert best.cp * best.tp == 8
    alone = training_cost.training(scale.QWEN_7, H100, task, 8, Parallel())
    assert alone.seconds > 6 * seconds


def test_ranks_that_share_cores_work_while_a_stage_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four micro-batches, two stages of 2 layers: a rank with a core of its own waits a fifth of the time."""
    monkeypatch.setattr(ranks, "cores", lambda: [0, 1])
    rates = {"flops": 1e11, "bandwidth": math.inf, "link": math.inf, "hop": 0.0}

    def seconds(count: int, way: Parallel, flops: float) -> float:
        return ranks.predicted(count, way, rates | {"flops": flops}, 1e11, 1.0, quick=False)

    whole, stages = seconds(1, Parallel(), 1e11), seconds(2, Parallel(pp=2), 1e11)
    busiest = stages / whole * 4 / 5
    assert 0.5 < busiest < 0.51  # the last stage has the head
    assert seconds(4, Parallel(pp=2), 5e10) == pytest.approx(busiest * whole)
    assert seconds(4, Parallel(), 5e10) == pytest.approx(whole / 2)
