"""Programs that train through the gateway: the page's example, gradients, rewards that come late."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch
from scripted_engine import ScriptedEngine
from tests.runs import metrics, rollouts

import silva
from silva.actors.policy import Policy
from silva.aio import cancelled
from silva.config.sections import EpisodeLimits, Sampling, TinyModel
from silva.engines.local.engine import LocalEngine
from silva.engines.settings import LocalEngineSettings
from silva.environments.foreign.harness import HarnessEnvironment
from silva.models.loading import load_model
from silva.models.tiny import tiny_tokenizer
from silva.orchestrator.tasks import Source, TaskStream
from silva.orchestrator.work import WorkQueue
from silva.protocols import Endpoint
from silva.rendering.renderer import Renderer
from silva.rollouts.episode import play
from silva.rollouts.linear import Linear
from silva.rollouts.samples import to_samples
from silva.rollouts.settings import LinearRolloutSettings
from silva.server.gateway import SessionGateway
from silva.storage.ledger import Ledger
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

pytestmark = pytest.mark.slow
PAGE = (Path(__file__).parents[1] / "docs" / "gateway.md").read_text()
LIMITS = EpisodeLimits(max_turns=6, max_turn_tokens=12, max_episode_tokens=400)
SAYS = ("hello", "and then?", "go on")


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (config,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "agent.py").write_text(program)
    (tmp_path / "agent.toml").write_text(config.replace("group_size = 4", "group_size = 2"))
    monkeypatch.chdir(tmp_path)
    outcome = silva.train("agent.toml")
    rows = [row for step in (1, 2) for row in rollouts(outcome.directory, step)]
    assert metrics(outcome.directory)[-1]["step"] == 2
    assert {row["status"] for row in rows} <= {"trained", "dropped", "eval"} and len(rows) >= 8
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


async def late(tmp_path: Path) -> tuple[list[Trajectory], Agent]:
    """Four steps of a queue that is two steps ahead, played by an agent that is slow to post."""
    environment = HarnessEnvironment(remote=True, rows=tuple({"n": n} for n in range(24)), eval_share=0.5)
    tasks, renderer = environment.taskset(), Renderer(tiny_tokenizer())
    tasks.gateway = gateway = SessionGateway(lease=1.0)
    engine = ScriptedEngine(lambda tokens, params: renderer.encode_reply("ok"))
    settings = LinearRolloutSettings(group_size=2, redo=0)
    stream = TaskStream([Source("harness", tasks, 1.0)], 0)
    ledger = Ledger.create(tmp_path / "ledger.jsonl")
    rollout = Linear(settings, engine, renderer, seed=0)
    queue, found = WorkQueue(stream, rollout, ledger, batch=1, steps=4, level=2), list[Trajectory]()
    agent = Agent(await gateway._listen())
    working = asyncio.ensure_future(agent.work())
    for step in range(1, 5):
        (played,) = await queue.take(1, step, attempt=0, temperature=1.0)
        found += played.groups[0].trajectories
    await cancelled([working])
    return found, agent


class Agent:
    """Takes tasks, asks once for each, and posts the reward when it has taken four more; one it forgets."""

    def __init__(self, address: str) -> None:
        self.address, self.taken, self.late = address, 0, 0

    async def work(self) -> None:
        waiting: list[str] = []
        async with httpx2.AsyncClient(timeout=60) as client:
            while True:
                told = await client.post(f"{self.address}/claim", json={})
                if told.status_code == 200:
                    self.taken += 1
                    session = told.json()
                    said = [{"role": "user", "content": str(session["task"]["data"]["n"])}]
                    await client.post(f"{session['base_url']}/chat/completions", json={"messages": said})
                    if self.taken != 3:
                        await client.post(session["reward_url"], json={"reward": None})
                        waiting.append(session["reward_url"])
                elif waiting:
                    await self.post(client, waiting.pop(0))
                else:
                    await asyncio.sleep(0.01)
                if len(waiting) > 4:
                    self.late += 1
                    await self.post(client, waiting.pop(0))

    async def post(self, client: httpx2.AsyncClient, url: str) -> None:
        assert (await client.post(url, json={"reward": 1})).status_code == 200
        assert (await client.post(url, json={"reward": 1})).status_code in (409, 410)


def test_rewards_that_come_steps_later_count_once_and_where_none_comes_there_is_a_reason(
    tmp_path: Path,
) -> None:
    found, agent = asyncio.run(asyncio.wait_for(late(tmp_path), 60))
    assert agent.late, "rewards were posted when tasks of later steps had been taken"
    assert [t.id for t in found] == [f"s{step}g{n}/{i}" for step, n in ORDER for i in range(2)]
    (lost,) = [t for t in found if t.failure]
    assert (lost.failure, len(lost.turns)) == ("redo", 1)
    assert "the agent gave no sign of life for 1 s" in (lost.error or "")
    assert [t.rewards for t in found if not t.failure] == [{"reward": 1.0}] * 7


ORDER = ((1, 0), (1, 1), (1, 2), (2, 0))
