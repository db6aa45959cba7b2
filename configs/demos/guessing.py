"""The game of `make demo TASK=game`: find a number between two others."""

import re


class GuessingGame:
    """Answers `>` to a guess that is too low and `<` to one that is too high. A guess that no answer has ruled out
    gives a little, another one takes it, the number itself gives 1. What is no number ends the game."""

    def __init__(self, prompt, little="0.2"):
        self.number = int(prompt.ground_truth)
        self.low, self.high = map(int, re.findall(r"\d+", prompt.messages[-1]["content"]))
        self.little = float(little)
        self.won = False

    def step(self, action):
        """(answer, reward, whether the game is over)"""
        if not re.fullmatch(r"!?\d+", action):
            return "", -self.little, True
        guess = int(action.removeprefix("!"))
        possible = self.low <= guess <= self.high
        if guess == self.number:
            self.won = True
            return "", 1.0, True
        if guess < self.number:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        return (">" if guess < self.number else "<"), self.little if possible else -self.little, False

    def score(self):
        """What counts as right is a game that was won; its rewards are those of the guesses."""
        return {"score": 0.0, "acc": float(self.won)}
