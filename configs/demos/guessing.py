"""The game of `make demo TASK=game`: find a number between two others."""

import re


class GuessingGame:
    """Answers `>` to a guess that is too low and `<` to one that is too high. Every guess costs, so that fewer are
    better; what is no number of the range costs the game."""

    def __init__(self, prompt, cost="0.1"):
        self.number = int(prompt.ground_truth)
        self.low, self.high = map(int, re.findall(r"\d+", prompt.messages[-1]["content"]))
        self.cost = float(cost)
        self.won = False

    def step(self, action):
        """(answer, reward, whether the game is over)"""
        if not re.fullmatch(r"\d+", action) or not self.low <= int(action) <= self.high:
            return "", -1.0, True
        guess = int(action)
        self.won = guess == self.number
        return (">" if guess < self.number else "<"), (1.0 if self.won else -self.cost), self.won

    def score(self):
        """What counts as right is a game that was won; its rewards stand at the guesses."""
        return {"score": 0.0, "acc": float(self.won)}
