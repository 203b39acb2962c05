"""ARPO's and AEPO's scripts and YAML: verl's, with branching and tools."""

from __future__ import annotations

from silva.conversion.configs import verl
from silva.conversion.configs.carried import Carried, number, real
from silva.conversion.configs.verl import ROLLOUT

TOOLS = {"search": "search", "python": "python", "code": "python"}


def convert(draft: Carried) -> None:
    verl.common(draft)
    verl.data(draft)
    leaves, beam = draft.values.get("rollout.group_size"), number(draft.take(f"{ROLLOUT}.beam_size", 1))
    if isinstance(leaves, int) and leaves > 1 and isinstance(beam, int | float) and beam >= 2:
        _branching(draft, int(beam))
    else:
        draft.note(f"{ROLLOUT}.beam_size", "no branches with one sample a task, or one way to go on")
    reply = draft.values.get("rollout.limits.max_turn_tokens")
    if reply:
        draft.note("data.max_response_length", "of all replies of an episode there, of each one here; "
                   "rollout.limits.max_episode_tokens bounds the whole")  # fmt: skip
    _tools(draft)
    draft.rest(
        {
            f"{ROLLOUT}.tools.*": "environments.tools says which tools there are (docs/tools.md)",
            **verl.REASONS,
        }
    )


def _branching(draft: Carried, beam: int) -> None:
    aepo = draft.take(f"{ROLLOUT}.enable_dynamic_rollouts") is True
    draft.set("rollout.type", "branching", f"{ROLLOUT}.mode")
    draft.take(f"{ROLLOUT}.mode")
    draft.set("rollout.variant", "code")
    draft.set("rollout.beam_size", beam, f"{ROLLOUT}.beam_size")
    draft.set("algorithm.type", "aepo" if aepo else "arpo")
    draft.move("rollout.initial_rollouts", f"{ROLLOUT}.initial_rollouts", change=number)
    for key in ("branch_probability", "entropy_weight"):
        draft.move(f"rollout.{key}", f"{ROLLOUT}.{key}", usual=0.5, change=real)
    if aepo:
        draft.set("rollout.entropy_gap_weight", 0.5, f"{ROLLOUT}.enable_dynamic_rollouts")
        draft.set("rollout.branch_penalty", 0.05)


def _tools(draft: Carried) -> None:
    named = {key.split(".")[4] for key in draft.below(f"{ROLLOUT}.tools.tool_instances")}
    tools = []
    for name in sorted(TOOLS[each] for each in named if each in TOOLS):
        if name == "search":
            cache = draft.take(f"{ROLLOUT}.tools.tool_instances.search.params.cache_file")
            tools.append({"type": "search", **({"arpo_cache": str(cache)} if cache else {})})
        else:
            tools.append({"type": name})
    environment = draft.environments[0]
    if tools:
        environment["tools"] = tools
    if limit := number(draft.take(f"{ROLLOUT}.tools.call_limit")):
        environment["max_tool_calls"] = limit
    if "deep_research" in str(environment["reward"]):
        environment["reward"] = "deep_research"
