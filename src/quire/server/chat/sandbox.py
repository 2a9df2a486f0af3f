"""Chat templates as Transformers renders them, but for a limited time and to a limited length.

Jinja makes Python of a template, and nothing stops Python from outside. So every loop and macro
gets a call in front of its body that looks at the clock, and the operators that can make much of
little look at the size first. What a template of the operator's can be driven to by messages is
bounded so; what a hostile template could still do in one call of a filter is not, and so those run
in a process that can be killed (``process.py``).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from quire.errors import RequestError
from quire.units import format_count

_DEADLINE = " deadline"  # no template can write this name


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one rendering."""

    seconds: float = 1.0
    max_chars: int = 8 * 1024 * 1024  # of the prompt, and of any text or list on the way to it


class Exhausted(Exception):
    """A template came to a limit; the message says which."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja with the names, filters and manners that Transformers gives to templates.

    Raises, as a template is made: TemplateSyntaxError.
    """

    intercepted_binops = frozenset(("+", "*", "**"))

    def __init__(self, limits: Limits) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        self.limits = limits
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Names

    def render(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Raises: RequestError: a limit, or what the template says against the messages."""
        deadline = monotonic() + self.limits.seconds
        pieces, length = [], 0
        try:
            for piece in template.generate({**variables, _DEADLINE: deadline}):
                pieces.append(piece)
                length += len(piece)
                self._check_size(length)
                self._check_time(deadline)
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

    @pass_context
    def tick(self, context: Context) -> None:
        """Called in front of the body of each loop and macro. Raises: Exhausted."""
        self._check_time(context.parent[_DEADLINE])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self._check_size(len(left) + len(right))
        elif operator == "*":
            for several, times in ((left, right), (right, left)):
                if hasattr(several, "__len__") and isinstance(times, int):
                    self._check_size(len(several) * times)
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
        bodies: Iterable[Any] = list(source.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
        for repeated in bodies:
            call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            repeated.body.insert(0, nodes.ExprStmt(call).set_lineno(repeated.lineno))
        return super()._generate(source, name, filename, defer_init)

    def _check_time(self, deadline: float) -> None:
        if monotonic() > deadline:
            raise Exhausted(f"it took longer than {self.limits.seconds:g} s")

    def _check_size(self, length: int) -> None:
        if length > self.limits.max_chars:
            raise Exhausted(f"more than {format_count(self.limits.max_chars)} characters")


class Generation(Extension):
    """``{% generation %}`` marks what an assistant said, for training. Here it is only text."""

    tags = frozenset(("generation",))  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
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
    """``namespace`` without names that begin with an underscore, as Transformers has it.

    ``self`` is among the positional arguments, so that a template may have that name too.
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
    """Jinja's own writes HTML."""
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
    """Where a template is wrong, in a line."""
    return f"line {error.lineno}: {error.message}"
