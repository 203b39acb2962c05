"""Environments. Each is one file: its settings, whose `taskset()` builds its tasks and episodes."""

ENVIRONMENTS: dict[str, str] = {
    "bandit": "silva.environments.bandit:Bandit",
    "calculator": "silva.environments.calculator:Calculator",
    "frozen_lake": "silva.environments.frozen_lake:FrozenLake",
    "guess_number": "silva.environments.guess_number:GuessNumber",
    "hanoi": "silva.environments.hanoi:Hanoi",
    "reverse_text": "silva.environments.reverse_text:ReverseText",
    "sokoban": "silva.environments.sokoban:Sokoban",
}
"""Value of `type` in the configuration -> module and settings class."""
