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
            return json.loads(server.handle_completions(json.dumps(request)))["usage"]["completion_tokens"]

        for line in pipe:
            asked = json.loads(line)
            requests = [
                {"prompt": tokens, "max_tokens": asked["new"], "temperature": 1.0, "ignore_eos": True,
                 "samplers": ["temperature"], "seed": seed}
                for seed, tokens in enumerate(asked["prompts"])
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
