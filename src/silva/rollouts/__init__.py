ROLLOUTS = {"linear": "silva.rollouts.settings:LinearRollout"}
