"""Worker for step.py: a step of Silva's own loop, without environments, so that lengths are exact.

    engine.sample ──> groups ──to_samples, assign, normalise──> forward_backward, optim_step ──> publish

Besides "step" it answers "rl" and "sft": one more update on the rows of the last step, by policy gradient, or
by cross-entropy with the same answers as an expert's.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence

import torch
from pipe import Pipe, Work, forget_peak, peak, reward

import silva
from silva.algorithms.aggregation import normalise
from silva.algorithms.assign import assign
from silva.algorithms.losses import ClippedLoss
from silva.algorithms.recipes import Grpo
from silva.compute import ComputeThread
from silva.config.sections import Lora, PretrainedModel, TinyModel
from silva.engines.local.engine import LocalEngine
from silva.engines.settings import LocalEngineSettings
from silva.models.loading import LoadedModel, load_model
from silva.models.memory import keep_freed_memory
from silva.ports import derive
from silva.rollouts.samples import to_samples
from silva.trainer.exact import exact_model
from silva.trainer.learner import Learner
from silva.trainer.local import LocalTrainer
from silva.trainer.settings import LocalTrainerSettings
from silva.types import (
    Completion,
    Group,
    LossSpec,
    OptimParams,
    Sample,
    SamplingParams,
    Segment,
    Task,
    Trajectory,
    Turn,
)


class Worker:
    def __init__(self, work: Work):
        self.work, self.done = work, 0
        self.recipe = Grpo(loss=ClippedLoss(clip_low=work.clip, clip_high=work.clip))
        keep_freed_memory()
        self.compute = ComputeThread(work.threads)
        self.loaded = self.compute.run(model, work)
        self.prompts: list[tuple[int, ...]] = [
            tuple(tokens) for tokens in self.loaded.tokenizer(list(work.prompts))["input_ids"]
        ]
        self.engine = LocalEngine(self.loaded, LocalEngineSettings(drafts=work.drafts), self.compute)
        self.optim = OptimParams(work.lr, max_grad_norm=work.max_grad_norm)
        settings = LocalTrainerSettings(micro_batch_tokens=work.micro_batch, exact=work.exact)
        trained = exact_model(self.loaded, settings) if work.exact else self.loaded
        self.trainer = LocalTrainer(Learner(trained, settings, seed=0, say=_say), compute=self.compute)
        self.groups: list[Group] = []

    async def step(self) -> dict[str, object]:
        """Rollout, one update, publish: as `orchestrator.rl.Loop._step` does."""
        forget_peak()
        began = time.perf_counter()
        self.groups = await self._rollout()
        rolled_out = time.perf_counter()
        await self.engine.sleep()
        mismatch = await self._update()
        await self.engine.load(await self.trainer.publish())
        ended = time.perf_counter()
        self.done += 1
        lengths = [t.tokens("policy") for group in self.groups for t in group.trajectories]
        seconds = {"rollout": rolled_out - began, "train": ended - rolled_out}
        return {**seconds, "peak": peak(), "mismatch": mismatch, "lengths": lengths}

    async def rl(self) -> dict[str, object]:
        began = time.perf_counter()
        await self._update()
        return {"seconds": time.perf_counter() - began}

    async def sft(self) -> dict[str, object]:
        groups = [expert(group) for group in self.groups]
        began = time.perf_counter()
        await self._train(normalise(to_samples(groups), "token_mean"), LossSpec("cross_entropy"))
        return {"seconds": time.perf_counter() - began}

    async def _update(self) -> float:
        """One update of the last step's rows; the mismatch of sampler and trainer in nats a token."""
        rows = assign(to_samples(self.groups), self.groups, self.recipe.advantage)
        metrics = await self._train(normalise(rows, self.recipe.aggregation), self.recipe.loss_spec())
        return metrics["mismatch_kl"]

    async def _train(self, rows: Sequence[Sample], loss: LossSpec) -> Mapping[str, float]:
        metrics = await self.trainer.forward_backward(rows, loss)
        answers = self.work.groups * self.work.samples * self.work.answer_tokens
        assert metrics["trained_tokens"] == answers, (metrics, answers)
        assert not (await self.trainer.optim_step(self.optim))["nonfinite"]
        return metrics

    async def _rollout(self) -> list[Group]:
        first = self.done * self.work.groups
        chosen = range(first, first + self.work.groups)
        return await asyncio.gather(*(self._group(n) for n in chosen))

    async def _group(self, number: int) -> Group:
        sampled = await asyncio.gather(*(self._sample(number, i) for i in range(self.work.samples)))
        prompt = self.prompts[number]
        task = Task(id=str(number), environment="fixed", seed=0, data={})
        return Group(
            str(number),
            task,
            tuple(trajectory(f"{number}/{i}", prompt, completion) for i, completion in enumerate(sampled)),
        )

    async def _sample(self, number: int, index: int) -> Completion:
        params = SamplingParams(max_tokens=self.work.answer_tokens, seed=derive(0, number, index))
        return await self.engine.sample(self.prompts[number], params)


def model(work: Work) -> LoadedModel:
    lora = (
        Lora(rank=work.lora_rank, alpha=float(work.lora_alpha), targets=tuple(work.lora_targets))
        if work.lora
        else None
    )
    if work.model == "tiny":
        return load_model(TinyModel(layers=4, width=128, lora=lora, dtype=work.dtype), seed=0)
    return load_model(PretrainedModel(name=work.model, lora=lora, dtype=work.dtype), seed=0)


def trajectory(id: str, prompt: Sequence[int], sampled: Completion) -> Trajectory:
    answer = Segment("policy", sampled.tokens, sampled.logprobs, sampled.raw_logprobs, sampled.entropies,
                     sampled.versions)  # fmt: skip
    rewards = {"even": reward(sampled.tokens)}
    turn = Turn(f"{id}/0", (Segment("environment", tuple(prompt)), answer), rewards=rewards, fresh=True)
    return Trajectory(id, (turn,), "terminated", rewards)


def expert(group: Group) -> Group:
    """The same tokens, the answers an expert's."""
    made = []
    for t in group.trajectories:
        (turn,) = t.turns
        prompt, answer = turn.segments
        turn = Turn(turn.id, (prompt, Segment("expert", answer.tokens)), fresh=True)
        made.append(Trajectory(t.id, (turn,), t.stop_reason))
    return Group(group.key, group.task, tuple(made))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def serve(work: Work, pipe: Pipe) -> None:
    worker = Worker(work)
    pipe.send(
        {
            "name": f"Silva, {work.other}" if work.other else "Silva",
            "about": f"Silva {silva.__version__}, torch {torch.__version__}, "
            f"{work.threads} threads, {worker.loaded.dtype}",
            "prompt_lengths": sorted({len(prompt) for prompt in worker.prompts}),
        }
    )
    commands = {"step": worker.step, "rl": worker.rl, "sft": worker.sft}
    for command in pipe:  # blocks the loop, in which nothing else runs meanwhile
        pipe.send(await commands[command]())
    worker.compute.shutdown()


def main() -> int:
    work, pipe = Work.read(sys.argv[1]), Pipe()
    asyncio.run(serve(work, pipe))
    return 0


if __name__ == "__main__":
    sys.exit(main())
