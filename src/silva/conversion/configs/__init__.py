"""Configurations of other frameworks, read without running anything, and Silva's for each.

    FILE ──source.py──> flat keys, each with its place ──trl, verl, prime, ...──> Carried ──> TOML and notes

What a framework does if a key is missing is not Silva's default, so where both matter its default is carried
over too. Not here: data, rewards and environments themselves.
"""

READERS = {
    "trl": "silva.conversion.configs.trl:convert",
    "verl": "silva.conversion.configs.verl:convert",
    "ragen": "silva.conversion.configs.ragen:convert",
    "arpo": "silva.conversion.configs.arpo:convert",
    "prime-rl": "silva.conversion.configs.prime:convert",
    "minrl": "silva.conversion.configs.minrl:convert",
    "trl-sft": "silva.conversion.configs.supervised:trl",
    "verl-sft": "silva.conversion.configs.supervised:verl",
    "prime-rl-sft": "silva.conversion.configs.supervised:prime",
    "act-prm": "silva.conversion.configs.act_prm:convert",
}
