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
from quire.chat.picture_bounds import open_pictures
from quire.config import ServerConfig
from quire.errors import RequestError
from quire.server.admission_control import (
    BYTES_OF_PIXEL,
    MOST_PIXELS_UNDER_WAY,
    AdmissionControl,
    Bounds,
)
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
    return data_url(encoded(pixels, kind, **options), kind)


def encoded(pixels: Any, kind: str, **options: Any) -> bytes:
    made = io.BytesIO()
    image = Image.fromarray(pixels) if isinstance(pixels, np.ndarray) else pixels
    image.save(made, kind, **options)
    return made.getvalue()


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


def test_each_interface_shows_pictures(llm: AsyncLLM) -> None:
    """Responses and Anthropic's messages say what a chat says, and count it."""
    shown_two = picture(1), picture(2)
    first, second = map(url_of, shown_two)
    greedy = {"temperature": 0, "ignore_eos": True, "skip_special_tokens": False}

    def source(url: str) -> dict[str, Any]:
        kind, data = url.removeprefix("data:").split(";base64,")
        return {"type": "base64", "media_type": kind, "data": data}

    async def ask() -> None:
        async with serving(ServerConfig(chat_template=PARTS), llm=llm) as client:
            chat = {"messages": asks(first, second), **GREEDY, "skip_special_tokens": False}
            answer = (await client.post("/v1/chat/completions", chat)).json
            expected = answer["choices"][0]["message"]["content"].strip()
            assert expected

            parts = [{"type": "input_image", "image_url": url} for url in (first, second)]
            items = [
                {"role": "system", "content": "w1 w2"},
                {"role": "user", "content": [*parts, {"type": "input_text", "text": "w5 w6"}]},
            ]
            asked = {"input": items, "max_output_tokens": 8, **greedy}
            responded = await client.post("/v1/responses", asked)
            assert responded.status == 200, responded.body
            assert responded.json["output"][0]["content"][0]["text"].strip() == expected
            assert responded.json["usage"]["input_tokens"] == 12
            more = {
                "input": "w7",
                "previous_response_id": responded.json["id"],
                "max_output_tokens": 1,
            }
            continued = await client.post("/v1/responses", more)
            assert continued.json["usage"]["input_tokens"] > 12 + 1, (
                continued.body
            )  # and the answer
            cut = await client.post("/v1/responses", {**asked, "truncation": "auto"})
            assert cut.status == 400
            assert "a conversation with images is not cut" in cut.error["message"]
            kept = [{"type": "input_image", "file_id": "file-1"}]
            named = await client.post(
                "/v1/responses", {"input": [{"role": "user", "content": kept}]}
            )
            assert "names a file, and this server keeps none" in named.error["message"]

            blocks = [{"type": "image", "source": source(url)} for url in (first, second)]
            turns = [{"role": "user", "content": [*blocks, {"type": "text", "text": "w5 w6"}]}]
            asked = {"system": "w1 w2", "messages": turns, "max_tokens": 8, **greedy}
            said = await client.post("/v1/messages", asked)
            assert said.status == 200, said.body
            assert said.json["content"][0]["text"].strip() == expected
            usage = said.json["usage"]
            assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 12
            count = await client.post("/v1/messages/count_tokens", {**asked, "max_tokens": None})
            assert count.json == {"input_tokens": 12}
            for wrong in ({"type": "file", "file_id": "x"}, {"type": "base64", "data": 3}, None):
                turns[0]["content"] = [{"type": "image", "source": wrong}]
                answer = await client.post("/v1/messages", asked)
                assert answer.status == 400
                assert "media_type and data, or url with a url" in answer.error["message"]
            turns[0]["content"] = [
                {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
            ]
            assert "fetches nothing" in (await client.post("/v1/messages", asked)).error["message"]

    run(ask())


def test_a_tool_may_show_a_picture(llm: AsyncLLM) -> None:
    """As computers do that a model uses, in Anthropic's words."""
    kind, data = url_of(picture(1)).removeprefix("data:").split(";base64,")
    image = {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}
    called = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    shows = {"type": "tool_result", "tool_use_id": "a", "content": [image]}
    turns = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": [called]},
        {"role": "user", "content": [shows]},
    ]

    async def ask() -> None:
        async with serving(ServerConfig(chat_template=PARTS), llm=llm) as client:
            asked = {"messages": turns, "max_tokens": 2, "temperature": 0}
            said = await client.post("/v1/messages", asked)
            assert said.status == 200, said.body
            assert said.json["usage"]["input_tokens"] == 5

    run(ask())


def test_nothing_is_decoded_that_is_refused(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is to be cut, and one with too many images."""
    opened: list[Any] = []
    monkeypatch.setattr("quire.server.pictures.open_shown", opened.append)

    async def ask() -> None:
        async with serving(ServerConfig(chat_template=PARTS), llm=llm) as client:
            for body in (
                {"messages": asks(WHOLE), "truncate_prompt_tokens": 3},
                {"messages": asks(*[WHOLE] * 65)},
            ):
                answer = await client.post("/v1/chat/completions", {**GREEDY, **body})
                assert answer.status == 400
            assert not opened

    run(ask())


def chunk(name: bytes, data: bytes) -> bytes:
    """A part of a PNG file."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """A header that promises so many pixels, with few bytes behind it."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


WHOLE = url_of(picture(1))
HOSTILE = {
    "elsewhere": ("https://example.org/cat.png", "this server fetches nothing"),
    "a file": ("file:///etc/passwd", "this server reads no files"),
    "no type": ("data:;base64,AAAA", "give it as data:image/png"),
    "no base64": ("data:image/png;base64,!!!!", "is not base64"),
    "letters": ("data:image/png;base64,\u00e9\u00e9", "is not base64"),
}


def test_what_is_no_picture_is_refused(llm: AsyncLLM) -> None:
    """By a server that may ask no one; ``test_hostile_pictures`` has more."""

    async def ask() -> None:
        async with serving(ServerConfig(chat_template=PARTS), llm=llm) as client:
            for url, reason in HOSTILE.values():
                answer = await client.post(
                    "/v1/chat/completions", {"messages": asks(url), **GREEDY}
                )
                assert answer.status == 400, answer.body
                assert reason in answer.error["message"]
                assert len(answer.error["message"]) < 400

    run(ask())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": asks(WHOLE, text="<image>")}, "has 2 × '<image>', and 1 images"),
        ({"messages": asks(*[WHOLE] * 40)}, "max_model_len"),
        ({"messages": asks(*[WHOLE] * 65)}, "has 65 images, and may have 64 (limit_mm_per_prompt)"),
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
def test_each_kind_is_read(llm: AsyncLLM, kind: str) -> None:
    [opened] = open_pictures([encoded(picture(1), kind)])
    assert (opened.format, opened.size) == (kind, (70, 90))
    assert llm.facts.vision.read("<image>", [opened]).images[0].num_tokens == 4


def test_a_picture_on_its_side_is_turned(llm: AsyncLLM) -> None:
    """By whatever way it comes."""
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turned by a quarter
    vision = llm.facts.vision
    [opened] = open_pictures([encoded(picture(1), "PNG", exif=exif)])
    upright = np.rot90(picture(1), -1).copy()
    ids = [
        vision.read("<image>", [each]).images[0].content_id
        for each in (opened, upright, picture(1))
    ]
    assert ids[0] == ids[1] != ids[2]


def test_pictures_share_one_bound() -> None:
    large = encoded(Image.new("RGB", (5000, 5000)), "PNG")
    assert len(open_pictures([large])) == 1
    with pytest.raises(RequestError, match="number 1 has 5,000 × 5,000 pixels"):
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


def test_what_a_processor_makes_of_a_small_picture_is_held(llm: AsyncLLM) -> None:
    """Eight by eight pixels become 28 by 28, three numbers of four bytes each."""
    made = 28 * 28 * 3 * 4 // BYTES_OF_PIXEL

    async def ask() -> None:
        async with serving(ServerConfig(chat_template=PARTS), llm=llm) as client:
            small = url_of(Image.new("RGB", (8, 8)))
            body = {"messages": asks(small), **GREEDY, "max_tokens": 1}
            admission = client.service.admission
            for room, status in ((made - 1, 503), (made, 200), (made - 1, 503)):
                with admission.hold_pixels(MOST_PIXELS_UNDER_WAY - room):
                    answer = await client.post("/v1/chat/completions", body)
                    assert answer.status == status, answer.body
            assert not admission._num_pixels

    run(ask())
