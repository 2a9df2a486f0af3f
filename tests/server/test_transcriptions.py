"""/v1/audio/…: the tokens of Transformers' own generate(), from files of sound, in forms."""

import asyncio
import io
import sys
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
import soxr
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, WhisperFeatureExtractor, WhisperTokenizer

from quire.chat.token_texts import _bytes_of_characters
from quire.config import ServerConfig
from quire.server import audio as recordings
from readers import tiny_reader
from server.asking import Answer, Client, nothing_runs, run, serving

AT, INTO_ENGLISH = "/v1/audio/transcriptions", "/v1/audio/translations"
RATE, WINDOW = 16_000, 16_000  # samples
MOST = 24  # tokens of a text, its beginning included
SPECIAL = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|fr|>", "<|ja|>", "<|sw|>"),
    *("<|translate|>", "<|transcribe|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
ID = {name: 256 + place for place, name in enumerate(SPECIAL)}
LANGUAGES = SPECIAL[2:7]
ENDS = (ID["<|endoftext|>"], 180)  # the last so that some texts end early
Sound = NDArray[np.float32]


def whisper(*, one_language: bool = False) -> PreTrainedModel:
    end, start = ID["<|endoftext|>"], ID["<|startoftranscript|>"]
    model = tiny_reader(
        "whisper",
        vocab_size=len(ID) + 256,
        max_target_positions=MOST,
        eos_token_id=end,
        bos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start,
    )
    said = model.generation_config
    said._from_model_config = False  # else what is said here is not read from its file
    said.eos_token_id, said.pad_token_id = list(ENDS), end
    said.max_length, said.decoder_start_token_id = MOST, start
    said.no_timestamps_token_id = ID["<|notimestamps|>"]
    said.is_multilingual = not one_language
    if not one_language:
        said.lang_to_id = {name: ID[name] for name in LANGUAGES}
        said.task_to_id = {name: ID[f"<|{name}|>"] for name in ("translate", "transcribe")}
        said.prev_sot_token_id = ID["<|startofprev|>"]
    return model


EXTRACTOR = WhisperFeatureExtractor(feature_size=8, hop_length=400, chunk_length=1)


def tokenizer() -> WhisperTokenizer:
    vocab = {character: byte for byte, character in enumerate(_letters())}
    return WhisperTokenizer(vocab=vocab | ID, merges=[], additional_special_tokens=list(SPECIAL))


def _letters() -> list[str]:
    return [own for own, _ in sorted(_bytes_of_characters().items(), key=lambda pair: pair[1])]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """With suppressed tokens that it would else say."""
    model = whisper()
    plain = [own(model, sound(seed)) for seed in range(4)]
    model.generation_config.begin_suppress_tokens = [plain[0][0], ID["<|endoftext|>"]]
    model.generation_config.suppress_tokens = sorted({plain[1][5], plain[2][3], ID["<|en|>"]})
    return model


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whisper")
    for part in (model, tokenizer(), EXTRACTOR):
        part.save_pretrained(path)
    return path


def sound(seed: int, num_samples: int = WINDOW - 500) -> Sound:
    """Tones that come and go, as 16 bits can hold them."""
    generator = np.random.default_rng(seed)
    at = np.arange(num_samples) / RATE
    tones = sum(
        np.sin(2 * np.pi * pitch * at) * (0.2 + 0.2 * np.sin(7 * at + pitch))
        for pitch in generator.uniform(90, 3000, 3)
    )
    return (np.round(np.asarray(tones) * 0.3 * 2**15) / 2**15).astype(np.float32)


def own(model: PreTrainedModel, samples: Sound, **options: Any) -> list[int]:
    """What generate() says."""
    given = EXTRACTOR(samples, sampling_rate=RATE, return_tensors="pt").input_features
    said = model.generate(given, **{"task": "transcribe", **options})[0].tolist()
    return [token for token in said if token not in ENDS]


def packed(samples: Sound, kind: str = "WAV", rate: int = RATE, **options: Any) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, **options)
    return file.getvalue()


def form(*files: bytes, **fields: Any) -> tuple[bytes, str]:
    """A body and its content type, as httpx writes them."""
    several = [("file", ("speech.bin", data)) for data in files]
    request = httpx.Request("POST", "http://server", data=fields, files=several or None)
    return request.read(), request.headers["content-type"]


async def ask(client: Client, file: bytes, at: str = AT, **fields: Any) -> Answer:
    body, kind = form(file, **fields)
    return await client.post(at, body, content_type=kind)


async def tokens(client: Client, file: bytes, at: str = AT, **fields: Any) -> list[list[int]]:
    """Of each window."""
    answer = await ask(client, file, at, **{"response_format": "verbose_json", **fields})
    assert answer.status == 200, answer.body
    return [segment["tokens"] for segment in answer.json["segments"]]


def hearing(
    model: Any, test: Callable[[Client], Awaitable[None]], config: ServerConfig | None = None
) -> None:
    """Run a test with a server of its own."""

    async def go() -> None:
        async with serving(config, model, max_model_len=None) as client:
            await test(client)
            assert not client.service.admission.num_under_way
            assert not client.service.bodies.num_bytes

    run(go())


# -- the same tokens ------------------------------------------------------------------------------


def test_tokens_are_those_of_generate(model: PreTrainedModel, folder: Path) -> None:
    languages = set()

    async def test(client: Client) -> None:
        for seed in range(4):
            file = packed(sound(seed))
            answer = (await ask(client, file, response_format="verbose_json")).json
            assert [answer["segments"][0]["tokens"]] == [own(model, sound(seed))]
            languages.add(answer["language"])
        file = packed(sound(0))
        assert await tokens(client, file, language="de") == [own(model, sound(0), language="de")]
        given = own(model, sound(0), task="translate", language="fr")
        assert await tokens(client, file, INTO_ENGLISH, language="French") == [given]
        assert given != own(model, sound(0), language="fr")
        before = tokenizer().get_prompt_ids("so he", return_tensors="pt")
        wanted = own(model, sound(0), language="en", prompt_ids=before)
        assert await tokens(client, file, language="en", prompt=" so he ") == [wanted]
        assert wanted != own(model, sound(0), language="en")
        last = torch.tensor([ID["<|startofprev|>"], *b"long ago ends here"[-(MOST // 2 - 2) :]])
        wanted = own(model, sound(0), language="en", prompt_ids=last)
        long = "what was said long ago ends here"
        assert await tokens(client, file, language="en", prompt=long) == [wanted]

    hearing(folder, test)
    assert len(languages) > 1, "else a detection that always says the same would pass"


def test_files_of_each_kind_sound_alike(model: PreTrainedModel, folder: Path) -> None:
    one, other = sound(5), sound(6)
    stereo = np.stack((one, other), axis=1)
    faster = soxr.resample(one, RATE, 44_100)

    async def test(client: Client) -> None:
        wanted = [own(model, one, language="en")]
        ask = {"language": "en"}
        assert await tokens(client, packed(one, "FLAC"), **ask) == wanted
        assert await tokens(client, packed(one, subtype="FLOAT"), **ask) == wanted
        assert await tokens(client, packed(np.stack((one, one), axis=1)), **ask) == wanted
        mixed = stereo.mean(axis=1)
        assert (
            await tokens(client, packed(stereo, "FLAC"), **ask)
            == [own(model, mixed, language="en")]
            != wanted
        )
        # Once as a whole, and once piece by piece.
        again = soxr.resample(faster.astype(np.float32), 44_100, RATE)
        fast = packed(faster, rate=44_100, subtype="FLOAT")
        assert await tokens(client, fast, **ask) == [own(model, again, language="en")]
        for kind in ("OGG", "MP3"):  # which do not give the same samples again
            assert (await ask_seconds(client, packed(one, kind))) == 1

    hearing(folder, test)


async def ask_seconds(client: Client, file: bytes) -> int:
    answer = (await ask(client, file)).json
    assert answer["usage"]["type"] == "duration"
    seconds: int = answer["usage"]["seconds"]
    return seconds


@pytest.mark.full
def test_a_long_one_is_cut_where_it_is_quiet(
    model: PreTrainedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One window after the other, under one admission; what was said before is told once."""
    samples = sound(7, int(2.4 * WINDOW))
    cuts = [WINDOW - 500, 2 * WINDOW - 1100]
    for cut in cuts:
        samples[cut - 40 : cut + 40] = 0
    monkeypatch.setattr(recordings, "_PIECE", 3_000)  # a window has several

    async def test(client: Client) -> None:
        admission, seen = client.service.admission, []
        admit = admission.admit

        def admitted(caller: Any, sizes: Any) -> Any:
            seen.append(sizes)
            return admit(caller, sizes)

        monkeypatch.setattr(admission, "admit", admitted)
        file = packed(samples)
        whole = (await ask(client, file, response_format="verbose_json", prompt="so")).json
        segments = whole["segments"]
        assert [sizes[0][0] for sizes in seen] == [1]
        assert [each["id"] for each in segments] == [0, 1, 2]
        assert segments[0]["start"] == 0
        assert segments[2]["end"] == whole["duration"] == len(samples) / RATE
        for cut, before, after in zip(cuts, segments, segments[1:], strict=False):
            assert before["end"] == after["start"] == pytest.approx(cut / RATE, abs=41 / RATE)
        assert whole["usage"]["seconds"] == 3
        ends = [0, *(round(each["end"] * RATE) for each in segments)]
        assert await tokens(client, file) == [
            own(model, samples[first:last], language=whole["language"])
            for first, last in pairwise(ends)
        ]
        before = tokenizer().get_prompt_ids("so", return_tensors="pt")
        assert segments[0]["tokens"] == own(
            model, samples[: ends[1]], language=whole["language"], prompt_ids=before
        )
        assert [each["tokens"] for each in segments[1:]] == (await tokens(client, file))[1:]
        assert whole["text"] == "".join(each["text"] for each in segments).lstrip()
        for each in segments:
            assert each["avg_logprob"] < 0 < each["compression_ratio"]

    hearing(folder, test)


def test_answers_come_in_the_form_that_was_asked_for(folder: Path) -> None:
    file, short = packed(sound(1, int(1.8 * WINDOW))), packed(sound(1, WINDOW // 2))

    async def test(client: Client) -> None:
        plain = await ask(client, file)
        text = plain.json["text"]
        assert set(plain.json) == {"text", "usage"}
        assert (await ask(client, file, response_format="json", seed="1")).json == plain.json
        said = await ask(client, file, response_format="text")
        assert said.headers["content-type"].startswith("text/plain")
        assert said.body.decode() == text + "\n"
        first, second = (await ask(client, file, response_format="verbose_json")).json["segments"]
        middle = first["end"]
        vtt = (await ask(client, file, response_format="vtt")).body.decode()
        assert vtt.startswith(f"WEBVTT\n\n00:00:00.000 --> 00:00:0{middle:.3f}\n")
        srt = (await ask(client, file, response_format="srt")).body.decode()
        assert srt.startswith("1\n00:00:00,000 --> 00:00:00,") or "\n2\n00:00:0" in srt
        assert second["text"].strip() in srt
        stream = await ask(client, file, stream="true")
        *deltas, done = stream.events
        assert {each["type"] for each in deltas} == {"transcript.text.delta"}
        assert len(deltas) > 2
        assert "".join(each["delta"] for each in deltas) == text == done["text"]
        assert done["type"] == "transcript.text.done"
        assert done["usage"] == plain.json["usage"]
        drawn = [
            (await ask(client, short, temperature="1.5", seed=seed)).json["text"]
            for seed in ("3", "3", "4")
        ]
        assert drawn[0] == drawn[1] != drawn[2]
        ignored = await ask(client, short, chunking_strategy="auto", user="me")
        assert ignored.headers["x-ignored-fields"] == "chunking_strategy"
        assert ignored.status == 200

    hearing(folder, test)


def test_openais_client_transcribes(folder: Path) -> None:
    file = packed(sound(1))

    async def test(client: Client) -> None:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(client.app))
        async with openai.AsyncOpenAI(
            api_key="none", base_url="http://127.0.0.1/v1", http_client=http
        ) as asking:
            audio: Any = asking.audio
            given: dict[str, Any] = {"model": client.service.model_name, "language": "en"}
            file_of = ("speech.wav", file)
            plain = await audio.transcriptions.create(file=file_of, **given)
            verbose = await audio.transcriptions.create(
                file=file_of,
                response_format="verbose_json",
                timestamp_granularities=["segment"],
                temperature=0,
                **given,
            )
            assert plain.text == verbose.text
            assert verbose.language == "english"
            assert verbose.segments[0].end == verbose.duration == len(sound(1)) / RATE
            stream = await audio.transcriptions.create(file=file_of, stream=True, **given)
            events = [event async for event in stream]
            assert events[-1].text == plain.text

    hearing(folder, test)


def test_who_leaves_ends_it(folder: Path) -> None:
    async def test(client: Client) -> None:
        for stream in ("false", "true"):
            body, kind = form(packed(sound(1, 20 * WINDOW), "FLAC"), stream=stream)
            call = client.call(AT, body, content_type=kind)
            while not client.service.admission.num_under_way:
                await asyncio.sleep(0.001)
            assert client.service.bodies.num_bytes == len(body), "of which it reads on"
            call.leave()
            await call.task
            await nothing_runs(client)
            assert not client.service.bodies.num_bytes

    hearing(folder, test)


# -- what is refused ------------------------------------------------------------------------------


def test_a_model_with_one_language_is_told_of_none(tmp_path: Path) -> None:
    model = whisper(one_language=True)
    for part in (model, tokenizer(), EXTRACTOR):
        part.save_pretrained(tmp_path)

    async def test(client: Client) -> None:
        file = packed(sound(1))
        begin = own(model, sound(1), task=None)
        assert await tokens(client, file) == await tokens(client, file, language="en") == [begin]
        for at, fields, said in (
            (AT, {"language": "de"}, "knows en"),
            (AT, {"prompt": "so"}, "prev_sot_token_id"),
            (INTO_ENGLISH, {}, "was not trained to translate"),
        ):
            refused = await ask(client, file, at, **fields)
            assert refused.status == 400
            assert said in refused.error["message"]

    hearing(tmp_path, test)


def test_what_it_cannot_do_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MOST_SECONDS", 2)
    good = packed(sound(1))
    loud = packed(np.full(100, 1e9, np.float32), subtype="FLOAT")
    silent_flac = packed(np.zeros(RATE * 3 + 1, np.float32), "FLAC")
    unsaid = bytearray(silent_flac)  # how long it is, as written to a pipe
    unsaid[21] &= 0xF0
    unsaid[22:26] = bytes(4)
    cases: list[tuple[bytes, dict[str, Any], str]] = [
        (good, {"response_format": "xml"}, "response_format: Invalid enum value 'xml'"),
        (good, {"timestamp_granularities[]": ["word"]}, "there are the times of segments"),
        (good, {"stream": "true", "response_format": "srt"}, "stream gives json"),
        (good, {"language": "klingon"}, "knows de, en, fr, ja, sw"),
        (good, {"temperature": "hot"}, "temperature"),
        (good, {"temperature": "-1"}, "temperature"),
        (good, {"prompt": "a <|en|>"}, "<|en|> is a special token"),
        (b"\x1aE\xdf\xa3webm", {}, "only WAV, FLAC, Ogg and MP3 are supported"),
        (b"RIFF\0\0\0\0WAVE", {}, "it cannot be read"),
        (b"", {}, "begins with b''"),
        (packed(sound(1)[:0]), {}, "it has no samples"),
        (silent_flac, {}, "3 seconds and may have 2"),
        (bytes(unsaid), {}, "its header has no length"),
        (packed(np.zeros((100, 9), np.float32)), {}, "9 channels and may have 8"),
        (packed(sound(1)[:100], rate=1000), {}, "it has 1,000 samples a second"),
        (loud, {}, "not numbers, or far too loud"),
        (packed(np.full(9, np.nan, np.float32), subtype="FLOAT"), {}, "not numbers, or far"),
    ]

    async def test(client: Client) -> None:
        for file, fields, said in cases:
            refused = await ask(client, file, **fields)
            assert refused.status == 400, said
            assert said in refused.error["message"]
        unknown = await ask(client, good, model="another")
        assert (unknown.status, unknown.error["param"]) == (404, "model")

    hearing(folder, test)


def test_a_model_that_reads_text_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: Client) -> None:
        refused = await ask(client, packed(sound(1)))
        assert refused.status == 400
        assert (
            refused.error["message"]
            == "T5ForConditionalGeneration cannot transcribe: it reads text"
        )
        monkeypatch.setitem(sys.modules, "python_multipart.multipart", None)
        missing = await ask(client, packed(sound(1)))
        assert missing.status == 501
        assert "pip install 'quire-kv[audio]'" in missing.error["message"]

    hearing(tiny_reader("t5"), test)


def test_without_a_decoder_the_extra_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: Client) -> None:
        monkeypatch.setitem(sys.modules, "soundfile", None)
        missing = await ask(client, packed(sound(1)))
        assert missing.status == 501
        assert "pip install 'quire-kv[audio]'" in missing.error["message"]

    hearing(folder, test)
