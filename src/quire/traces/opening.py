"""Open a trace: tell by what is in it which form it has.

``open_trace("mooncake.jsonl.gz")`` reads nothing but the beginning; iterating reads the rest. A new
form is a row here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import DecodeError

from quire.errors import ConfigError
from quire.traces.conversations import Conversations, is_tar, knows_conversation
from quire.traces.request import TraceRequest
from quire.traces.rows import Parse, RowForm, row_forms
from quire.traces.servegen import ServeGenClients, has_clients
from quire.traces.source import OnProgress, is_address, lines_of, opened
from quire.traces.trace import BadRow, Found, Trace

CONVERSATIONS, SERVEGEN = "kv-cache-tester", "servegen"


def form_names() -> tuple[str, ...]:
    """What ``form`` may be."""
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
    """Requests of a file, a folder or a web address, in any of the forms.

    ``form``: what it is, where its beginning does not say. ``max_skipped``: how many rows may be no
    requests; None: any number. ``session_interval_s`` and ``seed``: of forms that say nothing of
    when conversations begin, the mean time between two of them.

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
            raise ConfigError(f"trace {source} is no folder; ServeGen's is one, of clients")
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
        f"trace {folder} is a folder with neither kv-cache-tester's conversations (.json) nor "
        f"ServeGen's clients (chunk-0-trace.csv, chunk-0-dataset.json) in it"
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
        f"trace {source}, line 1: {first[:60].decode(errors='replace').strip()!r} begins none of "
        f"the forms that can be read: {titles}; kv-cache-tester's (.json, .tar.zst or a folder); "
        f"ServeGen's (a folder)"
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
