"""Hard questions over a fixed collection: search, open a document, scroll in it (Act-PRM on BrowseComp-Plus).

    search("museum opened in 1829 fossils")  ->  expand("sorunemar_museum#1")  ->  scroll_down()

Documents are divided into parts of the same length. A search shows previews of the parts that fit best;
`expand` opens one of them, `scroll_up` and `scroll_down` go on from there. Tools are on offer when they can
be used: nothing but `search` at first. The documents are a user's, or those of a made-up encyclopedia,
whose questions describe where to begin and do not name it.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from silva.config.sections import Positive
from silva.data.documents import Document
from silva.data.retrieval import Ranking, best_window, has_phrase
from silva.environments.worlds.corpus_qa import CorpusEpisode, CorpusQA
from silva.environments.worlds.encyclopedia import Hop
from silva.protocols import Reward, Tool
from silva.tools.function import ToolError, tool
from silva.types import Task, ToolCall


class BrowseCompPlusSearch(CorpusQA):
    type: Literal["browsecomp_plus_search"] = "browsecomp_plus_search"
    named: bool = False
    """Made-up questions name the page to begin with; off: they describe it."""
    min_hops: Positive = 2
    """Pages that the easiest made-up questions need."""
    max_hops: Annotated[int, Field(ge=1, le=4)] = 3
    """Pages that the hardest made-up questions need."""
    part_words: Positive = 60
    """Words of a part of a document; about 750 are the 1,024 tokens of Act-PRM."""
    preview_words: Positive = 20
    """Words of a preview; about 150 are the 204 tokens of Act-PRM."""
    results: Positive = 5
    """Parts that a search shows at most."""
    tools_change: bool = True
    """Offer only the tools that can be used now; off: all of them from the start, so that the context only
    ever grows."""
    max_tool_calls: Positive = 20
    """Tool calls of one episode, malformed ones and answers sent back included; one more ends it."""

    def toolset(self, found: Sequence[Document]) -> Library:
        return Library(found, self)

    def episode(self, task: Task, toolset: Any, reward: Reward, answers: Sequence[str]) -> BrowseEpisode:
        return BrowseEpisode(self, task, toolset, reward, answers)


class DocumentPart(NamedTuple):
    """Number `number` of the `of` parts of a document, from 1."""

    id: str
    title: str
    text: str
    number: int
    of: int


class Library:
    """A `silva.protocols.Toolset`: the parts of all documents, and the search in them."""

    def __init__(self, found: Sequence[Document], settings: BrowseCompPlusSearch) -> None:
        self.settings = settings
        self.parts = [part for document in found for part in divided(document, settings.part_words)]
        self.place = {part.id: place for place, part in enumerate(self.parts)}

    @functools.cached_property
    def _ranking(self) -> Ranking:
        return Ranking(f"{part.title}\n{part.text}" for part in self.parts)

    async def open(self, seed: int) -> Reader:
        return Reader(self)

    def search(self, query: str) -> list[int]:
        """Places of the parts that fit best."""
        return self._ranking.best(query, self.settings.results)

    def preview(self, place: int, query: str) -> str:
        part = self.parts[place]
        start, end = best_window(part.text, query, self.settings.preview_words)
        words = part.text.split()
        text = " ".join(words[start:end])
        return f"[{part.id}] {'... ' * (start > 0)}{text}{' ...' * (end < len(words))}"


class Reader:
    """A `silva.protocols.ToolSession`: what is open in one episode."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.searched = False
        self.opened: int | None = None
        self._tools = {
            name: tool(getattr(self, name)) for name in ("search", "expand", "scroll_up", "scroll_down")
        }

    @property
    def tools(self) -> Sequence[Tool]:
        names = ["search"]
        if not self.library.settings.tools_change:
            names = list(self._tools)
        elif self.searched:
            names.append("expand")
            if self.opened is not None:
                part = self.library.parts[self.opened]
                names += ["scroll_up"] * (part.number > 1) + ["scroll_down"] * (part.number < part.of)
        return [self._tools[name] for name in names]

    def metrics(self) -> Mapping[str, float]:
        return {}

    async def fork(self, seed: int) -> Reader:
        twin = Reader(self.library)
        twin.searched, twin.opened = self.searched, self.opened
        return twin

    async def close(self) -> None:
        pass

    async def search(self, query: Annotated[str, Field(description="words to look for")]) -> str:
        """Find documents: previews of the parts that fit best, each with its id in brackets."""
        places = self.library.search(query)
        if not places:
            raise ToolError(f"no document has any of the words {query!r}")
        self.searched, self.opened = True, None
        return "\n".join(self.library.preview(place, query) for place in places)

    async def expand(self, doc_id: Annotated[str, Field(description="an id that stood in brackets")]) -> str:
        """Open a part of a document that a search found."""
        place = self.library.place.get(doc_id.strip().strip("[]"))
        if place is None:
            raise ToolError(f"no document {doc_id!r}: search gives ids, in brackets")
        return self._open(place)

    async def scroll_up(self) -> str:
        """Open the part before the one that is open."""
        return self._scroll(-1)

    async def scroll_down(self) -> str:
        """Open the part after the one that is open."""
        return self._scroll(1)

    def _scroll(self, parts: int) -> str:
        if self.opened is None:
            raise ToolError("nothing is open: expand a document first")
        part = self.library.parts[self.opened]
        if not 1 <= part.number + parts <= part.of:
            raise ToolError(f"this is the {'last' if parts > 0 else 'first'} part of the document")
        return self._open(self.opened + parts)

    def _open(self, place: int) -> str:
        self.opened = place
        part = self.library.parts[place]
        return f"[{part.id}] {part.title}, part {part.number} of {part.of}\n{part.text}"


class BrowseEpisode(CorpusEpisode):
    settings: BrowseCompPlusSearch
    toolset: Library

    def rules(self) -> str:
        return (
            "Answer the question. You can search a collection of documents, expand what a search found and "
            "scroll in it. When you know the answer, give it alone: <answer>...</answer>"
        )

    def expert_calls(self, hops: Sequence[Hop]) -> list[ToolCall]:
        """For each page: a search with words of the question or, if they do not find it, with its title; then
        the part that was found, and from there to the part with the fact."""
        library, calls = self.toolset, []
        for hop in hops:
            query = hop.query if self._found(hop.query, hop.title) else hop.title
            start = self._found(query, hop.title)[0]
            goal = self._place_of(hop, start)
            calls += [
                ToolCall("search", {"query": query}),
                ToolCall("expand", {"doc_id": library.parts[start].id}),
                *[ToolCall("scroll_down" if goal > start else "scroll_up", {})] * abs(goal - start),
            ]
        return calls

    def random_call(self, rng: random.Random) -> ToolCall:
        offered = rng.choice(list(self.tools))
        part = rng.choice(self.toolset.parts)
        arguments = {"search": {"query": part.title}, "expand": {"doc_id": part.id}}
        return ToolCall(offered, arguments.get(offered, {}))

    def _found(self, query: str, title: str) -> list[int]:
        library = self.toolset
        return [place for place in library.search(query) if library.parts[place].title == title]

    def _place_of(self, hop: Hop, near: int) -> int:
        """The part in which a fact ends. If it begins in another one, that was seen on the way."""
        library, part = self.toolset, self.toolset.parts[near]
        first = near - part.number + 1
        wanted = hop.fact.split()
        words: list[str] = []
        for place in range(first, first + part.of):
            words += library.parts[place].text.split()
            if has_phrase(words, wanted):
                return place
        raise ValueError(f"{hop.title}: the fact {hop.fact!r} is not in its document")


def divided(document: Document, words: int) -> list[DocumentPart]:
    """Its text in parts of so many words. The last one may be shorter."""
    text = document.text.split()
    starts = range(0, len(text), words) or range(1)
    return [
        DocumentPart(
            f"{document.id}#{number}",
            document.title,
            " ".join(text[start : start + words]),
            number,
            len(starts),
        )
        for number, start in enumerate(starts, 1)
    ]
