"""Questions over a wiki: search for pages, look at their sections, read one (PRIME-RL's wiki_search).

    search_pages("Lumarin Works") -> view_sections("lumarin_works") -> read_section("lumarin_works:history")

The pages are a user's (`corpus`: rows with id, title and Markdown content), or those of a made-up
encyclopedia.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from silva.config.sections import Positive
from silva.data.documents import Document, DocumentSection, as_id, sections
from silva.data.retrieval import Ranking
from silva.environments.worlds.corpus_qa import CorpusEpisode, CorpusQA
from silva.environments.worlds.encyclopedia import Hop
from silva.protocols import Reward
from silva.tools.fixed import Fixed
from silva.tools.function import ToolError
from silva.types import Task, ToolCall

TITLE_WEIGHT = 3  # times that a title counts as text


class WikiSearch(CorpusQA):
    type: Literal["wiki_search"] = "wiki_search"
    search_in: Literal["pages", "titles"] = "pages"
    """What a search compares with the query."""
    results: Positive = 10
    """Pages that a search finds at most."""
    max_tool_calls: Positive = 10
    """Tool calls of one episode, malformed ones and answers sent back included; one more ends it."""

    def toolset(self, found: Sequence[Document]) -> Wiki:
        return Wiki(found, self.results, self.search_in == "titles")

    def episode(self, task: Task, toolset: Any, reward: Reward, answers: Sequence[str]) -> WikiEpisode:
        return WikiEpisode(self, task, toolset, reward, answers)


class Wiki(Fixed):
    """The three tools over some pages."""

    def __init__(self, pages: Sequence[Document], results: int, titles_only: bool) -> None:
        super().__init__([self.search_pages, self.view_sections, self.read_section])
        self.pages = {page.id: page for page in pages}
        self.titles = [page.title for page in pages]
        self._order = list(pages)
        self._results = results
        self._titles_only = titles_only

    async def search_pages(self, query: Annotated[str, Field(description="words to look for")]) -> Any:
        """Find pages: the ids and titles of those that fit best."""
        found = [self._order[number] for number in self._ranking.best(query, self._results)]
        if not found:
            raise ToolError(f"no page has any of the words {query!r}")
        return [{"page_id": page.id, "title": page.title} for page in found]

    async def view_sections(
        self, page_id: Annotated[str, Field(description="as search_pages gave it")]
    ) -> Any:
        """List the sections of a page: their ids and names."""
        if page_id not in self.pages:
            raise ToolError(f"no page {page_id!r}: search_pages gives the ids of pages")
        found = sections(self.pages[page_id])
        return [{"section_id": section.id, "section_name": section.name} for section in found]

    async def read_section(
        self, section_id: Annotated[str, Field(description="as view_sections gave it")]
    ) -> str:
        """Read the text of a section."""
        for place, character in enumerate(section_id):  # both parts of it may contain a colon
            if character == ":" and (page := self.pages.get(section_id[:place])):
                for section in sections(page):
                    if section.id == section_id:
                        return section.text
        raise ToolError(f"no section {section_id!r}: view_sections lists those of a page")

    @functools.cached_property
    def _ranking(self) -> Ranking:
        if self._titles_only:
            return Ranking(self.titles)
        return Ranking(f"{f'{page.title} ' * TITLE_WEIGHT}\n{page.text}" for page in self._order)

    def section_of(self, hop: Hop) -> DocumentSection:
        """Where a fact stands."""
        page = self._order[self.titles.index(hop.title)]
        return next(section for section in sections(page) if hop.fact in section.text)


class WikiEpisode(CorpusEpisode):
    toolset: Wiki

    def rules(self) -> str:
        return (
            "Answer the question with the help of the wiki: search for pages, view their sections, read the "
            "one that you need. When you know the answer, give it alone: <answer>...</answer>"
        )

    def expert_calls(self, hops: Sequence[Hop]) -> list[ToolCall]:
        wiki, calls = self.toolset, []
        for hop in hops:
            section = wiki.section_of(hop)
            calls += [
                ToolCall("search_pages", {"query": hop.title}),
                ToolCall("view_sections", {"page_id": as_id(hop.title)}),
                ToolCall("read_section", {"section_id": section.id}),
            ]
        return calls

    def random_call(self, rng: random.Random) -> ToolCall:
        return ToolCall("search_pages", {"query": rng.choice(self.toolset.titles)})
