"""`search` and, if configured, `fetch`: over a local corpus, or with a service on the web.

    query ──> cache ──> backend ──> results, cut, defused and quoted ──> the model

Results are data. No text in them can act as a tag or as a token of a chat template (quote.py); they can still
be wrong, or ask the model for something. A service that fails gives no result, and its episode has none.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from silva.config.requests import ChatApiSettings, RequestSettings
from silva.config.sections import Above0, Fraction, Natural, NotNegative, Positive, Section, WebAddress
from silva.errors import ConfigError
from silva.tools.settings import ToolSettings

if TYPE_CHECKING:
    from silva.protocols import Tool
    from silva.tools.bm25 import Bm25, Hit
    from silva.tools.cache import Cache

CACHE = "~/.cache/silva"
DESCRIPTION = "Search for a query. Returns numbered results, each with a title and a text."
MAX_QUERY = 1000  # characters


class Bm25Backend(Section):
    """A corpus on this machine, ranked by BM25."""

    type: Literal["bm25"] = "bm25"
    corpus: str = ""
    """A file (.jsonl, .json, .parquet) whose rows are documents, or a folder of such files, .txt and .md."""
    id_key: str = "id"
    """Column with the name of a document; rows without one are numbered."""
    title_key: str = "title"
    """Key of the title in a row of the corpus."""
    text_key: str = "text"
    """Key of the text in a row of the corpus."""
    k1: NotNegative = 1.5
    """How much a word counts that occurs again in a document."""
    b: Fraction = 0.75
    """How much long documents count less."""


class WebBackend(RequestSettings):
    """Base of the services."""

    timeout: Above0 = 20.0
    """Seconds that one request may take."""
    retries: Natural = 4
    """How often a request is tried again after a fault that may pass."""
    max_wait: Above0 = 30.0
    """Longest pause in seconds before a request is tried again. If the service asks for more, it fails."""
    max_requests: Natural = 0
    """Requests that may ever be sent, tries included, by all users of one cache. After that, episodes have no
    result. 0: no limit."""


class SerperBackend(WebBackend):
    """Google through https://serper.dev."""

    type: Literal["serper"] = "serper"
    url: WebAddress = "https://google.serper.dev/search"
    """Address of the service."""
    key_variable: str = "SERPER_API_KEY"
    """Environment variable (or line of .env) that holds the key."""
    country: str = ""
    """Two letters (`gl`), such as "us"."""
    language: str = ""
    """Of the page (`hl`), such as "en"."""


class BrightDataBackend(WebBackend):
    """Google or Bing through the SERP API of https://brightdata.com."""

    type: Literal["brightdata"] = "brightdata"
    url: WebAddress = "https://api.brightdata.com/request"
    """Address of the service."""
    key_variable: str = "BRIGHTDATA_API_KEY"
    """Environment variable (or line of .env) that holds the key."""
    zone: Annotated[str, Field(min_length=1)] = "serp_api1"
    """Name of the SERP API zone in the account."""
    engine: Literal["google", "bing"] = "google"
    """Whose results."""
    country: str = ""
    """Two letters, such as "us"."""
    language: str = ""
    """Of the page (`hl`), such as "en"."""


class SearxngBackend(WebBackend):
    """An instance of SearXNG that gives JSON (`search.formats` in its settings)."""

    type: Literal["searxng"] = "searxng"
    url: WebAddress = "http://127.0.0.1:8080"
    """Address of the instance, without /search."""
    engines: str = ""
    """Names with commas between them; "" leaves it to the instance."""
    categories: str = ""
    """Separated by commas, such as "general,science"; "": as the instance has it."""
    language: str = ""
    """Of the results, such as "en"; "": as the instance has it."""


class RetrievalServerBackend(WebBackend):
    """A server of Search-R1's form: `POST {"queries": [...], "topk": k, "return_scores": true}`."""

    type: Literal["retrieval_server"] = "retrieval_server"
    url: WebAddress = "http://127.0.0.1:8000/retrieve"
    """Address of the server."""


Backend = Annotated[
    Bm25Backend | SerperBackend | BrightDataBackend | SearxngBackend | RetrievalServerBackend,
    Field(discriminator="type"),
]


class SummarySettings(ChatApiSettings):
    """A second model that reads pages and shows what they say about the goal of the first."""

    max_tokens: Positive = 1024
    """Tokens of a summary, thoughts included."""
    read_chars: Positive = 40_000
    """Characters of a page that it reads."""


class FetchSettings(Section):
    """A tool that reads web pages."""

    timeout: Above0 = 20.0
    """Seconds for one page, redirects included."""
    max_bytes: Positive = 2_000_000
    """How much of a page is read."""
    max_chars: Positive = 8000
    """Characters of its text that are shown."""
    redirects: Natural = 5
    """Redirects that are followed for one page."""
    max_concurrent: Positive = 16
    """Pages fetched at once."""
    private_hosts: tuple[str, ...] = ()
    """Hosts that may be read although their addresses are private or those of this machine."""
    summary: SummarySettings | None = None
    """Shows what a second model makes of a page, and asks the first for its goal; null shows the page."""


class SearchSettings(ToolSettings):
    """`search`, and `fetch` if that section is there."""

    type: Literal["search"] = "search"
    backend: Backend = Bm25Backend()
    """Who answers."""
    results: Positive = 5
    """Results of one search."""
    max_result_chars: Positive = 1000
    """Characters of the text of one result."""
    max_chars: Positive = 6000
    """Characters of all results together."""
    description: str = DESCRIPTION
    """What the model is told about `search`."""
    cache: str = CACHE
    """Folder for indices and for the answers of services; "" keeps nothing."""
    arpo_cache: str = ""
    """A cache of ARPO (JSON of query -> text); its answers are used before the service is asked."""
    fetch: FetchSettings | None = None
    """Adds the tool `fetch(url)`; null goes without."""

    def build(self) -> SearchTools:
        return SearchTools(self)


class SearchTools:
    """A `silva.protocols.Toolset`. The index, the cache and the limits are shared by all episodes.

    Raises:
        ConfigError: the corpus, a key or a package is missing.
    """

    def __init__(self, settings: SearchSettings) -> None:
        from silva.tools.cache import Cache
        from silva.tools.fetch import Fetcher
        from silva.tools.function import tool

        self.settings = settings
        backend, folder = settings.backend, settings.cache
        needed = settings.fetch is not None or not isinstance(backend, Bm25Backend)
        self.cache = Cache(Path(folder) / "answers.sqlite" if folder and needed else "")
        self._source: Local | Web
        if isinstance(backend, Bm25Backend):
            self._source = Local(backend, folder)
        else:
            self._source = Web(backend, self.cache, settings.arpo_cache)
        # The backend keeps its own time, because a service that is late is a fault and no answer.
        options: dict[str, Any] = {"timeout": math.inf, "max_chars": settings.max_chars}
        self.tools: list[Tool] = [tool(self._function(), name="search", **options)]
        if settings.fetch is not None:
            self.tools.append(Fetcher(settings.fetch, self.cache).tool)

    async def open(self, seed: int) -> SearchSession:
        return SearchSession(self.tools, self._source)

    def _function(self) -> Any:
        async def search(
            query: Annotated[str, Field(min_length=1, max_length=MAX_QUERY, description="What to look for.")],
        ) -> str:
            from silva.tools.quote import listed

            query = " ".join(query.split())
            hits = await self._source.search(query, self.settings.results) if query else []
            rows = [(hit.id, hit.title, hit.text) for hit in hits]
            return listed(rows, self.settings.max_result_chars) or "No results found."

        search.__doc__ = self.settings.description
        return search


class SearchSession:
    """A `silva.protocols.ToolSession`. It remembers nothing of an episode."""

    def __init__(self, tools: Sequence[Tool], source: Local | Web) -> None:
        self.tools, self._source = tools, source
        self._open = True
        source.enter()

    def metrics(self) -> Mapping[str, float]:
        return {}

    async def fork(self, seed: int) -> SearchSession:
        return SearchSession(self.tools, self._source)

    async def close(self) -> None:
        if self._open:
            self._open = False
            await self._source.leave()


class Local:
    """Results from an index on this machine."""

    def __init__(self, settings: Bm25Backend, folder: str) -> None:
        from silva.tools.bm25 import Bm25
        from silva.tools.corpus import Keys

        if not settings.corpus:
            raise ConfigError(
                "search: backend.corpus is missing; expected a file or folder with documents, or another "
                "backend.type"
            )
        keys = Keys(settings.id_key, settings.title_key, settings.text_key)
        self.index: Bm25 = Bm25.open(settings.corpus, cache=folder, keys=keys, k1=settings.k1, b=settings.b)

    def enter(self) -> None:
        pass

    async def leave(self) -> None:
        pass

    async def search(self, query: str, k: int) -> list[Hit]:
        return await asyncio.to_thread(self.index.search, query, k)  # large indices take their time


class Web:
    """Results of a service, each asked for once and then kept."""

    def __init__(self, settings: Any, cache: Cache, arpo_cache: str) -> None:
        from silva.tools.backends import FORMS
        from silva.tools.cache import arpo_answers
        from silva.tools.web import WebService
        from silva.wire.requests import key_of

        self._name, self._cache, self._arpo = settings.type, cache, bool(arpo_cache)
        self._form = FORMS[self._name](settings)
        if arpo_cache:
            digest, answers = arpo_answers(arpo_cache)
            cache.import_answers(digest, ((["arpo", query], texts) for query, texts in answers))
        self._key, self._missing = "", ""  # why nothing can be asked
        try:
            self._key = key_of(settings.key_variable, "search.backend.key_variable")
        except ConfigError as error:  # kept answers can be replayed
            if cache.empty:
                raise
            self._missing = str(error)
        self._service = WebService(self._name, settings, cache, self._key)
        self.enter, self.leave = self._service.enter, self._service.leave

    async def search(self, query: str, k: int) -> list[Hit]:
        from silva.tools.bm25 import Hit
        from silva.tools.cache import arpo_query
        from silva.tools.web import ServiceFault

        if self._arpo and (texts := await self._cache.get(["arpo", arpo_query(query)])) is not None:
            return [Hit("", f"Page {i}", text) for i, text in enumerate(texts, 1)][:k]
        request = [self._name, self._form.parameters, query, k]  # all that an answer depends on, and no key

        async def ask() -> list[Hit]:
            if self._missing:
                raise ServiceFault(f"the query {query!r} is not in the cache, and {self._missing}")
            hits: list[Hit] = await self._service.ask(self._form.call(query, k, self._key), self._form.read)
            return hits

        return [Hit(*row) for row in await self._cache.get_or_make(request, ask)][:k]
