"""Advantages, losses, KL estimators, filters and masked reductions: pure functions of tensors.

The registry names recipes, each a full setting of all of them; the first is the default.
"""

_RECIPES = "silva.algorithms.recipes:"

ALGORITHMS = {
    "grpo": _RECIPES + "Grpo",
    "rloo": _RECIPES + "Rloo",
    "reinforce": _RECIPES + "Reinforce",
    "reinforce_pp": _RECIPES + "ReinforcePp",
    "reinforce_pp_baseline": _RECIPES + "ReinforcePpBaseline",
    "dr_grpo": _RECIPES + "DrGrpo",
    "dapo": _RECIPES + "Dapo",
    "gspo": _RECIPES + "Gspo",
    "cispo": _RECIPES + "Cispo",
    "opo": _RECIPES + "Opo",
    "aipo": _RECIPES + "Aipo",
    "gpg": _RECIPES + "Gpg",
    "max_rl": _RECIPES + "MaxRl",
    "ppo": _RECIPES + "Ppo",
    "starpo": _RECIPES + "Starpo",
    "starpo_s": _RECIPES + "StarpoS",
    "bi_level_gae": _RECIPES + "BiLevelGae",
    "arpo": _RECIPES + "Arpo",
    "aepo": _RECIPES + "Aepo",
    "act_prm": _RECIPES + "ActPrm",
    "act_prm_probs": _RECIPES + "ActPrmProbs",
    "dro": _RECIPES + "Dro",
    "distillation": _RECIPES + "Distillation",
    "cross_entropy": _RECIPES + "CrossEntropy",
}
