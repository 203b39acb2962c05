ROLLOUTS = {"linear": "silva.rollouts.settings:LinearRolloutSettings"}
