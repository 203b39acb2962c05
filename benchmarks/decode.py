"""Tokens a second of the local engine, against other engines and against the machine.

    .venv/bin/python benchmarks/decode.py --json decode.json     an hour, with the peers of `make peers`
    .venv/bin/python benchmarks/decode.py --quick                no peers, one small shape, under a minute
    .venv/bin/python benchmarks/decode.py --recorded             replies of trained policies, see recorded.py

SmolLM2-135M-Instruct in fp32, prompts of 64 random tokens, 64 new ones at temperature 1. Every engine runs in
a process of its own, one computes at a time, and all get the same prompts, new ones in every round, so that
no cache knows them. A round runs every engine once, in turn; ratios are medians over rounds of theirs over
Silva's seconds in the same round. Silva without drafts is the same process, as two processes of one program
differ by more than drafts bring. The seconds run from a list of prompts to a list of tokens. Silva also
returns log-probabilities and entropies, which the peers are not asked for.

Limits, for the tokens of the same run (`against` says which):
- linear layers: alone, on the real weights, each layer's own in turn, projections of one input joined, with
  the fastest of F.linear, MKL packed and oneDNN packed; in Silva's process, beside every run;
- roofline: a step reads the weights and the keys and values of every request (a shared prompt once a
  request, as Silva reads it) at the machine's bandwidth, and multiplies at the rate of its fp32 GEMM.
"Drafts" compares with a token of each request in each step; their targets are those of the recorded cases.
"Outside kernels" is the share of a run in which no torch operator computes. "Linear layers" are those of the
limit with each kernel, against F.linear. "Bits" compares with the same engine under MKL_CBWR=AUTO; with steps
that are not filled up to the probed number of rows; and with nothing that keeps a row's bits: neither of
these, nor attention and activations of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from common import Row, machine, parser, peers_environment, results, write
from decode_workers import CONTINUOUS, GENERATE, LOOSE, SILVA, UNFILLED, Answer, Tokens
from recorded import EPISODES, POLICIES, by_turns, recording
from recorded import measure as measure_recorded

from silva.models.loading import PACKAGE, PACKAGE_FILE, PACKAGED, resolve

PLAIN = "F.linear"
PEERS = Path(__file__).parents[1] / ".peers"
SCRIPTS = Path(__file__).parent / "peers"
AUTO = "bits: MKL_CBWR=AUTO"
OFF = "drafts: off"
OURS = (SILVA, OFF, AUTO, UNFILLED, LOOSE)
VLLM, VLLM_DRAFTS, LLAMA = "vLLM", "vLLM, n-gram drafts", "llama.cpp"
N_GRAMS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 2}
PEER_NAMES = {"generate": GENERATE, "continuous": CONTINUOUS, "vllm": VLLM, "llama.cpp": LLAMA}
# MKL_CBWR empty is MKL's own default; left out, importing silva would set it.
STRICT, ANY = {"MKL_CBWR": "AUTO,STRICT"}, {"MKL_CBWR": ""}


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
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="no peers, one small shape, one round")
    options.add_argument("--rounds", type=int, default=5, help="rounds a case (default 5)")
    options.add_argument("--threads", type=int, default=2, help="threads of every engine (default 2)")
    names = ", ".join(repr(case.name) for case in cases(quick=False))
    options.add_argument("--only", help=f"only cases whose name contains this; names: {names}")
    options.add_argument(
        "--peers", nargs="*", choices=PEER_NAMES, default=list(PEER_NAMES), help="only these"
    )
    options.add_argument(
        "--drafts", action="store_true", help="of all engines Silva with drafts and without alone"
    )
    options.add_argument(
        "--recorded",
        nargs="*",
        choices=POLICIES,
        help="in place of random tokens, with vLLM as the only peer",
    )
    options.add_argument(
        "--slots", nargs="*", type=int, choices=EPISODES, default=list(EPISODES), help="of recorded cases"
    )
    given = options.parse_args()
    if given.recorded is not None:
        return recorded_cases(given)
    chosen = [case for case in cases(given.quick) if not given.only or given.only in case.name]
    if not chosen:
        names = ", ".join(repr(case.name) for case in cases(given.quick))
        options.error(f"argument --only: no case contains {given.only!r} (names: {names})")
    torch.set_num_threads(given.threads)
    speed, words = machine()
    rows = [speed]
    engines = [SILVA, OFF, AUTO] if given.quick else [*OURS, *(PEER_NAMES[name] for name in given.peers)]
    engines = engines[:2] if given.drafts else engines
    with started(engines, given.threads) as workers:
        for case in chosen:
            print(f"... {case.name}", file=sys.stderr, flush=True)
            rows += measure(case, workers, 1 if given.quick else given.rounds)
            write(rows, given.json)
        about = [f"{name}: {worker.about}" for name, worker in workers.items() if worker.about]
    print(words, *about, "", results(rows[1:]), sep="\n\n")
    return 0


def recorded_cases(given: argparse.Namespace) -> int:
    torch.set_num_threads(given.threads)
    recordings = [recording(name) for name in given.recorded or POLICIES]
    speed, words = machine()
    rows = [speed]
    for each in recordings:
        alone = given.drafts or "vllm" not in given.peers or each.name == "frozen_lake"
        peers = [] if alone else [VLLM, VLLM_DRAFTS]
        with started([SILVA, OFF, *peers], given.threads, each.model.resolve()) as workers:
            for slots in given.slots:
                print(f"... {each.name}, {slots} at once", file=sys.stderr, flush=True)
                rows += measure_recorded(each, slots, workers, SILVA, OFF, given.rounds)
                write(rows, given.json)
    print(words, "", results(rows[1:]), sep="\n\n")
    return 0


def cases(quick: bool) -> list[Case]:
    if quick:
        return [Case(8, True, new=8)]
    shapes = [Case(requests, shared) for requests in (1, 8, 32, 64) for shared in (True, False)]
    return [*shapes, Case(32, True, prompt=448)]  # the last one long enough for attention in several blocks


def measure(case: Case, workers: Mapping[str, Engine], rounds: int) -> list[Row]:
    chosen = {n: w for n, w in workers.items() if case.prompt <= 64 or n in OURS}
    for name in OURS:
        if name in chosen and name != OFF:
            chosen[name].ask("rest")
    seconds: dict[str, list[float]] = {name: [] for name in [*chosen, "linears", "roofline"]}
    for number in range(rounds + 1):
        for name, worker in by_turns(chosen, number):
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
        *(
            Row(case.name, f"linear layers, {kernel}", 1000 * s, "ms", PLAIN, limit["kernels"][PLAIN] / s)
            for kernel, s in limit["kernels"].items()
            if kernel != PLAIN
        ),
    ]


def target(case: Case, against: str) -> str:
    if against == OFF:
        return ">= 0.98"
    if against in (GENERATE, CONTINUOUS, VLLM, LLAMA) and case.requests >= 8:
        return ">= 2.5" if against == GENERATE and case.requests == 64 else ">= 1"
    return {8: ">= 0.6", 64: ">= 0.55"}.get(case.requests, "") if against == "linears" else ""


# ------------------------------------------------------------------------------------------ processes


class Engine(Protocol):
    @property
    def about(self) -> str: ...
    def ask(self, do: str = "run", **what: Any) -> Answer: ...


class Worker:
    """The other end of peers/pipe.py."""

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str]):
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(part) for part in command],
            env={**peers_environment(), **environment},
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


@dataclass(frozen=True)
class WithoutDrafts:
    """The same process, which has drafts before and after."""

    worker: Engine
    about = ""

    def ask(self, do: str = "run", **what: Any) -> Answer:
        self.worker.ask("switch", drafts=False)
        found = self.worker.ask(do, **what)
        self.worker.ask("switch", drafts=True)
        return found


@contextlib.contextmanager
def started(names: Sequence[str], threads: int, model: Path | None = None) -> Iterator[dict[str, Engine]]:
    """One after another; what is not installed or does not start is left out, in words.

    Args:
        model: a folder; None: SmolLM2 as it is packaged.
    """
    folder, own = model or resolve(PACKAGED), [] if model is None else [model]
    here = (sys.executable, Path(__file__).with_name("decode_workers.py"))
    vllm = (PEERS / "vllm/bin/python", SCRIPTS / "vllm_server.py", folder)
    commands: dict[str, tuple[Sequence[str | Path], Mapping[str, str]]] = {
        SILVA: ((*here, SILVA, *own), STRICT),
        AUTO: ((*here, SILVA), {"MKL_CBWR": "AUTO"}),
        UNFILLED: ((*here, UNFILLED), STRICT),
        LOOSE: ((*here, LOOSE), ANY),
        GENERATE: ((*here, GENERATE), ANY),
        CONTINUOUS: ((*here, CONTINUOUS), ANY),
        VLLM: (vllm, ANY),
        VLLM_DRAFTS: ((*vllm, json.dumps(N_GRAMS)), ANY),
        LLAMA: ((PEERS / "llama/bin/python", SCRIPTS / "llama_server.py", PEERS / "llama/model.gguf"), ANY),
    }
    with contextlib.ExitStack() as stack:
        workers: dict[str, Engine] = {}
        for name in names:
            if name == OFF:
                workers[OFF] = WithoutDrafts(workers[SILVA])
                continue
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


if __name__ == "__main__":
    sys.exit(main())
