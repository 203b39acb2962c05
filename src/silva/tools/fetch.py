"""`fetch(url)`: the text of a web page.

The model is told (`ToolError`) what is wrong with a page (no such host, HTTP 404, too slow, an image), and
that an address must not be read. A host is looked up once, all its addresses are checked, and exactly the
checked address is connected to, at every redirect again; so neither a redirect nor a DNS server that changes
its answer leads into the network of this machine. Proxies of the environment are not used, because they would
look the host up again.
"""

from __future__ import annotations

import asyncio
import codecs
import functools
import ipaddress
import math
import re
import socket
import zlib
from collections.abc import Iterable
from html import unescape
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from silva.errors import ConfigError
from silva.tools.function import FunctionTool, ToolError, tool
from silva.tools.page_summary import PageReader
from silva.tools.quote import one_line, quoted
from silva.tools.web import httpx

if TYPE_CHECKING:
    from silva.tools.cache import Cache
    from silva.tools.search import FetchSettings

AGENT = "Mozilla/5.0 (compatible; silva)"
MAX_URL = 2000  # characters
KEPT = 200_000  # characters of a page in the cache
VERSION = 1  # of the extraction: a new one reads pages again
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_UNICAST = ipaddress.ip_network("2000::/3")  # all of IPv6 that is given out; other forms may carry IPv4
_TEXTUAL = ("application/json", "application/xml", "application/javascript", "application/ld+json")
_TAG = re.compile(r"<!--|<(?P<name>/?[a-z][a-z0-9-]{0,20})|<[!?/]", re.I | re.A)
_SKIPPED = ("script", "style", "noscript", "template", "svg", "iframe", "textarea")
_INLINE = ("a", "b", "i", "u", "em", "strong", "span", "code", "sub", "sup", "small", "font", "mark")
_SLOW = ("punycode", "idna")  # codecs of Python whose time grows with the square of the length
_HTML = ("text/html", "application/xhtml+xml", "")

Url = Annotated[str, Field(min_length=1, max_length=MAX_URL, description="Its address.")]
Goal = Annotated[str, Field(min_length=1, max_length=MAX_URL, description="What you want to know from it.")]


class Page(NamedTuple):
    url: str  # after redirects
    title: str
    text: str


class Fetcher:
    """The tool `fetch`, and what its calls share."""

    def __init__(self, settings: FetchSettings, cache: Cache) -> None:
        httpx()  # what is missing or broken is an error at the start
        _trafilatura()
        self.settings, self._cache = settings, cache
        self._loop: asyncio.AbstractEventLoop | None = None
        limit = settings.max_chars + MAX_URL + 1000  # the text is cut by itself, below its heading
        # A second model keeps its own time, because one that is late is a fault and no answer.
        self._reader = PageReader(settings.summary, cache) if settings.summary else None
        self.tool: FunctionTool = (
            tool(self.fetch_for, name="fetch", timeout=math.inf, max_chars=limit)
            if self._reader
            else tool(self.fetch, timeout=settings.timeout + 5, max_chars=limit)
        )

    async def fetch(self, url: Url) -> str:
        """Read a web page. Returns its title and its text."""
        return self._shown(page := await self._page(url), page.text)

    async def fetch_for(self, url: Url, goal: Goal) -> str:
        """Read a web page. Returns its title and what it says about your goal."""
        page = await self._page(url)
        assert self._reader is not None
        return self._shown(page, await self._reader.summary(page.text, goal))

    def _shown(self, page: Page, text: str) -> str:
        heading = f"{one_line(page.title, 200) or 'Untitled'} ({one_line(page.url, 300)})"
        return f"{heading}\n{quoted(text, self.settings.max_chars)}"

    async def _page(self, url: str) -> Page:
        url = url.strip().partition("#")[0]
        if not url.isprintable():
            raise ToolError("the address holds control characters")
        page = Page(*await self._cache.get_or_make(["fetch", VERSION, url], lambda: self._read(url)))
        if not page.text.strip():
            raise ToolError("the page has no text that can be read")
        return page

    async def _read(self, url: str) -> Page:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._places = loop, asyncio.Semaphore(self.settings.max_concurrent)
        async with self._places:
            limit = asyncio.timeout(self.settings.timeout)
            try:
                async with limit:
                    address, kind, body = await download(url, self.settings)
                    title, text = await asyncio.to_thread(extract, body, kind)
            except TimeoutError:
                if not limit.expired():
                    raise
                raise ToolError(f"the page took longer than {self.settings.timeout:g} s") from None
        return Page(address, title, text[:KEPT])


async def download(url: str, settings: FetchSettings) -> tuple[str, str, bytes]:
    """(address after redirects, content type, body up to `max_bytes`) of a page.

    Raises:
        ToolError: what the model did wrong, or what is wrong with the page.
    """
    import httpcore2

    client = httpx()
    backend = guarded(frozenset(settings.private_hosts))
    async with httpcore2.AsyncConnectionPool(ssl_context=_ssl(), network_backend=backend) as pool:
        for _ in range(settings.redirects + 1):
            address = _address(url)
            target = httpcore2.URL(
                scheme=address.raw_scheme, host=address.raw_host, port=address.port, target=address.raw_path
            )
            headers: dict[bytes | str, bytes | str] = {
                "Host": address.netloc.decode("ascii"),
                "User-Agent": AGENT,
                "Accept": "text/html,text/*;q=0.9,application/json;q=0.8",
                "Accept-Encoding": "gzip, deflate",
            }
            try:
                async with pool.stream("GET", target, headers=headers) as response:
                    found = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in
                             response.headers}  # fmt: skip
                    if response.status in (301, 302, 303, 307, 308) and "location" in found:
                        url = str(address.join(found["location"]))
                        continue
                    if response.status != 200:
                        raise ToolError(f"the page answers HTTP {response.status}")
                    body = await _body(response.aiter_stream(), found, settings.max_bytes)
                    return str(address), found.get("content-type", ""), body
            except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException) as error:
                raise ToolError(f"the page cannot be read: {one_line(str(error), 200)}") from None
            except client.InvalidURL as error:  # a redirect to something that is no address
                raise ToolError(f"the page leads to a wrong address: {one_line(str(error), 200)}") from None
    raise ToolError(f"the page leads on to other pages more than {settings.redirects} times")


def _address(url: str) -> Any:
    client = httpx()
    try:
        address = client.URL(url)
        host, port = address.raw_host, address.port
    except (client.InvalidURL, ValueError, UnicodeError) as error:
        raise ToolError(f"not an address: {one_line(str(error), 200)}") from None
    if address.scheme not in ("http", "https"):
        raise ToolError(
            f"got an address of {one_line(address.scheme, 20) or 'no scheme'!r}, expected http or https"
        )
    if not host or address.userinfo or not (port is None or 0 < port < 1 << 16):
        raise ToolError("not an address of a page: expected https://host/path, without a name or password")
    return address


async def _body(parts: Any, headers: dict[str, str], most: int) -> bytes:
    """At most `most` bytes, unpacked: a small answer that unpacks to a huge one is cut like a huge one."""
    coding = headers.get("content-encoding", "identity").strip().lower()
    unpack = None
    if coding in ("gzip", "x-gzip", "deflate"):
        unpack = zlib.decompressobj(zlib.MAX_WBITS | 32)  # either form of heading
    elif coding not in ("identity", ""):
        raise ToolError(f"the page is packed with {one_line(coding, 40)}, which cannot be read")
    body = bytearray()
    try:
        async for part in parts:
            body += unpack.decompress(part, most - len(body)) if unpack else part
            if len(body) >= most:
                break
    except zlib.error as error:
        raise ToolError(f"the page is damaged: {error}") from None
    return bytes(body[:most])


@functools.cache
def _ssl() -> Any:
    import httpcore2

    return httpcore2.default_ssl_context()


@functools.cache
def guarded(private_hosts: frozenset[str]) -> Any:
    """A backend of httpcore that connects to public addresses only, and to those of `private_hosts`."""
    import httpcore2

    class Guarded(httpcore2.AsyncNetworkBackend):
        def __init__(self) -> None:
            self._inner = httpcore2.AnyIOBackend()

        async def connect_tcp(
            self,
            host: str,
            port: int,
            timeout: float | None = None,
            local_address: str | None = None,
            socket_options: Iterable[Any] | None = None,
        ) -> Any:
            addresses = await _looked_up(host, port)
            if host not in private_hosts and not all(map(is_public, addresses)):
                raise ToolError(f"{one_line(host, 200)} is in a private network, which must not be read")
            fault: Exception | None = None
            for address in addresses[:4]:
                try:
                    return await self._inner.connect_tcp(
                        address, port, timeout, local_address, socket_options
                    )
                except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                    fault = error
            raise fault or httpcore2.ConnectError(f"no address of {host}")

        async def connect_unix_socket(self, *_: Any, **__: Any) -> Any:
            raise ToolError("sockets of this machine must not be read")

        async def sleep(self, seconds: float) -> None:
            await self._inner.sleep(seconds)

    return Guarded()


async def _looked_up(host: str, port: int) -> list[str]:
    """Every address of a host, also of one written as 0x7f.1 or 2130706433."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ToolError(f"there is no host {one_line(host, 200)}") from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_public(address: str) -> bool:
    """Whether an IP address, and the IPv4 address that it may carry, belongs to the public internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        carried = ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1])
        if ip in _NAT64:
            carried = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if carried:
            return is_public(str(carried))
        return ip in _UNICAST and ip.is_global
    return ip.is_global and not ip.is_multicast


def extract(body: bytes, content_type: str) -> tuple[str, str]:
    """(title, text). ToolError for what is no text."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in _HTML and not kind.startswith("text/") and kind not in _TEXTUAL:
        raise ToolError(f"the page is {one_line(kind, 80)}, expected text")
    text = _decoded(body, content_type)
    if kind not in _HTML or (not kind and "<" not in text):
        return "", text
    title, everything = plain(text)
    library = _trafilatura()  # leaves out menus and advertisements
    return title, (library.extract(text, include_tables=True) if library else "") or everything


def _trafilatura() -> Any:
    try:
        import trafilatura
    except ModuleNotFoundError as error:
        if error.name == "trafilatura":
            return None
        raise ConfigError(f"fetch: trafilatura lacks a package: {error}") from error
    except ImportError as error:
        raise ConfigError(f"fetch: trafilatura is installed and cannot be used: {error}") from error
    return trafilatura


def _decoded(body: bytes, content_type: str) -> str:
    """By the charset that is said in the heading or in the first kilobyte, else as UTF-8."""
    said = re.search(r"charset=[\"']?([\w.:-]+)", content_type, re.I)
    if said is None:
        said = re.search(r"<meta[^>]*charset=[\"']?([\w.:-]+)", body[:1024].decode("latin-1"), re.I)
    try:
        name = codecs.lookup(said[1]).name if said else "utf-8-sig"
        return body.decode(name if name not in _SLOW else "utf-8", "replace")
    except (LookupError, ValueError):  # unknown, or one of Python's codecs that is no charset
        return body.decode("utf-8", "replace")


def plain(html: str) -> tuple[str, str]:
    """(title, all text), blocks on lines of their own; what scripts and styles hold is left out.

    Every search goes on where the last one ended, and the first that fails ends it all. So the time grows
    with the length alone, whatever a page makes up (`html.parser` takes its square for some).
    """
    title, place = "", 0
    parts: list[str] = []
    while (tag := _TAG.search(html, place)) is not None:
        parts.append(html[place : tag.start()])
        name = (tag["name"] or "").lower()
        end = "-->" if tag[0] == "<!--" else ">"
        ended = html.find(end, tag.end())
        if ended < 0:
            place = len(html)
            break
        place = ended + len(end)
        if name in _SKIPPED or name == "title":
            closed = re.compile(f"</{name}", re.I | re.A).search(html, place)
            if closed is None:
                place = len(html)
                break
            title = title or (html[place : closed.start()] if name == "title" else "")
            place = closed.start()
        if name.lstrip("/") not in _INLINE:
            parts.append("\n")
    text = unescape("".join([*parts, html[place:]]))
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return " ".join(unescape(title).split()), "\n".join(line for line in lines if line)
