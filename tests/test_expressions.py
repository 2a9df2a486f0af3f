"""Every regular expression that input from outside meets, against the worst that 64 KB can be.

Each has a text here that it matches. What grows is made of that: every part of it is repeated, and
something is put behind that cannot match. An expression in which one text has many readings then
takes quadratic time or worse, which is hours at that length. It runs in a process of its own.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import quire

ROOT = Path(quire.__file__).parent
ROOMS = ("chat", "server", "cli", "traces", "planner", "config", "units.py")
_METHODS = ("match", "fullmatch", "search", "findall", "finditer", "sub", "split")
_AT_MOST_S = 60  # all of them together take a few seconds on a busy machine

SEEDS: dict[str | bytes, str] = {
    # server
    r"[A-Za-z0-9_.:-]{1,128}": "aB0_.:-",
    r"[A-Za-z0-9_.:/-]{1,128}": "aB0_.:/-",
    r"[A-Za-z0-9_.-]{1,64}": "aB0_.-",
    r" - at `\$(?P<path>[^`]*)`$": "a - at `$.a[0]`",
    r"field `([^`]*)`": "field `a`",
    r'[^"\\\x00-\x1f]+': "a b",
    r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?": "-10.25e+31",
    r"\\u[0-9a-fA-F]{4}": "\\u00e9",
    r"[0-9]+": "a12",
    r"%[^%a-zA-Z*]*\*": "%(0-5)*d",
    rb"\n\r?\n": "a\r\n\r\n\n\n",
    r"\{(\w+)(?::\w+)?\}": "/a/{name:path}",
    r"\w+": "ab 1",
    r"data:image/[a-z0-9.+-]{1,32};base64,": "data:image/png;base64,",
    r"(https?|data|file):": "https:",
    r"\*|[a-zA-Z0-9_.-]+(:[0-9]{1,5})?": "a-b.c:1234",
    # the command line, the environment, files
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f]": "\x00\x1f",
    r"\d{1,4}(\.\d+)?": "12.5",
    r"(\d+(?:\.\d+)?)([kKmM])": "12.5k",
    r"-O\d": "-O3",
    r"(?:(\d{1,5})x)?(\d{1,5})x(\d{1,5})": "2x1024x768",
    r"chunk-(\d+)-trace\.csv": "chunk-12-trace.csv",
    r"\.experts?\.\d+\.": "a.experts.12.b",
    r"auto|cpu|cuda(:[0-9]{1,3})?": "cuda:12",
    r"[!-~]+": "a~",
    r"\*|[a-z][a-z0-9+.-]*://[^/?#\s]+": "https+a://a.b:1",
    r"(/[!->@-~]+)?": "/a/b",
    r"https?://[^/\s]+\S*": "https://a.b/c/d",
    r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)": "12.5 GiB",
    r"0?[0-7]{3}": "0660",
    r"[_-]": "a_b-c",
    r"ipc://(?P<path>\S+)": "ipc:///a/b",
    r"tcp://(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[\w.*-]+)):(?P<port>[0-9]{1,5})": "tcp://a-b.c:1234",
}
# Run with a pattern, its seed and the methods: all that grows out of the seed.
_ATTACK = """
import ast, re, sys
pattern, seed, methods, most = map(ast.literal_eval, sys.argv[1:])
own = re.compile(pattern)
if isinstance(pattern, bytes):
    seed = seed.encode()
bad = b"\\0" if isinstance(seed, bytes) else "\\0"
assert own.search(seed), "the seed does not match"
for start in range(len(seed)):
    for stop in range(start + 1, len(seed) + 1):
        part = seed[start:stop]
        for behind in (bad, seed[stop:] + bad, seed[stop:]):
            text = seed[:start] + part * (most // len(part)) + behind
            for method in methods:
                if method in ("sub", "subn"):
                    own.sub(seed[:0], text)
                elif method == "finditer":
                    list(own.finditer(text))
                else:
                    getattr(own, method)(text)
"""


def attack(pattern: str | bytes, seed: str, methods: set[str], *, within_s: float) -> None:
    """Raises: subprocess.TimeoutExpired."""
    given = (pattern, seed, sorted(methods), 64 * 1024)
    subprocess.run([sys.executable, "-c", _ATTACK, *map(repr, given)], timeout=within_s, check=True)


@cache
def found() -> dict[str | bytes, set[str]]:
    """Patterns of these rooms, and by which methods they are asked."""
    patterns: dict[str | bytes, set[str]] = {}
    for room in ROOMS:
        path = ROOT / room
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            for pattern, methods in _found_in(ast.parse(file.read_text(encoding="utf-8"))):
                patterns.setdefault(pattern, set()).update(methods)
    return patterns


def _found_in(tree: ast.Module) -> Iterator[tuple[str | bytes, set[str]]]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {
        id(node.value): target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for call in calls:
        own = call.func
        if not (isinstance(own, ast.Attribute) and isinstance(own.value, ast.Name)):
            continue
        if own.value.id != "re" or own.attr not in (*_METHODS, "compile"):
            continue
        pattern = call.args[0]
        if isinstance(pattern, ast.JoinedStr):  # of our own words
            continue
        assert isinstance(pattern, ast.Constant), ast.unparse(call)
        methods = (
            {own.attr}
            if own.attr != "compile"
            else {
                each.func.attr
                for each in calls
                if isinstance(each.func, ast.Attribute)
                and isinstance(each.func.value, ast.Name)
                and each.func.value.id == names[id(call)]
                and each.func.attr in _METHODS
            }
        )
        assert isinstance(pattern.value, str | bytes)
        yield pattern.value, methods


def test_each_has_a_text_that_it_matches() -> None:
    assert {pattern: bool(methods) for pattern, methods in found().items()} == dict.fromkeys(
        SEEDS, True
    )


@pytest.mark.sampled(12)
@pytest.mark.parametrize("pattern", SEEDS, ids=repr)
def test_none_takes_longer_than_the_text_is_long(pattern: str | bytes) -> None:
    attack(pattern, SEEDS[pattern], found()[pattern], within_s=_AT_MOST_S)


@pytest.mark.parametrize(
    ("pattern", "seed"),
    [
        # A head of HTTP as it must not be read: blanks before a value are in two places.
        (rb"((?:[a-z]+:[ \t]*[ -~]*\r\n)+)\r\n", "a: b\r\n\r\n"),
        (r"\s*(\d+)\s*([a-z]*)\s*", "1 b "),
        (r"(a+)+b", "aab"),
    ],
)
def test_what_is_looked_for_is_found(pattern: str | bytes, seed: str) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        attack(pattern, seed, {"fullmatch"}, within_s=1)
