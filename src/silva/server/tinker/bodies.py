"""The fields of the service's JSON requests, with a limit on every number and list.

What cannot be done is refused with words, never ignored: such a field may only have the value that changes
nothing. The names of fields are the SDK's.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from silva.server.bodies import MAX_TOKENS, STOP_CHARACTERS, STOPS, Temperature
from silva.server.parsing import Body
from silva.types import SamplingParams

ALPHA = 32.0
"""Of every LoRA, whatever its rank: the service has no field for it, and the cookbook's learning rates assume
that it does not depend on the rank."""
RANKS = 512
TEXT = 4096
SAMPLES = 1024  # of one request
TOP = 20
CELLS = 1 << 20  # of a tensor in JSON
YEARS = 10 * 365 * 86400
NAMES = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"
Id = Annotated[str, Field(min_length=1, max_length=256)]
Text = Annotated[str, Field(max_length=TEXT)]
Name = Annotated[str, Field(pattern=NAMES, max_length=128)]
"""Of a checkpoint: it cannot lead out of a folder, though folders are not named after it."""
Path = Annotated[str, Field(pattern=r"^tinker://[^/]+/(sampler_)?weights/[^/]+$", max_length=512)]
Seq = Annotated[int, Field(ge=0, lt=1 << 31)]
Seconds = Annotated[int, Field(ge=1, le=YEARS)] | None
Metadata = dict[Text, Any] | None


def refusing(why: str) -> BeforeValidator:
    """Of a field of the SDK that may only have the value that changes nothing. `why`: what cannot be done."""

    def check(got: Any) -> Any:
        if got:
            raise ValueError(f"{why}; leave it out")
        return got

    return BeforeValidator(check)


NoToken = Annotated[None, refusing("this server has no access tokens: publish the checkpoint")]
NoProject = Annotated[None, refusing("this server has no projects")]
Session = Annotated[None, refusing("expected a sampling session")]


class SessionBody(Body):
    tags: Annotated[list[Text], Field(max_length=256)] = Field(default_factory=list)
    user_metadata: Metadata = None
    sdk_version: Text = ""
    project_id: NoProject = None
    display_name: Text | None = None
    type: Literal["create_session"] = "create_session"


class HeartbeatBody(Body):
    session_id: Id
    type: Literal["session_heartbeat"] = "session_heartbeat"


class OptimizerBody(Body):
    type: Literal["adamw"] = "adamw"


class LoraBody(Body):
    rank: Annotated[int, Field(ge=0, le=RANKS)]
    """0: all weights are trained."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateBody(Body):
    session_id: Id
    model_seq_id: Seq
    base_model: Text
    user_metadata: Metadata = None
    lora_config: LoraBody
    optimizer_config: OptimizerBody = OptimizerBody()
    type: Literal["create_model"] = "create_model"


class InfoBody(Body):
    model_id: Id
    type: Literal["get_info"] = "get_info"


class Ordered(Body):
    """A request that has its place in the order of a model."""

    model_id: Id
    seq_id: Annotated[int, Field(ge=1, lt=1 << 31)]


class AdamBody(Body):
    learning_rate: Annotated[float, Field(ge=0, le=1e6)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=0, le=1)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0


class OptimBody(Ordered):
    adam_params: AdamBody
    type: Literal["optim_step"] = "optim_step"


class SaveBody(Ordered):
    path: Name | None = None
    ttl_seconds: Seconds = None
    overwrite: bool = False
    user_metadata: dict[Text, Text] | None = None
    type: Literal["save_weights"] = "save_weights"


class SamplerBody(Ordered):
    path: Name | None = None
    sampling_session_seq_id: Seq | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Seconds = None
    user_metadata: dict[Text, Text] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class ExternalBody(Ordered):
    path: Name
    ttl_seconds: Seconds = None
    age_encryption_recipients: Annotated[None, refusing("this server encrypts no files")] = None
    type: Literal["save_weights_external"] = "save_weights_external"


class LoadWeightsBody(Ordered):
    """Into a model that is there."""

    path: Path
    optimizer: bool
    weights_access_token: NoToken = None
    type: Literal["load_weights"] = "load_weights"


class CreateLoadedBody(Body):
    """A new model from a checkpoint."""

    session_id: Id
    model_seq_id: Seq
    base_model: Text | None = None
    user_metadata: Metadata = None
    path: Path
    optimizer: bool
    optimizer_config: OptimizerBody = OptimizerBody()
    weights_access_token: NoToken = None
    type: Literal["load_weights"] = "load_weights"


class SamplingSessionBody(Body):
    session_id: Id
    sampling_session_seq_id: Seq
    base_model: Text | None = None
    model_path: Text | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class ChunkBody(Body):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=1 << 20)]


class PromptBody(Body):
    chunks: Annotated[list[ChunkBody], Field(min_length=1, max_length=4096)]

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]


class ParamsBody(Body):
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop: (
        Annotated[str, Field(min_length=1, max_length=STOP_CHARACTERS)]
        | Annotated[
            list[Annotated[str, Field(min_length=1, max_length=STOP_CHARACTERS)]], Field(max_length=STOPS)
        ]
        | Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=STOPS)]
        | None
    ) = None
    temperature: Temperature = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0

    def params(self, room: int, seed: int, ends: tuple[int, ...]) -> SamplingParams:
        """For an engine.

        Args:
            room: tokens that may be sampled.
            ends: the model's own end tokens; an empty `stop` turns them off.
        """
        given = [self.stop] if isinstance(self.stop, str) else self.stop
        tokens = tuple(each for each in given or () if isinstance(each, int))
        return SamplingParams(
            max_tokens=min(room, self.max_tokens or room),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            stop=tuple(each for each in given or () if isinstance(each, str)),
            stop_token_ids=() if given == [] else (*ends, *tokens),
            seed=seed,
        )


Indices = Annotated[list[Annotated[int, Field(ge=0, le=CELLS)]], Field(max_length=CELLS + 1)]


class TargetsBody(Body):
    """Tokens to be scored at places of a prompt, dense or sparse by rows; -1 names none."""

    data: Annotated[list[Annotated[int, Field(ge=-1, lt=1 << 31)]], Field(max_length=CELLS)]
    dtype: Literal["int64"]
    shape: Annotated[list[Annotated[int, Field(ge=0, le=CELLS)]], Field(min_length=2, max_length=2)]
    sparse_crow_indices: Indices | None = None
    sparse_col_indices: Indices | None = None


class SampleBody(Body):
    sampling_session_id: Id
    seq_id: Annotated[int, Field(ge=0, lt=1 << 63)]
    num_samples: Annotated[int, Field(ge=1, le=SAMPLES)] = 1
    prompt: PromptBody
    sampling_params: ParamsBody
    prompt_logprobs: bool = False
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=TOP)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=TOP)] = 0
    target_prompt_logprobs: TargetsBody | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=TOP)] = 0
    record_stability_info: Annotated[Literal[False], refusing("this server has no stable_reinforce")] = False
    base_model: Session = None
    model_path: Session = None
    type: Literal["sample"] = "sample"


class FutureBody(Body):
    request_id: Id
    allow_metadata_only: bool = False


class WeightsBody(Body):
    tinker_path: Text


class TtlBody(Body):
    ttl_seconds: Seconds = None


REASONS = ("success", "errored", "interrupted")
"""Why a client has ended its session."""
Reason = Literal["success", "errored", "interrupted"]


class ReasonBody(Body):
    type: Reason


class FinishBody(Body):
    reason: ReasonBody | None = None
    detail: Text | None = None


class SearchedOwner(Body):
    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: Annotated[list[Text], Field(max_length=10)] = Field(default_factory=list)


class SearchedStatus(Body):
    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: Annotated[list[Reason], Field(min_length=1, max_length=16)] | None = None

    def fits(self, finished: int) -> bool:
        """Whether a session is so, by its place in the database. None is cancelled or failed here."""
        ended = finished > 1 and REASONS[finished - 2] in (self.reasons or REASONS)
        return {"active": not finished, "client_finished": ended}.get(self.type, False)


class SearchCursor(Body):
    last_created_at: Text
    last_session_id: Id


class SearchBody(Body):
    session_id: Id | None = None
    project_ids: NoProject = None
    user_metadata: dict[Text, Text] = Field(default_factory=dict)
    display_name: Annotated[Text, Field(min_length=1)] | None = None
    owner: SearchedOwner = SearchedOwner()
    statuses: Annotated[list[SearchedStatus], Field(min_length=1, max_length=16)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SearchCursor | None = None

    def names(self, session: str, name: str) -> bool:
        """Whether it asks for a session, by its id or by words of its name: either suffices."""
        if self.session_id is None and self.display_name is None:
            return True
        words = (self.display_name or "").casefold().split()
        named = self.display_name is not None and all(word in name.casefold() for word in words)
        return named or session == self.session_id
