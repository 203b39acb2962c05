"""A made-up encyclopedia of linked facts, and questions that cannot be answered without reading it.

People, towns, rivers, companies, novels and museums have made-up names, each used once. Every fact stands in
one sentence of one page. A question follows links from page to page: "Into which sea does the river of the
town where the founder of Lumarin Works was born flow?" The same numbers and seed give the same encyclopedia.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

PROFESSIONS = ("baker", "botanist", "cellist", "chemist", "dentist", "engraver", "farmer", "geologist",
               "judge", "mason", "painter", "pilot", "sculptor", "surgeon", "tailor", "weaver")  # fmt: skip
PRODUCTS = ("barometers", "bicycles", "buttons", "candles", "clocks", "ferries", "lanterns", "looms",
            "pianos", "porcelain", "printing presses", "pumps", "spectacles", "tents", "tractors",
            "violins")  # fmt: skip
COLLECTIONS = ("amber figures", "bells", "butterflies", "carpets", "coins", "fossils", "glass beads",
               "globes", "maps", "masks", "mosaics", "music boxes", "sundials", "tapestries",
               "toy theatres", "wind organs")  # fmt: skip
REGIONS = ("Ostmark", "Lower Brenn", "Upper Brenn", "Salland", "Vesterholm", "Karrow", "Ilmenia",
           "Tessmark")  # fmt: skip
SEAS = ("Amaran", "Boreal", "Coral", "Dunmar", "Ebon", "Farrow")
YEARS = range(1820, 1981)


class Relation(NamedTuple):
    """A fact that every page of a kind has. `{}` stands for what the page is about, `{v}` for the value,
    `{a}` for its article.

    Attributes:
        values: what the value is drawn from: the pages of a kind, or plain values. Empty: a name is made up.
        phrase: what the value is called in a question that goes on from there.
        clause: how the value describes the page's subject, where the question does not name it.
    """

    section: str
    sentence: str
    ask: str
    values: str | Sequence[object] = ""
    phrase: str = ""
    clause: str = ""


RELATIONS: Mapping[str, Mapping[str, Relation]] = {
    "person": {
        "birth year": Relation("Early life", "{} was born in the year {v}.", "In which year was {} born?",
                               YEARS, clause="was born in the year {v}"),
        "birthplace": Relation("Early life", "The birthplace of {} is the town of {v}.",
                               "In which town was {} born?", "town", "the town where {} was born"),
        "teacher": Relation("Education", "{} was a pupil of {v}.", "Who was the teacher of {}?",
                            "person", "the teacher of {}"),
        "profession": Relation("Career", "{} worked as {a} {v}.", "What was the profession of {}?",
                               PROFESSIONS, clause="worked as {a} {v}"),
    },
    "town": {
        "river": Relation("Geography", "{} lies on the river {v}.", "On which river does {} lie?",
                          "river", "the river of {}"),
        "region": Relation("Geography", "{} belongs to the region of {v}.", "To which region does {} belong?",
                           REGIONS, clause="belongs to the region of {v}"),
        "founding": Relation("History", "{} was first mentioned in {v}.", "When was {} first mentioned?",
                             range(1240, 1641), clause="was first mentioned in {v}"),
        "population": Relation("Population", "{v} people live in {}.", "How many people live in {}?",
                               range(1100, 98001)),
        "mayor": Relation("Government", "The mayor of {} is {v}.", "Who is the mayor of {}?",
                          "person", "the mayor of {}"),
    },
    "river": {
        "length": Relation("Course", "The {} is {v} kilometres long.", "How many kilometres long is {}?",
                           range(41, 1401), clause="is {v} kilometres long"),
        "source": Relation("Course", "The {} rises on Mount {v}.", "On which mountain does {} rise?",
                           clause="rises on Mount {v}"),
        "mouth": Relation("Mouth", "The {} flows into the {v} Sea.", "Into which sea does {} flow?", SEAS),
    },
    "company": {
        "founding": Relation("History", "{} was founded in {v}.", "In which year was {} founded?",
                             YEARS, clause="was founded in {v}"),
        "founder": Relation("History", "The founder of {} was {v}.", "Who founded {}?",
                            "person", "the founder of {}"),
        "seat": Relation("Organisation", "{} is based in {v}.", "In which town is {} based?",
                         "town", "the town where {} is based"),
        "product": Relation("Products", "{} makes {v}.", "What does {} make?", PRODUCTS, clause="makes {v}"),
    },
    "novel": {
        "year": Relation("Publication", "{} was published in {v}.", "In which year was {} published?",
                         YEARS, clause="was published in {v}"),
        "author": Relation("Publication", "The author of {} is {v}.", "Who wrote {}?",
                           "person", "the author of {}"),
        "setting": Relation("Plot", "{} is set in the town of {v}.", "In which town is {} set?",
                            "town", "the town where {} is set"),
        "hero": Relation("Plot", "The hero of {} is {a} {v}.", "What is the profession of the hero of {}?",
                         PROFESSIONS, clause="has {a} {v} as its hero"),
    },
    "museum": {
        "opening": Relation("Building", "{} was opened in {v}.", "In which year was {} opened?",
                            YEARS, clause="was opened in {v}"),
        "architect": Relation("Building", "The architect of {} was {v}.", "Who was the architect of {}?",
                              "person", "the architect of {}"),
        "town": Relation("Location", "{} stands in {v}.", "In which town does {} stand?",
                         "town", "the town where {} stands"),
        "collection": Relation("Collection", "{} is known for its {v}.", "What is {} known for?",
                               COLLECTIONS, clause="is known for its {v}"),
    },
}  # fmt: skip
SHARES = {"person": 8, "town": 4, "river": 2, "company": 4, "novel": 3, "museum": 3}
SMALLEST = sum(SHARES.values())  # pages
LARGEST = 2000

FIRST_NAMES = ("Ada", "Boris", "Clara", "Dimitri", "Elif", "Farid", "Greta", "Hugo", "Ines",
               "Jonas", "Kaja", "Leon", "Mira", "Nils", "Olga", "Pavel", "Rosa", "Stefan",
               "Tilda", "Viktor")  # fmt: skip
ADJECTIVES = ("Amber", "Broken", "Crooked", "Distant", "Empty", "Frozen", "Golden", "Hidden", "Iron",
              "Last", "Muddy", "Narrow", "Patient", "Quiet", "Silent", "Wooden")  # fmt: skip
NOUNS = ("Anchor", "Bridge", "Candle", "Door", "Engine", "Feather", "Garden", "Harvest", "Island",
         "Journey", "Kettle", "Letter", "Mirror", "Orchard", "Staircase", "Window")  # fmt: skip
FIRMS, HOUSES = ("Works", "Mills", "Brothers", "Industries"), ("Museum", "Gallery")
FILLERS = (
    "Old photographs show how much has changed since then.",
    "Local papers still write about it every spring.",
    "Several letters about it were lost in a fire.",
    "A short film was made about this some years ago.",
    "Historians disagree about the details.",
    "Guides like to tell this story to visitors.",
    "Records from that time are kept in an archive.",
    "It has been described in more than one travel book.",
    "The weather is said to have played a part.",
    "Nobody paid much attention to it at first.",
    "A small stone marks the place today.",
    "Children learn about it at school.",
)


class Article(NamedTuple):
    title: str
    sections: tuple[tuple[str, str], ...]  # name and text

    @property
    def text(self) -> str:
        """As Markdown."""
        return "\n".join(f"## {name}\n{text}" for name, text in self.sections)


class Hop(NamedTuple):
    """One page to read on the way to an answer.

    Attributes:
        query: what the question, or the page before, says about it.
        fact: the sentence of the page that is needed.
    """

    query: str
    title: str
    fact: str


class MadeQuestion(NamedTuple):
    text: str
    answer: str
    hops: tuple[Hop, ...]


@dataclass(frozen=True)
class Encyclopedia:
    """`facts[title][relation]` is a value or the title of another page."""

    kinds: Mapping[str, str]
    facts: Mapping[str, Mapping[str, str]]
    pages: Sequence[Article]

    def questions(self, hops: int, *, named: bool = True) -> Iterator[MadeQuestion]:
        """All questions that need exactly `hops` pages.

        Args:
            named: whether a question names the first page, or describes it by two facts that no other page
                has both of.
        """
        descriptions = {} if named else self._descriptions()
        for title in self.facts:
            start = title if named else descriptions.get(title)
            if start is not None:
                yield from self._from(title, start, start, (), hops)

    def _from(
        self, title: str, subject: str, query: str, done: tuple[Hop, ...], hops: int
    ) -> Iterator[MadeQuestion]:
        for name, relation in RELATIONS[self.kinds[title]].items():
            value = self.facts[title][name]
            path = (*done, Hop(f"{query} {name}", title, _filled(relation.sentence, title, value)))
            if hops == 1 and value not in subject:  # otherwise the question would say it
                yield MadeQuestion(relation.ask.format(subject), value, path)
            elif hops > 1 and relation.phrase and value not in [hop.title for hop in path]:
                yield from self._from(value, relation.phrase.format(subject), value, path, hops - 1)

    def _descriptions(self) -> dict[str, str]:
        """What describes a page without its name, for those pages that two facts single out."""
        said = {}
        for title, kind in self.kinds.items():
            first, second = (
                _filled(relation.clause, title, self.facts[title][name])
                for name, relation in RELATIONS[kind].items()
                if relation.clause
            )
            said[title] = f"the {kind} {'who' if kind == 'person' else 'that'} {first} and {second}"
        count = Counter(said.values())
        return {title: text for title, text in said.items() if count[text] == 1}


def encyclopedia(pages: int, seed: int = 0) -> Encyclopedia:
    """Makes one.

    Args:
        pages: about how many, from SMALLEST to LARGEST.
    """
    rng = random.Random(f"encyclopedia/{seed}")
    names = _Names(rng)
    titles = {
        kind: [names.of(kind) for _ in range(max(2, pages * share // SMALLEST))]
        for kind, share in SHARES.items()
    }
    kinds = {title: kind for kind, some in titles.items() for title in some}
    facts = {
        title: {
            name: _value(relation, title, titles, names, rng) for name, relation in RELATIONS[kind].items()
        }
        for title, kind in kinds.items()
    }
    return Encyclopedia(kinds, facts, [_page(title, kinds[title], facts[title], rng) for title in kinds])


def _value(
    relation: Relation, title: str, titles: Mapping[str, Sequence[str]], names: _Names, rng: random.Random
) -> str:
    if not relation.values:
        return names.coined()
    if isinstance(relation.values, str):
        return rng.choice([other for other in titles[relation.values] if other != title])
    return str(rng.choice(relation.values))


def _page(title: str, kind: str, facts: Mapping[str, str], rng: random.Random) -> Article:
    sections: dict[str, list[str]] = {}
    for name, relation in RELATIONS[kind].items():
        sections.setdefault(relation.section, []).append(_filled(relation.sentence, title, facts[name]))
    intro = f"{title} is a {kind}."
    texts = [("Introduction", f"{intro} {' '.join(rng.sample(FILLERS, 2))}")]
    for section, sentences in sections.items():
        texts.append((section, " ".join([*sentences, *rng.sample(FILLERS, 2)])))
    return Article(title, tuple(texts))


def _filled(text: str, title: str, value: str) -> str:
    return text.format(title, v=value, a="an" if value[0] in "aeiou" else "a")


class _Names:
    """Names that are used once."""

    STARTS = ("Ar", "Bel", "Cal", "Dor", "Em", "Fal", "Gor", "Hal", "Il", "Jas", "Kor", "Lum", "Mar",
              "Nor", "Or", "Per", "Quen", "Ros", "Sil", "Tar", "Ul", "Var", "Wes", "Yr", "Zan")  # fmt: skip
    MIDDLES = ("a", "ade", "e", "eri", "i", "ili", "o", "oma", "u", "une")
    ENDS = ("bach", "dale", "feld", "gan", "holm", "lin", "mar", "nik", "rode", "stad", "thal", "vik")

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.used: set[str] = set()

    def coined(self) -> str:
        return self._unused(lambda pick: pick(self.STARTS) + pick(self.MIDDLES) + pick(self.ENDS))

    def of(self, kind: str) -> str:
        if kind == "novel":
            return self._unused(lambda pick: f"The {pick(ADJECTIVES)} {pick(NOUNS)} of {self.coined()}")
        coined, pick = self.coined(), self.rng.choice
        return {
            "person": f"{pick(FIRST_NAMES)} {coined}",
            "company": f"{coined} {pick(FIRMS)}",
            "museum": f"{coined} {pick(HOUSES)}",
        }.get(kind, coined)

    def _unused(self, make: Callable[[Callable[[Sequence[str]], str]], str]) -> str:
        name = make(self.rng.choice)
        while name in self.used:
            name = make(self.rng.choice)
        self.used.add(name)
        return name
