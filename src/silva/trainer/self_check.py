"""Before the first update: is the gradient of rows on their trie that of one row at a time?"""

from __future__ import annotations

from collections.abc import Callable

import torch

from silva.trainer.optimizer import Stepper

CHECKED = 8  # rows
MOST_GAP = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
Parts = list[list[int]]


def compared(
    stepper: Stepper, few: list[int], backward: Callable[[Parts], None], dtype: torch.dtype
) -> tuple[bool, str] | None:
    """Whether the two agree, and what to say of it; None without a gradient.

    Gradients that were there before are put back.

    Args:
        few: rows that share a prefix.
        backward: adds the gradients of rows, part by part.
        dtype: of the model.
    """
    parameters = list(stepper.parameters.values())
    kept, gradients = [p.grad for p in parameters], []
    try:
        for parts in ([few], [[index] for index in few]):
            stepper.drop_gradients()
            backward(parts)
            gradients.append([p.grad for p in parameters])
    finally:
        stepper.drop_gradients()
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient
    pairs = [(a, b) for a, b in zip(*gradients, strict=True) if a is not None and b is not None]
    size = stepper.norm([b for _, b in pairs])
    if not size > 0:  # also where it is not finite
        return None
    gap, most = stepper.norm([a - b for a, b in pairs]) / size, MOST_GAP[dtype]
    found = f"the gradient of {len(few)} rows on their trie and one by one differs by {gap:.1e} of its size"
    if gap <= most:
        return True, f"checked: {found}"
    return False, f"{found}, more than {most:g}: nothing is shared from here on, which is slower"
