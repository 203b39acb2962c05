"""What step_cost.py and training_cost.py reckon with: a model, a machine, the episodes of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

BF16, FP32 = 2, 4


@dataclass(frozen=True)
class Model:
    """A decoder. `active`: parameters that a token goes through, if that is not all (mixture of experts).

    Attributes:
        attended: heads * size of a head, `of_head`. cached: the same of keys (and of values).
        experts, chosen: of a layer; 0 without experts.
        width: bytes of a weight or activation in a pass of training.
    """

    parameters: float
    layers: int
    hidden: int
    attended: int
    cached: int
    vocabulary: int
    tied: bool = False
    active: float = 0.0
    experts: int = 0
    chosen: int = 0
    of_head: int = 128
    width: int = BF16

    @property
    def head(self) -> float:
        return float(self.vocabulary * self.hidden)

    @property
    def body(self) -> float:
        """Parameters that multiply a token, without embedding and head."""
        return (self.active or self.parameters) - self.head * (1 if self.tied else 2)

    @property
    def cache(self) -> float:
        """Bytes of keys and values of a token."""
        return 2.0 * BF16 * self.layers * self.cached

    @property
    def shared(self) -> float:
        """Parameters of no expert."""
        if not self.experts:
            return self.parameters
        return self.active - (self.parameters - self.active) * self.chosen / (self.experts - self.chosen)

    def read(self, batch: float) -> float:
        """Bytes of the weights that a decoding step reads. Of experts those that any of `batch` tokens chose,
        if each chooses at random: 1 - (1 - chosen / experts) ** batch of them."""
        if not self.experts:
            return BF16 * self.parameters
        touched = 1 - (1 - self.chosen / self.experts) ** batch
        return BF16 * (self.shared + (self.parameters - self.shared) * touched)


@dataclass(frozen=True)
class Machine:
    """Nodes of GPUs. The second half are shares of the first that programs reach: assumptions.

    Attributes:
        flops: dense bfloat16. memory: bytes. bandwidth: of memory, bytes/s.
        link: bytes/s in one direction from a GPU to the others of its node; net: to other nodes.
        disk: bytes/s that a node reads or writes; storage: all nodes together, of a file system they share.
        trained: of `flops` in training: 0.35 is torchtitan's with 8B on 8 H100 and torch.compile.
        prefilled: of `flops` in reading prompts.
        streamed: of `bandwidth` in decoding. launch: seconds of a decoding step beside memory and arithmetic.
            Both are fitted to vLLM with 8B and one request on an H100 and on an A100.
        moved: of `link` and `net` in collectives. hop: seconds of one step of a collective.
        hidden: of arithmetic, behind which weights are gathered. 0: what computes moves them, too.
        most: requests that one engine runs at once. room: of `memory` that weights and cache may take.
        lost: GPU-hours per failure that ends a job. 50,677: Llama 3, 419 failures of 16,384 GPUs in 54 days.
        restart: seconds until training goes on after a failure.
    """

    flops: float = 989e12
    memory: float = 80e9
    bandwidth: float = 3.35e12
    link: float = 450e9
    net: float = 50e9
    disk: float = 5e9
    storage: float = 100e9
    node: int = 8
    trained: float = 0.35
    prefilled: float = 0.50
    streamed: float = 0.85
    moved: float = 0.8
    launch: float = 0.7e-3
    hop: float = 5e-6
    hidden: float = 1.0
    most: int = 256
    room: float = 0.9
    lost: float = 50_677.0
    restart: float = 600.0

    def between(self, ranks: int, stride: int = 1) -> float:
        """Bytes/s of a collective over so many GPUs, every `stride`-th. Each byte enters a node once, through
        the cards of those in it, and is then handed on inside: so nodes are connected by `node * net` at
        best (bus bandwidth of nccl-tests)."""
        if ranks * stride <= self.node:
            return self.moved * self.link
        return self.moved * min(self.link, max(1, self.node // stride) * self.net)

    def pairwise(self, ranks: int) -> float:
        """Bytes/s of what each of so many GPUs sends to one other, or another part to each."""
        return self.moved * (self.link if ranks <= self.node else self.net)


@dataclass(frozen=True)
class Task:
    """The episodes of a step: `groups` tasks, `size` episodes each.

    Attributes:
        prompt: tokens that a group shares. reply, observed: tokens of a turn.
        spread: sigma of the log-normal of an episode's length, which is cut at `cut` times its mean (what
            rollout.limits does; the mean is then a little lower than it says).
        tool_seconds: that the environment takes for a turn.
        updates: optimizer steps of a step of RL. scores: forward passes over the batch beside training
            (log-probabilities before the updates, of a reference).
        level: batches that may be in flight behind the one that is trained (rollout.max_async_level).
    """

    groups: int = 64
    size: int = 16
    prompt: int = 512
    turns: int = 1
    reply: int = 2048
    observed: int = 0
    spread: float = 0.6
    cut: float = 4.0
    tool_seconds: float = 0.0
    updates: int = 1
    scores: int = 1
    level: int = 1

    @property
    def episodes(self) -> int:
        return self.groups * self.size

    @property
    def sampled(self) -> float:
        return float(self.episodes * self.turns * self.reply)

    @property
    def row(self) -> float:
        """Tokens of an episode when it ends."""
        return float(self.prompt + self.turns * (self.reply + self.observed))

    @property
    def flat(self) -> float:
        """Tokens of the step, a row for each episode."""
        return self.episodes * self.row

    @property
    def a_row_a_turn(self) -> float:
        """Tokens of the step if each turn is a row of its own, as where history is rendered again."""
        turn = self.reply + self.observed
        return float(self.episodes * (self.turns * self.prompt + turn * self.turns * (self.turns + 1) / 2))

    @property
    def unique(self) -> float:
        """The same as a trie: a prompt counts once for its group, history once for its episode."""
        return float(self.groups * self.prompt) + self.episodes * (self.row - self.prompt)

    @cached_property
    def longest(self) -> float:
        """Tokens of the longest episode of an update when it ends, on average over the updates."""
        longest = [max(self.lengths[update :: self.updates]) for update in range(self.updates)]
        return self.row + sum(longest) / self.updates - self.turns * self.reply

    @property
    def context(self) -> float:
        """Tokens that a token attends to, on average."""
        return self.row / 2

    @cached_property
    def lengths(self) -> tuple[float, ...]:
        """Sampled tokens of each episode: the quantiles of the log-normal, in a fixed order in which long and
        short ones are mixed."""
        mean = float(self.turns * self.reply)
        if not self.spread:
            return (mean,) * self.episodes
        normal, golden = NormalDist(0, self.spread), (math.sqrt(5) - 1) / 2
        count, middle = self.episodes, math.log(mean) - self.spread**2 / 2
        places = sorted(range(count), key=lambda i: i * golden % 1.0)
        drawn = (math.exp(middle + normal.inv_cdf((i + 0.5) / count)) for i in places)
        return tuple(min(length, self.cut * mean) for length in drawn)
