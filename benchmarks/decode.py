"""Tokens a second of the local engine, against other engines and against the machine.

    .venv/bin/python benchmarks/decode.py --json decode.json     an hour, with the peers of `make peers`
    .venv/bin/python benchmarks/decode.py --quick                no peers, small shapes, under a minute

SmolLM2-135M-Instruct in fp32, prompts of 64 random tokens, 64 new ones at temperature 1. Every engine runs in
a process of its own, one computes at a time, and all get the same prompts, new ones in every round, so that
no cache knows them. A round runs every engine once, in turn; ratios are medians over rounds of theirs over
Silva's seconds in the same round. The seconds run from a list of prompts to a list of tokens. Silva also
returns log-probabilities and entropies, which the peers are not asked for.

Limits, for the tokens of the same run (`against` says which):
- linear layers: alone, on the real weights, each layer's own in turn, projections of one input joined, with
  the fastest of F.linear, MKL packed and oneDNN packed; in Silva's process, beside every run;
- roofline: a step reads the weights and the keys and values of every request (a shared prompt once a
  request, as Silva reads it) at the machine's bandwidth, and multiplies at the rate of its fp32 GEMM.
"Outside kernels" is the share of a run in which no torch operator computes. "Bits" compares with the same
engine under MKL_CBWR=AUTO, and with neither that nor attention and activations that keep a row's bits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import Row, gemm_rate, machine, parser, table, write
from peers.pipe import Pipe

from silva.config.sections import PretrainedModel
from silva.engines.local import LocalEngine
from silva.engines.settings import LocalEngine as EngineSettings
from silva.models import kv_cache, loading
from silva.models.loading import PACKAGE, PACKAGE_FILE, PACKAGED, load_model, resolve
from silva.types import SamplingParams

PEERS = Path(__file__).parents[1] / ".peers"
SCRIPTS = Path(__file__).parent / "peers"
SILVA, AUTO, LOOSE = "Silva", "bits: MKL_CBWR=AUTO", "bits: any"
GENERATE, CONTINUOUS = "transformers generate", "transformers continuous batching"
VLLM, LLAMA = "vLLM", "llama.cpp"
# MKL_CBWR empty is MKL's own default; left out, it would be set by importing silva.
STRICT, ANY = {"MKL_CBWR": "AUTO,STRICT"}, {"MKL_CBWR": ""}

Tokens = list[int]
Answer = dict[str, Any]
Linear = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Case:
    requests: int
    shared: bool
    prompt: int = 64
    new: int = 64

    @property
    def name(self) -> str:
        return f"{self.requests} x {self.prompt} + {self.new}, {'one prompt' if self.shared else 'distinct'}"

    @property
    def work(self) -> dict[str, float]:
        """Rows of a step, prompt tokens to compute, cached tokens an average step reads, and steps."""
        prefill = self.prompt * (1 if self.shared else self.requests)
        read = self.requests * (self.prompt + self.new / 2)
        return {"rows": self.requests, "prefill": prefill, "read": read, "new": self.new}

    def prompts(self, seed: int) -> list[Tokens]:
        rng = np.random.default_rng([seed, self.requests, self.prompt, self.shared])
        tokens = rng.integers(5, 49152, (1 if self.shared else self.requests, self.prompt)).tolist()
        return tokens * self.requests if self.shared else tokens


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        return serve(WORKERS[sys.argv[2]])
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="no peers, two small shapes, two rounds")
    options.add_argument("--rounds", type=int, default=5, help="rounds a case (default 5)")
    options.add_argument("--threads", type=int, default=2, help="threads of every engine (default 2)")
    options.add_argument("--only", help="only cases whose name contains this")
    options.add_argument("--peers", nargs="*", default=[GENERATE, CONTINUOUS, VLLM, LLAMA], help="only these")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    speed, words = machine()
    rows = [speed]
    with started([SILVA, AUTO, LOOSE, *([] if given.quick else given.peers)], given.threads) as workers:
        for case in cases(given.quick):
            if given.only and given.only not in case.name:
                continue
            print(f"... {case.name}", file=sys.stderr, flush=True)
            rows += measure(case, workers, 2 if given.quick else given.rounds)
            write(rows, given.json)
        about = [f"{name}: {worker.about}" for name, worker in workers.items() if worker.about]
    head = ["case", "metric", "value", "against", "ratio", "target"]
    print(words, *about, "", table(head, [_line(row) for row in rows[1:]]), sep="\n\n")
    return 0


def cases(quick: bool) -> list[Case]:
    if quick:
        return [Case(8, True, new=16), Case(32, False, new=16)]
    shapes = [Case(requests, shared) for requests in (1, 8, 32, 64) for shared in (True, False)]
    return [*shapes, Case(32, True, prompt=448)]  # the last one long enough for attention in several blocks


def measure(case: Case, workers: Mapping[str, Worker], rounds: int) -> list[Row]:
    chosen = {n: w for n, w in workers.items() if case.prompt <= 64 or n in (SILVA, AUTO, LOOSE)}
    seconds: dict[str, list[float]] = {name: [] for name in [*chosen, "linears", "roofline"]}
    for number in range(rounds + 1):
        for name, worker in chosen.items():
            found = worker.ask(prompts=case.prompts(number), new=case.new)
            if found["tokens"] != case.requests * case.new:
                raise SystemExit(f"{name}: got {found['tokens']} tokens, expected {case.requests * case.new}")
            if number:  # the first round warms up
                seconds[name].append(found["seconds"])
            if name == SILVA:
                limit = worker.ask("limits", **case.work)
                if number:
                    seconds["linears"].append(limit["linears"])
                    seconds["roofline"].append(limit["roofline"])
    rate = case.requests * case.new / statistics.median(seconds[SILVA])

    def row(name: str, against: str) -> Row:
        pairs = zip(seconds[SILVA], seconds[name], strict=True)
        ratio = statistics.median(theirs / ours for ours, theirs in pairs)
        return Row(case.name, "tokens/s", rate, "", against, ratio, target(case, name))

    batches = [case.prompts(rounds + n) for n in range(1, 5)]
    outside = workers[SILVA].ask("outside", batches=batches, new=min(16, case.new))
    return [
        *(row(name, name) for name in chosen if name != SILVA),
        row("linears", f"linear layers alone ({limit['kernel']})"),
        row("roofline", f"roofline ({limit['bandwidth']:.0f} GB/s, {limit['gemm']:.0f} GFLOP/s)"),
        Row(case.name, "outside kernels", outside["share"], ""),
    ]


def target(case: Case, against: str) -> str:
    if against in (GENERATE, CONTINUOUS, VLLM, LLAMA) and case.requests >= 8:
        return ">= 2.5" if against == GENERATE and case.requests == 64 else ">= 1"
    return {8: ">= 0.6", 64: ">= 0.55"}.get(case.requests, "") if against == "linears" else ""


# ------------------------------------------------------------------------------------------ processes


class Worker:
    """The other end of peers/pipe.py."""

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str]):
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(part) for part in command],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.about = self._answer()["about"]

    def ask(self, do: str = "run", **what: Any) -> Answer:
        time.sleep(0.3)  # until the threads of whoever computed before have stopped spinning
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Answer:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError("ended with\n" + "".join(self._log.readlines()[-20:]))
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


@contextlib.contextmanager
def started(names: Sequence[str], threads: int) -> Iterator[dict[str, Worker]]:
    """One after another; what is not installed or does not start is left out, in words."""
    folder = resolve(PACKAGED)
    here = (sys.executable, __file__, "--worker")
    commands: dict[str, tuple[Sequence[str | Path], Mapping[str, str]]] = {
        SILVA: ((*here, SILVA), STRICT),
        AUTO: ((*here, SILVA), {"MKL_CBWR": "AUTO"}),
        LOOSE: ((*here, LOOSE), ANY),
        GENERATE: ((*here, GENERATE), ANY),
        CONTINUOUS: ((*here, CONTINUOUS), ANY),
        VLLM: ((PEERS / "vllm/bin/python", SCRIPTS / "vllm_server.py", folder), ANY),
        LLAMA: ((PEERS / "llama/bin/python", SCRIPTS / "llama_server.py", PEERS / "llama/model.gguf"), ANY),
    }
    with contextlib.ExitStack() as stack:
        workers = {}
        for name in names:
            command, environment = commands[name]
            if not Path(command[0]).exists():
                print(f"left out: {name} (`make peers` installs it)")
                continue
            if name == LLAMA:
                write_f32_gguf(Path(command[-1]))
            print(f"... starting {name}", file=sys.stderr, flush=True)
            try:
                worker = Worker(command, {"OMP_NUM_THREADS": str(threads), **environment})
            except RuntimeError as error:
                if name == SILVA:
                    raise
                print(f"left out: {name} {error}")
                continue
            workers[name] = stack.enter_context(contextlib.closing(worker))
        yield workers


def write_f32_gguf(path: Path) -> None:
    """The packaged model with every tensor in F32: the numbers that transformers reads from it."""
    import importlib.util

    from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, dequantize

    if path.exists():
        return
    spec = importlib.util.find_spec(PACKAGE)
    assert spec and spec.origin
    source = GGUFReader(Path(spec.origin).parent / PACKAGE_FILE)
    scratch = path.with_suffix(".part")
    writer = GGUFWriter(scratch, str(source.fields["general.architecture"].contents()))
    for name, field in source.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, *element = field.types
        value = int(LlamaFileType.ALL_F32) if name == "general.file_type" else field.contents()
        writer.add_key_value(name, value, kind, element[-1] if kind == GGUFValueType.ARRAY else None)
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    scratch.rename(path)


def serve(made: Callable[[], Any]) -> int:
    pipe, worker = Pipe(), made()
    pipe.send({"about": worker.about})
    for line in pipe:
        asked = json.loads(line)
        pipe.send(getattr(worker, asked.pop("do"))(**asked))
    return 0


# -------------------------------------------------------------------------------------------- workers


class SilvaWorker:
    def __init__(self) -> None:
        self.loaded = load_model(PretrainedModel(), seed=0)
        self.settings = EngineSettings()
        self.compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self.engine = LocalEngine(self.loaded, self.settings, self.compute)
        self.about = f"torch {torch.__version__}, MKL_CBWR={os.environ['MKL_CBWR'] or 'off'}"
        self._linears: tuple[int, Linears, Linears] | None = None

    def run(self, prompts: list[Tokens], new: int) -> Answer:
        async def sample() -> int:
            params = [SamplingParams(max_tokens=new, seed=seed) for seed in range(len(prompts))]
            found = await asyncio.gather(*map(self.engine.sample, prompts, params))
            return sum(len(completion.tokens) for completion in found)

        began = time.perf_counter()
        tokens = asyncio.run(sample())
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    def limits(self, rows: int, prefill: int, read: float, new: int) -> Answer:
        """Seconds that a run must take, on the thread that computes; see the module's docstring."""
        return self.compute.submit(self._limits, rows, prefill, read, new).result()

    @torch.inference_mode()
    def _limits(self, rows: int, prefill: int, read: float, new: int) -> Answer:
        chunk = min(prefill, self.settings.prefill_tokens)
        if self._linears is None or self._linears[0] != rows:
            self._linears = None  # gives the packed weights back
            weights = joined(self.loaded.model)
            self._linears = rows, fastest(weights, rows), fastest(weights, chunk)
        _, step, prompt = self._linears
        body, head = step.seconds(step.body), step.seconds(step.head)
        linears = (new - 1) * body + new * head + prefill / chunk * prompt.seconds(prompt.body)

        config = self.loaded.model.config
        position = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim  # bytes
        size = sum(p.numel() for p in self.loaded.model.parameters())
        bandwidth, gemm = reading_rate(4 * size), gemm_rate()
        reading = (4 * size + position * read) / bandwidth / 1e9
        multiplying = 2 * size * rows / gemm / 1e9
        roofline = (new - 1) * max(reading, multiplying) + 2 * size * prefill / gemm / 1e9
        return {"linears": linears, "roofline": roofline, "kernel": step.kernel, "bandwidth": bandwidth,
                "gemm": gemm}  # fmt: skip

    def outside(self, batches: list[list[Tokens]], new: int) -> Answer:
        """Kernel time of profiled runs over the time of runs without the profiler, which slows Python."""
        plain = kernels = 0.0
        for unprofiled, profiled in zip(batches[::2], batches[1::2], strict=True):
            plain += self.run(unprofiled, new)["seconds"]
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.compute.submit(profiler.start).result()  # it sees the thread that starts it
            self.run(profiled, new)
            self.compute.submit(profiler.stop).result()
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


class LooseWorker(SilvaWorker):
    """Without what makes a row's bits independent of the batch."""

    def __init__(self) -> None:
        kv_cache.BLOCK = 1 << 30
        loading.steady_activations = lambda model: None
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


def fastest(weights: Sequence[torch.Tensor], rows: int) -> Linears:
    made = (Linears(kernel, weights, rows) for kernel in KERNELS)
    return min(made, key=lambda linears: linears.seconds([*linears.body, *linears.head]))


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
        finished = []
        while len(finished) < len(prompts):
            found = self.manager.get_result(timeout=1)
            if found is not None and found.is_finished():
                finished.append(len(found.generated_tokens))
            elif not self.manager.is_running():
                raise RuntimeError("the manager's thread has ended")
        return {"seconds": time.perf_counter() - began, "tokens": sum(finished)}


def _line(row: Row) -> list[str]:
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return [row.case, row.metric, f"{row.value:.3g}", row.against, ratio, row.target]


WORKERS: dict[str, Callable[[], Any]] = {
    SILVA: SilvaWorker,
    LOOSE: LooseWorker,
    GENERATE: GenerateWorker,
    CONTINUOUS: ContinuousWorker,
}

if __name__ == "__main__":
    sys.exit(main())
