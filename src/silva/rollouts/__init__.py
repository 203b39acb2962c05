ROLLOUTS = {
    "linear": "silva.rollouts.settings:LinearRolloutSettings",
    "branching": "silva.rollouts.settings:BranchingRolloutSettings",
    "thoughts": "silva.rollouts.settings:ThoughtsRolloutSettings",
}
