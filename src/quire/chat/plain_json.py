"""JSON's own types: the only ones that a template, a schema or an error message is given."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from quire.errors import RequestError
from quire.units import format_bytes

Message: TypeAlias = dict[str, Any]

MAX_DEPTH = 64


def plain(value: Any, where: str, depth: int = MAX_DEPTH) -> Any:
    """Return a copy in dicts, lists, strings, numbers, booleans and None.

    A tuple becomes a list. Messages call the value ``where``.

    Raises: RequestError for another type, and for what is nested more than ``depth`` deep.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth == 0:
        raise RequestError(f"{where} is nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        if not all(type(key) is str for key in value):
            raise RequestError(f"{where} has a key that is not a string")
        return {key: plain(item, where, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, where, depth - 1) for item in value]
    raise RequestError(f"{where} has a {type(value).__name__}, which is not JSON")


def check_size(value: Any, where: str, max_bytes: int) -> None:
    """Bound the JSON of a plain value. Raises: RequestError above ``max_bytes`` bytes."""
    num_bytes = len(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    if num_bytes > max_bytes:
        raise RequestError(
            f"{where}: {format_bytes(num_bytes)} as JSON; the limit is {format_bytes(max_bytes)}"
        )


def text_of(content: Any, where: str) -> str | None:
    """Return a message's content as one text; parts are joined with line ends, as in vLLM. Raises:
    RequestError naming the part that is no text.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(
            f"{where} must be a string, a list of parts or null, not {type(content).__name__}"
        )
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


@dataclass(frozen=True, slots=True)
class VideoAddress:
    """Where a video is, as a message says it."""

    url: str


def parts_of(content: Any, where: str, images: list[Any]) -> Any:
    """Return a message's content as ``text_of`` does, or with images in it as a list of parts.

    What stands for the images is added to ``images``: addresses, of videos too, or pictures of a
    caller in this process. Raises: RequestError.
    """
    if not has_images(content):
        return text_of(content, where)
    found: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        if _is_image(part):
            images.append(_image(part, f"{where}[{index}]"))
            found.append({"type": "video" if part["type"] == _VIDEO else "image"})
        else:
            found.append({"type": "text", "text": _part(part, f"{where}[{index}]")})
    return found


def has_images(content: Any) -> bool:
    """Return whether a message's content is a list of parts with an image or a video among them."""
    return isinstance(content, list | tuple) and any(map(_is_image, content))


def content_of(content: Any, where: str) -> Any:
    """Return content that may have images as ``parts_of`` will read it, and other as ``text_of``.

    Raises: as ``text_of``.
    """
    return list(content) if has_images(content) else text_of(content, where)


# OpenAI's in chats and in responses, Anthropic's, and vLLM's for pictures in memory.
_IMAGES = ("image_url", "input_image", "image", "image_pil")
_VIDEO = "video_url"  # vLLM's


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in (*_IMAGES, _VIDEO)


def _image(part: Mapping[str, Any], where: str) -> Any:
    """Return an image's address, or a picture in memory. Raises: RequestError."""
    kind = part["type"]
    if kind == "image_pil":
        return part.get(kind)
    if kind == "image":
        return _of_source(part.get("source"), f"{where}.source")
    if kind == _VIDEO:
        given = part.get(kind)
        url = given.get("url") if isinstance(given, Mapping) else given
        if not isinstance(url, str):
            raise RequestError(f"{where}.video_url must be an object with a url, or a URL")
        return VideoAddress(url)
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str):
        if kind == "input_image" and part.get("file_id") is not None:
            raise RequestError(f"{where} names a file, and this server keeps none: give image_url")
        raise RequestError(f"{where}.image_url must be an object with a url, or a URL")
    return url


def _of_source(given: Any, where: str) -> str:
    """Return the address that one of Anthropic's sources says. Raises: RequestError."""
    source = given if isinstance(given, Mapping) else {}
    kind, name = source.get("media_type"), source.get("type")
    data = source.get("data" if name == "base64" else "url")
    if name == "url" and isinstance(data, str):
        return data
    if name == "base64" and isinstance(data, str) and isinstance(kind, str):
        return f"data:{kind};base64,{data}"
    raise RequestError(
        f"{where} must have the type base64 with media_type and data, or url with a url"
    )


def tool_message(identity: str, content: Any, where: str, names: Mapping[str, str]) -> Message:
    """Return a tool's result as a message; ``names``: the tools of known calls, by id. Raises:
    RequestError for content that is neither text nor has images.
    """
    message: Message = {
        "role": "tool",
        "tool_call_id": identity,
        "content": content_of(content, where) or "",
    }
    if identity in names:
        message["name"] = names[identity]
    return message


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise RequestError(f"{where} must be a part with a type, such as text")
    kind = part["type"]
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise RequestError(f"{where} is of type {kind[:40]!r}: only text is read here")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise RequestError(f"{where} has no text")
    return text
