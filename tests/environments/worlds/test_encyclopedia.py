"""Made-up questions: every step to their answers stands in the pages, and descriptions fit one page only."""

from __future__ import annotations

import itertools

import pytest

from silva.environments.worlds.encyclopedia import LARGEST, RELATIONS, SMALLEST, encyclopedia

BOOK = encyclopedia(240)
TEXTS = {page.title: page.text for page in BOOK.pages}
CASES = list(itertools.product((1, 2, 3), (True, False)))


@pytest.mark.parametrize("pages", [SMALLEST, 240, LARGEST])
def test_every_page_has_a_title_of_its_own_and_all_facts_of_its_kind(pages: int) -> None:
    book = encyclopedia(pages, seed=1)
    assert book.pages != BOOK.pages and encyclopedia(pages, seed=1) == book
    assert len({page.title for page in book.pages}) == len(book.pages) == pytest.approx(pages, abs=6)
    for page in book.pages:
        facts = book.facts[page.title]
        assert list(facts) == list(RELATIONS[book.kinds[page.title]])
        assert all(value in page.text for value in facts.values())


@pytest.mark.slow
@pytest.mark.parametrize(("hops", "named"), CASES)
def test_every_step_stands_in_a_page_and_leads_to_the_next(hops: int, named: bool) -> None:
    questions = list(BOOK.questions(hops, named=named))
    assert len(questions) > 300
    for question in questions:
        titles = [hop.title for hop in question.hops]
        assert len(set(titles)) == len(titles) == hops
        for hop, found in zip(question.hops, [*titles[1:], question.answer], strict=True):
            assert hop.fact in TEXTS[hop.title] and found in hop.fact
        assert (titles[0] in question.text) is named
        assert question.answer not in question.text
    # No question has two answers.
    assert hops == 3 or len({question.text for question in questions}) == len(questions)


def test_a_description_fits_one_page_only() -> None:
    """The two values of it, looked up in the facts of all pages of its kind."""
    for question in BOOK.questions(1, named=False):
        title = question.hops[0].title
        kind = BOOK.kinds[title]
        names = [name for name, relation in RELATIONS[kind].items() if relation.clause]
        assert all(BOOK.facts[title][name] in question.text for name in names)
        fitting = [
            other
            for other, its_kind in BOOK.kinds.items()
            if its_kind == kind and all(BOOK.facts[other][name] == BOOK.facts[title][name] for name in names)
        ]
        assert fitting == [title]


def test_questions_read_well() -> None:
    """Of one chain, worked by hand from the facts."""
    company = next(title for title, kind in BOOK.kinds.items() if kind == "company")
    founder = BOOK.facts[company]["founder"]
    town = BOOK.facts[founder]["birthplace"]
    found = {question.text: question for question in BOOK.questions(2)}
    question = found[f"In which town was the founder of {company} born?"]
    assert question.answer == town
    assert [tuple(hop) for hop in question.hops] == [
        (f"{company} founder", company, f"The founder of {company} was {founder}."),
        (f"{founder} birthplace", founder, f"The birthplace of {founder} is the town of {town}."),
    ]
