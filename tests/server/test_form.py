"""Forms with a file in them: what is read, and that what is hostile is refused in words, soon."""

import logging
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from quire.config import ServerConfig
from quire.server.wire.error_responses import Refused
from quire.server.wire.form import boundary_of, parse_form
from readers import tiny_reader
from server.asking import run, serving

AT = "/v1/audio/transcriptions"
B = b"boundary"


def part(name: str, data: bytes, *headers: bytes, file: bool = False) -> bytes:
    filename = b'; filename="a b.wav"' if file else b""
    disposition = b'Content-Disposition: form-data; name="%b"%b' % (name.encode(), filename)
    return b"\r\n".join((b"--" + B, disposition, *headers, b"", data, b""))


END = b"--" + B + b"--\r\n"


@pytest.fixture(autouse=True)
def _only_refusals_speak(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "python_multipart")


def test_files_are_bytes_and_fields_texts() -> None:
    data = bytes(range(256)) * 9 + b"\r\n--bound\r\n--boundar"
    form = (
        b"\r\n"
        + part("file", data, b"Content-Type: audio/wav", file=True)
        + part("language", "ü".encode())
        + part("many[]", b"1")
        + part("many[]", b"2", b"Content-Transfer-Encoding: 8bit")
        + part("empty", b"")
        + END
        + b"what follows is nothing"
    )
    wanted = {"file": data, "language": "ü", "many[]": ["1", "2"], "empty": ""}
    assert parse_form(form, B) == wanted


def test_it_reads_what_httpx_writes() -> None:
    files = {"file": ("näme.wav", b"\0\1", "audio/wav")}
    request = httpx.Request("POST", "http://a", data={"a": "x", "b": ["1"]}, files=files)
    boundary = boundary_of(Headers({"content-type": request.headers["content-type"]}))
    assert parse_form(request.read(), boundary) == {"a": "x", "b": "1", "file": b"\0\1"}


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (b"", "its end is missing"),
        (b"no form at all", "Expected boundary"),
        (b"{}", "Expected boundary"),
        (part("a", b"x"), "its end is missing"),
        (part("a", b"x") + b"--" + B, "its end is missing"),
        (b"".join(part(f"a{n}", b"") for n in range(65)) + END, "it may have 64 parts"),
        (b"\r\n--" + B + b"x" * 9 + (b"\r\n--" + B + b"x") * 99, "it may have 64 parts"),
        (b"--" + B + b" " * 2**20, "blanks stand behind"),
        (part("a", b"x") + part("a", b"y") + END, "'a' is there twice"),
        (part("a" * 5000, b"x") + END, "Maximum header size"),
        (part("a", b"", *(b"x: y",) * 9) + END, "Maximum header count"),
        (part("", b"x") + END, "no content-disposition"),
        (b"--" + B + b"\r\n\r\nx\r\n" + END, "no content-disposition"),
        (part("a", b"x", b"Content-Disposition: attachment; name=a") + END, "no content-disp"),
        (part("a", b"\xff") + END, "'a' is no text in UTF-8"),
        (part("a", b"eA==", b"Content-Transfer-Encoding: base64") + END, "'a' is packed"),
        (
            part("a", b"", b"Content-Type: multipart/mixed; boundary=c") + END,
            "form within the form",
        ),
        (part("file", b"YWJj") + END, "'file' is a text: send it as a file"),
    ],
)
def test_what_is_no_form_is_refused(form: bytes, said: str) -> None:
    with pytest.raises(Refused, match=f"the form cannot be read: .*{said}") as refused:
        parse_form(form, B)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("kind", "status", "said"),
    [
        (None, 415, "its content-type is ''"),
        ("application/json", 415, "its content-type is 'application/json'"),
        ("multipart/mixed; boundary=a", 415, "multipart/mixed"),
        ("multipart/form-data", 400, "has no boundary="),
        ("multipart/form-data; boundary=", 400, "has no boundary="),
        ("multipart/form-data; boundary=" + "a" * 71, 400, "of up to 70 characters"),
        ("multipart/form-data; " + ";" * 5000, 400, "has no boundary="),
    ],
)
def test_the_content_type_is_read_first(kind: str | None, status: int, said: str) -> None:
    with pytest.raises(Refused, match=said) as refused:
        boundary_of(Headers({} if kind is None else {"content-type": kind}))
    assert refused.value.status == status


def test_a_form_comes_by_the_same_door_as_json() -> None:
    kind = "multipart/form-data; boundary=boundary"
    good = part("file", b"no sound", file=True) + END

    async def ask() -> None:
        config = ServerConfig(api_key=("one",), max_request_bytes=2000)
        async with serving(config, tiny_reader("t5"), max_model_len=None) as anyone:
            client = anyone.with_key("one")
            assert (await anyone.post(AT, good, content_type=kind)).status == 401
            cases: list[tuple[bytes, dict[str, Any], int]] = [
                (good, {}, 415),
                (good, {"content_type": kind, "content_encoding": "gzip"}, 415),
                (b"a" * 2001, {"content_type": kind}, 413),
                (good[:-3], {"content_type": kind}, 400),
                (part("a", b"") + END, {"content_type": kind}, 400),
                (good, {"content_type": kind}, 400),
            ]
            for body, headers, status in cases:
                answer = await client.post(AT, body, **headers)
                assert answer.status == status, answer.body
            assert "cannot transcribe" in answer.error["message"]
            missing = (await client.post(AT, part("a", b"") + END, content_type=kind)).error
            assert missing["param"] == "file"
            assert "required field `file`" in missing["message"]
            assert not client.service.bodies.num_bytes

    run(ask())
