"""The sections of a run's configuration: every key, its default and its meaning.

Only pydantic here, so that help stays instant. Sections whose variants a registry lists (environments,
rollout, algorithm, engine, trainer, placement) are declared beside what they set.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from silva.wire.transport import part_address, web_address

Positive = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
"""Of a moving average: 1 would never take up anything new."""
NotNegative = Annotated[float, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]


WebAddress = Annotated[str, AfterValidator(web_address)]
PartAddress = Annotated[str, AfterValidator(part_address)]
"""Of a part of Silva in another process, or of an inference server."""


class Section(BaseModel):
    """Strict: unknown keys and silent conversions ("8" for 8) are errors; integers do for floats."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _has_64_bits(cls, value: object) -> object:
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError("expected an integer of at most 64 bits, as TOML has them")
        return value


class Lora(Section):
    rank: Positive = 16
    """Rank of the two factors of an adapter: numbers for each row and column of a layer."""
    alpha: float = 32.0
    """The adapter is scaled by alpha / rank."""
    dropout: Fraction = 0.0
    """Share of the inputs of an adapter that is dropped in training."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers that get an adapter, and of the weights of experts (docs/moe.md); not the
    head of a model whose embeddings it shares."""


class PretrainedModel(Section):
    type: Literal["pretrained"] = "pretrained"
    name: str = "SmolLM2-135M-Instruct"
    """Hub id, folder, GGUF file, or the packaged SmolLM2-135M-Instruct (needs no download)."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What is computed in; masters of trained weights, adapters and moments are float32 in any case."""
    lora: Lora | None = None
    """Adapters of low rank instead of full fine-tuning."""


class TinyModel(Section):
    """A small random transformer with a byte tokenizer: for tests and for learning from scratch."""

    type: Literal["tiny"] = "tiny"
    layers: Positive = 2
    """Transformer layers."""
    width: Positive = 64
    """Numbers of a hidden state."""
    heads: Positive = 4
    """Heads of queries; they divide the width."""
    kv_heads: Positive = 2
    """Heads of keys and values, which queries share; they divide the heads."""
    context: Positive = 2048
    """The most tokens that it reads."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """What weights and activations are computed in."""
    lora: Lora | None = None


Model = Annotated[PretrainedModel | TinyModel, Field(discriminator="type")]


class Sampling(Section):
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 samples greedily."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The likeliest tokens that make up this share of the probability; 1: all."""
    top_k: Natural = 0
    """0 switches it off."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Tokens less likely than this share of the likeliest one are left out; 0: none."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Stop strings, besides those of the environment's format."""


class Rendering(Section):
    history: Literal["keep", "template"] = "keep"
    """`keep`: earlier turns stay as sampled. `template`: the template rewrites them (each turn a new row)."""
    tools: Literal[
        "auto", "hermes", "tags", "qwen_xml", "glm", "llama", "mistral", "deepseek", "kimi", "pythonic"
    ] = "auto"
    """How tool calls are written. `auto`: as the chat template does it, otherwise as `hermes`, JSON in
    <tool_call>. `tags`: plain tags such as <search>...</search>. docs/models.md shows all."""
    system: str | None = None
    """System message used where the environment gives none; null leaves it to the template."""
    result: str | None = None
    """With `tags`: how a result follows its call in the same reply, {} being the result. null: a new turn."""

    @model_validator(mode="after")
    def _has_a_place_for_results(self) -> Self:
        if self.result is not None and self.result.count("{}") != 1:
            raise ValueError(f"result: got {self.result!r}, expected a text with one {{}} for the result")
        if self.result is not None and (self.tools != "tags" or self.history != "keep"):
            raise ValueError(
                'result needs tools = "tags" and history = "keep": other calls end the turn of the model'
            )
        return self


class EpisodeLimits(Section):
    """Limits of one episode."""

    max_turns: Positive = 8
    """Replies."""
    max_turn_tokens: Positive = 128
    """Tokens of one reply, thoughts and calls included."""
    max_episode_tokens: Positive = 2048
    """Tokens of the longest context: prompt, answers and observations."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that an environment may take over one episode; waiting for the engine does not count."""


class ContextSettings(Section):
    """What the model is shown of an episode so far. The task, all that comes before its first reply, always
    stays, and so does the newest observation."""

    strip_thoughts: bool = False
    """Earlier replies are shown without their thoughts, whatever the chat template does with them."""
    overflow: Literal["end", "drop_oldest"] = "end"
    """When the context leaves no room for a reply. `end`: replies get shorter until the episode ends as
    `max_tokens`, with the score so far. `drop_oldest`: the oldest turns go until `limits.max_turn_tokens`
    fit below `limits.max_episode_tokens`, for good; it ends only if that is not enough."""


class FullContext(ContextSettings):
    """The whole dialogue."""

    type: Literal["full"] = "full"


class LastTurns(ContextSettings):
    """The task and the last turns, as messages."""

    type: Literal["last_turns"] = "last_turns"
    turns: Natural = 3
    """How many earlier replies are shown, each with the observation that it answered."""


class SingleTurn(ContextSettings):
    """A dialogue of one turn: the task, the last turns as text, and the newest observation are one user
    message."""

    type: Literal["single_turn"] = "single_turn"
    turns: Natural = 3
    """How many earlier replies are shown, each with the observation that it answered."""
    strip_thoughts: bool = True
    """Earlier replies are shown without their thoughts."""


class HideObservations(ContextSettings):
    """The whole dialogue with "..." in place of older observations (Act-PRM)."""

    type: Literal["hide_observations"] = "hide_observations"
    first: Positive = 1
    """So many observations at the start are shown; the task is the first one."""
    last: Positive = 1
    """So many of the newest are shown."""
    roles: Annotated[tuple[Literal["user", "tool"], ...], Field(min_length=1)] = ("user", "tool")
    """Whose messages are hidden: `["tool"]` hides results of tools and keeps what users say."""


EpisodeContext = Annotated[
    FullContext | LastTurns | SingleTurn | HideObservations, Field(discriminator="type")
]


class Optimizer(Section):
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Learning rate of AdamW after the warm-up."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of the two moments for each update."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled: each update takes lr times this share of a weight away."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up, down to `min_lr_ratio` at the last update."""
    warmup: Natural = 0
    """Updates over which the learning rate rises from 0."""
    min_lr_ratio: Fraction = 0.0
    """The last learning rate of a schedule that falls, as a share of `lr`."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """A gradient with a larger norm is scaled to it; null: never."""


class CriticSettings(Section):
    """Of recipes that ask for values."""

    trunk: Literal["own", "policy"] = "own"
    """`own`: a copy of the model that learns values. `policy`: a head on the policy's hidden states alone."""
    optimizer: Optimizer = Optimizer(lr=1e-5)
    clip: Annotated[float, Field(gt=0)] | None = 0.5
    """How far one update's loss may pull a value, in units of reward."""
    warmup: Natural = 0
    """Updates at the start in which the critic learns and the policy waits."""


class WarmStart(Section):
    """Supervised steps on scripted play before RL (environments that can play themselves)."""

    steps: Positive = 50
    """Updates, at most."""
    episodes_per_step: Positive = 32
    """Episodes imitated in one update."""
    mistakes: Fraction = 0.0
    """Share of the expert's moves replaced by random ones that are not imitated: it shows how to recover."""
    noise: Fraction = 0.0
    """Share replaced by random ones that are imitated too: a teacher to surpass."""
    stop_success: Fraction | None = None
    """End early once the policy succeeds so often on training tasks: seeds differ in when they learn."""
    optimizer: Optimizer = Optimizer(lr=1e-3)


class Eval(Section):
    every: Natural = 10
    """Steps between evaluations on held-out tasks; 0 leaves only the first and the last."""
    tasks: Positive = 128
    """Held-out tasks of each environment that are played; all of them where there are fewer."""
    samples_per_task: Positive = 1
    """Episodes of each held-out task."""
    pass_at: tuple[Positive, ...] = ()
    """The k of pass@k; none given: all samples of a task, and half of them."""
    sampling: Sampling = Sampling()

    @model_validator(mode="after")
    def _has_samples(self) -> Self:
        if wrong := [k for k in self.pass_at if k > self.samples_per_task]:
            raise ValueError(
                f"pass_at: got {wrong[0]}, expected at most samples_per_task = {self.samples_per_task}, as "
                "pass@k cannot be estimated from fewer samples"
            )
        return self

    @property
    def pass_sizes(self) -> list[int]:
        usual = (self.samples_per_task // 2, self.samples_per_task)
        return [k for k in dict.fromkeys(self.pass_at or usual) if k > 1 or self.pass_at]


Language = Literal[
    "en", "de", "fr", "es", "it", "pt", "nl", "ru", "el", "ar", "he", "hi", "th", "ko", "ja", "zh"
]


class Synth(Section):
    """`silva synth`: rows to train on, from episodes of training tasks. All keys below `sampling` may change
    without an episode being played again."""

    tasks: Positive = 128
    """Training tasks of each environment that are played; all of them where there are fewer."""
    samples_per_task: Positive = 4
    """Episodes of each task."""
    sampling: Sampling = Sampling()
    best: Natural = 1
    """So many rows of each task are kept, those with the highest reward; 0: all."""
    only_solved: bool = True
    """Leave out episodes without success, in environments that report it."""
    min_reward: float | None = None
    """The least raw reward of a row; null: any."""
    max_rows: Positive | None = None
    """The most rows that are written, those of the first tasks; null: all."""
    min_chars: Natural = 0
    """The least characters of all replies of an episode, thoughts included."""
    max_chars: Positive | None = None
    """The most characters of all its replies; null: any number."""
    languages: tuple[Language, ...] = ()
    """Leave out episodes with a reply in another language; none given: any. Short replies, formulas and code
    count as every language in their script."""
    max_repetition: Fraction = 0.5
    """The largest share of a reply's words that may stand in repeated sequences of 5; 1: any."""
    near_duplicates: Annotated[float, Field(gt=0, le=1)] | None = None
    """Leave out episodes that share so much of their sequences of 5 words with an earlier row (Jaccard
    index), 0.8 for example; null: only equal ones. Needs 'silva[synth]'."""
    decontaminate: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Leave out episodes that share `ngram` words in a row with a question of these: names of suites, files
    or folders of rows, data sets of the hub."""
    ngram: Positive = 13
    """Words in a row, for `decontaminate`."""


class Checkpoint(Section):
    every: Natural = 10
    """Steps between checkpoints; 0 leaves only the last."""
    keep: Positive = 2
    """Newest checkpoints to keep."""
    keep_best: bool = True
    """Keep the best on evaluation too."""


class Foretold(Section):
    """Of one step, as `silva rl --dry-run --probe` writes it; the run says at its end how wrong it was."""

    seconds: NotNegative | None = None
    """Of a step, without evaluation and checkpoint."""
    sampling: NotNegative | None = None
    """Seconds of it in which nothing is trained."""
    training: NotNegative | None = None
    """Seconds of it."""
    publishing: NotNegative | None = None
    """Seconds of it in which new weights travel to the engine."""
    engine_idle: Fraction | None = None
    """Share of the time in which no request is in flight."""
    trainer_idle: Fraction | None = None
    """Share of the time in which the trainer has nothing to do."""
    age: NotNegative | None = None
    """Versions between the policy that sampled a token and the one that is trained on it, the mean."""
    tokens: NotNegative | None = None
    """Sampled in a step."""
    memory: NotNegative | None = None
    """GiB at most of the process that runs the loop."""
