"""What Silva adds to the workers of a vLLM that it launches (--worker-extension-cls silva_vllm.Extension).

Runs in vLLM's environment, where Silva is not installed, and imports nothing of it. This folder alone is on
the path there, so that no other module of Silva hides one of vLLM's.
"""

from __future__ import annotations

from typing import Any


class Extension:
    """Becomes a base class of vLLM's worker."""

    def silva_reload(self: Any, weights_path: str) -> int:
        """`reload_weights`, and then the heads that share their weights with the embeddings.

        On CPU vLLM multiplies by packed copies of weights. `reload_weights` packs those again that it
        loads by themselves. A tied head is not one of them, so it would keep the weights of the start.

        Returns:
            how many heads were packed again.
        """
        self.reload_weights(weights_path=weights_path)
        heads = [
            module
            for module in self.model_runner.get_model().modules()
            if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear")
        ]
        for head in heads:
            head.quant_method.process_weights_after_loading(head)
        return len(heads)
