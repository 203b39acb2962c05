"""Worker for sft.py: updates of `silva sft`, without its files.

    SupervisedStream ──draw──> rows ──Supervision.update──> forward_backward, optim_step

It answers "rows", those of all steps, which the peers train on. After a step it answers "sft" and "rl": one
more update on the rows of that step, by cross-entropy or by policy gradient on the same tokens.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

import torch
from pipe import Pipe, Supervised, digest, forget_peak, peak

import silva
from silva.algorithms.recipes import Grpo
from silva.compute import ComputeThread
from silva.config.sections import Optimizer, PretrainedModel, TinyModel
from silva.data.settings import SupervisedData
from silva.data.supervised import SupervisedStream
from silva.models.loading import LoadedModel, load_model
from silva.models.memory import keep_freed_memory
from silva.orchestrator.supervised import DataBatches, Supervision
from silva.rendering.renderer import Renderer
from silva.trainer.learner import Learner
from silva.trainer.local import LocalTrainer
from silva.trainer.policy import pack
from silva.trainer.settings import LocalTrainerSettings
from silva.types import Sample


class Worker:
    def __init__(self, work: Supervised):
        keep_freed_memory()
        self.work, self.compute = work, ComputeThread(work.threads)
        self.loaded = self.compute.run(model, work)
        self.batches = DataBatches(*stream(work, self.loaded.tokenizer))
        learner = Learner(self.loaded, LocalTrainerSettings(), seed=0, say=_say)
        self.trainer = LocalTrainer(learner, compute=self.compute)
        optimizer = Optimizer(lr=work.lr, max_grad_norm=work.max_grad_norm)
        self.how = Supervision(len(work.dialogues), optimizer)
        recipe = Grpo()
        self.rl_how = Supervision(len(work.dialogues), optimizer, recipe.loss_spec(), recipe.aggregation)
        self.done, self.rows, self.rl_rows = 0, list[Sample](), list[Sample]()

    async def step(self) -> dict[str, object]:
        """Rows and one update, as `orchestrator.sft.SupervisedLoop._step` makes them."""
        forget_peak()
        began, cpu = time.perf_counter(), time.process_time()
        self.rows = await self.batches.draw(self.done)
        drawn = time.perf_counter()
        metrics = await self.how.update(self.trainer, self.rows, self.done)
        ended, cpu = time.perf_counter(), time.process_time() - cpu
        assert not metrics["nonfinite"]
        self.done, self.rl_rows = self.done + 1, []
        return {
            "step": ended - began,
            "rows": drawn - began,
            "cpu": cpu,
            "peak": peak(),
            "loss": metrics["loss"],
            "digest": digest((row.tokens, row.loss_weights > 0) for row in self.rows),
            "flat": sum(map(len, self.rows)),
            "trie": len(pack(self.loaded, self.rows).trie),
            "trained": int(metrics["trained_tokens"]),
        }

    async def all_rows(self) -> dict[str, object]:
        """Those of all steps: (tokens, trained)."""
        batches = DataBatches(*stream(self.work, self.loaded.tokenizer))
        rows = [row for step in range(self.work.steps) for row in await batches.draw(step)]
        return {"rows": [(row.tokens.tolist(), (row.loss_weights > 0).tolist()) for row in rows]}

    async def sft(self) -> dict[str, object]:
        return await self._timed(self.how, self.rows)

    async def rl(self) -> dict[str, object]:
        if not self.rl_rows:
            signals = await self.trainer.score(self.rows, frozenset({"logprobs"}))
            assert signals.logprobs is not None
            self.rl_rows = [
                row.replace(
                    logprobs=logprobs,
                    versions=(row.loss_weights > 0) - 1,  # 0, the trainer's; -1 where nothing was sampled
                    advantages=row.loss_weights.astype(float) * (-1.0) ** i,
                )
                for i, (row, logprobs) in enumerate(zip(self.rows, signals.logprobs, strict=True))
            ]
        return await self._timed(self.rl_how, self.rl_rows)

    async def _timed(self, how: Supervision, rows: Sequence[Sample]) -> dict[str, object]:
        began, cpu = time.perf_counter(), time.process_time()
        metrics = await how.update(self.trainer, rows, self.done)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        return {"seconds": seconds, "cpu": cpu, "trained": int(metrics["trained_tokens"])}


def stream(work: Supervised, tokenizer: object) -> tuple[SupervisedStream, SupervisedData]:
    """The rows of `work`, as `silva sft` draws them."""
    tokenizer.chat_template = work.template  # type: ignore[attr-defined]
    settings = SupervisedData.model_validate(
        {"sources": ({"rows": tuple(work.dialogues)},), "dialogues_per_step": work.dialogues_per_step}
    )
    renderer = Renderer(tokenizer, history=work.history)  # type: ignore[arg-type]
    return SupervisedStream(settings, renderer, seed=0), settings


def model(work: Supervised) -> LoadedModel:
    if work.model == "tiny":
        return load_model(TinyModel(layers=4, width=128, context=8192), seed=0)
    return load_model(PretrainedModel(name=work.model), seed=0)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def serve(work: Supervised, pipe: Pipe) -> None:
    worker = Worker(work)
    about = (
        f"Silva {silva.__version__}, torch {torch.__version__}, {work.threads} threads, {worker.loaded.dtype}"
    )
    pipe.send({"name": "Silva", "about": about})
    commands = {"rows": worker.all_rows, "step": worker.step, "rl": worker.rl, "sft": worker.sft}
    for command in pipe:  # blocks the loop, in which nothing else runs meanwhile
        pipe.send(await commands[command]())
    worker.compute.shutdown()


if __name__ == "__main__":
    asyncio.run(serve(Supervised.read(sys.argv[1]), Pipe()))
