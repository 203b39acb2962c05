"""Rewards: each is one file with its settings, whose `build()` makes a `silva.protocols.Reward`."""

REWARDS: dict[str, str] = {
    "code_tests": "silva.rewards.code_tests:CodeTests",
    "deep_research": "silva.rewards.deep_research:DeepResearch",
    "exact_match": "silva.rewards.exact_match:ExactMatch",
    "function": "silva.rewards.function:Function",
    "instructions": "silva.rewards.instructions:Instructions",
    "judge": "silva.rewards.judge:Judge",
    "letter": "silva.rewards.letter:Letter",
    "math": "silva.rewards.maths:Math",
    "token_f1": "silva.rewards.token_f1:TokenF1",
    "weighted": "silva.rewards.weighted:Weighted",
}
"""Value of `type` in the configuration -> module and settings class."""
