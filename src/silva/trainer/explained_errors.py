"""Memory that is too small, in words that name the settings which would have helped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from silva.errors import CapabilityError, OutOfMemory
from silva.models.loading import LoadedModel
from silva.models.memory import is_out_of_memory, too_large
from silva.trainer.optimizer import learning_bytes
from silva.trainer.settings import LocalTrainerSettings
from silva.types import Sample


def refuse_too_large(loaded: LoadedModel, parts: int = 1) -> None:
    """Raise CapabilityError if what is there from the first update on does not fit into the CPU's memory.

    Linux would end the process without a word.

    Args:
        parts: that the model will be divided into, of which one must fit.
    """
    if loaded.device.type != "cpu":  # elsewhere torch says that memory ran out
        return
    parameters = list(loaded.model.parameters())
    needed = sum(p.nbytes for p in parameters) + learning_bytes(parameters)
    if why := too_large(needed / parts):
        each = f" on each of {parts} ranks" if parts > 1 else ""
        raise CapabilityError(
            f"model {loaded.name}: to train it, its weights, gradients and moments alone take{each} {why}; "
            "take [model.lora] or a smaller model"
        )


@contextlib.contextmanager
def explained_memory(settings: LocalTrainerSettings, doing: str) -> Iterator[None]:
    """Raises OutOfMemory in place of what torch raises."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        checkpointing = (
            "" if settings.gradient_checkpointing else "set trainer.gradient_checkpointing = true, "
        )
        raise OutOfMemory(
            f"memory ran out while {doing}: lower trainer.micro_batch_tokens "
            f"(now {settings.micro_batch_tokens}), {checkpointing}"
            "lower rollout.limits.max_episode_tokens, or use [model.lora] or a smaller model. "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ) from error


def size_of(samples: Sequence[Sample]) -> str:
    """Of a micro-batch, in words."""
    return f"{len(samples)} rows of up to {max(len(sample) for sample in samples)} tokens"
