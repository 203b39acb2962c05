"""The random numbers of dropout: torch draws them from the generators of the process, one set for all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

States = dict[str, torch.Tensor]


def states_of(device: torch.device) -> States:
    """Of the generators that modules on this device draw from, by name: uint8 tensors."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_states(states: States, device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


class Randomness:
    """A sequence of random numbers of one trainer, which others in the process neither change nor read."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        with self._kept():
            torch.manual_seed(seed)
            self.states = states_of(device)

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """What draws here goes on with the sequence."""
        with self._kept():
            set_states(self.states, self.device)
            try:
                yield
            finally:
                self.states = states_of(self.device)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        before = states_of(self.device)
        try:
            yield
        finally:
            set_states(before, self.device)
