"""Chat templates as Transformers renders them, but with limits on time and length.

Jinja compiles a template to Python, and nothing stops Python from outside. So every loop and macro
gets a call in front of its body that looks at the clock, as every filter and call does; operators,
filters and methods that make much of little check the size first; and all that a template writes is
counted, into variables too. A template comes with a model's files, which others have made.
"""

import json
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, wraps
from threading import local
from time import monotonic
from types import CodeType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from quire.errors import RequestError
from quire.units import format_count

_WRITTEN = 64  # times max_chars: the limit for all texts on the way to a prompt
# No chat template needs these, and each makes much of little.
_NO_FILTERS = ("pprint", "slice", "urlize", "wordwrap", "xmlattr")
_NO_METHODS = frozenset(("expandtabs", "format_map", "to_bytes", "translate"))
_DIGITS = re.compile(r"[0-9]+")
_STAR = re.compile(r"%[^%a-zA-Z*]*\*")  # a width that is given beside the value


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """The limits of one rendering."""

    seconds: float = 1.0
    max_chars: int = 8 * 1024 * 1024  # of the prompt, and of any text or list on the way to it


class Exhausted(Exception):
    """A template has reached a limit; the message says which."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja with the names, filters and conventions that Transformers gives to templates."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, limits: TemplateLimits) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            finalize=self._written,
        )
        self.limits, self._spent = limits, _Spent()
        self.filters["tojson"] = _tojson
        for name in _NO_FILTERS:
            del self.filters[name]
        for name, function in self.filters.items():
            self.filters[name] = self._bounded(name, function)
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Names

    def template(self, source: str) -> Template:
        """Return a template. Raises: TemplateSyntaxError; any other error of Jinja's compiler."""
        code = _compiled(source, self.limits)
        return Template.from_code(self, code, self.make_globals(None))

    def render(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Render a template. Raises: RequestError for a limit, or messages that it rejects."""
        self._spent.deadline, self._spent.num_chars = monotonic() + self.limits.seconds, 0
        pieces, length = [], 0
        try:
            for piece in template.generate(variables):
                pieces.append(piece)
                length += len(piece)
                self._check(length)
        except Exhausted as error:
            raise RequestError(f"the chat template was stopped: {error}") from error
        except TemplateError as error:
            raise RequestError(f"the chat template refuses the messages: {error}") from error
        except (RecursionError, MemoryError) as error:
            raise RequestError(f"the chat template was stopped: {type(error).__name__}") from error
        except Exception as error:  # a template may do anything with what it is given
            raise RequestError(
                f"the chat template fails on these messages: {type(error).__name__}: {error}"
            ) from error
        return "".join(pieces)

    def tick(self, num_chars: int) -> None:
        """Count a loop's or macro's body of so many characters. Raises: Exhausted."""
        self._make(num_chars)

    def joined(self, *values: Any) -> str:
        """Return what ``~`` gives. Raises: Exhausted."""
        self._make(sum(map(self._size, values)))
        return "".join(map(str, values))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may read an attribute."""
        return attr not in _NO_METHODS and super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method, after a look at what it would make."""
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja has a guard around str.format
        name, text = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if isinstance(text, str | bytes):
            if name == "join" and args:
                args = (list(__self._counted(args[0], text)), *args[1:])
            __self._look_at(name, text, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator, after a look at what it would make. Raises: Exhausted."""
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self._make(len(left) + len(right))
        elif operator == "*":
            for several, times in ((left, right), (right, left)):
                if hasattr(several, "__len__") and isinstance(times, int):
                    self._make(len(several) * times)
        elif operator == "%" and isinstance(left, str | bytes):
            self._look_at("%", left, (right,), {})
        if (
            operator in ("*", "**")
            and isinstance(left, int)
            and isinstance(right, int)
            and left.bit_length() * (right if operator == "**" else 1) > 4096
        ):
            raise Exhausted("a number of more than 4,096 bits")
        return super().call_binop(context, operator, left, right)

    def _generate(
        self, source: nodes.Template, name: Any, filename: Any, defer_init: bool = False
    ) -> str:
        source = _Joins().visit(source)
        bodies: Iterable[Any] = list(source.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
        for repeated in bodies:
            texts = [text for node in repeated.body for text in node.find_all(nodes.TemplateData)]
            length = nodes.Const(sum(len(text.data) for text in texts))
            call = nodes.Call(nodes.EnvironmentAttribute("tick"), [length], [], None, None)
            repeated.body.insert(0, nodes.ExprStmt(call).set_lineno(repeated.lineno))
        return super()._generate(source, name, filename, defer_init)

    # -- limits ------------------------------------------------------------------------------------

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter so that it looks at its input first."""
        place = int(
            hasattr(function, "jinja_pass_arg")
        )  # the value's place, behind what Jinja passes

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            before, value, more = args[:place], args[place], args[place + 1 :]
            if name == "join":
                separator = more[0] if more else kwargs.get("d", "")
                value = list(self._counted(value, separator))
            self._look_at(name, value, more, kwargs)
            return function(*before, value, *more, **kwargs)

        return bounded

    def _look_at(
        self, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Look at what a filter or a method of a text is given. Raises: Exhausted."""
        self._check(0)
        given = (*args, *kwargs.values())
        most = max((each for each in given if isinstance(each, int)), default=0)
        if name in ("center", "ljust", "rjust", "zfill"):
            self._make(most)
        elif name in ("%", "format"):
            self._make(self._formatted(name, value, given))
        elif name == "replace" and len(given) > 1:
            text, old, new = (
                each if isinstance(each, bytes) else str(each) for each in (value, *given[:2])
            )
            self._make(len(text) + text.count(old) * len(new))  # type: ignore[arg-type]
        elif name == "indent":
            width = max((len(each) for each in given if isinstance(each, str)), default=most or 4)
            self._make((str(value).count("\n") + 1) * width)
        elif name in ("tojson", "string"):
            self._make(self._size(value) * (1 + most))

    def _formatted(self, name: str, text: Any, given: tuple[Any, ...]) -> int:
        """Return how many characters a format string may become."""
        text = text.decode("latin-1") if isinstance(text, bytes) else str(text)
        if name == "format" and "%" not in text:
            specs = [spec or "" for _, _, spec, _ in string.Formatter().parse(text)]
            is_open, numbers = any("{" in spec for spec in specs), _DIGITS.findall(" ".join(specs))
            num_places = len(specs)
        else:
            is_open, numbers = _STAR.search(text) is not None, _DIGITS.findall(text)
            num_places = text.count("%")
        if is_open or max(map(len, numbers), default=0) > len(str(self.limits.max_chars)):
            raise Exhausted("a text with a width that has no bound")
        widest = max(map(int, numbers), default=0)
        return len(text) + num_places * (widest + sum(map(self._size, given)))

    def _counted(self, values: Iterable[Any], separator: Any) -> Iterator[Any]:
        length = 0
        for value in values:
            length += self._size(value) + len(separator)
            self._check(length)
            yield value
        self._make(length)

    def _size(self, value: Any) -> int:
        """Return about how many characters a value has as text. Raises: Exhausted for too many."""
        if isinstance(value, str | bytes):
            return len(value)
        length, left = 0, [value]
        while left:
            each = left.pop()
            if isinstance(each, str | bytes):
                length += len(each) + 4
            elif isinstance(each, Mapping):
                left += (*each.keys(), *each.values())
            elif isinstance(each, list | tuple):
                left += each
            length += 4
            self._check(length)
        return length

    def _written(self, value: Any) -> Any:
        """Count what stands in double braces, wherever it is written to."""
        self._make(self._size(value))
        return value

    def _make(self, length: int) -> None:
        """Count a text or list of this length that is made now. Raises: Exhausted."""
        self._check(length)
        self._spent.num_chars += length
        if self._spent.num_chars > _WRITTEN * self.limits.max_chars:
            raise Exhausted(
                f"more than {_WRITTEN} times {format_count(self.limits.max_chars)} characters on "
                "the way to the prompt"
            )

    def _check(self, length: int) -> None:
        """Check the clock and the length of one text. Raises: Exhausted."""
        if monotonic() > self._spent.deadline:
            raise Exhausted(f"it took longer than {self.limits.seconds:g} s")
        if length > self.limits.max_chars:
            raise Exhausted(f"more than {format_count(self.limits.max_chars)} characters")


@lru_cache(maxsize=16)
def _compiled(source: str, limits: TemplateLimits) -> CodeType:
    """Compile a template for every sandbox with these limits: an engine's and its server's."""
    return Sandbox(limits).compile(source)


class _Spent(local):
    """What this thread's rendering has used."""

    deadline = float("inf")
    num_chars = 0


class _Joins(NodeTransformer):
    """Replaces ``~`` by a call, so that it can be counted."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("joined"), node.nodes, [], None, None)
        return call.set_lineno(node.lineno)


class GenerationTag(Extension):
    """``{% generation %}`` marks an assistant's text for training. Here it is only text."""

    tags = frozenset(("generation",))  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the node for the tag and its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_said")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _said(self, caller: Macro) -> str:
        return str(caller())


class _Dict:
    """``dict`` in a template: an object, so that the type itself is out of reach."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Names(Namespace):
    """``namespace`` without names that begin with an underscore, as in Transformers.

    ``self`` is among the positional arguments, so that a template may use that name too.
    """

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        names = dict(*given, **kwargs)
        for name in names:
            _check_name(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have {name!r}: it begins with an underscore")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON. Jinja's own filter writes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateError(str(message))


def syntax_error(error: TemplateSyntaxError) -> str:
    """Return in one line where a template is wrong."""
    return f"line {error.lineno}: {error.message}"
