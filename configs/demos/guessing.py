"""The game of `make demo TASK=game`: find a number between two others."""

import re


class GuessingGame:
    """Answers `>` to a guess that is too low and `<` to one that is too high, `guesses` times. The number gives 1; a
    guess that an earlier answer has ruled out costs `ruled_out`. What is no number ends the game."""

    def __init__(self, prompt, guesses, ruled_out="0.5"):
        self.number = int(prompt.ground_truth)
        self.low, self.high = map(int, re.findall(r"\d+", prompt.messages[-1]["content"]))
        self.guesses_left, self.ruled_out = int(guesses), float(ruled_out)
        self.won = False

    def step(self, action):
        """(answer, reward, whether the game is over)"""
        if not re.fullmatch(r"!?\d+", action):
            return "", 0.0, True
        self.guesses_left -= 1
        guess = int(action.removeprefix("!"))
        if guess == self.number:
            self.won = True
            return "", 1.0, True
        reward = 0.0 if self.low <= guess <= self.high else -self.ruled_out
        if guess < self.number:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        return (">" if guess < self.number else "<"), reward, self.guesses_left == 0

    def score(self):
        """Added to the rewards of the guesses. Guesses that were not made cost as much as bad ones, and so giving up
        never pays; what counts as right is a game that was won."""
        given_up = 0.0 if self.won else -self.ruled_out * self.guesses_left
        return {"score": given_up, "acc": float(self.won)}
