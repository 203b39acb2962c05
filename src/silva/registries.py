"""Every name that may stand under `type`, in one value; loads no torch."""

from silva.algorithms import ALGORITHMS
from silva.config.schema import Registries
from silva.engines import ENGINES
from silva.environments import ENVIRONMENTS
from silva.placement import PLACEMENTS
from silva.rollouts import ROLLOUTS
from silva.trainer import TRAINERS

REGISTRIES = Registries(ENVIRONMENTS, ROLLOUTS, ALGORITHMS, ENGINES, TRAINERS, PLACEMENTS)
