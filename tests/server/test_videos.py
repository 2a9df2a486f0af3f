"""Videos in messages: their frames as JPEG files in one ``data:`` URL, as for vLLM."""

import base64
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine.test_videos import OPTIONS, own
from quire import AsyncLLM
from quire.chat.picture_bounds import open_shown
from quire.chat.plain_json import VideoAddress
from quire.config import ServerConfig
from quire.errors import RequestError
from seers import picture
from server.asking import run, serving
from server.test_images import GREEDY, PARTS, data_url, encoded
from zoo.sight import tiny_seer

VIDEOS = PARTS.replace(
    "{% if p.type == 'image' %}", "{% if p.type == 'video' %} <video>{% elif p.type == 'image' %}"
)


@pytest.fixture(scope="module")
def seer() -> Any:
    return tiny_seer("qwen2_5_vl")


@pytest.fixture(scope="module")
def llm(seer: Any) -> Iterator[AsyncLLM]:
    model, processor = seer
    with ExitStack() as stack:
        made = AsyncLLM(model, tokenizer=processor, **OPTIONS)
        stack.callback(made.close)
        yield made


def files(seed: int, number: int = 4, side: int = 40) -> list[bytes]:
    return [encoded(picture(100 * seed + i, side, side), "JPEG") for i in range(number)]


def url_of(frames: list[bytes]) -> str:
    return "data:video/jpeg;base64," + ",".join(base64.b64encode(each).decode() for each in frames)


def asks(url: Any) -> list[dict[str, Any]]:
    parts = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "w5"}]
    return [{"role": "user", "content": parts}]


def pixels(frames: list[bytes]) -> Any:
    opened, [], _ = open_shown([data_url(each, "jpeg") for each in frames])
    return np.stack([np.asarray(each.convert("RGB")) for each in opened])


@pytest.mark.parametrize("template", [VIDEOS, "{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_a_chat_shows_videos(llm: AsyncLLM, seer: Any, template: str) -> None:
    """By a template that knows videos, and by one for texts; in the prefix cache too."""
    frames = files(1)
    expected = own(seer, "<video> w5", videos=[pixels(frames)], video_metadata=[{"fps": 2.0}])
    words = " ".join(seer[1].tokenizer.convert_ids_to_tokens(expected))

    async def ask() -> None:
        async with serving(ServerConfig(chat_template=template), llm=llm) as client:
            body = {"messages": asks(url_of(frames)), **GREEDY, "skip_special_tokens": False}
            first = await client.post("/v1/chat/completions", body)
            assert first.status == 200, first.body
            assert first.json["choices"][0]["message"]["content"].split() == words.split()
            assert first.json["usage"]["prompt_tokens"] == 8 + 1
            again = await client.post("/v1/chat/completions", body)
            assert again.json["choices"] == first.json["choices"]
            assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
            [user] = body["messages"]
            item = {**user, "content": [user["content"][0], {"type": "input_text", "text": "w5"}]}
            asked = {"input": [item], "temperature": 0, "max_output_tokens": 8, "store": False}
            response = await client.post("/v1/responses", {**asked, "ignore_eos": True})
            assert response.status == 200, response.body
            assert response.json["usage"]["input_tokens"] == 8 + 1
            other = await client.post(
                "/v1/chat/completions", {**body, "messages": asks(url_of(files(2)))}
            )
            assert not (other.json["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")

    run(ask())


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:video/mp4;base64,AAAA", "no file of a video is decoded here: send its frames as"),
        ("https://example.org/cat.mp4", "no file of a video is decoded here"),
        ("file:///etc/passwd", "no file of a video is decoded here"),
        ("data:video/jpeg;base64,", "frame 0 cannot be read"),
        ("data:video/jpeg;base64,A*A", "is not base64"),
        ("data:video/jpeg;base64," + "," * 2000, "has more than 1,024 frames"),
        (url_of([*files(1, 1), b"no picture"]), "video_url: number 0, frame 1 cannot be read"),
        (url_of([*files(1, 1), *files(2, 1, side=50)]), "frames of several sizes"),
        (url_of(files(1, 18)), "is too large: .*send fewer frames"),
        (None, "video_url must be an object with a url"),
    ],
)
def test_what_cannot_be_shown_is_refused(llm: AsyncLLM, url: Any, reason: str) -> None:
    async def ask() -> Any:
        async with serving(ServerConfig(chat_template=VIDEOS), llm=llm) as client:
            return await client.post("/v1/chat/completions", {"messages": asks(url), **GREEDY})

    answer = run(ask())
    assert answer.status == 400
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(answer.json["error"]["message"])


def test_frames_have_the_bounds_of_pictures() -> None:
    """All pixels and scans of a prompt together, however they are spread."""
    small = encoded(Image.new("L", (1024, 1024)), "JPEG")
    scans = small[:-2] + b"\xff\xda\x00\x02" * 200 + small[-2:]
    with pytest.raises(RequestError, match="frame 5 draws each of its 1,024 × 1,024 pixels in 201"):
        open_shown([VideoAddress(url_of([scans] * 6))])
    assert open_shown([VideoAddress(url_of([scans] * 5))])[2] == 5 * 2**20
    blank = encoded(Image.new("L", (2048, 2048)), "JPEG")
    assert open_shown([VideoAddress(url_of([blank] * 8))])[2] == 2**25
    with pytest.raises(RequestError, match="frame 8 has 2,048 × 2,048 pixels, and all together"):
        open_shown([VideoAddress(url_of([blank] * 9))])
