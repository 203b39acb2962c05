"""Advantages, losses, KL estimators, filters and masked reductions: pure functions of tensors.

The registry names recipes, each a full setting of all of them; the first is the default.
"""

ALGORITHMS = {
    "grpo": "silva.algorithms.recipes:Grpo",
    "rloo": "silva.algorithms.recipes:Rloo",
    "reinforce": "silva.algorithms.recipes:Reinforce",
}
