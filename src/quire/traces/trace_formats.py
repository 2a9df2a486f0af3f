"""Open a trace, and detect its format by its content.

``open_trace("mooncake.jsonl.gz")`` reads only the beginning; an iteration reads the file. To add a
format, add a row to ``row_forms``.
"""

import csv
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Final

from msgspec import DecodeError, Struct
from msgspec.json import Decoder

from quire.errors import ConfigError
from quire.traces.conversations import Conversations, is_tar, knows_conversation
from quire.traces.request_log import LogHead, LogRow
from quire.traces.servegen import ServeGenClients, has_clients
from quire.traces.trace import BadRow, Found, Trace, TraceRequest
from quire.traces.trace_files import OnProgress, is_address, lines_of, opened

# -- one request a line ----------------------------------------------------------------------------

# Formats with a CSV row or a JSON object per line. A format turns a line into a request with the
# file's own clock; ``Trace`` checks the request and the clock, and skips invalid rows.
#
# * Azure's LLM inference traces of 2023 and 2024 (Azure/AzurePublicDataset): lengths and times.
# * BurstGPT (HPMLL/BurstGPT): lengths, times, and in its third part the session. A row of 0
#   response tokens is a failed request. Implemented from its description and published rows,
#   without a file to test.
# * Mooncake (kvcache-ai/Mooncake, FAST25-release): hash ids of 512 tokens, each of which covers all
#   tokens before it. A row may name another ``block_size``, as rows of ``kvcache-simulator`` do.
# * Bailian (alibaba-edu/qwen-bailian-usagetraces-anon): hash ids of 16 tokens, and the chat that a
#   request continues. Implemented from its description, without a file to test.
# * Quire's own (``quire.traces.request_log``).


Parse = Callable[[bytes], TraceRequest]
_MOONCAKE_TOKENS: Final = 512
_BAILIAN_TOKENS: Final = 16
_MOST_CHATS: Final = 2**20  # chats whose sessions are remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class RowForm:
    """A format: how to detect it, and how to parse its rows."""

    name: str
    title: str
    wanted: str  # the fields of a row, for error messages
    known: Callable[[bytes], bool]  # whether a first line is of this format
    begin: Callable[[bytes], tuple[Parse, bool]]  # the parser; whether the first line is a row


# -- comma-separated -----------------------------------------------------------------------------


def _columns(header: bytes) -> list[str]:
    try:
        text = header.decode("utf-8-sig")
    except UnicodeDecodeError:
        return []
    try:
        return [name.strip() for name in next(csv.reader([text]), [])]
    except csv.Error:  # a line of JSON may be longer than csv allows
        return []


def _fields(line: bytes, count: int) -> list[str]:
    try:
        fields = next(csv.reader([line.decode()], strict=True), [])
    except (csv.Error, UnicodeDecodeError) as error:
        raise BadRow(str(error)) from error
    if len(fields) != count:
        raise BadRow(f"{len(fields)} columns; the header has {count}")
    return fields


def _begin_azure(header: bytes) -> tuple[Parse, bool]:
    columns = _columns(header)
    when, asked, made = map(columns.index, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"))

    def parse(line: bytes) -> TraceRequest:
        fields = _fields(line, len(columns))
        return TraceRequest(
            at_s=_date_s(fields[when]),
            input_tokens=_integer(fields[asked]),
            output_tokens=_integer(fields[made]),
        )

    return parse, False


def _begin_burstgpt(header: bytes) -> tuple[Parse, bool]:
    columns = _columns(header)
    when, asked, made = map(columns.index, ("Timestamp", "Request tokens", "Response tokens"))
    session = columns.index("Session ID") if "Session ID" in columns else None

    def parse(line: bytes) -> TraceRequest:
        fields = _fields(line, len(columns))
        return TraceRequest(
            at_s=_number(fields[when]),
            input_tokens=_integer(fields[asked]),
            output_tokens=_integer(fields[made]),
            session=(fields[session] or None) if session is not None else None,
        )

    return parse, False


def _date_s(text: str) -> float:
    """Parse Azure's time, with up to seven digits of a second and, in 2024, a time zone."""
    clock, _, zone = text.strip().partition("+")
    whole, _, fraction = clock.partition(".")
    try:
        date = datetime.fromisoformat(f"{whole}+{zone or '00:00'}")
        return date.timestamp() + float(f"0.{fraction or 0}")
    except ValueError as error:
        raise BadRow(f"{text!r} is not a time") from error


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise BadRow(f"{text!r} is not a number") from error


def _integer(text: str) -> int:
    """Parse a whole number, which some files write as 17.0."""
    number = _number(text)
    if not number.is_integer():
        raise BadRow(f"{text!r} is not a whole number")
    return int(number)


def _has(*names: str) -> Callable[[bytes], bool]:
    return lambda line: set(names) <= set(_columns(line))


# -- JSON ----------------------------------------------------------------------------------------


class _MooncakeRow(Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    block_size: int = _MOONCAKE_TOKENS


class _BailianRow(Struct):
    chat_id: int
    parent_chat_id: int
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def _begin_mooncake(_first: bytes) -> tuple[Parse, bool]:
    decode = Decoder(_MooncakeRow).decode

    def parse(line: bytes) -> TraceRequest:
        row = decode(line)
        return TraceRequest(
            at_s=row.timestamp / 1e3,
            input_tokens=row.input_length,
            output_tokens=row.output_length,
            hash_ids=row.hash_ids,
            id_tokens=row.block_size,
        )

    return parse, True


def _begin_bailian(_first: bytes) -> tuple[Parse, bool]:
    decode = Decoder(_BailianRow).decode
    sessions: OrderedDict[int, int] = OrderedDict()  # chat → the first chat of its session

    def parse(line: bytes) -> TraceRequest:
        row = decode(line)
        session = row.chat_id
        if row.parent_chat_id >= 0:
            session = sessions.pop(row.parent_chat_id, row.parent_chat_id)
            sessions[row.parent_chat_id] = session
        sessions[row.chat_id] = session
        if len(sessions) > _MOST_CHATS:
            sessions.popitem(last=False)
        return TraceRequest(
            at_s=row.timestamp,
            input_tokens=row.input_length,
            output_tokens=row.output_length,
            hash_ids=row.hash_ids,
            id_tokens=_BAILIAN_TOKENS,
            session=session,
        )

    return parse, True


def _begin_quire(first: bytes) -> tuple[Parse, bool]:
    head = Decoder(LogHead).decode(first)
    decode = Decoder(LogRow).decode

    def parse(line: bytes) -> TraceRequest:
        return decode(line).request(head.id_tokens)

    return parse, False


def _json_has(*names: str) -> Callable[[bytes], bool]:
    decode = Decoder(dict[str, object]).decode

    def known(line: bytes) -> bool:
        try:
            return set(names) <= set(decode(line))
        except (DecodeError, RecursionError):
            return False

    return known


def row_forms() -> Mapping[str, RowForm]:
    """Return the formats by name; the first that knows a file's first line is taken."""
    lengths = ("timestamp", "input_length", "output_length")
    forms = (
        RowForm(
            name="azure",
            title="Azure's LLM inference trace (.csv)",
            wanted="TIMESTAMP, ContextTokens, GeneratedTokens",
            known=_has("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
            begin=_begin_azure,
        ),
        RowForm(
            name="burstgpt",
            title="BurstGPT (.csv)",
            wanted="Timestamp, Request tokens, Response tokens",
            known=_has("Timestamp", "Request tokens", "Response tokens"),
            begin=_begin_burstgpt,
        ),
        RowForm(
            name="quire",
            title="Quire's own log (.jsonl)",
            wanted="at_s, input_tokens, output_tokens, after a first line with quire_trace",
            known=_json_has("quire_trace"),
            begin=_begin_quire,
        ),
        RowForm(
            name="bailian",
            title="Bailian's (qwen-bailian-usagetraces-anon, .jsonl)",
            wanted="chat_id, parent_chat_id, timestamp, input_length, output_length, hash_ids",
            known=_json_has("chat_id", "parent_chat_id", *lengths),
            begin=_begin_bailian,
        ),
        RowForm(
            name="mooncake",
            title="Mooncake's (.jsonl)",
            wanted="timestamp, input_length, output_length, hash_ids",
            known=_json_has(*lengths),
            begin=_begin_mooncake,
        ),
    )
    return MappingProxyType({form.name: form for form in forms})


# -- detection of the format -----------------------------------------------------------------------


CONVERSATIONS, SERVEGEN = "kv-cache-tester", "servegen"
_OWN_COLUMNS = "TIMESTAMP,ContextTokens,GeneratedTokens"


def form_names() -> tuple[str, ...]:
    """Return the names of all formats."""
    return (*row_forms(), CONVERSATIONS, SERVEGEN)


def open_trace(
    source: str | Path,
    form: str | None = None,
    *,
    max_skipped: int | None = 0,
    seed: int = 0,
    session_interval_s: float = 60.0,
    on_progress: OnProgress | None = None,
) -> Trace:
    """Open a file, a folder or a web address of any format.

    ``form`` overrides the detection. ``max_skipped`` is the number of invalid rows to skip, or None
    for any. Conversations without a start time start at random, ``session_interval_s`` apart in the
    mean, with ``seed``.

    Raises: ConfigError.
    """
    if form is not None and form not in form_names():
        raise ConfigError(f"trace form {form!r} is none of {', '.join(form_names())}")
    if not 0 < session_interval_s < float("inf"):
        raise ConfigError(f"session_interval_s {session_interval_s} must be a number above 0")
    folder = not is_address(source) and Path(source).is_dir()
    if form is None:
        form = _form_of_folder(Path(source)) if folder else _form_of_file(source)
    if form == SERVEGEN:
        if not folder:
            raise ConfigError(
                f"trace {source} is not a folder; a ServeGen trace is a folder of clients"
            )
        clients = ServeGenClients(Path(source), seed=seed, on_progress=on_progress)
        return Trace(source, form, clients.reading)
    if form == CONVERSATIONS:
        several = Conversations(
            source, seed=seed, interval_s=session_interval_s, on_progress=on_progress
        )
        return Trace(
            source, form, several.reading, wanted=Conversations.WANTED, max_skipped=max_skipped
        )
    if folder:
        raise ConfigError(f"trace {source} is a folder; {row_forms()[form].title} is a file")
    return _trace_of_rows(source, row_forms()[form], max_skipped, on_progress)


def _form_of_folder(folder: Path) -> str:
    try:
        if has_clients(folder):
            return SERVEGEN
        if next(folder.rglob("*.json"), None) is not None:
            return CONVERSATIONS
    except OSError as error:
        raise ConfigError(f"trace {folder} cannot be read: {error.strerror}") from error
    raise ConfigError(
        f"trace {folder} is a folder without kv-cache-tester's conversations (.json) and without "
        f"ServeGen's clients (chunk-0-trace.csv, chunk-0-dataset.json)"
    )


def _form_of_file(source: str | Path) -> str:
    with opened(source) as data:
        if is_tar(data):
            return CONVERSATIONS
        _, first = next(lines_of(source, data), (0, b""))
        if not first:
            raise ConfigError(f"trace {source} has no requests: it is empty")
        for form in row_forms().values():
            if form.known(first):
                return form.name
        if knows_conversation(first):
            return CONVERSATIONS
    titles = "; ".join(form.title for form in row_forms().values())
    raise ConfigError(
        f"trace {source}, line 1: {first[:60].decode(errors='replace').strip()!r} is of no known "
        f"format; known: {titles}; kv-cache-tester's (.json, .tar.zst or a folder); "
        f"ServeGen's (a folder). For requests of your own write a CSV with three columns, "
        f"{_OWN_COLUMNS} (a time such as 2026-01-31 12:00:00.5, and two numbers of tokens): "
        f"docs/reference/traces.md has a script, which also draws times where there are none"
    )


def _trace_of_rows(
    source: str | Path, form: RowForm, max_skipped: int | None, on_progress: OnProgress | None
) -> Trace:
    @contextmanager
    def reading() -> Iterator[Iterator[Found]]:
        with opened(source, on_progress) as data:
            yield _rows(source, form, lines_of(source, data))

    return Trace(source, form.name, reading, wanted=form.wanted, max_skipped=max_skipped)


def _rows(source: str | Path, form: RowForm, lines: Iterator[tuple[int, bytes]]) -> Iterator[Found]:
    number, first = next(lines, (0, b""))
    if not number:
        return
    try:
        parse, is_row = form.begin(first)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"trace {source}, line {number}: {error}. Wanted: {form.wanted}"
        ) from error
    if is_row:
        yield number, _parsed(parse, first)
    for number, line in lines:
        yield number, _parsed(parse, line)


def _parsed(parse: Parse, line: bytes) -> TraceRequest | BadRow:
    try:
        return parse(line)
    except BadRow as error:
        return error
    except (DecodeError, RecursionError, UnicodeDecodeError) as error:
        return BadRow(str(error))
