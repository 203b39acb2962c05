"""Settings of the trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from silva.config.field_types import refuse_idle
from silva.config.parts import TinkerService, TrainerSettings
from silva.config.sections import Above0, CriticSettings, Optimizer, Positive, Section
from silva.errors import CapabilityError

if TYPE_CHECKING:
    from silva.algorithms.settings import Algorithm
    from silva.assembly import Assembly
    from silva.protocols import Publishes, Trainer
    from silva.trainer.sharding.parallel import Mesh
    from silva.trainer.transfer import WeightTransfer


Way = Literal["auto", "shared", "folder", "shm", "nccl"]


class Parallel(Section):
    """How a model is divided among the ranks of a trainer."""

    dp_shard: Annotated[int, Field(ge=-1)] = -1
    """Ranks among which one copy of the model is divided (FSDP2); -1: all that `dp_replicate` leaves."""
    dp_replicate: Positive = 1
    """Copies of the model."""
    cp: Positive = 1
    """Ranks that share the tokens of each pass, for long contexts; they are among those of a copy."""
    cp_style: Literal["all_gather", "ulysses"] = "all_gather"
    """What they exchange: keys and values of all tokens, or tokens for heads, which must then divide."""
    tp: Positive = 1
    """Ranks that share every product of a layer (tensor parallel); the fastest links should join them."""
    ep: Positive = 1
    """Ranks among which a layer's experts are divided (expert parallel); they are among those of a copy."""
    pp: Positive = 1
    """Stages of consecutive layers, through which micro-batches follow one another (pipeline parallel)."""
    pp_schedule: Literal["1f1b", "interleaved_1f1b"] = "1f1b"
    """In which order; interleaved, a rank has two runs of layers and waits less."""
    offload: bool = False
    """Keep weights, gradients and moments in the memory of the CPU, and step there (FSDP2's CPU offload)."""

    @field_validator("dp_shard")
    @classmethod
    def _is_a_number_of_ranks(cls, given: int) -> int:
        if given == 0:
            raise ValueError("expected 1 or more ranks, or -1 for all")
        return given

    @model_validator(mode="after")
    def _every_key_does_something(self) -> Parallel:
        alone = {"cp_style": ("cp = 1", self.cp), "pp_schedule": ("pp = 1", self.pp)}
        refuse_idle(self, {key: why for key, (why, ranks) in alone.items() if ranks == 1})
        return self

    def shape(self, ranks: int) -> dict[str, int]:
        """Of the mesh of so many ranks: stages, copies of the model, parts of each copy's parameters, tp.

        Ranks that share tokens have parts of their own.

        Raises:
            CapabilityError: so many ranks cannot be divided in this way.
        """
        copies, cp, tp, pp = self.dp_replicate, self.cp, self.tp, self.pp
        others = copies * cp * tp * pp
        shares = ranks // others if self.dp_shard == -1 else self.dp_shard
        if shares * others != ranks:
            raise CapabilityError(
                f"trainer.parallel: got {ranks} ranks for pp = {pp}, dp_replicate = {copies}, cp = {cp}, "
                f"tp = {tp} and dp_shard = {self.dp_shard}, expected {max(shares, 1) * others}: see "
                "trainer.ranks"
            )
        parts = shares * cp
        if parts % self.ep:
            raise CapabilityError(
                f"trainer.parallel.ep = {self.ep}: experts are divided among the {parts} ranks of a copy "
                f"(dp_shard x cp); expected a divisor of {parts}"
            )
        return {"pp": pp, "copies": copies, "parts": parts, "tp": tp}


class LocalTrainerSettings(TrainerSettings):
    """In-process torch, updating the parameters that the local engine samples from."""

    shares: ClassVar[bool] = True
    type: Literal["local"] = "local"
    ranks: Positive = 1
    """Processes that share each update; more than 1 take placement.type = "services"."""
    parallel: Parallel = Parallel()
    transfer: Way = "auto"
    """How weights reach the engine: `shared` (it reads the trainer's own), `folder` (files of the run), `shm`
    (files in shared memory, for engines on the trainer's machine), `nccl` (into the GPUs of vLLM, without
    files); `auto`: `shared` if it is in the same process, else `folder`."""
    optimizer: Optimizer = Optimizer()
    critic: CriticSettings = CriticSettings()
    updates_per_step: Positive = 1
    """Optimizer steps a batch is split into."""
    micro_batch_tokens: Positive = 4096
    """Token budget of one forward and backward; tokens that rows share count once."""
    peak_flops: Above0 | None = None
    """FLOP/s of a device, of which `perf/mfu` is a share; none: by its data sheet (bfloat16), or measured."""
    self_check: bool = True
    """Compare the gradient of the first rows of a run with that of one row at a time, and say so."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, a third more time."""
    replay_routing: bool = False
    """Of a mixture of experts: tokens go to the experts that they went to when they were sampled (R3,
    docs/moe.md). The engine records them."""
    exact: bool = False
    """The trainer computes a sampled token's log-probability to the last bit as the sampler did: on CPU, with
    Silva's own engine (docs/engines.md)."""
    max_nonfinite: Positive = 3
    """Stop after this many updates in a row, of policy or critic, whose loss or gradient is not finite."""

    def build(
        self,
        context: Assembly,
        algorithm: Algorithm | None = None,
        *,
        transfer: WeightTransfer | None = None,
        mesh: Mesh | None = None,
    ) -> Trainer:
        """`algorithm`: what it needs beside the policy, a reference or a critic, is made too. `transfer`: how
        weights reach the engine; None: it shares them. `mesh`: of this process and others.

        Raises:
            CapabilityError: the ranks are not there.
        """
        size = mesh.size if mesh else 1
        if self.ranks > 1 and self.ranks != size:
            raise CapabilityError(
                f"trainer.ranks = {self.ranks}: got {size} in this trainer, expected as many"
            )
        self.parallel.shape(size)
        if self.parallel.offload and size == 1:
            got = "got a trainer of one process, expected trainer.ranks above 1"
            raise CapabilityError(f"trainer.parallel.offload = true: {got}")
        from silva.trainer.exact import exact_model
        from silva.trainer.learner import Learner
        from silva.trainer.local import LocalTrainer
        from silva.trainer.reference import load_reference

        model = context.model
        if self.exact:
            model = exact_model(model, self, prepack=getattr(context.config.engine, "prepack_weights", True))
        learner = Learner(
            model,
            self,
            seed=context.config.seed,
            reference=load_reference(context, algorithm) if algorithm else False,
            critic=bool(algorithm and algorithm.critic),
            mesh=mesh,
            say=context.say,
        )
        return LocalTrainer(learner, transfer, compute=context.compute)


class TinkerTrainerSettings(TrainerSettings):
    """LoRA at the Tinker service, or at `silva serve tinker`, as `[engine]` says which."""

    remote: ClassVar[bool] = True

    type: Literal["tinker"] = "tinker"
    optimizer: Optimizer = Optimizer()
    updates_per_step: Positive = 1
    """Optimizer steps a batch is split into."""
    modules: Annotated[tuple[Literal["attn", "mlp", "unembed"], ...], Field(min_length=1)] = ("attn", "mlp")
    """Which layers get adapters, in place of `model.lora.targets`: the service knows these three kinds."""

    def build(
        self, context: Assembly, algorithm: Algorithm | None = None, *, transfer: WeightTransfer | None = None
    ) -> Trainer:
        """`transfer` is none of its business: weights stay at the service.

        Raises:
            CapabilityError: what the service cannot do of `[model]`.
        """
        from silva.models.loading import name_of
        from silva.trainer.tinker import ServiceAdapter, TinkerTrainer

        config = context.config
        at, lora = config.engine, config.model.lora
        if not isinstance(at, TinkerService):
            raise CapabilityError(
                f'trainer.type = "tinker" with engine.type = "{at.type}": the weights stay at the service; '
                'expected engine.type = "tinker"'
            )
        if lora is None:
            raise CapabilityError(
                'model.lora: got none with trainer.type = "tinker", which trains adapters; expected '
                "model.lora.rank"
            )
        if ours := sorted(lora.model_fields_set - {"rank"}):
            raise CapabilityError(
                f"model.lora.{ours[0]}: the service decides it; expected model.lora.rank alone, and "
                "trainer.modules"
            )
        name = at.model or name_of(config.model)
        adapter = ServiceAdapter(name, lora.rank, config.seed, frozenset(self.modules))
        engine: Any = context.engine  # one limit of costs for both
        return TinkerTrainer(at, adapter, config.name, say=context.say, requests=engine.requests)


def published(way: Way, loads: frozenset[str], lora: bool) -> Publishes:
    """What to publish for an engine that loads these kinds of snapshots.

    Args:
        way: `trainer.transfer`.
        lora: the model has adapters.

    Raises:
        CapabilityError: this engine cannot be reached in this way.
    """
    wrong = f'trainer.transfer = "{way}": '
    if "shared" in loads:
        if way in ("auto", "shared"):
            return "shared"
        raise CapabilityError(
            f'{wrong}the engine is in the trainer\'s process and reads its parameters; expected "auto", or '
            'placement.type = "services"'
        )
    if way == "shared":
        raise CapabilityError(f'{wrong}the engine is in another process; expected "auto", "folder" or "shm"')
    if way == "nccl":
        if "sent" not in loads:
            raise CapabilityError(f"{wrong}expected servers of vLLM, with VLLM_SERVER_DEV_MODE=1")
        if lora:
            raise CapabilityError(f'{wrong}vLLM takes adapters as files; expected "folder" or "shm"')
        return "sent"
    if "parameters" in loads:
        return "parameters"
    return "adapter" if lora and "adapter" in loads else "folder"
