"""`silva cluster plan`: which part runs where, what each takes and what is missing, before anything starts.

    [placement], [trainer], [engine] ──> parts: where, resources, memory, address
    [model], by its config.json ───────> memory: weights, what learning takes, a micro-batch, keys and values
    this machine ──────────────────────> missing: packages, tokens and keys, memory, a model

Nothing is loaded and no cluster is asked, so what other machines have is not known. Memory is that of the
longest episodes and the largest micro-batch; `silva rl --dry-run` measures shorter ones. Not here: seconds.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from silva.commands.checks import check
from silva.commands.command import Given
from silva.commands.plan import process_bytes, training_bytes
from silva.config.schema import RunConfig
from silva.errors import ConfigError, ModelError
from silva.models.attention import head_dim
from silva.models.memory import in_words, memory_limit, too_large
from silva.models.outline import outline
from silva.monitoring.printable import put
from silva.placement.carrier import TOKEN, TOKEN_PATH, part_of
from silva.wire.transport import UNIX

HERE, ACTOR, BY_HAND = "this machine", "a Ray actor", "started by hand"
WORKERS = "10002-19999"  # https://docs.ray.io/en/latest/ray-core/configure.html


@dataclass(frozen=True)
class PlacedPart:
    """Attributes:
    needs: resources that Ray keeps for it, on one node.
    memory: bytes, of the device that computes; None: not known.
    address: where it is reached.
    """

    name: str
    where: str
    memory: float | None
    address: str = ""
    needs: Mapping[str, float] | None = None


@dataclass(frozen=True)
class ClusterPlan:
    """Attributes:
    ranks: how those of the trainer divide the model.
    ports: what must be reachable, in words.
    shared: folders that all parts must see under the same path.
    """

    placement: str
    ranks: str
    parts: Sequence[PlacedPart]
    ports: Sequence[str]
    shared: Sequence[str]
    missing: Sequence[str]


def run(given: Given) -> int:
    if given.first("word after cluster; expected plan") != "plan":
        raise ConfigError(f"silva cluster: got {given.rest[0]!r}, expected plan")
    found = plan(given.resolve(given.rest[1:]).config)
    put(json.dumps(asdict(found), indent=1) if "--json" in given else describe(found))
    return 1 if found.missing else 0


def plan(config: RunConfig) -> ClusterPlan:
    """Raises SilvaError: whatever would stop the run at its start, as far as its settings tell."""
    check(config)
    missing, model = list[str](), None
    try:
        model = outline(config.model)
    except ModelError as error:
        missing.append(str(error))
    parts = _parts(config, model)
    output = [str(Path(config.output_dir).absolute())] if config.placement.processes else []
    return ClusterPlan(
        placement=config.placement.type, ranks=_ranks(config), parts=parts, ports=[*_ports(config, parts)],
        shared=output,
        missing=[*missing, *_packages(config), *_access(config, parts), *_room(config, parts)],
    )  # fmt: skip


def describe(found: ClusterPlan) -> str:
    rows = [("part", "where", "memory", "needs", "address")]
    for part in found.parts:
        needs = ", ".join(f"{key} {amount:g}" for key, amount in sorted((part.needs or {}).items()))
        memory = "unknown" if part.memory is None else in_words(part.memory)
        rows.append((part.name, part.where, memory, needs or "-", part.address or "-"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([
        f"placement: {found.placement}", f"ranks of the trainer: {found.ranks}", *table,
        *(f"port: {port}" for port in found.ports or ["none is opened"]),
        *(f"shared: every part must see {folder} under this path" for folder in found.shared),
        *(f"missing: {each}" for each in found.missing or ["nothing, as far as this machine can tell"]),
    ])  # fmt: skip


def _ranks(config: RunConfig) -> str:
    if config.ranks == 1:
        return "1"
    parallel = config.trainer.parallel
    shape = parallel.shape(config.ranks)
    sizes = {"pp": shape["pp"], "dp_replicate": shape["copies"], "dp_shard": shape["parts"] // parallel.cp,
             "cp": parallel.cp, "tp": shape["tp"]}  # fmt: skip
    ways = " x ".join(f"{way} {size}" for way, size in sizes.items() if size > 1)
    schedule = f", {parallel.pp_schedule}" if parallel.pp > 1 else ""
    return f"{config.ranks} = {ways}{schedule}{f', ep {parallel.ep}' if parallel.ep > 1 else ''}"


def _parts(config: RunConfig, model: PreTrainedModel | None) -> list[PlacedPart]:
    placement = config.placement
    own = process_bytes()
    ranks = config.ranks
    shards: float = max(1, ranks // config.trainer.parallel.dp_replicate)
    if config.trainer.parallel.offload and not _on_cpu(config, getattr(placement, "trainer_needs", {})):
        shards = math.inf  # of the GPU: they are in the memory of the CPU
    trained = model and training_bytes(config, model, _micro_batch(config), shards)
    if trained and model and (parallel := config.trainer.parallel).pp > 1 and shards > parallel.pp:
        trained += _kept_by_stage(model) / parallel.pp
    sampled = model and _sampling_bytes(config, model)
    if not placement.processes:
        both = trained and trained + (_cached(config, model) if model else 0.0)
        return [PlacedPart("all of them", HERE, both and both + own * _on_cpu(config, {}))]
    parts = [PlacedPart("orchestrator", HERE, own)]
    if placement.clustered:
        for name, needs in placement.needs(ranks, config.workers).items():
            if part_of(name) == "worker":  # what an environment takes is its own affair
                parts.append(PlacedPart(name, ACTOR, None, needs=needs))
                continue
            took = trained if part_of(name) == "trainer" else sampled
            memory = took and took + own * _on_cpu(config, needs)
            parts.append(PlacedPart(name, ACTOR, memory, f"ray:{name}", needs))
        return parts
    inference = placement.inference or [""] * placement.servers
    for name, given, took in (
        *((f"trainer{i or ''}", placement.trainer, trained) for i in range(ranks)),
        *((f"inference{i or ''}", address, sampled) for i, address in enumerate(inference)),
    ):
        memory = took and took + own * _on_cpu(config, {})
        follows = part_of(name) == "trainer" and name != "trainer"  # only the first rank is asked
        address = "" if follows else given or _started(config, name)
        parts.append(PlacedPart(name, BY_HAND if given else f"{HERE}, by silva rl", memory, address))
    return parts


def _kept_by_stage(model: PreTrainedModel) -> int:
    """Bytes of weights that are gathered for a whole update, and of their gradients, of all stages."""
    trained = (p for p in model.parameters() if p.requires_grad)
    gradients = (p.numel() * torch.promote_types(p.dtype, torch.float32).itemsize for p in trained)
    return sum(p.nbytes for p in model.parameters()) + sum(gradients)


def _started(config: RunConfig, name: str) -> str:
    launched = config.engine.launched and name != "trainer"
    return "http://127.0.0.1, any free port" if launched else "a Unix socket in a private folder"


def _on_cpu(config: RunConfig, needs: Mapping[str, float]) -> bool:
    """Whether the process itself lies in the memory that counts."""
    device = config.placement.device
    gpu = bool(needs.get("GPU")) if config.placement.clustered else torch.cuda.is_available()
    return device == "cpu" or (device == "auto" and not gpu)


def _micro_batch(config: RunConfig) -> float:
    """Tokens, if all episodes are as long as they may be."""
    rollout = config.rollout
    rows = rollout.groups_per_step * rollout.group_size / config.trainer.updates_per_step
    return float(min(config.trainer.micro_batch_tokens, rows * rollout.limits.max_episode_tokens))


def _sampling_bytes(config: RunConfig, model: PreTrainedModel) -> float:
    return sum(p.nbytes for p in model.parameters()) + _cached(config, model)


def _cached(config: RunConfig, model: PreTrainedModel) -> float:
    """Bytes of keys and values of the rollouts of a step, as long as they may be."""
    text, rollout, engine = model.config.get_text_config(), config.rollout, config.engine
    rows = rollout.groups_per_step * rollout.group_size
    if kept := getattr(engine, "max_concurrent", 0) + getattr(engine, "cached_sequences", 0):
        rows = min(rows, kept)
    each = 2 * text.num_hidden_layers * text.num_key_value_heads * head_dim(model.config)
    length = min(rollout.limits.max_episode_tokens, text.max_position_embeddings)
    return float(getattr(torch, config.model.dtype).itemsize * each * rows * length)


def _ports(config: RunConfig, parts: Sequence[PlacedPart]) -> Iterator[str]:
    placement = config.placement
    if placement.clustered and placement.address:
        head = "6379" if placement.address == "auto" else placement.address.rpartition(":")[2]
        yield f"{head}/tcp of the cluster's head, from every node"
        yield f"{WORKERS}/tcp between all nodes, unless ray start was given others (--min-worker-port)"
    elif placement.clustered:
        yield "of Ray, on loopback, chosen by Ray"
    for part in parts:
        if part.address.startswith("http") and "any free port" not in part.address:
            yield f"{part.address}, from the orchestrator, with a key"


def _packages(config: RunConfig) -> Iterator[str]:
    placement = config.placement
    needed = (
        {"httpx2": "services", "starlette": "services", "uvicorn": "services"} if placement.processes else {}
    )
    if placement.clustered:
        needed["ray"] = "ray"
    for package, extra in needed.items():
        if importlib.util.find_spec(package) is None:
            yield f"the package {package}: pip install 'silva[{extra}]'"


def _access(config: RunConfig, parts: Sequence[PlacedPart]) -> Iterator[str]:
    placement = config.placement
    if placement.clustered and placement.address:
        file = Path(os.environ.get(TOKEN_PATH) or Path.home() / ".ray" / "auth_token")
        if not os.environ.get(TOKEN) and not file.is_file():
            yield f"the cluster's token: {TOKEN} is not set, and there is no file {file}"
    elsewhere = [p for p in parts if p.address and p.where == BY_HAND and not p.address.startswith(UNIX)]
    if elsewhere and not placement.key:
        variable = placement.key_variable or "SILVA_API_KEY"
        yield f"the key of {', '.join(p.name for p in elsewhere)}: the variable {variable} is not set"


def _room(config: RunConfig, parts: Sequence[PlacedPart]) -> Iterator[str]:
    """What does not fit, here or in what Ray is asked to keep."""
    placement = config.placement
    if placement.clustered:
        for part in parts:
            kept = (part.needs or {}).get("memory")
            if kept and part.memory and kept < part.memory:
                key = "trainer_needs" if part_of(part.name) == "trainer" else "server_needs"
                yield f"memory of {part.name}: placement.{key}.memory is {in_words(kept)}, expected more"
        if not placement.address:
            yield from _this_cluster(parts)
    elif placement.device == "cuda" and not torch.cuda.is_available():
        yield 'a GPU: placement.device = "cuda", and torch sees none here'
    local = [p for p in parts if p.where.startswith(HERE) or (placement.clustered and not placement.address)]
    needed = sum(part.memory or 0.0 for part in local if _on_cpu(config, part.needs or {}))
    if (limit := memory_limit()) and too_large(needed):
        yield f"memory: the parts on this machine take {in_words(needed)}, and there are {in_words(limit)}"


def _this_cluster(parts: Sequence[PlacedPart]) -> Iterator[str]:
    """Of what Ray will find here, on a cluster of this machine alone."""
    there = {"CPU": os.cpu_count() or 1, "GPU": torch.cuda.device_count(), "memory": memory_limit() or 0}
    asked: dict[str, float] = {}
    for part in parts:
        for key, amount in (part.needs or {}).items():
            asked[key] = asked.get(key, 0.0) + amount
    for key, amount in sorted(asked.items()):
        if amount > there.get(key, 0):
            yield f"{key}: the parts need {amount:g}, and this machine has {there.get(key, 0):g}"
