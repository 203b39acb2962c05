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
    "gymnasium": "silva.environments.foreign.gymnasium:Gymnasium",
    "hanoi": "silva.environments.hanoi:Hanoi",
    "harbor": "silva.environments.foreign.harbor:Harbor",
    "hotpotqa_mc": "silva.environments.hotpotqa_mc:HotpotQA",
    "longbench_v2": "silva.environments.longbench_v2:LongBench",
    "metamath": "silva.environments.metamath:MetaMath",
    "nemo_gym": "silva.environments.foreign.nemo_gym:NemoGym",
    "openenv": "silva.environments.foreign.openenv:OpenEnv",
    "reasoning_gym": "silva.environments.foreign.reasoning_gym:ReasoningGym",
    "reverse_text": "silva.environments.reverse_text:ReverseText",
    "textarena": "silva.environments.foreign.textarena:TextArena",
    "trl": "silva.environments.foreign.trl:Trl",
    "verifiers": "silva.environments.foreign.verifiers:Verifiers",
    "webshop": "silva.environments.webshop:WebShop",
    "wiki_search": "silva.environments.wiki_search:WikiSearch",
}
"""Value of `type` in the configuration -> module and settings class."""
