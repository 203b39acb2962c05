"""Worker for orchestrator.py: Silva's FrozenLake through the loop of verifiers, in one process.

Runs in .peers/verifiers (`make peers PEERS=verifiers`). verifiers gets its cheapest way: the harness plays
in this process (by default each turn would start a program) and the box is borrowed. The engine is replaced
where it is reached, so that no HTTP to it counts; what remains is its own: the interception server,
rendering, the trace. `renderer`: "default" is what it takes for SmolLM2 and renders all messages at every
turn; "qwen3" knows the same chat format and adds new turns to the tokens it has.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import verifiers.v1 as vf
from renderers import Qwen3RendererConfig
from transformers import AutoTokenizer
from verifiers.v1.clients import train

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
from silva.environments.worlds.frozen_lake import FrozenLake
from silva.types import Message, Task

MARKUP = [
    "<unk>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]


class Answers:
    """Stands for the client of the engine: a reply at once, drawn at random."""

    base_url = "http://engine/v1"

    def __init__(self, replies: list[list[int]]) -> None:
        self._random = random.Random(0)
        self._bodies = [
            json.dumps(
                {
                    "choices": [
                        {
                            "token_ids": tokens,
                            "finish_reason": "stop",
                            "logprobs": {
                                "content": [{"token": f"token_id:{t}", "logprob": 0.0} for t in tokens]
                            },
                        }
                    ]
                }
            ).encode()
            for tokens in replies
        ]

    async def get(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {"data": []}

    async def post(self, *_: Any, **__: Any) -> Any:
        await asyncio.sleep(0)
        return SimpleNamespace(content=self._random.choice(self._bodies))

    async def close(self) -> None:
        pass


class Player(vf.Harness[vf.HarnessConfig]):
    """Plays the task named by `data.name`, asking the model as every harness does."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    def __init__(self, config: vf.HarnessConfig, tasks: dict[str, Task], turns: int) -> None:
        super().__init__(config)
        self.tasks, self.turns, self.taskset = tasks, turns, FrozenLake().taskset()
        self.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def launch(self, ctx: Any, trace: vf.Trace, runtime: Any, endpoint: str, secret: str,
                     mcp_urls: Any, data: vf.TaskData, **_: Any) -> vf.ProgramResult:  # fmt: skip
        game = self.taskset.environment(self.tasks[data.name or ""])
        observation = await game.reset()
        messages: list[dict[str, Any]] = []
        for _turn in range(self.turns):
            messages.append({"role": "user", "content": observation.messages[0].content})
            body = {"model": ctx.model, "messages": messages}
            async with self.http.post(
                f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
            ) as answer:
                if answer.status != 200:
                    raise RuntimeError(await answer.text())
                reply = (await answer.json())["choices"][0]["message"]
            messages.append(reply)
            text, thoughts = reply.get("content") or "", reply.get("reasoning_content")
            step = await game.step(Message("assistant", text, reasoning=thoughts))
            for name, value in step.rewards.items():
                trace.record_reward(name, value)
            trace.record_metrics(step.metrics)
            if step.terminated or step.truncated:
                break
            observation = step.observation
        return vf.ProgramResult(0, "", "")


async def play(job: dict[str, Any]) -> dict[str, Any]:
    tasks = {f"{i}": Task(id, "frozen_lake", seed, data) for i, (id, seed, data) in enumerate(job["tasks"])}
    renderer = Qwen3RendererConfig(thinking_retention="all") if job["renderer"] == "qwen3" else None
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
        tokenizer.add_tokens(MARKUP)  # the renderer asks for them; no reply holds them
        tokenizer.unk_token = "<unk>"
        tokenizer.save_pretrained(folder)
        client = vf.TrainClientConfig(renderer=renderer, renderer_model_name=folder)
        config = vf.AgentConfig(
            harness={"id": "null"}, runtime=vf.SubprocessConfig(), model="m", client=client
        )
        async with vf.Agent(config) as agent, agent.provision() as box:
            agent.harness = Player(agent.harness.config, tasks, job["turns"])
            await agent.run(_task("0"), runtime=box)
            waiting, traces = iter(tasks), []

            async def work() -> None:
                for name in waiting:
                    traces.append(await agent.run(_task(name), runtime=box))

            gc.collect()
            began = time.process_time()
            await asyncio.gather(*(work() for _ in range(job["live"])))
            seconds = time.process_time() - began
            await agent.harness.http.close()
    broken = [trace.last_error for trace in traces if not trace.ok]
    if broken:
        raise RuntimeError(f"{len(broken)} of {len(traces)} episodes failed: {broken[0]}")
    return {"version": version("verifiers"), "seconds": seconds, "turns": sum(t.num_turns for t in traces),
            "tokens": sum(len(b.token_ids) for t in traces for b in t.branches)}  # fmt: skip


def _task(name: str) -> vf.Task:
    return vf.Task(vf.TaskData(name=name, prompt="play"), vf.TaskConfig())


def main() -> int:
    job = json.load(sys.stdin)
    logging.disable(logging.WARNING)
    train.build_async_openai = lambda config: Answers(job["replies"])
    print(json.dumps(asyncio.run(play(job))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
