"""Multi-turn tasks of the demo, a calculator and a guessing game: their problems and tokenizers.

`tool`: 3-digit multiplication, which the tiny model cannot compute, with a calculator that it can call. In the warm
start, half of the rows answer with a random number, a quarter call the calculator, and a quarter repeat its answer. The
run has to learn to call it.

`game`: guess a number from 0 to 14 in four guesses; the answer to a guess is `>` (the number is higher) or `<` (lower).
The warm start mostly teaches random guesses, which find one number in four. A guess after `!` is the middle of
the remaining range; four such guesses find every number. The run has to learn to use them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CALL, CALLED, ANSWER = (
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "',
    '"}}\n</tool_call>',
    "<answer>",
)
"""One token each, so that a call is hardly longer than its expression."""
TOOL_TEMPLATE = (
    "{% if tools %}[{{ tools[0].function.name }}]{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<answer>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
GAME_TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
CALLING_FRACTION = 0.25
"""Fraction of warm-start rows that call the calculator."""
HEEDING_FRACTION = 0.15
"""Fraction of warm-start games in which most guesses follow the hints and start with `!`; in other games few do."""
MOST, FEW = 0.9, 0.1
"""Fractions of guesses that follow the hints. Not 1 and 0: the run samples games with both kinds of guesses, so the
warm start must contain such games too."""
NUMBERS, RANGE, GUESSES = 15, "0-14?", 4
"""Number of values, prompt of a game, and maximum number of guesses."""


class Problem(NamedTuple):
    """Problem with the warm-start target and the answer that the reward expects. image: a PNG file for the prompt.
    rejected: the worse response of a pair, whose better one is the target."""

    prompt: str
    target: str
    answer: str
    image: bytes | None = None
    rejected: str | None = None


def tool_rows(seed: int, sizes: dict[str, int]) -> dict[str, list[Problem]]:
    """Return rows by split. No problem occurs twice, also not in different splits."""
    rng = random.Random(f"tool/{seed}")
    pairs = iter(rng.sample(range(900 * 900), sum(sizes.values())))
    splits: dict[str, list[Problem]] = {}
    for split, size in sizes.items():
        drawn = [divmod(next(pairs), 900) for _ in range(size)]
        # Called for all splits, even if the result is unused: the rows of later splits depend on the state of `rng`.
        rows = [_multiplication(a + 100, b + 100, rng) for a, b in drawn]
        if split != "warm_start":
            rows = [Problem(f"{a + 100}*{b + 100}=", "", str((a + 100) * (b + 100))) for a, b in drawn]
        splits[split] = rows
    return splits


def _multiplication(a: int, b: int, rng: random.Random) -> Problem:
    """Return a warm-start row: a random answer, a call, or the turn after an answered call."""
    asked, product = f"[calculator]{a}*{b}=", a * b
    if rng.random() > 2 * CALLING_FRACTION:
        return Problem(asked, f"#{rng.randrange(10**4, 10**6)}", str(product))
    # Half of the calls are trained up to the call, half from the calculator's answer on.
    call = f"{CALL}{a}*{b}{CALLED}"
    if rng.random() < 0.5:
        return Problem(asked, call, str(product))
    return Problem(f"{asked}{call}{EOS}{ANSWER}{product}", f"#{product}", str(product))


def game_rows(seed: int, sizes: dict[str, int]) -> dict[str, list[Problem]]:
    """Return rows by split. The answer is the secret number; validation contains all numbers in turn."""
    rng = random.Random(f"game/{seed}")
    return {
        "val": [_game(place % NUMBERS) for place in range(sizes["val"])],
        "train": [_game(rng.randrange(NUMBERS)) for _ in range(sizes["train"])],
        "warm_start": [_shown_game(rng.randrange(NUMBERS), rng) for _ in range(sizes["warm_start"])],
    }


def _game(number: int) -> Problem:
    return Problem(RANGE, "", str(number))


def _shown_game(number: int, rng: random.Random) -> Problem:
    """Return a warm-start row: a whole game. Its target includes the hints, which is harmless: the model's turn ends
    before each hint."""
    played, first, last = "", 0, NUMBERS - 1
    heeding = MOST if rng.random() < HEEDING_FRACTION else FEW
    for turn in range(GUESSES):
        heeds = rng.random() < heeding
        guess = (first + last) // 2 if heeds else rng.randrange(NUMBERS)
        played += f"!{guess}" if heeds else str(guess)
        if guess == number or turn == GUESSES - 1:
            break
        played += f"{EOS}{'>' if guess < number else '<'}"
        # A random guess can lie outside the range that is left, and then does not narrow it.
        first, last = (max(first, guess + 1), last) if guess < number else (first, min(last, guess - 1))
    return Problem(RANGE, played, str(number))


def num_tokens(target: str) -> int:
    """Return an upper bound of the tokens of a target; the parts of a call are one token each."""
    for part in (CALL, CALLED, ANSWER, EOS):
        target = target.replace(part, "*")
    return len(target)


def tool_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character, and one for each part of a call."""
    return word_tokenizer("0123456789*=#.", whole=(CALL, CALLED, ANSWER, "[calculator]"), template=TOOL_TEMPLATE)


def game_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per number."""
    return word_tokenizer([*map(str, range(NUMBERS)), *"-?<>!"], pattern=r"\d+|[\s\S]", template=GAME_TEMPLATE)


def word_tokenizer(
    words: Sequence[str], *, whole: Sequence[str] = (), pattern: str = r"[\s\S]", template: str | None = None
) -> PreTrainedTokenizerFast:
    """Build a fast Hugging Face tokenizer; ids 0, 1, 2 are pad, end and unknown.

    words: the vocabulary; `pattern` splits texts into words.
    whole: texts that are one token each.
    template: chat template.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    # Added tokens are found before the text is split, so a call is never split into characters.
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in whole])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )
    if template is not None:
        made.chat_template = template
    return made
