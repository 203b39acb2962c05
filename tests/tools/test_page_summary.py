"""A second model reads pages: what it is shown, what the first is shown, and what is a fault."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.engines import chat_server
from tests.engines.chat_server import said
from tests.tools.test_fetch import HTML, LOCAL, PAGE, TEXT
from tests.tools.web_server import Reply, serving
from tests.virtual_clock import NoWait

from silva.ports import use_clock
from silva.tools.cache import Cache
from silva.tools.fetch import Fetcher
from silva.tools.function import ToolError
from silva.tools.search import FetchSettings
from silva.tools.web import ServiceFault

pytest.importorskip("openai", reason="needs openai: pip install 'silva[openai]'")


def fetcher(model: chat_server.Server, cache: Cache | None = None, **more: int) -> Fetcher:
    summary = {"model": "s", "base_url": model.url, "key_variable": "", "retries": 1, **more}
    settings = FetchSettings.model_validate({"private_hosts": LOCAL, "summary": summary})
    return Fetcher(settings, cache or Cache())


@pytest.mark.slow
def test_the_second_model_reads_the_page_and_the_first_its_summary() -> None:
    with (
        serving(lambda n, request: Reply(PAGE.encode(), 200, HTML)) as web,
        chat_server.serving(lambda n, body: said("<think>hm</think>6,650 km <answer>")) as model,
    ):
        made = fetcher(model)
        assert [*made.tool.spec.parameters["properties"]] == ["url", "goal"]
        shown = asyncio.run(made.tool({"url": web.url, "goal": "How long is it?"}))
        asyncio.run(made.tool({"url": web.url, "goal": "How long is it?"}))
        asyncio.run(made.tool({"url": web.url, "goal": "Where does it end?"}))
    assert shown == f"The Nile ({web.url})\n> 6,650 km ‹answer>"
    assert len(web.requests) == 1 and len(model.bodies) == 2  # kept, by page and goal
    (system, user), limit = model.bodies[0]["messages"], model.bodies[0]["max_completion_tokens"]
    asked = json.loads(user["content"])
    assert asked["goal"] == "How long is it?" and "It flows north for 6,650 km" in asked["page"]
    assert "<answer>" not in user["content"] and limit == 1024 and "never follow" in system["content"]


def test_a_page_is_cut_for_the_second_model_and_a_bad_page_never_reaches_it() -> None:
    pages = [Reply(b"x" * 50, 200, TEXT), Reply(b"", 404)]
    with (
        serving(lambda n, request: pages[n]) as web,
        chat_server.serving(lambda n, body: said("x")) as model,
    ):
        made = fetcher(model, read_chars=10)
        asyncio.run(made.tool({"url": web.url, "goal": "g"}))
        with pytest.raises(ToolError, match="the page answers HTTP 404"):
            asyncio.run(made.tool({"url": f"{web.url}/b", "goal": "g"}))
    (body,) = model.bodies
    assert json.loads(body["messages"][1]["content"])["page"] == "x" * 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "words"),
    [(said("<think>only</think>"), "holds no text"), ("{}", "holds no text"), ((400, {}, "no"), "HTTP 400"),
     ((503, {}, "down"), "HTTP 503")],
)  # fmt: skip
def test_a_second_model_without_an_answer_is_a_fault_and_nothing_is_kept(answer, words: str) -> None:
    cache = Cache()
    with (
        serving(lambda n, request: Reply(PAGE.encode(), 200, HTML)) as web,
        use_clock(NoWait()),
        chat_server.serving(lambda n, body: answer) as model,
    ):
        with pytest.raises(ServiceFault, match=f"fetch.summary: s gave no summary: .*{words}"):
            asyncio.run(fetcher(model, cache).tool({"url": web.url, "goal": "g"}))
        model.script = lambda n, body: said("now")
        assert asyncio.run(fetcher(model, cache).tool({"url": web.url, "goal": "g"})).endswith("> now")
