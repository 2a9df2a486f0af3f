"""Files that a request names: of hosts and of a folder that the operator has allowed, under bounds.

A client who may name an address could have the server ask others in its place: programs of this
machine, the network behind it, a cloud's store of credentials. So a host's name must be one of the
operator's list, and the addresses that it resolves to must be public. The connection goes to an
address that was checked, so it does not matter what the name resolves to a moment later. A redirect
is checked as the first address was.
"""

import asyncio
import os
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Network, ip_address
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias, final
from urllib.parse import unquote, urljoin, urlsplit

import h11

from quire.errors import RequestError
from quire.units import format_bytes

Resolve: TypeAlias = Callable[[str, int], Awaitable[list[str]]]  # (name, port) → addresses
Take: TypeAlias = Callable[[int], None]  # counts bytes, and refuses too many

ANY_HOST = "*"
_PORTS: Mapping[str, int] = MappingProxyType({"http": 80, "https": 443})
_MOST_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_AT_ONCE = 8  # files of one key
_NUM_RESOLVERS = 8  # threads: a name that does not resolve holds one until the system gives up
_PIECE = 2**16
_TURN = 128  # parts of an answer, after which others get their turn
_HEADER_BYTES = 2**14
_TYPES = ("image/", "application/octet-stream", "binary/octet-stream")
_GLOBAL_UNICAST = IPv6Network("2000::/3")
# They look public: Azure's host of a machine, and Oracle's metadata of older machines.
_OF_CLOUDS = frozenset({IPv4Address("168.63.129.16"), IPv4Address("192.0.0.192")})


@dataclass(frozen=True, slots=True)
class Place:
    """Where a file is on the web."""

    scheme: str
    host: str
    port: int
    target: str  # path and query

    @classmethod
    def of(cls, url: str) -> "Place":
        """Read an address. Raises: RequestError for one that can be read in two ways."""
        if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
            raise RequestError("its URL has characters that a URL has not: encode them")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise RequestError(f"its URL cannot be read: {error}") from None
        if parts.scheme not in _PORTS:
            raise RequestError(f"its URL is {parts.scheme[:20]}:, and only http and https are read")
        if not host or "@" in parts.netloc:
            raise RequestError("its URL must have a host, and no user")
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(parts.scheme, host.removesuffix("."), port or _PORTS[parts.scheme], target)

    @property
    def named(self) -> str:
        """Return the host, with its port unless that is the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def is_public(address: str) -> bool:
    """Return whether an address is of the internet: not private, of this machine or of its link.

    An IPv6 address in which an IPv4 address is written is not, nor one at which a cloud answers its
    own machines alone.
    """
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv4Address):
        return found.is_global and not found.is_multicast and found not in _OF_CLOUDS
    inner = found.ipv4_mapped, found.sixtofour, found.teredo
    return found in _GLOBAL_UNICAST and found.is_global and not any(inner)


@final
class MediaFiles:
    """Reads files for requests. It belongs to one event loop.

    ``domains`` may be asked: names, or names with ports other than the scheme's own; ``"*"`` is
    each. ``folder`` is the one whose files may be read. A file has ``most_bytes`` at most, and one
    of another host comes within ``timeout_s`` seconds. ``resolve``, ``may_ask`` and
    ``tls`` are for tests.
    """

    def __init__(
        self,
        domains: Sequence[str],
        folder: str | None,
        *,
        timeout_s: float,
        most_bytes: int,
        resolve: Resolve | None = None,
        may_ask: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._domains = frozenset(domain.lower() for domain in domains)
        self._folder = None if folder is None else Path(folder).resolve()
        self._timeout_s, self._most_bytes = timeout_s, most_bytes
        self._resolve, self._may_ask = resolve or self._by_system, may_ask
        self._resolvers = ThreadPoolExecutor(_NUM_RESOLVERS, thread_name_prefix="quire-names")
        self._turns: dict[int, asyncio.Semaphore] = {}  # of each key
        self._tls = tls

    def reads(self, url: str) -> bool:
        """Return whether a URL is for ``read``, if only to be refused there."""
        return url[:8].lower().startswith(("http://", "https://", "file:"))

    async def read(self, url: str, caller: int, take: Take) -> bytes:
        """Return the bytes of a file, for a key. ``take`` counts them.

        Raises: RequestError saying why not; what ``take`` raises.
        """
        async with self._turns.setdefault(caller, asyncio.Semaphore(_AT_ONCE)):
            if url[:5].lower() == "file:":
                data = await asyncio.get_running_loop().run_in_executor(
                    self._resolvers, self._local, url
                )
                take(len(data))
                return data
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._remote(url, take)
            except TimeoutError:
                raise RequestError(
                    f"it has not come within {self._timeout_s:g} s (image_fetch_timeout)"
                ) from None

    def close(self) -> None:
        """End the threads when they have nothing to do."""
        self._resolvers.shutdown(wait=False, cancel_futures=True)

    # -- other hosts -------------------------------------------------------------------------------

    async def _remote(self, url: str, take: Take) -> bytes:
        for _ in range(_MOST_REDIRECTS + 1):
            place = self._allowed(url)
            addresses = await self._addresses(place)
            try:
                found = await self._asked(place, addresses, take)
            except (OSError, ssl.SSLError, h11.ProtocolError) as error:
                why = " ".join(str(error).split())[:120]
                raise RequestError(f"{place.named} cannot be read: {why}") from None
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise RequestError(f"its URL leads to more than {_MOST_REDIRECTS} others")

    def _allowed(self, url: str) -> Place:
        """Return where a URL leads. Raises: RequestError for a host that is not on the list."""
        place = Place.of(url)
        if not self._domains:
            raise RequestError(
                "this server fetches nothing from other hosts, unless its operator allows some "
                "(allowed_media_domains): send the picture as data:image/png;base64,…"
            )
        is_named = place.named in self._domains
        if not is_named and not (ANY_HOST in self._domains and place.port == _PORTS[place.scheme]):
            raise RequestError(
                f"{place.named[:80]} is not among the hosts that the operator of this server "
                "allows (allowed_media_domains)"
            )
        return place

    async def _addresses(self, place: Place) -> list[str]:
        """Return what a host's name resolves to. Raises: RequestError if not all is public."""
        try:
            found = await self._resolve(place.host, place.port)
        except (OSError, UnicodeError) as error:
            why = " ".join(str(error).split())[:80]
            raise RequestError(f"{place.host[:80]} cannot be resolved: {why}") from None
        if not found or not all(map(self._may_ask, found)):
            raise RequestError(
                f"{place.host[:80]} resolves to an address that is not public, which this server "
                "does not ask"
            )
        return found

    async def _by_system(self, host: str, port: int) -> list[str]:
        def ask() -> list[str]:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return [*dict.fromkeys(str(each[4][0]) for each in found)]

        return await asyncio.get_running_loop().run_in_executor(self._resolvers, ask)

    async def _asked(self, place: Place, addresses: Sequence[str], take: Take) -> bytes | str:
        """Ask the first address that can be reached. Returns: a file, or where it is.

        Raises: OSError, h11.ProtocolError; RequestError.
        """
        secure = place.scheme == "https"
        if secure and self._tls is None:
            self._tls = ssl.create_default_context()  # which reads the system's certificates
        for number, address in enumerate(addresses):
            try:
                reader, writer = await asyncio.open_connection(
                    address,
                    place.port,
                    limit=_PIECE,
                    ssl=self._tls if secure else None,
                    server_hostname=place.host if secure else None,
                )
                break
            except ssl.SSLError:
                raise
            except OSError:
                if number + 1 == len(addresses):
                    raise
        try:
            return await self._answered(place, reader, writer, take)
        finally:
            writer.transport.abort()  # a goodbye could be waited for

    async def _answered(
        self, place: Place, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, take: Take
    ) -> bytes | str:
        wire = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEADER_BYTES)
        headers = {
            "host": place.named,
            "accept": "image/*",
            "accept-encoding": "identity",
            "user-agent": "quire",
            "connection": "close",
        }
        asked = h11.Request(method="GET", target=place.target, headers=[*headers.items()])
        writer.write((wire.send(asked) or b"") + (wire.send(h11.EndOfMessage()) or b""))
        await writer.drain()
        found = bytearray()
        for number in count(1):
            if not number % _TURN:  # a piece may have thousands, and reading it may not wait
                await asyncio.sleep(0)
            event = wire.next_event()
            if event is h11.NEED_DATA:
                wire.receive_data(await reader.read(_PIECE))
            elif isinstance(event, h11.Response):
                if (elsewhere := self._checked(place, event)) is not None:
                    return elsewhere
            elif isinstance(event, h11.Data):
                if len(found) + len(event.data) > self._most_bytes:
                    raise self._too_long()
                take(len(event.data))
                found += event.data
            elif isinstance(event, h11.EndOfMessage):
                return bytes(found)
            elif not isinstance(event, h11.InformationalResponse):
                raise OSError("it closed the connection")
        raise AssertionError("the count has no end")

    def _checked(self, place: Place, answer: h11.Response) -> str | None:
        """Return where a file is if it is elsewhere; None if it follows. Raises: RequestError."""
        said = {name.decode("ascii"): value.decode("latin-1") for name, value in answer.headers}
        if answer.status_code in _REDIRECTS and "location" in said:
            return said["location"]
        if answer.status_code != 200:
            raise RequestError(f"{place.named} answers with status {answer.status_code}")
        kind = said.get("content-type", _TYPES[0])
        if not kind.lower().startswith(_TYPES):
            raise RequestError(f"{place.named} sends {kind[:40]!r}, and no picture")
        if said.get("content-encoding", "identity").lower() != "identity":
            raise RequestError(f"{place.named} sends it packed, which was not asked for")
        if int(said.get("content-length", "0")) > self._most_bytes:  # a number, says h11
            raise self._too_long()
        return None

    def _too_long(self) -> RequestError:
        return RequestError(
            f"its file has more than {format_bytes(self._most_bytes)} (max_request_bytes)"
        )

    # -- files of this machine ---------------------------------------------------------------------

    def _local(self, url: str) -> bytes:
        """Read a file beneath the folder. Raises: RequestError."""
        if self._folder is None:
            raise RequestError(
                "this server reads no files, unless its operator allows a folder "
                "(allowed_local_media_path): send the picture as data:image/png;base64,…"
            )
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise RequestError(f"its URL cannot be read: {error}") from None
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise RequestError("its URL must be file:///PATH, with a whole path")
        try:
            return self._beneath(Path(unquote(parts.path)))
        except RequestError:
            raise
        # A RuntimeError is of links in a circle. Each would tell what else is there.
        except (OSError, ValueError, RuntimeError):
            raise RequestError(
                "there is no such file in the folder that the operator of this server allows "
                "(allowed_local_media_path)"
            ) from None

    def _beneath(self, path: Path) -> bytes:
        """Read a file whose path, without links, is beneath the folder.

        No part of that path may become a link meanwhile. Raises: OSError; ValueError for another
        path; RequestError.
        """
        assert self._folder is not None
        inner = path.resolve(strict=True).relative_to(self._folder)
        if not inner.parts:
            raise ValueError("no file")
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for part in inner.parts[:-1]:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                outer, folder = folder, os.open(part, flags, dir_fd=folder)
                os.close(outer)
            # A pipe would be waited for.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            with open(os.open(inner.parts[-1], flags, dir_fd=folder), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise ValueError("no file")
                data = file.read(self._most_bytes + 1)
        finally:
            os.close(folder)
        if len(data) > self._most_bytes:
            raise self._too_long()
        return data
