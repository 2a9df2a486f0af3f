"""Hold the docstrings of public functions to the rules in CONTRIBUTING.

A public function or method has a docstring, unless a protocol or a base class in the source
documents a method of that name. It begins with a verb, as an order: "Return the blocks …". Where
the signature has a tensor or an array, the docstring or a comment beside the parameter gives its
shape in brackets; where it has a number of bytes or seconds, its name ends in the unit or the
docstring says it; where the body raises an error, the docstring names it or says "Raises".

    python tools/check_docstrings.py [PATH …]        files or folders; default: src/quire
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/quire"
VERBS = frozenset((Path(__file__).parent / "docstring_verbs.txt").read_text().split())

Function = ast.FunctionDef | ast.AsyncFunctionDef

_SHAPE = re.compile(r"\[[^\]\[]*[A-Za-z0-9…][^\]\[]*\]|\bshape|\bscalar", re.IGNORECASE)
_ARRAYS = re.compile(r"\bTensor\b|\bNDArray\b")
_MEASURED = re.compile(
    r"(^|_)(bytes|memory|timeout|delay|interval|deadline|duration|age|seconds|period|patience)$"
)
_NUMBER = re.compile(r"\b(int|float)\b")
_UNIT = re.compile(
    r"\b(bytes?|[KMGT]iB|seconds?|milliseconds?|ms|s|tokens?|blocks?|pages?|steps?)\b",
    re.IGNORECASE,
)
# Errors that say that Quire itself is wrong, or that a caller never sees.
_UNNAMED = frozenset({"AssertionError", "NotImplementedError", "StopIteration", "SystemExit"})
# What a library calls by this name: its own documentation says what it does.
_OF_LIBRARIES = frozenset({"forward", "emit", "format", "filter", "dispatch", "run"})


def main() -> int:
    """Print a line for each rule that a docstring breaks; exit with 1 if there is one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, default=[SOURCE], metavar="PATH")
    paths = parser.parse_args().paths
    declared = _declared()
    files = [
        file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])
    ]
    broken = [line for file in files for line in check(file.resolve(), declared)]
    print("\n".join(broken) or f"{len(files)} files: every docstring keeps the rules")
    return 1 if broken else 0


def check(file: Path, declared: frozenset[str]) -> Iterator[str]:
    """Yield a line, with file and line number, for each rule that a function of the file breaks."""
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    place = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
    for function, in_class in _public(ast.parse(text), in_class=False):
        for words in _broken_rules(function, lines, in_class, declared):
            yield f"{place}:{function.lineno}: {function.name}: {words}"


def _broken_rules(
    function: Function, lines: list[str], in_class: bool, declared: frozenset[str]
) -> Iterator[str]:
    doc = ast.get_docstring(function)
    if doc is None:
        known = in_class and (function.name in declared or function.name in _OF_LIBRARIES)
        if not known and not _is_property(function):
            yield "has no docstring"
        return
    first = re.match(r"[A-Za-z]+", doc)
    if not _is_property(function) and (first is None or first[0] not in VERBS):
        yield f'begins with "{doc.split()[0]}", which is no verb of tools/docstring_verbs.txt'
    body = function.body[0].lineno
    comments = " ".join(
        line.partition("#")[2] for line in lines[function.lineno - 1 : body] if "#" in line
    )
    said = doc + " " + comments
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    types = {each.arg: ast.unparse(each.annotation) for each in arguments if each.annotation}
    returned = ast.unparse(function.returns) if function.returns else ""
    if not _SHAPE.search(said) and any(
        _ARRAYS.search(each) for each in (*types.values(), returned)
    ):
        yield "gives no shape of its tensors"
    for name, kind in types.items():
        bare = not name.endswith("_bytes") and name != "num_bytes" and _MEASURED.search(name)
        if bare and _NUMBER.search(kind) and not _UNIT.search(said):
            yield f"gives no unit of {name}"
    for error in sorted(_raised(function)):
        if error not in said and "Raises" not in said:
            yield f"does not say that it raises {error}"


def _public(node: ast.AST, in_class: bool) -> Iterator[tuple[Function, bool]]:
    for each in getattr(node, "body", []):
        if getattr(each, "name", "_").startswith("_"):
            continue
        if isinstance(each, ast.ClassDef):
            yield from _public(each, in_class=True)
        elif isinstance(each, Function) and not _is_overload(each):
            yield each, in_class


def _decorators(function: Function) -> Iterator[str]:
    for each in function.decorator_list:
        yield ast.unparse(each)


def _is_property(function: Function) -> bool:
    return any(
        re.search(r"property$|\.(setter|deleter)$", each) is not None
        for each in _decorators(function)
    )


def _is_overload(function: Function) -> bool:
    return "overload" in _decorators(function)


def _raised(function: Function) -> set[str]:
    """Find the names of the errors that the function's own body raises."""
    found: set[str] = set()
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (*Function.__args__, ast.Lambda, ast.ClassDef)):
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = ast.unparse(node.exc.func).rpartition(".")[2]
            if name[:1].isupper() and name not in _UNNAMED:
                found.add(name)
        todo += ast.iter_child_nodes(node)
    return found


def _declared() -> frozenset[str]:
    """Find the names of methods that a protocol or a base class in the source documents."""
    classes: dict[str, ast.ClassDef] = {}
    bases: set[str] = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes[node.name] = node
                names = {ast.unparse(base).partition("[")[0] for base in node.bases}
                bases |= names
                if names & {"Protocol", "ABC"}:
                    bases.add(node.name)
    return frozenset(
        each.name
        for name, node in classes.items()
        if name in bases
        for each in node.body
        if isinstance(each, Function) and ast.get_docstring(each)
    )


if __name__ == "__main__":
    sys.exit(main())
