"""Worker for decode.py: llama.cpp's server in process, without HTTP. Runs in .peers/llama (`make peers`).

    llama_server.py MODEL.gguf

Answers {"prompts": [[token]], "new": n} with {"seconds": s, "tokens": n}. Keys and values are F32 like the
weights. What the binary was compiled for is in its greeting: the wheel on PyPI knows AVX2, not AVX-512.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xllamacpp
from pipe import Pipe

SLOTS, CONTEXT = 64, 256  # requests at once, and tokens of each


def main() -> int:
    pipe = Pipe()
    server = xllamacpp.Server(settings(sys.argv[1]))
    compiled = xllamacpp.get_system_info().strip()
    pipe.send({"about": f"xllamacpp {xllamacpp.__version__}, {compiled}"})
    with ThreadPoolExecutor(SLOTS) as clients:

        def complete(request: dict[str, Any]) -> int:
            answer = server.handle_completions(request)
            return answer["usage"]["completion_tokens"] * len(answer["choices"])

        for line in pipe:
            asked = json.loads(line)
            # Completions of one prompt as `n` of one request: the server then computes the prompt once.
            requests = [
                {"prompt": tokens, "n": count, "max_tokens": asked["new"], "temperature": 1.0,
                 "samplers": ["temperature"], "ignore_eos": True, "seed": seed}
                for seed, (tokens, count) in enumerate(Counter(map(tuple, asked["prompts"])).items())
            ]  # fmt: skip
            began = time.perf_counter()
            tokens = sum(clients.map(complete, requests))
            pipe.send({"seconds": time.perf_counter() - began, "tokens": tokens})
    return 0


def settings(path: str) -> Any:
    threads = int(os.environ["OMP_NUM_THREADS"])
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_parallel, params.n_ctx, params.kv_unified = SLOTS, SLOTS * CONTEXT, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_ram_mib = 0  # prompts are never seen twice
    params.verbosity = 0
    return params


if __name__ == "__main__":
    sys.exit(main())
