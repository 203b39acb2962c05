"""Programs that train through the gateway: the page's example, gradients, rewards that come late."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch
from tests.runs import metrics, rollouts, small

import silva
from silva.actors.policy import Policy
from silva.config.sections import EpisodeLimits, Sampling, TinyModel
from silva.engines.local.engine import LocalEngine
from silva.engines.settings import LocalEngineSettings
from silva.models.loading import load_model
from silva.protocols import Endpoint
from silva.rendering.renderer import Renderer
from silva.rollouts.episode import play
from silva.rollouts.samples import to_samples
from silva.server.gateway import SessionGateway
from silva.trainer.learner import Learner
from silva.trainer.settings import LocalTrainerSettings
from silva.types import (
    Completion,
    Group,
    LossSpec,
    Message,
    Observation,
    SamplingParams,
    Step,
    Task,
    Trajectory,
)

PAGE = (Path(__file__).parents[1] / "docs" / "gateway.md").read_text()
LIMITS = EpisodeLimits(max_turns=6, max_turn_tokens=12, max_episode_tokens=400)
SAYS = ("hello", "and then?", "go on")


@pytest.mark.slow
def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (config,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "agent.py").write_text(program)
    (tmp_path / "agent.toml").write_text(config)
    monkeypatch.chdir(tmp_path)
    outcome = silva.train("agent.toml")
    rows = rollouts(outcome.path, "trained") or rollouts(outcome.path, "dropped")
    assert len(metrics(outcome.path)) == 2 and rows
    assert len(program.splitlines()) <= 15


class Replies:
    """The environment of the same dialogue, natively."""

    def __init__(self) -> None:
        self.said = 0

    def tasks(self, split: str) -> Sequence[Task]:
        return []

    def environment(self, task: Task) -> Any:
        self.said = 0
        return self

    async def reset(self) -> Observation:
        return Observation((Message("user", SAYS[0], id="0"),))

    async def step(self, message: Message) -> Step:
        self.said += 1
        if self.said == len(SAYS):
            return Step(rewards={"reward": 1.0}, terminated=True)
        return Step(Observation((Message("user", SAYS[self.said], id=str(self.said)),)))

    async def close(self) -> None: ...


class Program:
    """The same dialogue as an OpenAI client has it."""

    def __init__(self) -> None:
        self.gateway, self.harness = SessionGateway(), self

    async def run(self, task: Task, endpoint: Endpoint) -> Step:
        dialogue: list[Any] = []
        async with openai.AsyncOpenAI(base_url=endpoint.openai, api_key="any") as client:
            for text in SAYS:
                dialogue.append({"role": "user", "content": text})
                answer = await client.chat.completions.create(model="m", messages=dialogue)
                dialogue.append(answer.choices[0].message)
        return Step(rewards={"reward": 1.0})

    async def graded(self, task: Task, given: Any, messages: Any) -> Step:
        return given


class Recorded:
    """What an engine gave, by prompt: for the same dialogue once more."""

    def __init__(self, played: Trajectory, engine: LocalEngine) -> None:
        self.capabilities, self._answers, context = (
            engine.capabilities,
            dict[tuple[int, ...], Completion](),
            (),
        )
        for turn in played.turns:
            context = (*context, *turn.segments[0].tokens)
            (s,) = turn.reply
            self._answers[context] = Completion(
                s.tokens, s.logprobs, s.raw_logprobs, s.entropies, s.versions, turn.stop_reason
            )
            context = (*context, *s.tokens)

    async def sample(self, tokens: Sequence[int], params: SamplingParams, *, session: str = "") -> Completion:
        return self._answers[tuple(tokens)]


def test_the_gradient_is_that_of_the_same_dialogues_played_natively() -> None:
    settings = TinyModel(layers=2, width=32, heads=4, kv_heads=2, context=512, dtype="float64")
    loaded = load_model(settings, seed=0)
    renderer, task = Renderer(loaded.tokenizer), Task("t", "agent", 0, {})
    with ThreadPoolExecutor(1) as compute:
        engine = LocalEngine(loaded, LocalEngineSettings(context=512), compute)

        async def episode(number: int) -> tuple[Trajectory, Trajectory]:
            how: dict[str, Any] = {"id": f"e{number}", "seed": number}
            policy = Policy(engine, renderer, Sampling())
            programs: Any = Program()
            through = await play(task, programs, policy, renderer, LIMITS, **how)
            recorded: Any = Recorded(through, engine)
            native = await play(
                task, Replies(), Policy(recorded, renderer, Sampling()), renderer, LIMITS, **how
            )
            return through, native

        async def episodes() -> list[tuple[Trajectory, Trajectory]]:
            return [await episode(number) for number in range(3)]

        pairs = asyncio.run(episodes())
    gradients = []
    for played in zip(*pairs, strict=True):
        assert all(len(each.turns) == 3 and each.raw_reward == 1.0 for each in played)
        groups = [Group("g", task, played)]
        learner = Learner(loaded, LocalTrainerSettings(), seed=0)
        rows = [row.replace(advantages=row.loss_weights * 0.5 - 0.1) for row in to_samples(groups)]
        learner.forward_backward(rows, LossSpec("reinforce"))
        gradients.append([p.grad.clone() for p in loaded.model.parameters() if p.grad is not None])
        loaded.model.zero_grad()
    mine, native = gradients
    assert len(mine) > 5 and all(map(torch.equal, mine, native)) and any(g.abs().max() > 0 for g in mine)


@pytest.mark.slow
def test_rewards_that_come_steps_later_are_trained_once_and_none_is_a_reason(tmp_path: Path) -> None:
    """An agent far away takes what it gets, posts when later tasks have been given out, and forgets one."""
    port = free_port()
    config = small(tmp_path, steps=4) | {
        "environments": [
            {"type": "harness", "remote": True, "port": port, "lease": 2.0, "eval_share": 0.5,
             "rows": [{"n": n, "answer": str(n)} for n in range(24)]},
        ],
        "rollout.groups_per_step": 1, "rollout.group_size": 2, "rollout.max_async_level": 2,
        "eval.tasks": 0, "rollout.redo": 0,
    }  # fmt: skip
    agent = Agent(f"http://127.0.0.1:{port}")
    thread = threading.Thread(target=agent.work, daemon=True)
    thread.start()
    outcome = silva.train(config)
    agent.over.set()
    thread.join(30)
    ledger = [json.loads(line) for line in (outcome.path / "ledger.jsonl").read_text().splitlines()]
    assert agent.late, "rewards were posted after later tasks had been given out"
    found = {status: rollouts(outcome.path, status) for status in ("trained", "failed")}
    assert [row["reason"] for row in found["failed"]] == [
        "redo: program: PartLost: the agent gave no sign of life for 2 s"
    ]
    ids = [row["trajectory"] for row in found["trained"]]
    assert len(ids) == len(set(ids)) == 7
    assert sum(entry.get("kind") == "sealed" for entry in ledger) in (0, 4)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Agent:
    """Takes tasks, asks once for each, and posts rewards of tasks that it took two steps ago."""

    def __init__(self, address: str) -> None:
        self.address, self.over = address, threading.Event()
        self.late = 0

    def work(self) -> None:
        waiting: list[str] = []
        with httpx2.Client(timeout=60) as client:
            while not self.over.is_set():
                try:
                    told = client.post(f"{self.address}/claim", json={})
                except httpx2.TransportError:
                    told = None
                if told is None or told.status_code != 200:
                    if waiting:
                        self.post(client, waiting.pop(0))
                    self.over.wait(0.05)
                    continue
                session = told.json()
                said = [{"role": "user", "content": str(session["task"]["data"]["n"])}]
                client.post(f"{session['base_url']}/chat/completions", json={"messages": said})
                if len(waiting) == 3 and not self.late:
                    self.late += 1
                    continue  # forgets this one
                client.post(session["reward_url"], json={"reward": None})
                waiting.append(session["reward_url"])
                if len(waiting) > 4:
                    self.late += 1
                    self.post(client, waiting.pop(0))

    def post(self, client: httpx2.Client, url: str) -> None:
        assert client.post(url, json={"reward": 1}).status_code == 200
        assert client.post(url, json={"reward": 1}).status_code in (409, 410)
