"""What code of a model may use."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from silva.config.sections import Positive, Section


class SandboxSettings(Section):
    """Walls and limits of a sandbox. Where the machine has cgroups, memory and processes hold for all that a
    sandbox runs."""

    sandbox: Literal["auto", "bubblewrap", "userns", "none"] = "auto"
    """`auto` takes bubblewrap, else a user namespace. `none`: the host's interpreter without any wall."""
    seconds: Annotated[float, Field(gt=0)] = 10.0
    """Time one call may take."""
    cpu_seconds: Positive = 10
    """Computing time of one process."""
    memory_mb: Annotated[int, Field(ge=64)] = 1024
    """Memory of one process, in MiB."""
    processes: Positive = 32
    """Processes and threads at the same time."""
    file_mb: Positive = 64
    """Size of one file and of /tmp, in MiB."""
    output_chars: Positive = 10_000
    """Characters of output. More ends the call."""
    keep_state: bool = False
    """Variables stay from one call of an episode to the next. A call that dies leaves them as they were."""
    packages: bool = True
    """Installed packages can be imported; off: the standard library alone."""

    @model_validator(mode="after")
    def _has_room_for_itself(self) -> Self:
        least, why = (4, " with keep_state") if self.keep_state else (2, "")
        if self.processes < least:
            raise ValueError(
                f"processes: got {self.processes}, expected at least {least}{why}: those of the sandbox "
                "itself, and the code's"
            )
        return self
