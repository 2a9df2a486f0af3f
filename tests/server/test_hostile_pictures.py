"""Pictures and addresses that mean harm: each is refused in words, and holds up nothing else."""

import asyncio
import io
import os
import shutil
import ssl
import struct
import subprocess
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from quire import AsyncLLM
from quire.config import ServerConfig
from quire.errors import RequestError
from quire.server.media_files import MediaFiles, is_public
from seers import picture, seer
from server.asking import Client, run, serving
from server.test_images import GREEDY, OPTIONS, PARTS, asks, chunk, data_url, encoded, png

PUBLIC = "127.0.0.2"  # stands for an address of the internet
NAMES = {
    "pictures.example": [PUBLIC],
    "second.example": [PUBLIC],
    "other.example": [PUBLIC],
    "loopback.example": ["127.0.0.1"],
    "inside.example": ["10.0.0.7"],
    "clouds.example": ["169.254.169.254"],
    "mapped.example": ["::ffff:127.0.0.1"],
    "both.example": [PUBLIC, "192.168.1.1"],
}
WHOLE, JPEG = encoded(picture(1), "PNG"), encoded(picture(1), "JPEG")


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    model, processor = seer("llava")
    made = AsyncLLM(model, tokenizer=processor, **OPTIONS)
    yield made
    made.close()


# -- files -----------------------------------------------------------------------------------------


def many_scans() -> bytes:
    """A JPEG file of many pixels, whose last scan comes again and again."""
    made = encoded(Image.new("L", (4000, 4000)), "JPEG", progressive=True)
    last = made.rindex(b"\xff\xda")
    return made[:-2] + made[last:-2] * 2000 + made[-2:]


def album() -> bytes:
    """Two JPEG pictures in a file, of which the first has many scans: Pillow calls it MPO."""
    made = io.BytesIO()
    second = Image.new("L", (16, 16))
    pictures = {"save_all": True, "append_images": [second]}
    Image.new("L", (2000, 2000)).save(made, "MPO", progressive=True, **pictures)
    whole = made.getvalue()
    end = whole.index(b"\xff\xd9")
    last = whole.rindex(b"\xff\xda", 0, end)
    return whole[:end] + whole[last:end] * 1500 + whole[end:]


def gif_of_comments() -> bytes:
    made = encoded(Image.new("L", (16, 16)), "GIF")
    place = made.index(b"\x2c\0\0\0\0")
    return made[:place] + b"\x21\xfe\0" * 20_000 + made[place:]


def wide_frame() -> bytes:
    """A GIF file whose screen is small, and whose picture is not."""
    made = bytearray(encoded(Image.new("L", (16, 16)), "GIF"))
    place = made.index(b"\x2c\0\0\0\0")
    made[place + 5 : place + 9] = struct.pack("<HH", 60_000, 60_000)
    return bytes(made)


def of_palette(*, colours: bytes | None, depth: int = 8) -> bytes:
    header = struct.pack(">IIBBBBB", 20, 20, depth, 3, 0, 0, 0)
    parts = [chunk(b"IHDR", header)]
    if colours is not None:
        parts.append(chunk(b"PLTE", colours))
    parts += [chunk(b"IDAT", zlib.compress(b"\0" * 10)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def with_text(text: bytes) -> bytes:
    """A PNG file with a comment that is long once it is unpacked."""
    comment = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(text, 9))
    return WHOLE[:33] + comment + WHOLE[33:]


def bmp(width: int, height: int, depth: int = 24, packing: int = 0) -> bytes:
    head = b"BM" + struct.pack("<IHHI", 54, 0, 0, 54)
    return head + struct.pack("<IiiHHIIiiII", 40, width, height, 1, depth, packing, 0, 0, 0, 0, 0)


def webp(width: int, height: int) -> bytes:
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + size
    return b"RIFF" + struct.pack("<I", len(body)) + body


def middle_lost(data: bytes) -> bytes:
    return data[: len(data) // 2]


FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "cannot be read"),
    "noise": (lambda: b"\x00\xff" * 500, "cannot be read"),
    "svg": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be read"),
    "svg with entities": (lambda: b"<!DOCTYPE x [<!ENTITY a 'aaaa'>]><svg>&a;</svg>", "read"),
    "a page": (lambda: b"<html><body>hello</body></html>", "cannot be read"),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be read"),
    "pdf": (lambda: b"%PDF-1.7\n1 0 obj\n", "cannot be read"),
    "zip": (lambda: b"PK\x03\x04" + bytes(60), "cannot be read"),
    "tiff": (lambda: encoded(picture(1), "TIFF"), "cannot be read"),
    "icon": (lambda: encoded(Image.new("RGB", (16, 16)), "ICO"), "cannot be read"),
    "ppm": (lambda: b"P6\n99999 99999\n255\n", "cannot be read"),
    "heic": (lambda: b"\0\0\0\x18ftypheic" + bytes(40), "cannot be read"),
    "cut png": (lambda: middle_lost(WHOLE), "cannot be read"),
    "cut jpeg": (lambda: encoded(picture(1), "JPEG")[:300], "cannot be read"),
    "cut gif": (lambda: middle_lost(encoded(picture(1), "GIF")), "cannot be read"),
    "cut webp": (lambda: middle_lost(encoded(picture(1), "WEBP")), "cannot be read"),
    "cut bmp": (lambda: middle_lost(encoded(picture(1), "BMP")), "cannot be read"),
    "wrong sum": (lambda: WHOLE[:20] + b"\x7f" + WHOLE[21:], "cannot be read"),
    "no rows": (lambda: png(20, 20), "cannot be read"),
    "nothing wide": (lambda: png(0, 20), "cannot be read"),
    "no palette": (lambda: of_palette(colours=None), "cannot be read"),
    "half a colour": (lambda: of_palette(colours=b"\1\2"), "cannot be read"),
    "deep palette": (lambda: of_palette(colours=b"\1\2\3", depth=16), "cannot be read"),
    "a bomb": (lambda: png(8000, 8000), "8,000 × 8,000 pixels, and all together"),
    "a larger bomb": (lambda: png(60_000, 60_000), "number 0"),
    "the largest bomb": (lambda: png(2**31 - 1, 2**31 - 1), "number 0"),
    "a bmp bomb": (lambda: bmp(30_000, 30_000), "number 0"),
    "an upside-down bmp bomb": (lambda: bmp(7000, -7000), "number 0"),
    "a packed bmp bomb": (lambda: bmp(9000, 9000, 8, 1), "number 0"),
    "a webp bomb": (lambda: webp(2**24, 2**24), "number 0"),
    "a wide frame": (wide_frame, "number 0"),
    "a thread": (lambda: encoded(Image.new("1", (1_000_000, 1)), "PNG"), "200 times"),
    "a pole": (lambda: encoded(Image.new("1", (1, 1_000_000)), "PNG"), "200 times"),
    "many scans": (many_scans, "scans: save it with fewer"),
    "an album of scans": (album, "scans: save it with fewer"),
    "many chunks": (lambda: WHOLE[:33] + chunk(b"abCd", b"") * 20_000 + WHOLE[33:], "10,000 parts"),
    "chunks behind": (lambda: WHOLE[:-12] + chunk(b"abCd", b"") * 20_000, "10,000 parts"),
    "many crumbs": (lambda: WHOLE[:33] + chunk(b"IDAT", b"") * 20_000 + WHOLE[33:], "10,000 parts"),
    "many segments": (lambda: JPEG[:2] + b"\xff\xef\0\2" * 20_000 + JPEG[2:], "10,000 parts"),
    "many fillers": (lambda: JPEG[:2] + b"\xff" * 20_000 + JPEG[2:], "10,000 parts"),
    "many blocks": (gif_of_comments, "10,000 parts"),
    "many comments": (
        lambda: (
            WHOLE[:33] + chunk(b"zTXt", b"C\0\0" + zlib.compress(bytes(2**19), 9)) * 65 + WHOLE[33:]
        ),
        "more than 64 that are packed",
    ),
    "a wide profile": (
        lambda: WHOLE[:33] + chunk(b"iCCP", b"C\0\0" + zlib.compress(bytes(2**24), 9)) + WHOLE[33:],
        "cannot be read",
    ),
    "a long comment": (lambda: with_text(bytes(2**26)), "cannot be read"),
}


# -- addresses -------------------------------------------------------------------------------------


async def answer(
    path: str, port: int, send: Callable[[bytes], Awaitable[None]], over: asyncio.Event
) -> None:
    """What a hostile host says to each path."""

    def moved(to: str) -> bytes:
        return f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()

    def whole(kind: str, data: bytes, *more: str) -> bytes:
        lines = ["HTTP/1.1 200 OK", f"Content-Type: {kind}", f"Content-Length: {len(data)}", *more]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + data

    fixed = {
        "/cat.png": whole("image/png", WHOLE),
        "/moved": moved("/cat.png"),
        "/to-loopback": moved(f"http://127.0.0.1:{port}/cat.png"),
        "/to-inside": moved(f"http://inside.example:{port}/cat.png"),
        "/to-other": moved("http://other.example/cat.png"),
        "/to-file": moved("file:///etc/passwd"),
        "/to-itself": moved("/to-itself"),
        "/page": whole("text/html", b"<html/>"),
        "/svg": whole("image/svg+xml", b"<svg/>"),
        "/packed": whole("image/png", b"\x1f\x8b", "Content-Encoding: gzip"),
        "/missing": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        "/broken": b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n",
        "/no-http": b"SSH-2.0-OpenSSH_9.2\r\n",
        "/huge": b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999\r\n\r\n",
        "/two-lengths": whole("image/png", WHOLE, "Content-Length: 7"),
        "/cut": whole("image/png", WHOLE)[:-40],
        "/gone": b"",
    }
    if path in fixed:
        await send(fixed[path])
        return
    ok = b"HTTP/1.1 200 OK\r\n"
    without_end = {
        "/headers": (ok, b"X-More: " + b"a" * 4000 + b"\r\n"),
        "/endless": (ok + b"Content-Type: image/png\r\n\r\n", bytes(2**16)),
        "/crumbs": (ok + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n" * 10_000),
    }
    if path in without_end:
        head, more = without_end[path]
        await send(head)
        while True:
            await send(more)
    if path == "/continue":
        while not over.is_set():
            await send(b"HTTP/1.1 100 Continue\r\n\r\n")
            await asyncio.sleep(0.01)
    if path == "/drips":
        await send(whole("image/png", WHOLE)[:200])
    await over.wait()  # "/slow": nothing comes


@asynccontextmanager
async def host(tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A host of pictures; yields its port."""
    over = asyncio.Event()
    talks: set[asyncio.Task[None] | None] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def send(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        talks.add(asyncio.current_task())
        try:
            path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
            await answer(path, port, send, over)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(talk, PUBLIC, 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    try:
        yield port
    finally:
        over.set()
        server.close()
        await asyncio.gather(*filter(None, talks), return_exceptions=True)


async def resolve(name: str, _: int) -> list[str]:
    if name not in NAMES and not name[0].isdigit():
        raise OSError("Name or service not known")
    return NAMES.get(name, ["127.0.0.1"])  # the system reads numbers of any form so


def media(port: int, folder: Path | None, **options: Any) -> MediaFiles:
    hosts = (*NAMES, "unknown.example", "127.0.0.1")
    return MediaFiles(
        [*hosts, *(f"{name}:{port}" for name in hosts if name != "other.example")],
        None if folder is None else str(folder),
        **{
            "timeout_s": 60.0,
            "most_bytes": 100_000,
            "resolve": resolve,
            "may_ask": lambda address: address == PUBLIC or is_public(address),
            **options,
        },
    )


class BrieflyForSlowHosts:
    """Waits for hosts that never answer only a moment; the others may take as long as they need.

    All are asked at once, and a machine that is busy with them is no slow host.
    """

    def __init__(self, port: int, folder: Path | None) -> None:
        self._briefly, self._patiently = media(port, folder, timeout_s=0.3), media(port, folder)
        self.reads = self._patiently.reads

    async def read(self, url: str, *more: Any) -> bytes:
        own = self._briefly if url.startswith("https:") or url.endswith(SLOW) else self._patiently
        return await own.read(url, *more)

    def close(self) -> None:
        self._briefly.close()
        self._patiently.close()


@asynccontextmanager
async def asked(llm: AsyncLLM, folder: Path | None = None) -> AsyncIterator[tuple[Client, int]]:
    """A server that may ask the hosts of ``NAMES``."""
    config = ServerConfig(chat_template=PARTS)
    async with host() as port, serving(config, llm=llm) as client:
        client.service.media.close()
        client.service.media = BrieflyForSlowHosts(port, folder)
        yield client, port


SLOW = ("/continue", "/slow", "/drips")  # and what speaks no TLS where it is asked for
# {} is the port of the hostile host.
URLS = {
    "http://127.0.0.1:{}/cat.png": "not public",
    "http://loopback.example:{}/cat.png": "not public",
    "http://inside.example/cat.png": "not public",
    "http://clouds.example/latest/meta-data": "not public",
    "http://mapped.example:{}/cat.png": "not public",
    "http://both.example:{}/cat.png": "not public",
    "http://unknown.example/cat.png": "cannot be resolved",
    "http://pictures.example:1/cat.png": "not among the hosts",
    "http://elsewhere.example/cat.png": "not among the hosts",
    "http://2130706433:{}/cat.png": "not among the hosts",
    "http://0x7f.1:{}/cat.png": "not among the hosts",
    "http://[::1]:{}/cat.png": "not among the hosts",
    "http://pictures.example@elsewhere.example/cat.png": "no user",
    "http://pictures.example:x/cat.png": "cannot be read",
    "http://pictures.example\\@elsewhere.example/": "characters",
    "http://pictures.example:{}/cat.png\r\nX: y": "characters",
    "http:///cat.png": "must have a host",
    "http://pictures.example:{}/to-loopback": "not public",
    "http://pictures.example:{}/to-inside": "not public",
    "http://other.example:{}/cat.png": "not among the hosts",
    "http://pictures.example:{}/to-file": "only http and https",
    "http://pictures.example:{}/to-itself": "more than 5",
    "http://pictures.example:{}/page": "'text/html', and no picture",
    "http://pictures.example:{}/svg": "cannot be read",
    "http://pictures.example:{}/packed": "packed",
    "http://pictures.example:{}/missing": "status 404",
    "http://pictures.example:{}/broken": "status 500",
    "http://pictures.example:{}/no-http": "cannot be read",
    "http://pictures.example:{}/huge": "max_request_bytes",
    "http://pictures.example:{}/two-lengths": "cannot be read",
    "http://pictures.example:{}/cut": "cannot be read",
    "http://pictures.example:{}/gone": "cannot be read",
    "http://pictures.example:{}/headers": "cannot be read",
    "http://pictures.example:{}/endless": "max_request_bytes",
    "http://pictures.example:{}/continue": "within 0.3 s (image_fetch_timeout)",
    "http://[::ffff:127.0.0.1]:{}/cat.png": "not among the hosts",
    "http://%31%32%37.0.0.1:{}/cat.png": "not among the hosts",
    "http://pictures.example:{}/slow": "within 0.3 s",
    "http://pictures.example:{}/drips": "within 0.3 s",
    "https://pictures.example:{}/cat.png": "within 0.3 s",  # no TLS there
    "ftp://pictures.example/cat.png": "give it as data:",
    "javascript:alert(1)": "give it as data:",
    "file://elsewhere/cat.png": "whole path",
    "file:cat.png": "whole path",
    "file://[/cat.png": "cannot be read: Invalid IPv6 URL",
    "file:///etc/passwd": "no such file",
}


def test_what_means_harm_is_refused_in_words(llm: AsyncLLM, tmp_path: Path) -> None:
    """All at once; a good question beside them is answered while slow hosts are waited for."""

    async def ask() -> None:
        async with asked(llm, tmp_path) as (client, port):
            urls = {name: (data_url(make()), why) for name, (make, why) in FILES.items()}
            urls |= {url: (url.format(port), why) for url, why in URLS.items()}

            async def one(url: str) -> tuple[int, str]:
                got = await client.post(
                    "/v1/chat/completions", {"messages": asks(url), **GREEDY, "max_tokens": 1}
                )
                return got.status, got.body.decode()

            hostile = [asyncio.ensure_future(one(url)) for url, _ in urls.values()]
            slow = hostile[[*urls].index("http://pictures.example:{}/slow")]
            good = await one(f"http://pictures.example:{port}/moved")
            assert good[0] == 200, good
            for (name, (_, why)), (status, body) in zip(
                urls.items(), await asyncio.gather(*hostile), strict=True
            ):
                assert status == 400, (name, status, body)
                assert why in body, (name, body)
                assert len(body) < 600
            assert slow.done()
            assert not client.service.bodies.num_bytes
            assert not client.service.admission._num_pixels

    assert len(FILES) + len(URLS) >= 50
    run(ask())


def test_an_answer_in_crumbs_leaves_others_their_turn() -> None:
    """Chunks of one byte, thousands of them in each piece that is read."""

    async def ask() -> None:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        async with host() as port:
            files, beside = (
                media(port, None, most_bytes=30_000),
                asyncio.ensure_future(others()),
            )
            with pytest.raises(RequestError, match="max_request_bytes"):
                await files.read(f"http://pictures.example:{port}/crumbs", 0, lambda _: None)
            beside.cancel()
            files.close()
            assert turns > 30_000 / 200

    run(ask())


def test_a_slow_host_holds_up_nothing_else(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with asked(llm) as (client, port):
            client.service.media = media(port, None)
            body = {"messages": asks(f"http://pictures.example:{port}/slow"), **GREEDY}
            waiting = client.call("/v1/chat/completions", body)
            text = {"messages": [{"role": "user", "content": "w1"}], **GREEDY}
            assert (await client.post("/v1/chat/completions", text)).status == 200
            assert not waiting.task.done()
            waiting.leave()  # a client that leaves waits for nothing
            await waiting.whole()

    run(ask())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl on the path")
def test_a_certificate_must_be_of_the_host(tmp_path: Path) -> None:
    """Though the connection is made to an address."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = (
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "
        f"-keyout {key} -out {certificate} -subj /CN=x -addext subjectAltName=DNS:pictures.example"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(certificate, key)

    async def ask() -> None:
        trusting = ssl.create_default_context(cafile=str(certificate))
        async with host(ours) as port:
            files = media(port, None, tls=trusting)
            url = f"https://pictures.example:{port}/cat.png"
            assert await files.read(url, 0, lambda _: None) == WHOLE
            other = url.replace("pictures", "second")
            with pytest.raises(RequestError, match="certificate"):
                await files.read(other, 0, lambda _: None)
            files.close()
            files = media(port, None)  # which trusts the system's certificates
            with pytest.raises(RequestError, match="certificate"):
                await files.read(url, 0, lambda _: None)
            files.close()

    run(ask())


# -- files of the server's own ---------------------------------------------------------------------


def test_files_of_the_folder_are_read_and_no_others(tmp_path: Path) -> None:
    folder, outside = tmp_path / "in", tmp_path / "out"
    (folder / "sub").mkdir(parents=True)
    outside.mkdir()
    (folder / "sub" / "my cat.png").write_bytes(WHOLE)
    (outside / "cat.png").write_bytes(WHOLE)
    (folder / "inner").symlink_to(folder / "sub")
    (folder / "link.png").symlink_to(outside / "cat.png")
    (folder / "linked").symlink_to(outside)
    (folder / "circle").symlink_to(folder / "circle")
    (folder / "long.png").write_bytes(bytes(100_001))
    os.mkfifo(folder / "pipe.png")

    async def read() -> None:
        files = media(1, folder)
        counted: list[int] = []
        for path in ("sub/my%20cat.png", "inner/my%20cat.png", "sub/../inner/my%20cat.png"):
            assert await files.read(f"file://{folder}/{path}", 0, counted.append) == WHOLE
        assert counted == [len(WHOLE)] * 3
        for path, why in {
            "link.png": "no such file",
            "linked/cat.png": "no such file",
            "../out/cat.png": "no such file",
            "%2e%2e/out/cat.png": "no such file",
            "missing.png": "no such file",
            "sub": "no such file",
            "": "no such file",
            "pipe.png": "no such file",
            "cat%00.png": "no such file",
            "circle": "no such file",
            "circle/cat.png": "no such file",
            "long.png": "max_request_bytes",
        }.items():
            with pytest.raises(Exception, match=why):
                await files.read(f"file://{folder}/{path}", 0, counted.append)
        assert len(counted) == 3
        files.close()

    run(read())


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.0.1", False),
        ("100.64.0.1", False),
        ("168.63.129.16", False),  # Azure's, of the machine's own host
        ("168.63.129.17", True),
        ("169.254.169.254", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("fec0::1", False),
        ("ff02::1", False),
        ("::ffff:8.8.8.8", False),
        ("::8.8.8.8", False),
        ("2002:7f00:1::", False),
        ("64:ff9b::7f00:1", False),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public


def test_a_host_may_be_any(llm: AsyncLLM) -> None:
    """With ``*``, at the scheme's own port: what it resolves to is checked all the same."""

    async def ask() -> None:
        files = media(1, None)
        files._domains = frozenset("*")
        for url, why in {
            "http://2130706433/cat.png": "not public",
            "http://inside.example/cat.png": "not public",
            "http://pictures.example:81/cat.png": "not among the hosts",
        }.items():
            with pytest.raises(Exception, match=why):
                await files.read(url, 0, lambda _: None)
        files.close()

    run(ask())


def test_a_key_has_its_share_of_bytes(llm: AsyncLLM) -> None:
    """What is fetched counts as its bodies."""

    async def ask() -> None:
        async with asked(llm) as (client, port):
            client.service.bodies._most_bytes = len(WHOLE)
            body = {"messages": asks(f"http://pictures.example:{port}/cat.png"), **GREEDY}
            answer = await client.post("/v1/chat/completions", body)
            assert (answer.status, answer.error["code"]) == (503, "bodies_full"), answer.body

    run(ask())
