"""Word lists, invented words, and the rule that splits training data from held-out data."""

# ruff: noqa: SIM905  (lists of words read better as text)

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TRAIN, TEST = "train", "test"

NOUNS = """anchor apple arrow badge basket bell bird boat book bottle bridge brush bucket button
cabin camel candle canyon castle chair clock cloud coat comet cotton cradle crown desert dolphin
door dragon drum eagle engine falcon feather fern field flute forest fox garden ghost glove goat
harbor hammer hill horse island jacket jar jungle kettle key kite ladder lake lamp lantern leaf
lemon lion magnet maple market meadow mirror moon mountain needle nest ocean olive onion otter owl
paper parrot pearl pencil pepper piano pillow planet pocket pond puzzle rabbit radio raven ribbon
river robot rocket rope saddle sail salmon scarf shadow shell shield ship silver spoon stable stone
storm table temple tiger timber tower train tunnel valley violin wagon walnut whale wheel willow
window wolf""".split()

ADJECTIVES = """amber ancient bitter brave bright broken calm clever cold cosmic crisp curious
dusty eager early empty fancy fast fierce frozen gentle giant golden grand happy heavy hidden
hollow honest humble icy jolly kind late lazy little lonely loud lucky mellow misty modern noble
odd pale proud quick quiet rapid rare royal rusty salty shiny silent simple sleepy slow smooth
soft solid spicy steady strange strong sweet tall tiny vivid warm wild wise young""".split()

VERBS = """finds follows guards helps holds keeps likes meets paints passes pulls pushes sees
sells takes visits watches""".split()

NAMES = """Ada Adam Aisha Alba Amir Anna Anton Aria Ben Bianca Boris Carla Carlos Chen Clara Cora
Dana Daniel David Diego Elena Eli Ella Emil Emma Erik Eva Fatima Felix Fiona Frank Freya Gina Grace
Hana Hannah Hassan Hugo Ida Igor Ines Ingrid Iris Ivan Jack Jane Jonas Julia Kai Karim Kira Lara
Lars Leo Lena Lila Lina Liam Louis Lucy Luna Magnus Maria Marta Max Maya Mia Milo Mira Nadia Nina
Noah Nora Olga Oliver Omar Oscar Paul Petra Priya Rosa Ruben Ruth Sami Sara Sofia Stella Sven Tara
Theo Tom Uma Vera Victor Wei Yara Yuki Zara Zoe""".split()

CITIES = """Athens Berlin Boston Bogota Cairo Chicago Dakar Delhi Dublin Geneva Hanoi Havana
Helsinki Jakarta Kyiv Lagos Lima Lisbon London Madrid Manila Miami Milan Mumbai Nairobi Oslo Paris
Porto Prague Quito Riga Rome Seoul Sofia Sydney Tallinn Tokyo Toronto Tunis Vienna Warsaw
Zurich""".split()

COLOURS = "red green blue yellow orange purple pink black white brown gray".split()
JOBS = "baker doctor driver farmer nurse painter pilot singer teacher writer".split()
ANIMALS = "bird cat dog fish horse parrot rabbit turtle".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
LANGUAGES = "French German Italian Spanish Polish Dutch Greek Turkish Arabic Hindi".split()
CURRENCIES = "euro dollar pound yen franc peso".split()
ROOMS = "kitchen bedroom bathroom office garage hall attic cellar".split()
DISHES = "bread coffee pasta pizza rice salad soup tea noodles cake".split()

_STARTS = "b bl br c ch d dr f fl g gr h j k kl l m n p pl qu r s sh st t tr v w z".split()
_VOWELS = "a e i o u ai ee oo".split()
_ENDS = ["", "", "", "l", "m", "n", "r", "s", "t", "x", "nd", "rk"]


def is_held_out(content: object) -> bool:
    """Whether content belongs to the held-out split: one part in ten, by its hash."""
    return hashlib.sha256(repr(content).encode()).digest()[0] < 26


def fresh(rng: random.Random, split: str, make: Callable[[], T]) -> T:
    """Draw content until it falls into the wanted split; ``make`` must be able to give both."""
    while True:
        content = make()
        if is_held_out(content) == (split == TEST):
            return content


def invented(rng: random.Random) -> str:
    """A word nobody has seen, of one to three syllables, so that copying has to be general."""
    return "".join(
        rng.choice(_STARTS) + rng.choice(_VOWELS) + rng.choice(_ENDS) for _ in range(rng.choice((1, 2, 2, 3)))
    )


def name(rng: random.Random) -> str:
    """A person's name: a known one, or an invented one."""
    return rng.choice(NAMES) if rng.random() < 0.7 else invented(rng).capitalize()


def city(rng: random.Random) -> str:
    """A place: a known city, or an invented one."""
    return rng.choice(CITIES) if rng.random() < 0.8 else invented(rng).capitalize()


def thing(rng: random.Random) -> str:
    """One or two plain words."""
    noun = rng.choice(NOUNS) if rng.random() < 0.85 else invented(rng)
    return noun if rng.random() < 0.5 else f"{rng.choice(ADJECTIVES)} {noun}"


def code(rng: random.Random) -> str:
    """A short code of letters and digits."""
    letters = rng.choice(("abcdefghjkmnpqrstuvwxyz", "ABCDEFGHJKLMNPQRSTUVWXYZ"))
    text = "".join(rng.choice(letters + "23456789") for _ in range(rng.randint(2, 6)))
    return f"{text}-{rng.randint(10, 999)}" if rng.random() < 0.3 else text


def sentence(rng: random.Random) -> str:
    """A plain sentence that means little, to fill a context with."""
    form = rng.randrange(3)
    a, b = rng.choice(NOUNS), rng.choice(NOUNS)
    if form == 0:
        return f"The {rng.choice(ADJECTIVES)} {a} {rng.choice(VERBS)} the {b}."
    if form == 1:
        return f"{rng.choice(NAMES)} {rng.choice(VERBS)} a {rng.choice(ADJECTIVES)} {b}."
    return f"In {rng.choice(CITIES)} the {a} is {rng.choice(ADJECTIVES)}."
