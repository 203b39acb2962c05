"""Environments. Each is one file: its settings, whose `taskset()` builds its tasks and episodes."""

ENVIRONMENTS: dict[str, str] = {
    "alphabet_sort": "silva.environments.alphabet_sort:AlphabetSort",
    "bandit": "silva.environments.bandit:Bandit",
    "browsecomp_plus_search": "silva.environments.browsecomp_plus_search:BrowseCompPlusSearch",
    "calculator": "silva.environments.calculator:Calculator",
    "connections": "silva.environments.connections:Connections",
    "countdown": "silva.environments.countdown:Countdown",
    "dataset": "silva.environments.dataset:Dataset",
    "frozen_lake": "silva.environments.frozen_lake:FrozenLake",
    "guess_number": "silva.environments.guess_number:GuessNumber",
    "hanoi": "silva.environments.hanoi:Hanoi",
    "hotpotqa_mc": "silva.environments.hotpotqa_mc:HotpotQA",
    "longbench_v2": "silva.environments.longbench_v2:LongBench",
    "metamath": "silva.environments.metamath:MetaMath",
    "reverse_text": "silva.environments.reverse_text:ReverseText",
    "sokoban": "silva.environments.sokoban:Sokoban",
    "webshop": "silva.environments.webshop:WebShop",
    "wiki_search": "silva.environments.wiki_search:WikiSearch",
    "wordle": "silva.environments.wordle:Wordle",
}
"""Value of `type` in the configuration -> module and settings class."""
