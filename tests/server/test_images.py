"""Pictures in chats: data: URLs, what they count, and what is refused before it takes memory."""

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine.test_images import OPTIONS, own, shown
from quire import AsyncLLM
from quire.config import ServerConfig
from quire.server.admission_control import MOST_PIXELS_UNDER_WAY, AdmissionControl, Bounds
from quire.server.pictures import MOST_PICTURES, in_colours, open_pictures
from quire.server.wire.error_responses import Refused
from seers import picture, seer
from server.asking import run, serving

PARTS = (
    "{% for m in messages %}{% if m.content is string %} {{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %} <image>{% else %} {{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
TEXTS = "{% for m in messages %} {{ m.content }}{% endfor %}"
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 8}


def url_of(pixels: Any, kind: str = "PNG", **options: Any) -> str:
    made = io.BytesIO()
    image = Image.fromarray(pixels) if isinstance(pixels, np.ndarray) else pixels
    image.save(made, kind, **options)
    return data_url(made.getvalue(), kind)


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind.lower()};base64,{base64.b64encode(data).decode()}"


def asks(*urls: str, text: str = "w5 w6") -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "auto"}} for url in urls]
    return [
        {"role": "system", "content": "w1 w2"},
        {"role": "user", "content": [*parts, {"type": "text", "text": text}]},
    ]


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    model, processor = seer("llava")
    with ExitStack() as stack:
        made = AsyncLLM(model, tokenizer=processor, **OPTIONS)
        stack.callback(made.close)
        yield made


@pytest.mark.parametrize("template", [PARTS, TEXTS])
def test_a_chat_shows_pictures(llm: AsyncLLM, template: str) -> None:
    """By a template that knows images, and by one that reads texts alone."""
    several = picture(1), picture(2)
    expected = own("llava", shown("llava", "w1 w2 @ @ w5 w6", *several))
    words = " ".join(seer("llava")[1].tokenizer.convert_ids_to_tokens(expected))

    async def ask() -> None:
        async with serving(ServerConfig(chat_template=template), llm=llm) as client:
            body = {"messages": asks(*map(url_of, several)), **GREEDY, "skip_special_tokens": False}
            first = await client.post("/v1/chat/completions", body)
            assert first.status == 200, first.body
            assert first.json["choices"][0]["message"]["content"].split() == words.split()
            # Each of the two has four tokens.
            assert first.json["usage"]["prompt_tokens"] == 4 + 2 * 4
            tokens = await client.post("/tokenize", {"messages": body["messages"]})
            assert tokens.json["count"] == 4 + 2 * 4
            again = await client.post("/v1/chat/completions", body)
            assert again.json["choices"] == first.json["choices"]
            assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 11
            other = {**body, "messages": asks(url_of(picture(3)), url_of(picture(2)))}
            third = await client.post("/v1/chat/completions", other)
            details = third.json["usage"].get("prompt_tokens_details") or {}
            assert details.get("cached_tokens", 0) <= 2  # of the text before it

    run(ask())


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """A header that promises so many pixels, with few bytes behind it."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


WHOLE = url_of(picture(1))
HOSTILE = {
    "elsewhere": ("https://example.org/cat.png", "this server fetches nothing"),
    "a file": ("file:///etc/passwd", "this server fetches nothing"),
    "no type": ("data:;base64,AAAA", "this server fetches nothing"),
    "no base64": ("data:image/png;base64,!!!!", "is not base64"),
    "letters": ("data:image/png;base64,\u00e9\u00e9", "is not base64"),
    "empty": ("data:image/png;base64,", "cannot be read"),
    "noise": (data_url(b"\x00" * 64), "cannot be read"),
    "a page": (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml"), "cannot be read"),
    "another kind": (url_of(picture(1), "TIFF"), "cannot be read"),
    "cut short": (data_url(base64.b64decode(WHOLE.partition(",")[2])[:-4000]), "cannot be read"),
    "a bomb": (data_url(png(8000, 8000)), "8,000 × 8,000 pixels, and all together"),
    "a larger bomb": (data_url(png(60_000, 60_000)), "image_url: number 0"),
    "no rows": (data_url(png(20, 20)), "cannot be read"),
    "nothing wide": (data_url(png(0, 20)), "cannot be read"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_picture_is_refused(llm: AsyncLLM, name: str) -> None:
    url, reason = HOSTILE[name]

    async def ask() -> None:
        async with serving(ServerConfig(chat_template=PARTS), llm=llm) as client:
            body = {"messages": asks(url), **GREEDY}
            answer = await client.post("/v1/chat/completions", body)
            assert answer.status == 400, answer.body
            assert reason in answer.error["message"]
            assert len(answer.error["message"]) < 400

    run(ask())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": asks(WHOLE, text="<image>")}, "has 2 × '<image>', and 1 images"),
        ({"messages": asks(*[WHOLE] * 40)}, "max_model_len"),
        ({"messages": asks(*[WHOLE] * (MOST_PICTURES + 1))}, "there are 65 and may be 64"),
        ({"messages": asks(WHOLE), "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "with a url"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "content[0].image_url must be an object with a url",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "only text"),
    ],
)
def test_what_cannot_be_asked_is_said(llm: AsyncLLM, body: dict[str, Any], reason: str) -> None:
    async def ask() -> None:
        async with serving(ServerConfig(chat_template=PARTS), llm=llm) as client:
            answer = await client.post("/v1/chat/completions", {**GREEDY, **body})
            assert answer.status == 400, answer.body
            assert reason in answer.error["message"]

    run(ask())


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_each_kind_is_read(kind: str) -> None:
    [read] = in_colours(open_pictures([url_of(picture(1), kind)]))
    assert (read.mode, read.size) == ("RGB", (70, 90))


def test_a_picture_on_its_side_is_turned() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turned by a quarter
    [read] = in_colours(open_pictures([url_of(picture(1), "JPEG", exif=exif)]))
    assert read.size == (90, 70)


def test_pictures_share_one_bound() -> None:
    large = url_of(Image.new("RGB", (5000, 5000)))
    assert len(open_pictures([large])) == 1
    with pytest.raises(Refused, match="number 1 has 5,000 × 5,000 pixels"):
        open_pictures([large, large])


def test_requests_under_way_share_one_bound_of_pixels() -> None:
    bounds = Bounds(num_queued_reqs=None, num_queued_tokens=None, num_reqs_per_key=None)
    admission = AdmissionControl(bounds)
    with admission.hold_pixels(MOST_PIXELS_UNDER_WAY - 10):
        with admission.hold_pixels(10):
            with pytest.raises(Refused, match="send smaller images, or later") as refused:
                admission.hold_pixels(1).__enter__()
            assert refused.value.status == 503
        with admission.hold_pixels(10):
            pass  # they have been given back
    with admission.hold_pixels(MOST_PIXELS_UNDER_WAY + 1):
        pass  # a request by itself is bounded elsewhere


def test_pixels_are_held_while_a_chat_is_answered(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(ServerConfig(chat_template=PARTS), llm=llm) as client:
            body = {"messages": asks(WHOLE), **GREEDY}
            admission = client.service.admission
            with admission.hold_pixels(MOST_PIXELS_UNDER_WAY):
                answer = await client.post("/v1/chat/completions", body)
                assert (answer.status, answer.error["code"]) == (503, "pixels"), answer.body
                assert answer.headers["retry-after"]
            for _ in range(2):  # what the first one held is given back
                answer = await client.post("/v1/chat/completions", body)
                assert answer.status == 200, answer.body
            with admission.hold_pixels(MOST_PIXELS_UNDER_WAY - 70 * 90):
                answer = await client.post("/v1/chat/completions", body)
                assert answer.status == 200, answer.body

    run(ask())
