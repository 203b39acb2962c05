"""Logs of Inspect (inspect-ai, log version 2), written by the standard library alone.

One log holds one task of Inspect, which is an environment here, and one model. A `.eval` file is a zip:

    _journal/start.json   what was asked
    samples/ID_epoch_N.json   one episode; the samples of a task are its epochs
    summaries.json        the samples without their messages
    header.json           what was asked, and what came of it
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from silva import __version__
from silva.data.recorded import messages_of
from silva.evaluation.evaluator import Job
from silva.rendering.openai import call_ids
from silva.storage.rollouts import RolloutRow
from silva.storage.summary import finite
from silva.types import Message, Trajectory

VERSION = 2
_SHORT = ("id", "epoch", "input", "target", "scores", "metadata", "uuid")


def log_of(
    name: str,
    model: str,
    environment: str,
    episodes: Sequence[tuple[RolloutRow, Job]],
    results: Iterable[Mapping[str, Any]],
    *,
    created: str,
) -> dict[str, Any]:
    """One log as plain JSON, its samples under `samples`.

    Args:
        name: of the evaluation.
        episodes: of this environment and model.
        results: the rows of summary.json for them.
        created: when, in the form of ISO 8601 with a time zone.
    """
    model = f"silva/{model}"
    samples = [_sample(row.trajectory, job, model) for row, job in episodes]
    own = sha256(f"{name} {model} {environment} {created}".encode()).hexdigest()[:22]
    ids = list(dict.fromkeys(sample["id"] for sample in samples))
    spec = {
        "eval_id": own, "run_id": own, "created": created, "task": environment, "task_id": own,
        "task_version": 0, "task_file": None, "task_attribs": {}, "task_args": {}, "solver": None,
        "dataset": {"name": environment, "location": environment, "samples": len(ids), "sample_ids": ids,
                    "shuffled": False},
        "model": model, "model_args": {}, "config": {"epochs": max(sample["epoch"] for sample in samples)},
        "revision": None, "packages": {"silva": __version__}, "metadata": {"evaluation": name},
    }  # fmt: skip
    usage = _usage(t for row, _ in episodes for t in [row.trajectory])
    log = {
        "version": VERSION, "status": "success", "eval": spec,
        "plan": {"name": "plan", "steps": [], "config": {}},
        "results": {
            "total_samples": len(samples), "completed_samples": sum("error" not in each for each in samples),
            "scores": [_scorer(row) for row in results if row["mean"] is not None],
        },
        "stats": {"started_at": created, "completed_at": created, "model_usage": {model: usage}},
        "samples": samples,
    }  # fmt: skip
    return finite(log)  # type: ignore[no-any-return]


def eval_file(log: Mapping[str, Any]) -> bytes:
    """A log as a `.eval` file; the same log gives the same bytes."""
    head = {key: value for key, value in log.items() if key != "samples"}
    start = {key: log[key] for key in ("version", "eval", "plan")}
    short = [
        {key: sample[key] for key in _SHORT}
        | {"completed": "error" not in sample, "message_count": len(sample["messages"])}
        for sample in log["samples"]
    ]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for path, value in (
            ("_journal/start.json", start),
            *((f"samples/{each['id']}_epoch_{each['epoch']}.json", each) for each in log["samples"]),
            ("summaries.json", short),
            ("header.json", head),
        ):
            entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(entry, json.dumps(value, allow_nan=False))
    return buffer.getvalue()


def file_name(log: Mapping[str, Any]) -> str:
    """TIME_task_id.eval, as Inspect lists them."""
    spec = log["eval"]
    stamp = spec["created"].replace(":", "-")
    task = "".join(char if char.isalnum() else "-" for char in spec["task"])
    return f"{stamp}_{task}_{spec['eval_id']}.eval"


def _sample(trajectory: Trajectory, job: Job, model: str) -> dict[str, Any]:
    messages = _messages(messages_of(trajectory))
    asked = next((i for i, each in enumerate(messages) if each["role"] == "assistant"), len(messages))
    said = next((each for each in reversed(messages) if each["role"] == "assistant"), None)
    cut = bool(trajectory.turns) and trajectory.turns[-1].cut
    sample: dict[str, Any] = {
        "id": job.task.id.replace("/", "-"), "epoch": job.sample + 1,
        "input": messages[:asked] or job.task.id, "target": _target(job.task.answer), "messages": messages,
        "output": {
            "model": model, "usage": _usage([trajectory]),
            "choices": [{"message": said, "stop_reason": "max_tokens" if cut else "stop"}] if said else [],
        },
        "scores": {}, "metadata": {"stop_reason": trajectory.stop_reason, **trajectory.metrics},
        "store": {}, "events": [], "model_usage": {model: _usage([trajectory])}, "attachments": {},
        "uuid": sha256(f"{model} {job.environment} {trajectory.id}".encode()).hexdigest()[:22],
    }  # fmt: skip
    if not trajectory.has_result:
        error = trajectory.error or "no result"
        return sample | {"error": {"message": error, "traceback": error, "traceback_ansi": error}}
    answer = said["content"] if said and isinstance(said["content"], str) else None
    parts = {name: float(value) for name, value in trajectory.rewards.items()}
    sample["scores"]["reward"] = {"value": trajectory.raw_reward, "answer": answer, "metadata": parts}
    if "success" in trajectory.metrics:
        sample["scores"]["success"] = {"value": trajectory.metrics["success"], "answer": answer}
    return sample


def _messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages in Inspect's form."""
    found, names = list[dict[str, Any]](), dict[str, str]()
    for message, ids in zip(messages, call_ids(messages), strict=True):
        shown: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            thought = {"type": "reasoning", "reasoning": message.reasoning}
            shown["content"] = [thought, {"type": "text", "text": message.content}]
        if message.role == "assistant":
            shown["source"] = "generate"
            calls = [
                {"id": id, "function": call.name, "arguments": dict(call.arguments), "type": "function"}
                for id, call in zip(ids, message.tool_calls, strict=True)
            ]
            names |= {id: call.name for id, call in zip(ids, message.tool_calls, strict=True)}
            shown |= {"tool_calls": calls} if calls else {}
        elif ids:
            shown |= {"tool_call_id": ids[0], "function": names[ids[0]]}
        found.append(shown)
    return found


def _target(answer: Any) -> str | list[str]:
    if isinstance(answer, list | tuple) and all(isinstance(each, str) for each in answer):
        return list(answer)
    return answer if isinstance(answer, str) else "" if answer is None else json.dumps(answer)


def _usage(trajectories: Iterable[Trajectory]) -> dict[str, int]:
    counts = [(t.tokens("policy"), t.tokens()) for t in trajectories]
    output, total = sum(o for o, _ in counts), sum(all_of for _, all_of in counts)
    return {"input_tokens": total - output, "output_tokens": output, "total_tokens": total}


def _scorer(row: Mapping[str, Any]) -> dict[str, Any]:
    values = {"mean": row["mean"], "ci_low": row["ci_low"], "ci_high": row["ci_high"]}
    metrics = {name: {"name": name, "value": value, "params": {}}
               for name, value in values.items() if value is not None}  # fmt: skip
    return {"name": row["metric"], "scorer": row["metric"], "params": {}, "metrics": metrics}
