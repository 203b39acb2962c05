"""What every environment's settings share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from pydantic import Field, model_validator

from silva.config.sections import Above0, Natural, NotNegative, Section, WebAddress

if TYPE_CHECKING:
    from silva.protocols import TaskSet


class EnvironmentSettings(Section):
    """Base of the settings of an environment: `type` picks the class, `taskset` builds the environment."""

    licence: ClassVar[str] = ""
    """Of what the environment is made of, for `silva envs`; empty: that of its package."""
    needs: ClassVar[str] = ""
    """What must be given or be there, such as keys without a default, data or a server; empty: nothing."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Modules of optional packages that must be installed."""
    programs: ClassVar[tuple[str, ...]] = ()
    """Programs that must be on the path."""
    bounds: ClassVar[tuple[str, ...]] = ()
    """("turns",) if `min_turns` and `max_turns` must be in order."""
    reward_range: ClassVar[tuple[float, float] | None] = None
    """The least and the highest raw reward of an episode; None: not known, or what `reward` knows."""

    type: str = ""
    name: str = ""
    """Name in metrics and reports; the type where empty."""
    weight: NotNegative = 1.0
    """Share of training tasks against the other environments; 0: it is evaluated, and never trained on."""
    echo: NotNegative = 0.0
    """Weight of the cross-entropy of what it answers to replies, beside the loss of RL (ECHO): the policy
    learns to foresee it."""
    train_size: Natural = 0
    """Training tasks of a pass; 0: all of a list (of rows, games, words), up to 4096 of a world that makes
    its own."""
    eval_size: Natural = 0
    """Held-out tasks, of which `eval.tasks` are played; 0: all of a list, up to 256 of a world that makes its
    own."""
    eval_share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of all problems that is held out. A problem's content decides, so the share is approximate; no
    other setting moves a problem to the other side. 1 holds out all: a test set, which nothing trains on."""
    workers: Natural = 0
    """Processes that run its episodes, so that a step that blocks or computes holds up nothing else; 0: this
    one. On a Ray cluster they are actors."""
    variables: tuple[str, ...] = ()
    """Environment variables that its workers get besides those of the machine, such as one with a key."""
    seed: Natural = 0
    """Moves the whole task set, apart from the run's seed."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        for what in self.bounds:
            low, high = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if high < low:
                raise ValueError(f"max_{what} = {high}: expected min_{what} = {low} or more")
        return self

    @property
    def label(self) -> str:
        return self.name or self.type or type(self).__name__

    @property
    def offers_tools(self) -> bool:
        """Whether it names tools, by a key or a method `tools` as that of `ToolQA`."""
        tools = getattr(self, "tools", ())
        return bool(tools() if callable(tools) else tools)

    def taskset(self) -> TaskSet:
        raise TypeError(f"{type(self).__name__} must define taskset()")


class GatewaySettings(Section):
    """Where programs find their model; of environments that programs play."""

    host: str = "127.0.0.1"
    """Where the gateway listens. Any other than one of this machine needs a key."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0: any free one."""
    certificate: str = ""
    """A file in PEM with the gateway's certificate, for TLS; "": none."""
    private_key: str = ""
    """A file in PEM with the key of the certificate."""
    key_variable: Annotated[str, Field(min_length=1)] = "SILVA_API_KEY"
    """Environment variable (or line of .env) with the key of agents that call in. With one of its own they
    cannot use the run's other servers."""
    public_url: WebAddress | None = None
    """What programs call the gateway by if not by `host` and `port`, such as the address of a proxy."""
    lease: Above0 = 60.0
    """Seconds without a request of it after which an agent that has called in counts as gone."""
