"""Programs that train through the gateway: the page's example, gradients, rewards that come late."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx2
import openai
import pytest
import torch
from scripted_engine import ScriptedEngine
from tests.orchestrator.test_async_level import loop, trained
from tests.runs import metrics, rollouts, small
from tests.server.running import says as scripted

import silva
from silva.actors.policy import Policy
from silva.aio import first
from silva.config.sections import EpisodeLimits, Sampling, TinyModel
from silva.engines.local.engine import LocalEngine
from silva.engines.settings import LocalEngineSettings
from silva.environments.foreign.harness import HarnessEnvironment
from silva.errors import ConfigError
from silva.models.loading import load_model
from silva.models.tiny import tiny_tokenizer
from silva.orchestrator.tasks import Source, TaskStream
from silva.protocols import Endpoint
from silva.rendering.renderer import Renderer
from silva.rollouts.episode import play
from silva.rollouts.linear import Linear
from silva.rollouts.samples import to_samples
from silva.rollouts.settings import LinearRolloutSettings
from silva.server.gateway import SessionGateway
from silva.storage.ledger import audit, history, read
from silva.storage.rollouts import RolloutRow
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
    ToolSpec,
    Trajectory,
)

pytestmark = pytest.mark.slow
PAGE = (Path(__file__).parents[1] / "docs" / "gateway.md").read_text()


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


@dataclass(frozen=True)
class Said:
    """What a program says next, after all of its dialogue or after the first `keeps` messages of it."""

    role: Any
    content: str
    keeps: int | None = None


TOOLS = (ToolSpec("add", "Adds.", {"type": "object", "properties": {"a": {"type": "number"}}}),)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
DIALOGUES = {
    "turns": [Said("user", "hello"), Said("user", "and then?"), Said("user", "go on")],
    "a tool": [Said("user", "1 + 1?"), Said("tool", "2"), Said("user", "thanks")],
    "a branch": [
        Said("user", "hello"), Said("user", "and then?"), Said("user", "or else?", 2), Said("user", "go on"),
    ],
}  # fmt: skip


class Replies:
    """The environment of the same dialogue, natively."""

    def __init__(self, says: Sequence[Said]) -> None:
        self.says, self.said, self.messages = says, 0, list[Message]()

    def tasks(self, split: str) -> Sequence[Task]:
        return []

    def environment(self, task: Task) -> Any:
        return self

    def shown(self) -> Observation:
        said = self.says[self.said]
        self.said += 1
        message = Message(said.role, said.content, id=f"said {self.said}")
        if said.keeps is None:
            self.messages.append(message)
            return Observation((message,), tools=TOOLS)
        self.messages = [*self.messages[: said.keeps], message]
        return Observation(context=tuple(self.messages), tools=TOOLS)

    async def reset(self) -> Observation:
        return self.shown()

    async def step(self, message: Message) -> Step:
        self.messages.append(message)
        if self.said == len(self.says):
            return Step(rewards={"reward": 1.0}, terminated=True)
        return Step(self.shown())

    async def close(self) -> None: ...


class Program:
    """The same dialogue as an OpenAI client has it."""

    def __init__(self, says: Sequence[Said]) -> None:
        self.says, self.gateway, self.harness = says, SessionGateway(), self

    async def run(self, task: Task, endpoint: Endpoint) -> Step:
        dialogue: list[Any] = []
        tools: Any = [{"type": "function", "function": asdict(each)} for each in TOOLS]
        async with openai.AsyncOpenAI(base_url=endpoint.openai, api_key="any") as client:
            for said in self.says:
                dialogue = dialogue[: said.keeps]
                of = {"tool_call_id": dialogue[-1].tool_calls[0].id} if said.role == "tool" else {}
                dialogue.append({"role": said.role, "content": said.content, **of})
                answer = await client.chat.completions.create(model="m", messages=dialogue, tools=tools)
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
            context = (*(() if turn.fresh else context), *turn.segments[0].tokens)
            (s,) = turn.reply
            self._answers[context] = Completion(
                s.tokens, s.logprobs, s.raw_logprobs, s.entropies, s.versions, turn.stop_reason
            )
            context = (*context, *s.tokens)

    async def sample(self, tokens: Sequence[int], params: SamplingParams, *, session: str = "") -> Completion:
        return self._answers[tuple(tokens)]


@pytest.mark.parametrize("dialogue", DIALOGUES)
def test_the_gradient_is_that_of_the_same_dialogues_played_natively(dialogue: str) -> None:
    says = DIALOGUES[dialogue]
    settings = TinyModel(layers=2, width=32, heads=4, kv_heads=2, context=2048, dtype="float64")
    most = 100 if dialogue == "a tool" else 12
    limits = EpisodeLimits(max_turns=6, max_turn_tokens=most, max_episode_tokens=settings.context)
    loaded = load_model(settings, seed=0)
    renderer, task = Renderer(loaded.tokenizer), Task("t", "agent", 0, {})
    with ThreadPoolExecutor(1) as compute:
        local = LocalEngine(loaded, LocalEngineSettings(context=settings.context), compute)

        async def episode(number: int) -> tuple[Trajectory, Trajectory]:
            how: dict[str, Any] = {"id": f"e{number}", "seed": number}
            engine: Any = local
            if dialogue == "a tool":
                engine = scripted(renderer, CALL, "it is 2", "bye", context=settings.context)
            programs: Any = Program(says)
            policy = Policy(engine, renderer, Sampling())
            through = await play(task, programs, policy, renderer, limits, **how)
            recorded: Any = Recorded(through, engine)
            native = await play(
                task, Replies(says), Policy(recorded, renderer, Sampling()), renderer, limits, **how
            )
            return through, native

        async def episodes() -> list[tuple[Trajectory, Trajectory]]:
            return [await episode(number) for number in range(3)]

        pairs = asyncio.run(episodes())
    fresh, gradients = [i == 0 or each.keeps is not None for i, each in enumerate(says)], []
    for played in zip(*pairs, strict=True):
        for each in played:
            assert each.raw_reward == 1.0 and [turn.fresh for turn in each.turns] == fresh
        groups = [Group("g", task, played)]
        learner = Learner(loaded, LocalTrainerSettings(), seed=0)
        rows = [row.replace(advantages=row.loss_weights * 0.5 - 0.1) for row in to_samples(groups)]
        assert len(rows) == 3 * sum(fresh)
        trained_tokens = sum(len(turn.reply_tokens) for each in played for turn in each.turns)
        assert sum(row.loss_weights.sum() for row in rows) == trained_tokens, "each reply carries loss once"
        learner.forward_backward(rows, LossSpec("reinforce"))
        gradients.append([p.grad.clone() for p in loaded.model.parameters() if p.grad is not None])
        loaded.model.zero_grad()
    mine, native = gradients
    assert len(mine) > 5 and all(map(torch.equal, mine, native)) and any(g.abs().max() > 0 for g in mine)


class Agent:
    """Takes all tasks there are at the time, asks once for each, and posts a reward of its own: at once, or
    when as many steps have been trained as `WAITS` says of the place of the task. Those of `FORGOTTEN` it
    forgets.

    Args:
        state: how many steps have been trained.
        ahead: of how many steps tasks are played while one is trained.

    Attributes:
        posted: the rewards that were taken, with the place of the task.
        refused: places of those that came too late.
        rode: by place, how many steps were trained between the claim and the reward.
    """

    def __init__(self, address: str, state: Callable[[], int], ahead: int) -> None:
        self.address, self.trained, self.ahead = address, state, ahead
        self.posted, self.refused, self.taken = dict[float, int](), list[int](), 0
        self.rode, self._claimed = dict[int, int](), dict[int, int]()
        self._waiting = list[tuple[int, str]]()  # place, where to post

    async def work(self) -> None:
        async with httpx2.AsyncClient(timeout=60) as client:
            while True:
                while self.taken < min(PLACES, OF_STEP * (1 + self.ahead + self.trained())):
                    if not await self.claim(client):
                        await asyncio.sleep(0.01)
                for each in [each for each in self._waiting if self.trained() >= WAITS.get(each[0], 0)]:
                    self._waiting.remove(each)
                    await self.post(client, *each)
                await asyncio.sleep(0.01)

    async def claim(self, client: httpx2.AsyncClient) -> bool:
        told = await client.post(f"{self.address}/claim", json={})
        if told.status_code == 404:
            return False
        session, place, self.taken = told.json(), self.taken, self.taken + 1
        self._claimed[place] = self.trained()
        said = {"messages": [{"role": "user", "content": str(session["task"]["data"]["n"])}]}
        await client.post(f"{session['base_url']}/chat/completions", json=said)
        if place not in FORGOTTEN:
            await client.post(session["reward_url"], json={"reward": None})
            self._waiting.append((place, session["reward_url"]))
        return True

    async def post(self, client: httpx2.AsyncClient, place: int, url: str) -> None:
        reward = (1 + len(self.posted)) / 64
        self.rode[place] = self.trained() - self._claimed[place]
        status = (await client.post(url, json={"reward": reward})).status_code
        assert status in (200, 410)
        if status == 200:
            self.posted[reward] = place
            assert (await client.post(url, json={"reward": 1})).status_code in (409, 410)
        else:
            self.refused.append(place)


OF_STEP, PLACES = 8, 32  # episodes
# Those of a step begin while one before it is played; 17 waits for its own step.
WAITS = {8: 1, 9: 1, 16: 2, 17: 3, 20: 2, 21: 2}
FORGOTTEN = (18, 19, 26)  # 18 and 19 are a whole group
LOST, SLOW = "the agent gave no sign of life for 1 s", "no end within rollout.limits.timeout = "


async def late(path: Path, level: int) -> tuple[list[RolloutRow], Agent]:
    """A run of four steps, `level` of which are played while one is trained."""
    rows = tuple({"n": n} for n in range(24))
    tasks = HarnessEnvironment(remote=True, rows=rows, eval_share=0.2).taskset()
    tasks.gateway = gateway = SessionGateway(lease=1.0)
    renderer = Renderer(tiny_tokenizer())
    engine = ScriptedEngine(lambda tokens, params: renderer.encode_reply("ok"))
    limits = EpisodeLimits(timeout=1.0 + level)
    settings = LinearRolloutSettings(group_size=2, redo=0, limits=limits)
    run: Any = loop(path, level, steps=4)
    run.parts.buffer.work.stream = TaskStream([Source("harness", tasks, 1.0)], 0)
    run.parts.buffer.work.rollout = Linear(settings, engine, renderer, seed=0)
    run.parts.buffer.recipe = run.parts.buffer.recipe.model_copy(update={"max_refills": 0})
    run.parts.engine.load = engine.load
    run.parts.trainer.forward_backward = AsyncMock(return_value={})
    agent = Agent(await gateway.listen(), lambda: run.state.step, level)
    working = asyncio.ensure_future(agent.work())
    ended = await first(run.run(), working)
    assert (ended or working).result()
    return [row for call in run.parts.monitor.rollouts.call_args_list for row in call.args[1]], agent


@pytest.mark.parametrize("level", [1, 2])
def test_late_rewards_are_trained_once_or_dropped_with_a_reason(tmp_path: Path, level: int) -> None:
    rows, agent = asyncio.run(asyncio.wait_for(late(tmp_path, level), 60))
    records = history(read(tmp_path / "ledger.jsonl"))
    assert audit(records, finished=True) == []
    assert len({row.trajectory.id for row in rows}) == len(rows) == agent.taken == PLACES
    rewards = {row.trajectory.raw_reward: row for row in rows if row.trajectory.failure is None}
    assert sorted(rewards) == sorted(agent.posted), "what an agent could post counts, once"
    waited = {place: rewards[reward] for reward, place in agent.posted.items() if place in WAITS}
    assert waited.keys() == WAITS.keys() - {17} and agent.refused == [17]
    assert agent.rode[20] == agent.rode[21] == level < agent.rode[17]
    reasons = [row.reason for row in rows if row.status == "failed"]
    assert len(reasons) == 4 == PLACES - len(rewards)
    assert [sum(each in reason for reason in reasons) for each in (LOST, SLOW)] == [3, 1]
    # Of one group nothing came, and of two so little that there is nothing to compare.
    dropped = {r.fields["group"]: r.fields["reason"] for r in records if r.event == "dropped"}
    assert sorted(dropped.values()) == ["failed", "zero_variance", "zero_variance"]
    assert dropped.keys() == {row.group for row in rows if row.status == "failed"}
    learnt = trained(tmp_path)
    assert sorted(learnt) == sorted({row.group for row in rows} - dropped.keys()), "once each"
    assert waited[20].group == waited[21].group in learnt and waited[8].group in learnt


def test_a_gateway_that_others_can_reach_needs_a_key_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGENTS_KEY", raising=False)
    environment = {
        "type": "harness", "remote": True, "rows": [{"n": n} for n in range(8)], "host": "0.0.0.0",
        "port": 8900, "key_variable": "AGENTS_KEY",
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"^environment harness: http://0\.0\.0\.0:8900: .*AGENTS_KEY"):
        silva.train(small(tmp_path, environments=[environment]))
