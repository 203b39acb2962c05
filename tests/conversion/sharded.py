"""Shards as verl writes them, by torch.distributed itself: `python -m tests.conversion.sharded MODEL OUT`.

OUT/fsdp2 and OUT/fsdp1: two ranks, mesh (fsdp). OUT/hsdp: four ranks, mesh (ddp, fsdp). verl saves
`model.state_dict()` of FSDP2, and of FSDP 1 within `SHARDED_STATE_DICT`.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from transformers import AutoModelForCausalLM

WORLDS = {"fsdp2": 2, "fsdp1": 2, "hsdp": 4}


def rank_of(rank: int, kind: str, source: str, out: Path) -> None:
    world = WORLDS[kind]
    dist.init_process_group(
        "gloo", init_method=f"file://{out}/{kind}.rendezvous", rank=rank, world_size=world
    )
    shape, names = ((2, 2), ("ddp", "fsdp")) if kind == "hsdp" else ((world,), ("fsdp",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = AutoModelForCausalLM.from_pretrained(source)
    if kind == "fsdp1":
        wrapped = FullyShardedDataParallel(
            model, device_mesh=mesh, sharding_strategy=ShardingStrategy.FULL_SHARD, use_orig_params=False,
            device_id=torch.device("cpu"),
        )  # fmt: skip
        settings = ShardedStateDictConfig(offload_to_cpu=True)
        with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT, settings):
            state = wrapped.state_dict()
    else:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        state = fully_shard(model, mesh=mesh).state_dict()
    torch.save(state, out / kind / f"model_world_size_{world}_rank_{rank}.pt")
    dist.destroy_process_group()


def main(source: str, out: Path) -> None:
    warnings.simplefilter("ignore")
    for kind, world in WORLDS.items():
        (out / kind).mkdir(parents=True)
        multiprocessing.start_processes(rank_of, (kind, source, out), world, start_method="fork")


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(sys.argv[1], Path(sys.argv[2]))
