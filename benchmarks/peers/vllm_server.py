"""Worker for decode.py: vLLM in process, without HTTP. Runs in .peers/vllm (`make peers`).

    vllm_server.py MODEL_FOLDER [SPECULATIVE_CONFIG]

Answers {"prompts": [[token]], "new": n} with {"seconds": s, "tokens": n}, and "play" as its function says.
Not vLLM's defaults: all cores (it would keep one for its server), fp32, text where a stop string needs it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

cores = sorted(os.sched_getaffinity(0))[: int(os.environ["OMP_NUM_THREADS"])]
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}

import vllm  # noqa: E402
from pipe import Pipe  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402


def main() -> int:
    pipe = Pipe()
    eager = os.environ.get("EAGER") == "1"
    llm = LLM(
        sys.argv[1],
        dtype="float32",
        block_size=32,  # its default of 128 on CPUs would share no prompt of 64 tokens
        max_model_len=1024,
        max_num_seqs=64,
        enforce_eager=eager,
        speculative_config=json.loads(sys.argv[2]) if len(sys.argv) > 2 else None,
    )
    pipe.send({"about": f"vLLM {vllm.__version__}, {'eager' if eager else 'compiled'}, {len(cores)} threads"})
    for line in pipe:
        asked = json.loads(line)
        if asked.pop("do") == "play":
            pipe.send(play(llm, **asked))
            continue
        params = SamplingParams(temperature=1.0, max_tokens=asked["new"], ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": tokens} for tokens in asked["prompts"]]
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        pipe.send({"seconds": seconds, "tokens": sum(len(o.outputs[0].token_ids) for o in outputs)})
    return 0


def play(
    llm: LLM, episodes: Sequence[Sequence[list[int]]], slots: int, params: dict[str, Any], seed: int
) -> dict[str, Any]:
    """Episodes by their prompts, turn by turn, so many at once; sampled with seeds that vLLM draws."""
    llm.reset_prefix_cache()
    own = SamplingParams(
        temperature=1.0,
        detokenize=bool(params["stop"]),
        include_stop_str_in_output=True,
        ignore_eos=True,
        **params,
    )
    engine, waiting, tokens = llm.llm_engine, list(enumerate(episodes)), 0
    turns: dict[int, int] = {}

    def ask(number: int, turn: int) -> None:
        turns[number] = turn
        engine.add_request(f"{number}.{turn}", {"prompt_token_ids": episodes[number][turn]}, own)

    began = time.perf_counter()
    for number, _ in waiting[:slots]:
        ask(number, 0)
    del waiting[:slots]
    while engine.has_unfinished_requests():
        for output in engine.step():
            if not output.finished:
                continue
            tokens += len(output.outputs[0].token_ids)
            number = int(output.request_id.partition(".")[0])
            if turns[number] + 1 < len(episodes[number]):
                ask(number, turns[number] + 1)
            elif waiting:
                ask(waiting.pop(0)[0], 0)
    return {"seconds": time.perf_counter() - began, "tokens": tokens}


if __name__ == "__main__":
    sys.exit(main())
