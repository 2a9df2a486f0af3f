"""Run ``quire cache``: list, check, prune and export the blocks that a folder keeps.

``--kv-tier file:PATH`` writes such a folder. An engine may use it meanwhile.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn

from quire.cli.help_text import HelpfulCommand, HelpfulGroup
from quire.cli.options import AsJson, check_folder, plain_table, progress_bar
from quire.errors import ConfigError
from quire.tiers import Deadline
from quire.tiers.address import parse_age
from quire.tiers.fingerprint import NAMESPACE_DIGITS, is_inner
from quire.tiers.inspection import export_chain, inspect, remove_flawed
from quire.tiers.record import RecordHeader
from quire.tiers.record_folder import (
    NamespaceContents,
    RecordFolder,
    list_namespaces,
    list_records,
    namespaces_of,
)
from quire.units import format_bytes, format_count, format_number_of, format_seconds, parse_bytes

T = TypeVar("T")

_NO_LIMIT_S = 1e9  # of a command that a person waits for, and can end
_TOLD_FLAWS = 20  # records that are named one by one
_LONGEST_FIELD = 40  # characters of a field in a namespace's description, with its name
_MOST_FIELDS = 12  # of a namespace, that are told
# Of a model's configuration, what tells models apart at a glance.
_CONFIG, _MODEL = "config.", "config.model_type"
_SIZES = MappingProxyType({"config.num_hidden_layers": "layers", "config.hidden_size": "width"})

Folder: TypeAlias = Annotated[
    Path, typer.Argument(metavar="PATH", help="The folder: PATH of --kv-tier file:PATH.")
]
Namespace: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Only this namespace: 16 hex digits, or the first ones of them."),
]


def cache() -> typer.Typer:
    """Make the command line of ``quire cache``."""
    from quire.cli import help_of

    app = typer.Typer(cls=HelpfulGroup, no_args_is_help=True, rich_markup_mode=None)
    for name, command in (("ls", ls), ("check", check), ("prune", prune), ("export", export)):
        app.command(name, cls=HelpfulCommand, help=help_of(command))(command)
    return app


def ls(path: Folder, *, as_json: AsJson = False) -> None:
    """List what a folder holds: a namespace for each configuration that wrote into it.

    Only engines whose model, numbers and layout are those of a namespace find its records;
    quire doctor says why an engine fits none.

    \b
    quire cache ls /var/cache/quire

    Raises: TierError, ConfigError.
    """
    several = sorted(namespaces_of(_existing(path)), key=lambda each: -(each.newest_s or 0))
    if as_json:
        print(json.dumps({"path": str(path), "namespaces": [_as_dict(each) for each in several]}))
        return
    out = Console(highlight=False)
    table = plain_table(
        f"Records in {escape(str(path))}", "namespace", "records", "bytes", "used last", "oldest"
    )
    for each in several:
        table.add_row(
            each.name,
            format_count(each.num_records),
            format_bytes(each.num_bytes),
            _ago(each.newest_s),
            _ago(each.oldest_s),
        )
    if len(several) > 1:
        num_records = sum(each.num_records for each in several)
        num_bytes = sum(each.num_bytes for each in several)
        table.add_row("all", format_count(num_records), format_bytes(num_bytes), "", "")
    out.print(table)
    for name, words in _described(several):
        out.print(f"[bold]{name:<{NAMESPACE_DIGITS}}[/]  {words}", soft_wrap=True)
    if not several:
        out.print("There is no namespace: no engine has written a record here.")


def check(
    path: Folder,
    *,
    namespace: Namespace = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the files that are no whole records.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check every record: its sizes, its name, and the checksum of each part.

    Engines check what they read, so this is for finding a disk that loses bits. Records that are
    sealed with a key show their sizes only. The exit code is 1 if a file is no whole record.

    \b
    quire cache check /var/cache/quire
    quire cache check /var/cache/quire --remove

    Raises: TierError, ConfigError.
    """
    names = _chosen(_existing(path), namespace)
    counts = {name: _Checked() for name in names}
    flawed = list[dict[str, str]]()
    with progress_bar(MofNCompleteColumn(), console=Console(stderr=True)) as progress:
        for name in names:
            task = progress.add_task(f"checking {name}", total=None)
            for record in list_records(path, name):
                found = inspect(record, name)
                progress.advance(task)
                counts[name].num_bytes += record.num_bytes
                if isinstance(found, RecordHeader):
                    counts[name].num_sealed += found.is_sealed
                    counts[name].num_sound += not found.is_sealed
                    continue
                counts[name].num_flawed += 1
                flawed.append({"file": record.path, "reason": found})
                if remove:
                    remove_flawed(record)
            progress.remove_task(task)
    if as_json:
        told = {
            "num_sound": sum(each.num_sound for each in counts.values()),
            "num_sealed": sum(each.num_sealed for each in counts.values()),
            "num_bytes": sum(each.num_bytes for each in counts.values()),
            "namespaces": {name: asdict(each) for name, each in counts.items()},
        }
        print(json.dumps({"path": str(path), **told, "flawed": flawed, "removed": remove}))
    else:
        _tell_check(counts, flawed, removed=remove)
    if flawed:
        raise typer.Exit(1)


def prune(
    path: Folder,
    *,
    size: Annotated[
        str | None, typer.Option(help="Bytes that may stay, e.g. 20GiB: the least used go.")
    ] = None,
    age: Annotated[
        str | None, typer.Option(help="Remove what was last used longer ago, e.g. 7d or 12h.")
    ] = None,
    namespace: Namespace = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove records: the old ones, the least used ones, or a whole namespace.

    An engine that uses the folder goes on: it computes what it does not find. With --namespace all
    of its records go, and neither --size nor --age may be given.

    \b
    quire cache prune /var/cache/quire --age 7d
    quire cache prune /var/cache/quire --size 20GiB
    quire cache prune /var/cache/quire --namespace 0123abcd

    Raises: TierError, ConfigError.
    """
    if (namespace is None) == (size is None and age is None):
        raise ConfigError("give --size, --age or both; or --namespace, which goes as a whole")
    size_bytes = None if size is None else _parsed("--size", size, parse_bytes)
    age_s = None if age is None else _parsed("--age", age, parse_age)
    names = _chosen(_existing(path), namespace)
    if namespace is not None and len(names) != 1:
        raise ConfigError(f"--namespace {namespace}: several begin so: {', '.join(names)}")
    what = f"namespace {names[0]}" if namespace is not None else "what exceeds these limits"
    if not yes and not _says_yes(f"Remove {what} from {path}?"):
        raise typer.Exit(1)
    folder, deadline = RecordFolder(path), Deadline.after(_NO_LIMIT_S)
    try:
        if namespace is not None:
            count, num_bytes = folder.remove_namespace(names[0], deadline)
        else:
            count, num_bytes = folder.prune(size_bytes=size_bytes, age_s=age_s, deadline=deadline)
    finally:
        folder.close()
    if as_json:
        print(json.dumps({"path": str(path), "num_removed": count, "removed_bytes": num_bytes}))
    else:
        print(f"{format_number_of(count, 'record')} removed, {format_bytes(num_bytes)}")


def export(
    path: Folder,
    record: Annotated[
        str,
        typer.Argument(help="The last block's record: hex digits with which its file name begins."),
    ],
    out: Annotated[Path, typer.Argument(help="The safetensors file to be written.")],
    *,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Export a prompt's keys and values, up to a block, as a safetensors file.

    The blocks before that one are found by their records, in all groups of layers. A tensor is one
    layer of one block, with a row for each head (its keys of all tokens, then its values), or under
    virtual for each token; states, and numbers with scales beside them, are bytes. The file's
    metadata have the token ids. Sealed records cannot be exported:
    only an engine that has the key and the tokens can read them.

    \b
    quire cache export /var/cache/quire 3fa9 prompt.safetensors

    Raises: TierError, ConfigError.
    """
    check_folder("OUT", out)
    names = [
        name
        for name in _chosen(_existing(path), namespace)
        if any(each.name.startswith(record) for each in list_records(path, name))
    ]
    if len(names) != 1:
        where = f"in namespaces {', '.join(names)}: choose with --namespace" if names else "nowhere"
        raise ConfigError(f"RECORD {record!r}: a name that begins so is {where} in {path}")
    written = export_chain(path, names[0], record, out)
    if as_json:
        print(json.dumps({"file": str(out), "namespace": names[0], **asdict(written)}))
        return
    print(
        f"{format_number_of(written.num_tokens, 'token')} in "
        f"{format_number_of(written.num_blocks, 'block')}: "
        f"{format_number_of(written.num_tensors, 'tensor')}, {format_bytes(written.num_bytes)}, "
        f"in {out}"
    )


def _parsed(flag: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r}: {error}") from None


def _existing(path: Path) -> Path:
    if not path.is_dir():
        raise ConfigError(f"PATH {path}: no such folder; --kv-tier file:PATH makes one")
    return path


def _chosen(path: Path, namespace: str | None) -> list[str]:
    names = list_namespaces(path)
    chosen = [name for name in names if name.startswith(namespace or "")]
    if namespace is not None and not chosen:
        known = ", ".join(names) or "none"
        raise ConfigError(f"--namespace {namespace}: no such one in {path}; there are: {known}")
    return chosen


def _says_yes(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("nothing was removed: without a terminal to ask on, it needs --yes")
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:
        return False


def _as_dict(each: NamespaceContents) -> dict[str, Any]:
    return {
        "namespace": each.name,
        "description": each.fingerprint and each.fingerprint.fields,
        "num_records": each.num_records,
        "num_bytes": each.num_bytes,
        "oldest_used_s": each.oldest_s,
        "newest_used_s": each.newest_s,
    }


def _described(several: list[NamespaceContents]) -> Iterator[tuple[str, str]]:
    """Yield what all namespaces are, and what each is that not all are.

    Anyone who can write to the folder may have chosen the words: they are printable ASCII, and
    steer no terminal.
    """
    leaves = {each.name: each.fingerprint.leaves for each in several if each.fingerprint}
    alike = dict[str, str]()
    if len(leaves) > 1:
        first, *rest = leaves.values()
        alike = dict(set(first.items()).intersection(*(each.items() for each in rest)))
    if alike:
        yield "in all", _told(alike)
    own = {name: dict(each.items() - alike.items()) for name, each in leaves.items()}
    told = Counter(map(_told, own.values()))
    for each in several:
        if each.name in own:
            fields = own[each.name]
            words = _told(fields)
            yield each.name, words if told[words] == 1 else _told(fields, with_inner=True)
        else:
            yield each.name, "[dim]without a description of its own[/]"


def _told(leaves: dict[str, str], *, with_inner: bool = False) -> str:
    """Say what fields are, the model first; ``with_inner``: those within fields, too."""
    words, left = [], leaves
    if _MODEL in left:
        sizes = ", ".join(f"{what} {left[path]}" for path, what in _SIZES.items() if path in left)
        words.append(_bare(left[_MODEL]) + f" ({sizes})" * bool(sizes))
        left = {path: value for path, value in left.items() if not path.startswith(_CONFIG)}
    paths = sorted(path for path in left if not is_inner(path) and left[path] != "null")
    if with_inner:
        paths += sorted(path for path in left if is_inner(path))
    words += (f"{path} {_bare(left[path])}" for path in paths)
    shown = [_cut(each) for each in words[:_MOST_FIELDS]]
    if len(words) > _MOST_FIELDS:
        shown.append(f"and {len(words) - _MOST_FIELDS} more (--json)")
    return escape(", ".join(shown))


def _bare(value: str) -> str:
    return value[1:-1] if value.startswith('"') else value


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_FIELD else f"{text[:_LONGEST_FIELD]}…"


@dataclass(slots=True)
class _Checked:
    """What a check has found in a namespace."""

    num_sound: int = 0
    num_sealed: int = 0
    num_flawed: int = 0
    num_bytes: int = 0  # of all files


def _tell_check(
    counts: dict[str, _Checked], flawed: list[dict[str, str]], *, removed: bool
) -> None:
    out = Console(highlight=False)
    for name, own in counts.items():
        words = [format_number_of(own.num_sound, "whole record")]
        if own.num_sealed:
            words.append(format_number_of(own.num_sealed, "sealed record"))
        if own.num_flawed:
            words.append(f"[red]{own.num_flawed:,} with a flaw[/]")
        out.print(f"[bold]{name}[/]  {', '.join(words)}; {format_bytes(own.num_bytes)}")
    if not counts:
        out.print("There is no namespace: no engine has written a record here.")
    if any(own.num_sealed for own in counts.values()):
        out.print("Sealed: only an engine with the key can check more than sizes")
    for each in flawed[:_TOLD_FLAWS]:
        out.print(f"[red]{each['reason']}[/]  {escape(each['file'])}", soft_wrap=True)
    if len(flawed) > _TOLD_FLAWS:
        out.print(f"… and {format_count(len(flawed) - _TOLD_FLAWS)} more (--json lists all)")
    if flawed:
        done = "removed" if removed else "with a flaw; --remove removes what has one"
        out.print(f"{format_number_of(len(flawed), 'file')} {done}")


def _ago(seconds: float | None) -> str:
    return "–" if seconds is None else f"{format_seconds(max(0.0, time.time() - seconds))} ago"
