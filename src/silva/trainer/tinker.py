"""A trainer whose weights are at the Tinker service, or at `silva serve tinker`: LoRA over one of its models.

    samples ──> forward_backward("ppo", ...)     a loss that the service has, by its name
            └─> forward_backward_custom(loss)    any other: log-probabilities come here, the loss is computed
                                                 here, and its gradient goes back as weights
    publish ──> a sampler of these weights ──> Snapshot.sent ──> engines/tinker
    save    ──> tinker.json: where the service keeps the weights and moments of a checkpoint

Metrics are Silva's own in both ways, of the log-probabilities that come back. The service averages nothing:
normalised weights are part of the advantages. Not here: how requests are repeated (wire/tinker.py).
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from silva.algorithms import objective
from silva.algorithms.losses import CispoLoss, ClippedLoss, CrossEntropyLoss, GspoLoss, ReinforceLoss
from silva.config.parts import TinkerService
from silva.errors import CapabilityError, CheckpointError, ConfigError, NonFiniteError, RecordError
from silva.ports import FILES, crash_point
from silva.protocols import TrainerCapabilities
from silva.trainer.loss_inputs import streams
from silva.trainer.policy import IDLE, TokenLogprobs, trained
from silva.trainer.sharding.parallel import Mesh
from silva.trainer.update import Update
from silva.types import LossSpec, OptimParams, Sample, Signals, Snapshot
from silva.wire.requests import Limits, Requests, Usage
from silva.wire.tinker import faults, service

if TYPE_CHECKING:
    from tinker import SamplingClient, ServiceClient, TrainingClient
    from tinker.types import LossFnType

FILE = "tinker.json"


@dataclass(frozen=True)
class ServiceAdapter:
    """What the service makes a run with: `modules` are some of attn, mlp, unembed."""

    model: str  # its name at the service
    rank: int
    seed: int
    modules: frozenset[str]


class TinkerTrainer:
    """Implements `protocols.Trainer`. `connect` comes before everything else.

    Args:
        run: begins the names of what is saved.
        say: takes what people should know.
        requests: counts what passes cost; None: they cost nothing.
    """

    capabilities = TrainerCapabilities(
        publishes="sampler", temperatures=False, entropies=False, references=False, pipelined=True
    )

    def __init__(
        self,
        at: TinkerService,
        adapter: ServiceAdapter,
        run: str,
        *,
        say: Callable[[str], None] = lambda text: None,
        requests: Requests | None = None,
    ) -> None:
        self._requests = requests or Requests(Limits(retries=0, max_wait=0.0))
        self._settings, self._adapter, self._run, self._say = at, adapter, run, say
        self._service: ServiceClient | None = None
        self._client: TrainingClient | None = None
        self._base: SamplingClient | None = None
        self._last: Snapshot | None = None
        self._clipped: tuple[np.ndarray, ...] = ()
        self._turn = asyncio.Lock()  # calls are sent in the order in which they are made
        self.version = 0

    async def connect(self) -> None:
        """Reach the service; a run is made there by the first call that needs one, unless one is loaded."""
        if self._service is None:
            self._service = await asyncio.to_thread(service, self._settings.url, self._settings.key)

    async def score(self, samples: Sequence[Sample], needs: frozenset[str]) -> Signals:
        """As `Learner.score`: of the current policy, and of the base model as the reference."""
        if unknown := needs - self.capabilities.needs:
            raise CapabilityError(
                f"score: got the needs {sorted(unknown)}, expected some of {sorted(self.capabilities.needs)}"
            )
        _check(samples)
        logprobs = None
        if "logprobs" in needs and samples:
            async with self._turn:
                client = await self._training()
                self._requests.charge(Usage(_tokens(samples), 0))
                with faults("score"):
                    sent = client.forward(_data(samples, _weights(samples)), "cross_entropy")
            with faults("score"):
                found = await sent
            logprobs = tuple(_of_rows(samples, _logprobs(found)))
        reference = await self._references(samples) if "reference_logprobs" in needs else None
        return Signals(logprobs if samples else (), reference)

    async def forward_backward(self, samples: Sequence[Sample], loss: LossSpec) -> Mapping[str, float]:
        """As `Learner.forward_backward`, without `entropy`.

        Raises:
            CapabilityError: a loss that reads entropies, which the service does not give.
            NonFiniteError: a loss that is not finite, computed here; nothing was sent for it then.
        """
        asked, samples = samples, [sample for sample in samples if trained(sample).any()]
        _check(samples)
        async with self._turn:
            references = await self._references(samples) if loss.params.get("kl_coef", 0) else None
            update = Update(samples, references, loss, self.version, _Blamed())
            if not samples:
                return update.metrics(Mesh())
            client, named = await self._training(), _named(samples, loss)
            count = _tokens(samples)  # another loss needs a pass more for its log-probabilities
            self._requests.charge(Usage(0 if named else count, 0, trained=count))
            with faults("train"):
                if named:
                    name, inputs, params = named
                    sent = client.forward_backward(_data(samples, inputs), name, params)
                else:
                    data = _data(samples, _weights(samples))
                    sent = client.forward_backward_custom(data, lambda _, found: (_loss(update, found), {}))
        with faults("train"):
            found = await sent
        if named:
            _loss(update, [torch.from_numpy(each) for each in _logprobs(found)])
        crash_point("backward")
        self._clipped = update.clipped(asked, Mesh())
        return update.metrics(Mesh())

    async def clipped(self) -> Sequence[np.ndarray]:
        return self._clipped

    def usage(self, needs: frozenset[str], loss: LossSpec) -> Usage:
        """How often an update sends each token of its rows, after `score` for `needs`."""
        row = IDLE.replace(advantages=np.zeros(len(IDLE)))
        passes = len(needs) + bool(loss.params.get("kl_coef")) + (_named([row], loss) is None)
        return Usage(passes, 0, trained=1)

    async def optim_step(self, policy: OptimParams, critic: OptimParams | None = None) -> Mapping[str, float]:
        """One AdamW step at the service; its own metrics come back beside `lr`."""
        import tinker

        if critic is not None:
            raise CapabilityError("optim_step: got numbers for a critic, expected none: the service has none")
        params = tinker.AdamParams(
            learning_rate=policy.lr,
            beta1=policy.betas[0],
            beta2=policy.betas[1],
            eps=policy.eps,
            weight_decay=policy.weight_decay,
            grad_clip_norm=policy.max_grad_norm or 0.0,
        )
        crash_point("optim")
        async with self._turn:
            client = await self._training()
            with faults("step"):
                sent = client.optim_step(params)
        with faults("step"):
            found = await sent
        named = {name.rpartition(":")[0] or name: float(x) for name, x in (found.metrics or {}).items()}
        return {"nonfinite": 0.0, **named, "lr": policy.lr}

    async def publish(self) -> Snapshot:
        self.version += 1
        self._last = None
        return await self.snapshot()

    async def snapshot(self) -> Snapshot:
        if self._last is None:
            client = await self._training()
            with faults(f"publish version {self.version}"):
                sampler = await client.save_weights_and_get_sampling_client()
            self._last = Snapshot(self.version, sent=sampler.get_sampler_handle())
        return self._last

    async def refresh_reference(self) -> None:
        raise CapabilityError("refresh_reference: the reference at the service is the base model, for good")

    async def restart(self) -> None:
        """A run with these weights, and moments at zero."""
        path = await self._saved()
        with faults("begin again with the same weights"):
            self._client = await self._reached.create_training_client_from_state(path)
        self._last = None

    async def save(self, path: Path) -> None:
        """Have the service keep weights and moments, and write down where."""
        kept = await self._saved()
        path.mkdir(parents=True, exist_ok=True)
        state = {"path": kept, "version": self.version, "model": self._adapter.model}
        FILES.write_atomic(path / FILE, json.dumps(state, indent=1).encode())

    async def load(self, path: Path) -> None:
        """Raises CheckpointError if it is none of this trainer, or of another model."""
        try:
            state = json.loads((path / FILE).read_text())
            kept, version, model = str(state["path"]), int(state["version"]), state["model"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f'{path}: got no checkpoint of trainer.type = "tinker" ({error}), expected {FILE}'
            ) from error
        if model != self._adapter.model:
            raise CheckpointError(f"{path}: got weights of {model}, expected those of {self._adapter.model}")
        with faults(f"load {kept}", own=False):
            self._client = await self._reached.create_training_client_from_state_with_optimizer(kept)
        self.version, self._last = version, None

    async def export(self, path: Path) -> None:
        """The service keeps the weights: a name for them is written, for its own tools to download."""
        kept = await self._saved()
        path.mkdir(parents=True, exist_ok=True)
        FILES.write_atomic(path / FILE, json.dumps({"path": kept, "model": self._adapter.model}).encode())
        self._say(f"the trained weights are at the service as {kept}: `tinker checkpoint download {kept}`")

    async def close(self) -> None:
        if self._service is not None:
            with faults("end the session"):
                await self._service.close("success")
            self._service = self._client = None

    @property
    def _reached(self) -> ServiceClient:
        assert self._service is not None, "connect comes before everything else"
        return self._service

    async def _training(self) -> TrainingClient:
        if self._client is None:
            adapter, begins = self._adapter, self._settings.weights
            with faults(f"train {begins or adapter.model}", own=False):
                if begins:
                    await self._check_begins(begins)
                    made = self._reached.create_training_client_from_state(begins)
                else:
                    made = self._reached.create_lora_training_client(
                        adapter.model,
                        rank=adapter.rank,
                        seed=adapter.seed,
                        train_attn="attn" in adapter.modules,
                        train_mlp="mlp" in adapter.modules,
                        train_unembed="unembed" in adapter.modules,
                    )
                self._client = await made
        return self._client

    async def _check_begins(self, path: str) -> None:
        """Raises ConfigError if these weights are not of the model and the layers of the configuration."""
        import tinker

        adapter = self._adapter
        rest = tinker.RestClient(base_url=self._settings.url or None, api_key=self._settings.key)
        found = await rest.get_weights_info_by_tinker_path(path)
        told = {name: getattr(found, f"train_{name}") for name in ("attn", "mlp", "unembed")}
        modules = sorted(m for m, is_in in told.items() if is_in or (is_in is None and m in adapter.modules))
        for key, got, expected in (
            ("model.name", adapter.model, found.base_model),
            ("model.lora.rank", adapter.rank, found.lora_rank),
            ("trainer.modules", sorted(adapter.modules), modules),
        ):
            if got != expected:
                raise ConfigError(f"{key}: got {got}, expected {expected} as in {path}")

    async def _saved(self) -> str:
        client, run = await self._training(), re.sub(r"[^A-Za-z0-9_]+", "-", self._run)[:80].strip("-")
        with faults("save"):
            found = await client.save_state(f"{run or 'run'}-v{self.version}-{secrets.token_hex(3)}")
        return str(found.path)

    async def _references(self, samples: Sequence[Sample]) -> tuple[np.ndarray, ...]:
        """[T] per sample, of the base model; NaN without a loss."""
        import tinker

        with faults("score with the base model"):
            if self._base is None:
                self._base = await self._reached.create_sampling_client(base_model=self._adapter.model)
            self._requests.charge(Usage(_tokens(samples), 0))
            asked = [
                self._base.compute_logprobs(tinker.ModelInput.from_ints(sample.tokens.tolist()))
                for sample in samples
            ]
            found = [np.array([np.nan if x is None else x for x in await each]) for each in asked]
        rows = zip(samples, found, strict=True)
        return tuple(np.where(trained(sample), row, np.nan) for sample, row in rows)


class _Blamed:
    """Takes the blame for a loss that is not finite."""

    def blame(self, loss: torch.Tensor, trajectories: Sequence[str]) -> None:
        if not torch.isfinite(loss):
            raise NonFiniteError(
                f"the loss of {', '.join(trajectories[:4])} is {float(loss)}; nothing was trained with it"
            )


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.tokens) for sample in samples)


def _check(samples: Sequence[Sample]) -> None:
    for sample in samples:
        chosen = sample.temperatures[trained(sample)]
        if len(wrong := chosen[chosen != 1]):
            raise CapabilityError(
                f"sample of {sample.trajectory}: got a token sampled at temperature {wrong[0]}, which the "
                "service cannot train; expected 1"
            )


def _named(
    samples: Sequence[Sample], loss: LossSpec
) -> tuple[LossFnType, list[dict[str, np.ndarray]], dict[str, float]] | None:
    """The loss by its name at the service, with the inputs of each sample and its parameters; None: it has
    none whose gradient is the same."""
    _, settings, terms = objective.parse(loss)
    if streams(samples) != [""] or terms != objective.Terms():
        return None
    if isinstance(settings, CrossEntropyLoss) and settings.weighting == "none":
        return "cross_entropy", _weights(samples), {}
    name: LossFnType = "cispo"
    bounds: tuple[float, float] | None = None
    if isinstance(settings, ClippedLoss) and settings.clip_dual is None:
        if settings.balanced_clip_min_entropy is None:
            name, bounds = "ppo", (1 - settings.clip_low, 1 + settings.clip_high)
    elif isinstance(settings, CispoLoss):
        bounds = 1 - settings.clip_low, 1 + settings.clip_high
    elif isinstance(settings, ReinforceLoss):
        bounds = 1.0, 1.0  # a weight of 1, whatever the ratio
    elif isinstance(settings, GspoLoss):
        name, bounds = "gspo", (1 - settings.clip_low, 1 + settings.clip_high)
    if bounds is None:
        return None
    inputs = []
    for sample in samples:
        mask, advantages = trained(sample), sample.advantages
        if advantages is None:
            raise RecordError(f"advantages of the sample of {sample.trajectory}: got None, expected [T]")
        old = sample.logprobs if sample.old_logprobs is None else sample.old_logprobs
        if np.isnan(old[mask]).any():  # nobody sampled it: the loss says what becomes of it
            return None
        row = {"logprobs": np.where(mask, old, 0.0), "advantages": sample.loss_weights * advantages * mask}
        inputs.append(row | ({"sequence_ratio_mask": mask.astype(float)} if name == "gspo" else {}))
    return name, inputs, {"clip_low_threshold": bounds[0], "clip_high_threshold": bounds[1]}


def _weights(samples: Sequence[Sample]) -> list[dict[str, np.ndarray]]:
    return [{"weights": sample.loss_weights} for sample in samples]


def _data(samples: Sequence[Sample], inputs: Sequence[Mapping[str, np.ndarray]]) -> list[Any]:
    """Each sample as the service has it: what is read, and what is to follow each token of it."""
    import tinker

    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(sample.tokens[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData(sample.tokens[1:].astype(np.int64), "int64"),
                **{
                    name: tinker.TensorData(np.asarray(values[1:], np.float32), "float32")
                    for name, values in row.items()
                },
            },
        )
        for sample, row in zip(samples, inputs, strict=True)
    ]


def _logprobs(found: Any) -> list[np.ndarray]:
    """[T - 1] per sample, of the tokens after the first."""
    return [np.asarray(out["logprobs"].data, np.float32) for out in found.loss_fn_outputs]


def _of_rows(samples: Sequence[Sample], rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """[T] per sample, NaN without a loss."""
    return [
        np.where(trained(sample), np.concatenate([[np.nan], row]), np.nan)
        for sample, row in zip(samples, rows, strict=True)
    ]


def _loss(update: Update, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of all samples, from their log-probabilities [T - 1]; its metrics are the update's."""
    masks = [torch.from_numpy(trained(sample)[1:]) for sample in update.samples]
    logprobs = torch.cat([row[mask] for row, mask in zip(rows, masks, strict=True)])
    numbers = torch.cat([torch.full((int(mask.sum()),), i) for i, mask in enumerate(masks)])
    return update.loss(TokenLogprobs(logprobs, None, numbers), range(len(masks)))
