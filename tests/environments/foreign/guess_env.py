"""A class as TRL's documentation has them: nothing in it knows Silva."""

import random


class GuessEnv:
    def __init__(self):
        self.reward = 0.0

    def reset(self, low: int = 1, high: int = 9, **kwargs) -> str | None:
        self.reward = 0.0
        self.secret = random.randint(low, high)
        self.luck = 0.0
        return f"\nThe number is between {low} and {high}."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: Between the two limits,
                both included.

        Returns:
            Whether it is that number.
        """
        self.luck = random.random()
        if self.reward == 1.0:
            raise ValueError("Game over.")
        if number == self.secret:
            self.reward = 1.0
            return "Right."
        return "Higher." if number < self.secret else "Lower."

    async def hint(self, even: bool = True) -> bool:
        """Whether the number is even (or odd).

        Args:
            even: Ask for even, else for odd.
        """
        return (self.secret % 2 == 0) == even

    def _private(self) -> None:
        raise AssertionError("never called")

    @property
    def looked_at(self) -> str:
        raise AssertionError("never looked at")


class OwnsReward(GuessEnv):
    def get_reward(self) -> float:
        return 0.5 * self.reward


class NoReset:
    pass


class NoHint(GuessEnv):
    def untyped(self, number) -> str:
        """Without a type hint."""
        return ""


class NoReward(GuessEnv):
    def __init__(self):
        pass

    def reset(self, **kwargs) -> str:
        self.secret, self.reward = 3, None
        return "Guess."


class Silent(GuessEnv):
    def reset(self, **kwargs) -> None:
        super().reset()
