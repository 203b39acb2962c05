"""What the settings of environments of other libraries share."""

from __future__ import annotations

from typing import ClassVar

from silva.config.sections import Natural
from silva.environments.settings import EnvironmentSettings


class ForeignSettings(EnvironmentSettings):
    named_by: ClassVar[str] = ""
    """The key that says which environment of the library it is: it names it in metrics and reports."""

    workers: Natural = 1
    """Processes that run its episodes: other libraries block. 0: this process."""

    @property
    def label(self) -> str:
        chosen: str = getattr(self, self.named_by, "")
        return self.name or chosen.rpartition(":")[2] or self.type
