"""What of sharded training goes together: one table for runs, `silva cluster plan` and the docs.

Everything in WAYS combines with everything in WAYS and BESIDE, except what stands in REFUSED. What depends on
the family or the sizes of a model (heads that tp must divide, a decoder that can be cut) is refused beside
what divides it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from silva.errors import CapabilityError

if TYPE_CHECKING:
    from silva.trainer.settings import Parallel

WAYS = ("dp_shard", "dp_replicate", "cp", "tp", "pp", "ep")
"""Keys of `trainer.parallel`."""
LORA, CRITIC, REFERENCE = "`[model.lora]`", "a critic", "a reference"
CHECKPOINTING, REPLAY = "`trainer.gradient_checkpointing`", "`trainer.replay_routing`"
WALKS = "rows longer than `trainer.micro_batch_tokens`"
INTERLEAVED = '`trainer.parallel.pp_schedule = "interleaved_1f1b"`'
TIED, EXPERTS = "embeddings that are the head too", "a mixture of experts"
OFFLOAD = "`trainer.parallel.offload`"
BESIDE = (LORA, CRITIC, REFERENCE, CHECKPOINTING, WALKS, TIED, EXPERTS, REPLAY, OFFLOAD)

OTHERWISE = "transformers divides experts in another way than linear layers, which Silva does not do"
REFUSED: dict[tuple[str, ...], str] = {
    ("pp", "cp"): "ranks that share tokens exchange keys and values in chunks, and stages make none",
    ("ep", "tp"): "a copy of the model would be a mesh of three dimensions",
    ("ep", "pp"): "experts are divided among all ranks of a copy, and a stage has some of them",
    ("pp", CRITIC): "its head would need what the last stage alone has",
    ("pp", "tp", TIED): "copies of them are parts of a mesh of their own",
    ("pp", INTERLEAVED, TIED): "the end that is done with them first would wait for the other in mid-update",
    ("pp", WALKS): "stages compute a row in one piece",
    ("pp", REPLAY): "several micro-batches are under way in a stage, and a router replays one",
    ("tp", EXPERTS): OTHERWISE,
    ("tp", REPLAY): OTHERWISE,
}


def refuse(parallel: Parallel, beside: Iterable[str] = ()) -> None:
    """Raise CapabilityError for what does not go together: ways of `parallel`, and some of BESIDE."""
    ways = {way: size for way in WAYS if (size := getattr(parallel, way)) > 1}
    asked = {*ways, *beside, *([INTERLEAVED] if parallel.pp_schedule == "interleaved_1f1b" else [])}
    for names, why in REFUSED.items():
        if asked.issuperset(names):
            words = [f"trainer.parallel.{x} = {ways[x]}" if x in ways else x for x in names]
            raise CapabilityError(f"{' with '.join(words)}: {why}; expected trainer.parallel.{names[0]} = 1")


def of_model(model: Any) -> list[str]:
    """What of BESIDE a model is, with or without its numbers."""
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    experts = any(name.endswith(".experts") for name, _ in model.named_modules())
    return [name for name, holds in ((TIED, tied), (EXPERTS, experts)) if holds]


def table() -> str:
    """In Markdown, with the reasons below."""
    apart = [set(names) for names in REFUSED]
    rows = [["", *map(_code, WAYS)], ["---"] * (len(WAYS) + 1)]
    for name in (*WAYS, *BESIDE):
        found = ("" if way == name else "no" if {way, name} in apart else "yes" for way in WAYS)
        rows.append([_code(name), *found])
    reasons = [f"- {' with '.join(map(_code, names))}: {why}." for names, why in REFUSED.items()]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", *reasons])


def _code(name: str) -> str:
    return f"`{name}`" if name in WAYS else name
