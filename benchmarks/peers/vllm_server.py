"""Worker for decode.py: vLLM in process, without HTTP. Runs in .peers/vllm (`make peers`).

    vllm_server.py MODEL_FOLDER

Answers {"prompts": [[token]], "new": n} with {"seconds": s, "tokens": n}. Not vLLM's defaults: all cores (it
would keep one for its server), fp32, no detokenising.
"""

from __future__ import annotations

import json
import os
import sys
import time

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
    )
    pipe.send({"about": f"vLLM {vllm.__version__}, {'eager' if eager else 'compiled'}, {len(cores)} threads"})
    for line in pipe:
        asked = json.loads(line)
        params = SamplingParams(temperature=1.0, max_tokens=asked["new"], ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": tokens} for tokens in asked["prompts"]]
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        pipe.send({"seconds": seconds, "tokens": sum(len(o.outputs[0].token_ids) for o in outputs)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
