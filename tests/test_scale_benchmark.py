"""The cost model of a step against numbers by hand, torch's count of FLOP, the trie, and enumeration."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scale
import step_cost
import torch
import training_cost
from hypothesis import given, settings
from hypothesis import strategies as st
from step_shapes import Machine, Model, Task
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from silva.models.trie import build
from silva.trainer.settings import Parallel

LLAMA = scale.LLAMA
SMALL = Model(1e9, 10, 100, 100, 50, 1000)
H100 = Machine()


def test_llama_by_hand() -> None:
    assert LLAMA.body == 8.03e9 - 2 * 128_256 * 4096
    assert LLAMA.cache == 128 * 1024  # 8 heads of 128, keys and values, 2 bytes, 32 layers


def test_an_expert_that_nobody_chose_is_not_read() -> None:
    model = scale.MODELS["30B-A3B"]
    assert model.read(1) == pytest.approx(2 * model.active)
    assert model.read(1e6) == pytest.approx(2 * model.parameters)
    assert model.read(0) == pytest.approx(2 * (3.3e9 - 27.2e9 * 8 / 120))


def test_flop_are_those_that_torch_counts() -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=97, attn_implementation="eager",
    )  # fmt: skip
    model, length = LlamaForCausalLM(config), 48
    tokens = torch.arange(length)[None]
    with FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens).loss.backward()
    shape = Model(sum(p.numel() for p in model.parameters()), 3, 64, 64, 32, 97)
    task = Task(groups=1, size=1, prompt=0, reply=length, scores=0)
    found = training_cost.training_flop(shape, task, recompute=False)
    masked = 3 * 4 * 3 * 64 * length * length / 2  # torch counts pairs that the mask hides
    assert counter.get_total_flops() == pytest.approx(found + masked, rel=0.01)


def test_tokens_of_a_step_are_those_of_its_trie() -> None:
    task, rng = Task(groups=3, size=4, prompt=7, turns=3, reply=5, observed=2), np.random.default_rng(0)
    rows = []
    for _ in range(task.groups):
        prompt = rng.integers(0, 10**6, task.prompt)
        rows += [np.concatenate([prompt, rng.integers(0, 10**6, 21)]) for _ in range(task.size)]
    assert (task.unique, task.flat) == (len(build(rows, 1)), sum(map(len, rows)))
    turns = [len(row[: 7 + 7 * (turn + 1)]) for row in rows for turn in range(3)]
    assert task.a_row_a_turn == sum(turns)
    assert task.sampled == 3 * 4 * 3 * 5


def test_lengths_have_the_mean_that_is_asked_for_and_the_cut() -> None:
    task = Task(groups=100, size=10, reply=1000, spread=0.4, cut=100.0)
    assert np.mean(task.lengths) == pytest.approx(1000, rel=0.01)
    assert np.std(np.log(task.lengths)) == pytest.approx(0.4, rel=0.02)
    assert max(replace(task, cut=2.0).lengths) == 2000
    assert set(replace(task, spread=0.0).lengths) == {1000.0}


def test_a_model_is_divided_among_as_few_gpus_as_have_room() -> None:
    """8B on two: 65.5 GB that learn, 0.9 GB gathered and 7.1 GB of activations are more than 72 GB."""
    assert training_cost.shard(scale.MODELS["8B"], H100, 64, 16_384) == 4
    assert training_cost.shard(scale.MODELS["8B"], H100, 23, 16_384) == 23
    assert training_cost.shard(scale.MODELS["8B"], H100, 64, 8192) == 2
    assert training_cost.shard(scale.MODELS["8B"], H100, 24, 16_384) == 4  # three would not stay in a node
    assert training_cost.shard(scale.MODELS["8B"], H100, 3, 16_384) == 3  # 43.7 GB that learn
    assert training_cost.shard(scale.MODELS["32B"], H100, 48, 16_384) == 16
    assert training_cost.shard(scale.MODELS["8B"], H100, 2, 16_384) == 0
    assert training_cost.sharded(scale.MODELS["8B"], H100, Task(), 2) == math.inf


def test_bytes_enter_a_node_once() -> None:
    assert H100.between(8) == 0.8 * 450e9
    assert H100.between(16) == 0.8 * 8 * 50e9


def test_training_by_hand() -> None:
    """One pass on 2 of 2 GPUs with 10 layers; 1e9 parameters, 1e12 FLOP/s, 1e9 B/s, no latency."""
    machine = Machine(flops=1e12, trained=0.5, link=1e9, moved=1.0, hop=0.0, bandwidth=1e10, memory=1e12)
    task = Task(groups=2, size=1, prompt=0, reply=1000, spread=0.0, scores=0)
    forward = 2 * (1e9 - 2e5) * 2000 + 2 * 1e5 * 2000 + 4 * 10 * 100 * 2000 * 500
    arithmetic, gathering = 3 * forward / 1e12, 8e9 / 2 / 1e9
    stepping = 28 * 1e9 / 2 / 1e10
    found = training_cost.training(SMALL, machine, task, 2, Parallel(), micro=1000, recompute=False).seconds
    assert found == pytest.approx(arithmetic + gathering / 10 + stepping)
    slow = replace(machine, link=1e8)
    found = training_cost.training(SMALL, slow, task, 2, Parallel(), micro=1000, recompute=False).seconds
    assert found == pytest.approx(40 + 40 / 10 + stepping)  # nothing is hidden longer than it computes


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (1, [(3, 1), (1, 1), (2, 1)]),
        (2, [(1, 2), (2, 2)]),
        (3, [(1, 3), (1, 2), (1, 1)]),
    ],
)
def test_slots_take_the_next_episode(slots: int, expected: list[tuple[float, int]]) -> None:
    assert [*step_cost._running((3.0, 1.0, 2.0), slots)] == expected


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 8))
def test_every_token_is_sampled_once(lengths: list[int], slots: int) -> None:
    found = [*step_cost._running(tuple(map(float, lengths)), slots)]
    assert sum(ticks * running for ticks, running in found) == pytest.approx(sum(lengths))
    assert max(running for _, running in found) <= slots


def test_a_decoding_step_reads_weights_and_cache() -> None:
    machine = Machine(bandwidth=1e12, streamed=0.5, launch=0.0)
    read = 2e9 + 8 * 100 * 2 * 2 * 10 * 50
    assert step_cost.decoding(SMALL, machine, 8, 100) == pytest.approx(read / 5e11)
    assert step_cost.decoding(SMALL, replace(machine, flops=1e6), 8, 100) > 1e4  # then arithmetic is longer


def test_episodes_that_wait_for_tools_leave_their_place_to_others() -> None:
    """At level 1 twice the batch is in flight, so waits of as long as the replies cost nothing."""
    task = Task(groups=64, size=16, prompt=64, turns=4, reply=100, spread=0.0)
    batch = step_cost.capacity(SMALL, H100, task)
    reply = 100 * step_cost.decoding(SMALL, H100, batch, task.context)
    gpus = task.episodes // batch
    waits = replace(task, tool_seconds=reply)
    assert step_cost.streaming(SMALL, H100, waits, gpus, 1) == pytest.approx(
        step_cost.streaming(SMALL, H100, task, gpus, 1), rel=0.02
    )
    alone = step_cost.sampling(SMALL, H100, waits, gpus, 1) - step_cost.sampling(SMALL, H100, task, gpus, 1)
    assert alone == pytest.approx(4 * reply)


@pytest.mark.parametrize("name", ["maths", "agent"])
def test_no_split_of_the_gpus_is_faster(name: str) -> None:
    model, task = scale.MODELS["1.7B"], replace(scale.TASKS[name], groups=16)
    found = step_cost.apart(model, H100, task, 8)
    assert found is not None and found.samplers + found.trainers <= 8
    every = [
        max(step_cost.streaming(model, H100, task, n, 1), training_cost.sharded(model, H100, task, m))
        for n in range(1, 8)
        for m in range(1, 9 - n)
    ]
    assert min(every) <= found.seconds - found.transfer <= 1.02 * min(every)


def test_transfer_by_hand() -> None:
    machine = Machine(net=50e9, moved=0.8, disk=5e9)
    seconds = {how: step_cost.transfer(LLAMA, machine, how) for how in ("nccl", "folder", "shm", "lora")}
    assert seconds == pytest.approx({"nccl": 0.4015, "folder": 6.424, "shm": 3.212, "lora": 0.06424})
    assert step_cost.transfer(LLAMA, machine, "folder", writers=4) == pytest.approx(3.212 * 1.25)
    crowd = step_cost.transfer(LLAMA, machine, "folder", writers=64, readers=64)  # 64 nodes share 100 GB/s
    assert crowd == pytest.approx(16.06 / 100 + 16.06 * 64 / 100)
    with pytest.raises(ValueError, match="got 'tcp', expected nccl, folder, shm or lora"):
        step_cost.transfer(LLAMA, machine, "tcp")


def test_the_period_is_the_best_of_all_periods() -> None:
    """Llama 3 on 16,384 GPUs lost one every 54 * 24 / 419 hours."""
    best = step_cost.endurance(H100, 16_384, 20.0)
    assert best.between / 3600 == pytest.approx(54 * 24 / 419, rel=1e-3)
    others = [step_cost.endurance(H100, 16_384, 20.0, period=float(p)).useful for p in range(10, 5000, 5)]
    assert best.useful >= max(others) - 1e-9
    assert best.useful == pytest.approx(max(others), abs=1e-4)
    assert step_cost.endurance(H100, 16_384, 20.0, period=1e9).useful == 0.0


def test_predictions_of_what_was_measured_here_are_within_a_third() -> None:
    own = [check for check in scale._cpu() if not check.fitted]
    assert len(own) == 5 and max(abs(check.error) for check in own) < 1 / 3


@pytest.mark.slow
def test_the_page_has_the_tables_of_the_program() -> None:
    page = (Path(__file__).parents[1] / "docs" / "scale.md").read_text()
    assert [table for table in (*scale.everything(), scale.checked()) if table.strip("\n") not in page] == []
