"""Routing replay: how far sampler and trainer are apart with the experts that the sampler chose, and without.

    same weights       both in float32: only kernels differ
    bf16 sampler       the sampler has the trainer's weights rounded to bfloat16, and computes in it
    one update older   the sampler has the weights before an update (AdamW, --lr)

A Qwen3-MoE of random weights answers prompts of random tokens. `experts differ`: share of all (token, layer)
at which the trainer's own routers choose another set of experts than the sampler. `KL`: nats a token, the
mean of r - 1 - log r, r the trainer's probability over the sampler's, as in `train/mismatch_kl`. `gap`: the
largest |log r|. Free: the trainer's routers choose; replayed: they do as the sampler's did.

    python benchmarks/routing.py            half a minute on a core
    python benchmarks/routing.py --quick    a smaller model
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import silva  # noqa: F401  # isort: skip  (before torch, which reads at its start what this sets)
import torch
from common import Row, machine, parser, results, table, write
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from silva.config.sections import Optimizer, PretrainedModel
from silva.engines.local.engine import LocalEngine
from silva.engines.settings import LocalEngineSettings
from silva.models.loading import LoadedModel, load_model
from silva.models.routing import Routing
from silva.models.tiny import tiny_tokenizer
from silva.trainer.learner import Learner
from silva.trainer.settings import LocalTrainerSettings
from silva.types import Completion, LossSpec, OptimParams, Sample, SamplingParams

LARGE = {"hidden_size": 256, "num_hidden_layers": 8, "num_experts": 64, "num_experts_per_tok": 8,
         "moe_intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
QUICK = LARGE | {"hidden_size": 64, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}
PROMPTS, ANSWERS, PROMPT, ANSWER = 8, 4, 32, 48
ROUNDS = 3
NEEDS = frozenset({"logprobs"})


def load(folder: Path, dtype: Any) -> LoadedModel:
    return load_model(PretrainedModel(name=str(folder), dtype=dtype), seed=0)


def make(folder: Path, sizes: dict[str, int]) -> None:
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), head_dim=64, max_position_embeddings=256, norm_topk_prob=True,
        initializer_range=0.08, pad_token_id=0, eos_token_id=tokenizer.eos_token_id, **sizes,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def answers(loaded: LoadedModel, *, routes: bool = True) -> tuple[list[Sample], float]:
    """Rows of all completions, and the CPU seconds that sampling took."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, PROMPT).tolist() for _ in range(PROMPTS) for _ in range(ANSWERS)]
    prompts = [prompts[ANSWERS * (n // ANSWERS)] for n in range(len(prompts))]
    with ThreadPoolExecutor(1) as compute:
        engine = LocalEngine(loaded, LocalEngineSettings(drafts="off"), compute, routes=routes)

        async def ask() -> list[Completion]:
            asked = (engine.sample(p, SamplingParams(ANSWER, seed=n)) for n, p in enumerate(prompts))
            return list(await asyncio.gather(*asked))

        began = time.process_time()
        found = asyncio.run(ask())
        seconds = time.process_time() - began
    return [_row(n, *pair) for n, pair in enumerate(zip(prompts, found, strict=True))], seconds


def _row(number: int, prompt: Sequence[int], found: Completion) -> Sample:
    tokens = np.array([*prompt, *found.tokens])
    new = np.arange(len(tokens)) >= len(prompt)
    known = found.prompt_routes is not None and found.routes is not None
    return Sample(
        tokens=tokens,
        loss_weights=new / (PROMPTS * ANSWERS * ANSWER),
        logprobs=np.concatenate([np.full(len(prompt), np.nan), found.logprobs]),
        temperatures=np.ones(len(tokens)),
        versions=np.where(new, 0, -1),
        trajectory=f"t{number}",
        group=f"g{number // ANSWERS}",
        advantages=np.full(len(tokens), float(np.random.default_rng(number).normal())),
        routes=np.concatenate([found.prompt_routes, found.routes]) if known else None,  # type: ignore[list-item]
    )


def trainer(loaded: LoadedModel, *, replays: bool) -> Learner:
    settings = LocalTrainerSettings(optimizer=Optimizer(), replay_routing=replays, self_check=False)
    return Learner(loaded, settings, seed=0)


def differing(loaded: LoadedModel, samples: Sequence[Sample]) -> float:
    """Share of all (token, layer) at which these weights choose other experts than were recorded."""
    routing, differ = Routing(loaded.model), []
    for sample in samples:
        with torch.no_grad(), routing.recorded() as own:
            loaded.model.get_decoder()(input_ids=torch.tensor(sample.tokens)[None], use_cache=False)
        told = routing.known(sample.routes, len(sample), "")[1:]
        differ.append((np.sort(torch.stack(own, 1).numpy()[:-1]) != np.sort(told)).any(-1).mean())
    return float(np.mean(differ))


def mismatch(case: str, loaded: LoadedModel, samples: Sequence[Sample]) -> list[Row]:
    gaps = []
    for replays in (False, True):
        (found,) = (trainer(loaded, replays=replays).score(samples, NEEDS).logprobs,)
        assert found is not None
        pairs = [(s.logprobs[s.loss_weights > 0], row[s.loss_weights > 0])
                 for s, row in zip(samples, found, strict=True)]  # fmt: skip
        gaps.append(np.concatenate([theirs.astype(np.float64) - mine for mine, theirs in pairs]))
    free, replayed = gaps
    rows = [Row(case, "experts differ", differing(loaded, samples), "")]
    for name, of in (("KL", lambda gap: (np.expm1(gap) - gap).mean()), ("gap", lambda gap: abs(gap).max())):
        rows.append(Row(case, f"{name}, free", float(of(free)), "nats"))
        ratio = float(of(free) / of(replayed))
        rows.append(Row(case, f"{name}, replayed", float(of(replayed)), "nats", "free", ratio))
    return rows


def shown(rows: Sequence[Row]) -> str:
    """A line for each case of `mismatch`."""
    cases = list(dict.fromkeys(row.case for row in rows))
    found = {case: [row for row in rows if row.case == case] for case in cases}
    lines = [[case, *(f"{row.value:.2g}" for row in of)] for case, of in found.items()]
    return table(["sampler", *(row.metric for row in found[cases[0]])], lines)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="a smaller model")
    options.add_argument("--lr", type=float, default=1e-5, help="of the update (default 1e-5)")
    given = options.parse_args()
    speed, words = machine()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        make(folder, QUICK if given.quick else LARGE)
        wide, narrow = load(folder, "float32"), load(folder, "bfloat16")
        answers(wide, routes=False)  # warms up
        plain = min(answers(wide, routes=False)[1] for _ in range(ROUNDS))
        samples, recording = min((answers(wide) for _ in range(ROUNDS)), key=lambda made: made[1])
        routes = samples[0].routes
        assert routes is not None
        costs = [
            Row("recording", "CPU of sampling", recording, "s", "without", plain / recording),
            Row("recording", "bytes a token", routes.nbytes / len(routes), "B"),
        ]
        rows = mismatch("same weights", wide, samples)
        rows += mismatch("bf16 sampler", wide, answers(narrow)[0])
        learner = trainer(wide, replays=True)
        learner.forward_backward(samples, LossSpec("reinforce"))
        learner.optim_step(OptimParams(given.lr))
        rows += mismatch("one update older", wide, samples)
    write([speed, *costs, *rows], given.json)
    print(words, "", shown(rows), "", results(costs), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
