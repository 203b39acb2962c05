"""Worker of decode.py: engines that run in this environment, and how fast this machine can be.

    decode_workers.py "Silva" [MODEL_FOLDER]

Answers {"do": "run", "prompts": [[token]], "new": n} with {"seconds": s, "tokens": n}; "play", "limits" and
"outside" as their methods say.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

import silva  # noqa: F401  # isort: skip  (before torch, which reads at its start what this sets)
import torch
import torch.nn.functional as F
from common import gemm_rate
from peers.pipe import Pipe

from silva.compute import ComputeThread
from silva.config.sections import PretrainedModel
from silva.engines.local import ragged_step
from silva.engines.local.engine import LocalEngine
from silva.engines.local.history import History, Trail
from silva.engines.settings import LocalEngineSettings
from silva.models import blocked_attention, decoder, loading, prepacked, steady
from silva.models.loading import PACKAGED, load_model, resolve
from silva.models.memory import give_freed_memory_back, keep_freed_memory
from silva.models.same_bits import RowRules
from silva.ports import derive
from silva.types import Completion, SamplingParams

SILVA, UNFILLED, LOOSE = "Silva", "bits: nothing filled up", "bits: any"
GENERATE, CONTINUOUS = "transformers generate", "transformers continuous batching"

Tokens = list[int]
Answer = dict[str, Any]
Linear = Callable[[torch.Tensor], torch.Tensor]


def serve(made: Callable[[], Any]) -> int:
    pipe, worker = Pipe(), made()
    pipe.send({"about": worker.about})
    for line in pipe:
        asked = json.loads(line)
        pipe.send(getattr(worker, asked.pop("do"))(**asked))
    return 0


class SilvaWorker:
    drafts: Literal["forest", "off"] = "forest"

    def __init__(self, model: str = PACKAGED) -> None:
        if "STRICT" not in os.environ["MKL_CBWR"]:
            prepacked._exact = lambda group, rule: True  # packed without asking whether bits change
        self.settings = LocalEngineSettings(drafts=self.drafts)
        keep_freed_memory()
        self.compute = ComputeThread()
        self.loaded = self.compute.run(load_model, PretrainedModel(name=model), seed=0)
        self.engine = LocalEngine(self.loaded, self.settings, self.compute)
        self._drafts = self.engine.batch.drafts
        self.about = f"torch {torch.__version__}, MKL_CBWR={os.environ['MKL_CBWR'] or 'off'}"
        self._linears: tuple[int, Kernels, Kernels] | None = None

    def run(self, prompts: list[Tokens], new: int) -> Answer:
        async def sample() -> int:
            params = [SamplingParams(max_tokens=new, seed=seed) for seed in range(len(prompts))]
            found = await asyncio.gather(*map(self.engine.sample, prompts, params))
            return sum(len(completion.tokens) for completion in found)

        began = time.perf_counter()
        tokens = asyncio.run(sample())
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    def switch(self, drafts: bool) -> Answer:
        """Sample with drafts or without; what they cost and bring stays known, and nothing of prompts."""
        self.engine.batch.drafts = self._drafts if drafts else None
        self._forget_prompts()
        return {}

    def _forget_prompts(self) -> None:
        """The memory of the cache stays."""
        for row in self.engine.cache.rows:
            self.engine.cache._write(row, np.empty(0, np.int64))
            row.computed, row.owners = 0, ()

    def remember(self, trajectories: list[list[Tokens]]) -> Answer:
        """Begin with these as all that was played before; what drafts cost and bring stays known."""
        drafts = self._drafts
        assert drafts is not None
        drafts._history = History()
        for said in trajectories:
            text: Tokens = []
            for tokens in said:
                Trail(drafts._history, text).extend(tokens)
                text += tokens
        return {}

    def play(self, episodes: list[list[Tokens]], slots: int, params: Answer, seed: int) -> Answer:
        """Episodes by their prompts, turn by turn, so many at once."""
        tuples: Answer = {
            key: tuple(value) if isinstance(value, list) else value for key, value in params.items()
        }
        digest, before = hashlib.sha256(), self.engine.counts()

        async def play() -> list[Completion]:
            free, found = asyncio.Semaphore(slots), dict[tuple[int, int], Completion]()

            async def episode(number: int, prompts: list[Tokens]) -> None:
                async with free:
                    for turn, prompt in enumerate(prompts):
                        own = SamplingParams(**tuples, seed=derive(seed, number, turn))
                        found[number, turn] = await self.engine.sample(prompt, own)

            await asyncio.gather(*(episode(*each) for each in enumerate(episodes)))
            return [found[key] for key in sorted(found)]

        self._forget_prompts()
        began = time.perf_counter()
        completions = asyncio.run(play())
        seconds = time.perf_counter() - began
        for each in completions:
            digest.update(repr((each.tokens, each.logprobs, each.raw_logprobs, each.entropies)).encode())
        done = {key: count - before[key] for key, count in self.engine.counts().items()}
        return {
            "seconds": seconds, "tokens": sum(len(each.tokens) for each in completions),
            "digest": digest.hexdigest(), "steps": done["steps"], "decoded": done["decode_tokens"],
            "drafted": done["drafted_tokens"], "accepted": done["accepted_tokens"],
        }  # fmt: skip

    def rest(self) -> Answer:
        """Forget what other cases have left: keys, values and freed memory, else none would be left."""
        asyncio.run(self.engine.sleep())
        self.engine._pack = True  # as before the first case
        self._linears = None
        self.compute.run(give_freed_memory_back)
        return {}

    def limits(self, rows: int, prefill: int, read: float, new: int) -> Answer:
        """Seconds that a run must take, on the thread that computes; see the module's docstring."""
        return self.compute.run(self._limits, rows, prefill, read, new)

    @torch.inference_mode()
    def _limits(self, rows: int, prefill: int, read: float, new: int) -> Answer:
        chunk = min(prefill, self.settings.prefill_tokens)
        if self._linears is None or self._linears[0] != rows:
            self._linears = None  # gives the packed weights back
            weights = joined(self.loaded.model)
            self._linears = rows, fastest(weights, rows), fastest(weights, chunk)
            give_freed_memory_back()  # the copies of the other kernels
        _, (step, seconds), (prompt, _) = self._linears
        body, head = step.seconds(step.body), step.seconds(step.head)
        linears = (new - 1) * body + new * head + prefill / chunk * prompt.seconds(prompt.body)

        config = self.loaded.model.config
        position = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim  # bytes
        size = sum(p.numel() for p in self.loaded.model.parameters())
        bandwidth, gemm = reading_rate(4 * size), gemm_rate()
        reading = (4 * size + position * read) / bandwidth / 1e9
        multiplying = 2 * size * rows / gemm / 1e9
        roofline = (new - 1) * max(reading, multiplying) + 2 * size * prefill / gemm / 1e9
        return {"linears": linears, "roofline": roofline, "kernel": step.kernel, "kernels": seconds,
                "bandwidth": bandwidth, "gemm": gemm}  # fmt: skip

    def outside(self, batches: list[list[Tokens]], new: int) -> Answer:
        """Kernel time of profiled runs over the time of runs without the profiler, which slows Python."""
        plain = kernels = 0.0
        for unprofiled, profiled in zip(batches[::2], batches[1::2], strict=True):
            plain += self.run(unprofiled, new)["seconds"]
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.compute.run(profiler.start)  # it sees the thread that starts it
            self.run(profiled, new)
            self.compute.run(profiler.stop)
            kernels += sum(
                event.time_range.elapsed_us() / 1e6
                for event in profiler.events() or ()
                if event.cpu_parent is None and event.name.removeprefix("aten::") not in NO_COMPUTING
            )
        return {"share": 1 - kernels / plain}


NO_COMPUTING = {
    *("alias", "as_strided", "chunk", "detach", "empty", "empty_like", "empty_strided", "expand", "flatten"),
    *("lift_fresh", "narrow", "permute", "reshape", "resize_", "select", "slice", "split", "squeeze", "t"),
    *("to", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as"),
}  # fmt: skip


class UnfilledWorker(SilvaWorker):
    """With steps that hold the tokens of requests and nothing else, as if no rule had been probed."""

    drafts = "off"  # they need the same bits

    def __init__(self) -> None:
        steady.probe = lambda *_, **__: RowRules(hold=False)
        super().__init__()


class LooseWorker(UnfilledWorker):
    """Without anything that makes a row's bits independent of the batch."""

    def __init__(self) -> None:
        ragged_step.BLOCK = blocked_attention.BLOCK = decoder.SERIAL = 1 << 30
        loading.steady_activations = lambda model, always=False: None  # type: ignore[misc,assignment]
        super().__init__()


def _packed_for_mkl(weight: torch.Tensor, rows: int) -> Linear:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkl._mkl_linear(x, packed, weight, None, rows)


def _packed_for_onednn(weight: torch.Tensor, rows: int) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


KERNELS: dict[str, Callable[[torch.Tensor, int], Linear]] = {
    "F.linear": lambda weight, rows: lambda x: F.linear(x, weight),
    "MKL packed": _packed_for_mkl,
    "oneDNN packed": _packed_for_onednn,
}


class Linears:
    """Linear layers for `rows` tokens with nothing between them: the body, and the last one, the head."""

    def __init__(self, kernel: str, weights: Sequence[torch.Tensor], rows: int):
        inputs = {width: torch.rand(rows, width) for width in {w.shape[1] for w in weights}}
        calls = [(KERNELS[kernel](w, rows), inputs[w.shape[1]]) for w in weights]
        self.kernel, self.body, self.head = kernel, calls[:-1], calls[-1:]

    def seconds(self, calls: Sequence[tuple[Linear, torch.Tensor]], repeats: int = 5) -> float:
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            for linear, x in calls:
                linear(x)
            times.append(time.perf_counter() - began)
        return statistics.median(times)


def joined(model: Any) -> list[torch.Tensor]:
    """The weights in the order of a step, those that share an input as one."""
    made = []
    for layer in model.get_decoder().layers:
        a, f = layer.self_attn, layer.mlp
        made.append(torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]))
        made += [a.o_proj.weight, torch.cat([f.gate_proj.weight, f.up_proj.weight]), f.down_proj.weight]
    return [weight.detach() for weight in (*made, model.get_output_embeddings().weight)]


Kernels = tuple[Linears, dict[str, float]]


def fastest(weights: Sequence[torch.Tensor], rows: int) -> Kernels:
    """The layers with the fastest kernel, and the seconds of each; the best of three tries counts."""
    seconds = {}
    for kernel in KERNELS:
        linears = Linears(kernel, weights, rows)
        seconds[kernel] = min(linears.seconds([*linears.body, *linears.head]) for _ in range(3))
    return Linears(min(seconds, key=seconds.__getitem__), weights, rows), seconds


def reading_rate(size: int) -> float:
    """GB/s of reading as many bytes as the weights have; the best of five."""
    buffer, best = torch.ones(size // 4), float("inf")
    for _ in range(5):
        began = time.perf_counter()
        buffer.sum()
        best = min(best, time.perf_counter() - began)
    return size / best / 1e9


class GenerateWorker:
    """`generate` on one static batch."""

    def __init__(self) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            resolve(PACKAGED), dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.about = f"transformers {transformers.__version__}, torch {torch.__version__}, sdpa"
        self.model.generation_config = transformers.GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=0
        )

    @torch.inference_mode()
    def run(self, prompts: list[Tokens], new: int) -> Answer:
        began = time.perf_counter()
        ids = torch.tensor(prompts)
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new).tolist()
        return {"seconds": time.perf_counter() - began, "tokens": sum(map(len, out)) - ids.numel()}


class ContinuousWorker(GenerateWorker):
    """The manager behind `generate_batch`, kept between runs."""

    def __init__(self) -> None:
        from transformers import ContinuousBatchingConfig

        super().__init__()
        settings = ContinuousBatchingConfig(
            num_blocks=160, page_size=64, max_batch_tokens=512, max_requests_per_batch=64,
            auto_switch_to_flash=False
        )  # fmt: skip
        self.manager = self.model.init_continuous_batching(continuous_batching_config=settings)
        self.manager.start()

    def run(self, prompts: list[Tokens], new: int) -> Answer:
        began = time.perf_counter()
        # Completions of one prompt as forks of one request: the prompt is then computed once.
        shared = len(set(map(tuple, prompts))) == 1
        self.manager.num_return_sequences = len(prompts) if shared else 1
        self.manager.add_requests(prompts[:1] if shared else prompts, max_new_tokens=new)
        finished: list[Any] = []
        while len(finished) < len(prompts):
            found = self.manager.get_result(timeout=1)
            if found is not None and found.is_finished():
                finished.append(len(found.generated_tokens))
            elif not self.manager.is_running():
                raise RuntimeError("the manager's thread has ended")
        return {"seconds": time.perf_counter() - began, "tokens": sum(finished)}


WORKERS: dict[str, Callable[[], Any]] = {
    SILVA: SilvaWorker,
    UNFILLED: UnfilledWorker,
    LOOSE: LooseWorker,
    GENERATE: GenerateWorker,
    CONTINUOUS: ContinuousWorker,
}

if __name__ == "__main__":
    name, *model = sys.argv[1:]
    sys.exit(serve(lambda: WORKERS[name](*model)))
