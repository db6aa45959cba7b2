"""Trains the tokenizer of configs/models/gsm8k_tiny: a small byte-level BPE on word problems made here.

    python scripts/tiny_tokenizer.py [--out DIR]

The text comes from this file alone, so that the result changes only with it. Any text can be encoded, since every byte
is a token; a digit is always a token of its own, so that numbers of one length have one length.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "configs" / "models" / "gsm8k_tiny"
END = "<|endoftext|>"
VOCABULARY = 1280
NUM_PROBLEMS = 6000

WORDS = {
    "name": """Anna Ben Carla David Emma Felix Grace Henry Ida James Kate Liam Maria Noah Olivia Peter Rosa Sam Tina
        Victor Wendy Jack Lisa Tom Mark Sarah John Mary Mike Jenny Alex Bob Lily Max Sophie Paul Nora Leo Clara Tim""",
    "relation": """friend friends brother sister mother father son daughter uncle aunt cousin grandmother neighbor
        teacher students children classmates parents family boss customer team""",
    "thing": """apples oranges bananas eggs cookies cakes pies pizzas slices sandwiches books pages pencils pens
        notebooks toys dolls cars trucks bikes balls cards marbles stickers stamps coins flowers roses plants trees
        seeds potatoes tomatoes carrots vegetables fish dogs cats chickens cows horses sheep birds shirts shoes
        dresses hats socks jackets boxes bags baskets bottles cups plates glasses tickets candies chocolates muffins
        cupcakes bracelets necklaces chairs tables lamps phones computers games puzzles photos letters stories
        crayons balloons bricks tires""",
    "unit": """hours minutes seconds days weeks months years miles feet inches meters kilometers yards gallons
        liters ounces pounds grams kilograms dollars cents pieces dozen pairs degrees""",
    "place": """store shop school market farm house home garden park library museum restaurant bakery office
        hospital station beach lake river mountain city town village street kitchen classroom bedroom zoo theater
        factory bank class party game race""",
    "day": """Monday Tuesday Wednesday Thursday Friday Saturday Sunday January February March April May June July
        August September October November December Christmas Halloween""",
    "time": """morning afternoon evening night day week month year weekend summer winter spring hour minute lunch
        dinner breakfast""",
    "bought": """bought sold baked picked collected ate made found read wrote planted washed painted packed carried
        borrowed lost needed used ordered gave received counted cooked cleaned delivered shared saved wanted kept
        took""",
    "action": """walks runs drives rides swims works studies plays reads practices travels sleeps jogs earns spends
        saves drinks pays charges costs weighs takes produces makes sells buys eats gives gets needs uses has spent""",
    "adjective": """red blue green yellow white black big small large little new old different same first second
        third last next other more fewer extra whole empty full cheap expensive fresh broken long short tall heavy
        old young remaining regular equal""",
    "number": """two three four five six seven eight nine ten eleven twelve fifteen twenty thirty forty fifty
        hundred thousand half twice quarter double triple one-third two-thirds three-fourths""",
}
PROBLEMS = """\
{name} {bought} {n} {adjective} {thing} at the {place} on {day}. How many {thing} does {name} have left?

{name} has {n} {thing}. Her {relation} has {number} times as many {thing} as she does. How many do they have together?

{name} {action} {n} {unit} every {time} and {n} {unit} in the {time}. How many {unit} is that in {number} {time}s?

There are {n} {thing} in the {place}. If {n} of them are {adjective} and the rest are {adjective}, how many are
    {adjective}?

Each of the {thing} costs ${n}, and each of the {thing} costs ${n} less. What is the total cost of {n} {thing}?

A {place} sells {thing} for ${n}.50 each. If {name} buys {n} of these, how much change will he get from ${n}00?

{name}'s {relation} {bought} {number} {thing} for {name} and gave {n}% of his {thing} to the {relation} in the
    {place}.

After {number} {unit}, {name} had only {n} {thing} and decided to buy {n} more from her {relation}, who sold them for
    ${n} per {unit}.

It takes {name} {n} {unit} to {action} from the {place} to the {place}. How long would it take if the speed was
    {number} as fast?

In a {place} of {n},000 people, 1/{n} are {relation} and {n} percent of the others like {thing}. How many people don't
    like {thing}?

If there were {n} {adjective} {thing} and each box can hold {n}, how many boxes were needed for all of the {thing}?

{name} is {n} years older than {name}, who is {number} as old as his {relation}. How old will {name} be in {n} years?

The {adjective} {place} is {n} {unit} longer than the {adjective} one. What is the average length, in {unit}, between
    them?

{name} wants to save money for {number} {adjective} {thing}. She earns ${n} an hour and works {n} hours a {time}. How
    much money does she still need?

Then {name} went to the {place} with {n} {relation}. They each {bought} {n} {thing}, but {number} of these weren't
    {adjective}.

During the {time}, {name} {bought} three times more {thing} than on {day}. By the end of the {time} there was {number}
    of it left over.

{name} and {name} split the {thing} evenly, so that both would get the same number. What fraction of the total number
    did each receive?
"""
SOLUTIONS = (
    "{name} has {a} + {b} = <<{a}+{b}={sum}>>{sum} {thing}.\n#### {sum}",
    "First, find the total number: {a} {thing} * {b} = <<{a}*{b}={product}>>{product} {thing}\n#### {product}",
    "They cost ${a} * {b} = $<<{a}*{b}={product}>>{product} in total.\nSo {name} spent ${product}.\n#### {product}",
    "Together they {bought} {a} + {b} = {sum} {thing}, which means {sum} - {a} = {b} were {adjective}.\nAnswer: {b}",
    "Let x be the number of {thing}. Then x + {a} = {sum}, therefore x = {sum} - {a}.\nThe answer is \\boxed{{{b}}}.",
    "That is {product} / {a} = <<{product}/{a}={b}>>{b} {unit} per {time} because there are {a} of them.\n#### {b}",
)


def texts() -> Iterator[str]:
    """Word problems with solutions, the same ones every time."""
    rng = random.Random(0)
    words = {kind: text.split() for kind, text in WORDS.items()}
    problems = [" ".join(problem.split()) for problem in PROBLEMS.split("\n\n")]

    def fill(template: str, **numbers: int) -> str:
        def choose(slot: re.Match[str]) -> str:
            kind = slot[1]
            return str(numbers.get(kind) or rng.randrange(1, 60)) if kind not in words else rng.choice(words[kind])

        return re.sub(r"\{(\w+)\}", choose, template).replace("{{", "{").replace("}}", "}")

    for _ in range(NUM_PROBLEMS):
        a, b = rng.randrange(2, 100), rng.randrange(2, 100)
        question = " ".join(fill(template) for template in rng.sample(problems, 2))
        solution = fill(rng.choice(SOLUTIONS), a=a, b=b, sum=a + b, product=a * b)
        yield f"Question: {question}\nAnswer: {solution}\n"


def train_tokenizer() -> Any:
    """A tokenizers.Tokenizer of VOCABULARY entries; id 0 ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def write(directory: Path) -> None:
    """Writes tokenizer.json, and the tokenizer_config.json that names its class and its end."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(train_tokenizer().to_str() + "\n", encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Trains the small tokenizer of configs/models/gsm8k_tiny.")
    parser.add_argument("--out", type=Path, default=MODEL, metavar="DIR", help="default: %(default)s")
    directory = parser.parse_args(arguments).out
    write(directory)
    print(f"wrote {directory / 'tokenizer.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
