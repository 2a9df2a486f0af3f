"""Texts of a prescribed form: a grammar, compiled once, says at each place which tokens may come.

llguidance does it, an extra that is imported when the first such request comes. How the bits are
used is the sampler's business.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.errors import RequestError
from quire.sampling_params import Reasoning, StructuredOutputsParams
from quire.units import format_bytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

# llguidance goes from rule to rule on the stack: some thousand of them ended the process in 8 MiB.
_STACK_BYTES = 256 * 1024 * 1024
# GBNF is put into Lark's notation in time that grows with the square of its rules.
_MOST_GRAMMAR_BYTES = 16 * 1024
_MOST_SOURCE_BYTES = 64 * 1024  # of the other kinds
_MOST_GRAMMARS = 64  # kept for requests to come
# One at each place: small models like to go on with blanks for ever.
_WHITESPACE = r"[\x20\x0A\x0D\x09]"


class Matcher:
    """Where one sequence is in its grammar.

    It goes where its sequence has gone, and comes back from every look ahead. ``error`` says why
    it can say nothing more; empty as long as it can.
    """

    def __init__(self, matcher: "LLMatcher", num_mask_bytes: int) -> None:
        self._matcher = matcher
        self._num_mask_bytes = num_mask_bytes

    @property
    def error(self) -> str:
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else ""

    def consume(self, token_ids: list[int]) -> None:
        """These have been generated."""
        if token_ids:  # to take nothing would end a grammar of the empty text
            self._matcher.consume_tokens(token_ids)

    def masks(self, drafts: tuple[int, ...]) -> list[NDArray[np.uint8]]:
        """The tokens that may come next, and after each draft, up to one that must not come.

        A bit a token, the lowest of a byte first.
        """
        found = [self._mask()]
        for draft in drafts:
            if not self._matcher.try_consume_tokens([draft]):
                break
            found.append(self._mask())
        self._matcher.rollback(len(found) - 1)
        return found

    def taken(self, token_ids: Sequence[int]) -> tuple[int, bool]:
        """How many of these the grammar takes, up to one that nothing can follow; and if one is."""
        num_taken, at_end = 0, False
        for token_id in token_ids:
            if at_end or not self._matcher.try_consume_tokens([token_id]):
                break
            num_taken, at_end = num_taken + 1, self._matcher.is_stopped()
        self._matcher.rollback(num_taken)
        return num_taken, at_end

    def _mask(self) -> NDArray[np.uint8]:
        bits = np.zeros(self._num_mask_bytes, np.uint8)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return bits


class Grammar:
    """A compiled grammar; every sequence that has to follow it gets a matcher of its own."""

    def __init__(self, matcher: "LLMatcher", num_mask_bytes: int) -> None:
        self._matcher = matcher
        self._num_mask_bytes = num_mask_bytes

    def matcher(self) -> Matcher:
        """At the beginning of the text."""
        return Matcher(self._matcher.deep_copy(), self._num_mask_bytes)


class Grammars:
    """All grammars of one tokenizer. Those that were used last are kept for requests to come.

    Any thread may compile one. How long that takes is bounded by a limit on the text and by
    llguidance's own, on a grammar's size and on the work that it makes: a second or so.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._prepared: LLTokenizer | None = None
        self._kept: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Raises: RequestError naming what is wrong with the grammar, or what is missing here."""
        with self._lock:
            if params in self._kept:
                self._kept.move_to_end(params)
                return self._kept[params]
            if self._prepared is None:
                self._prepared = _prepare(self._tokenizer, self._vocab_size, self._eos_token_ids)
        if params.reasoning is not None:
            self.compile(replace(params, reasoning=None))  # what is wrong is said of this one
        matcher = _on_a_large_stack(partial(_compiled, params, self._prepared, self._parts))
        grammar = Grammar(matcher, 4 * -(-self._vocab_size // 32))
        if params.reasoning is None:
            _refuse_without_texts(grammar, params, self._eos_token_ids)
        with self._lock:
            self._kept[params] = grammar
            if len(self._kept) > _MOST_GRAMMARS:
                self._kept.popitem(last=False)
        return grammar

    def _parts(self, mark: str) -> list[tuple[str, int | None]]:
        """A mark's tokens that are no text to llguidance, and the texts between them, with None."""
        assert self._prepared is not None, "a grammar is being compiled"
        found = self._tokenizer.backend_tokenizer.encode(mark, add_special_tokens=False)
        parts: list[tuple[str, int | None]] = []
        at = 0
        for token_id, (start, end) in zip(found.ids, found.offsets, strict=True):
            if self._prepared.is_special_token(token_id):
                parts += [(mark[at:start], None), (mark[start:end], token_id)]
                at = end
        return [(text, token_id) for text, token_id in [*parts, (mark[at:], None)] if text]


def _prepare(tokenizer: Any, vocab_size: int, eos_token_ids: list[int]) -> "LLTokenizer":
    """The tokenizer as llguidance wants it. Raises: RequestError."""
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise RequestError(
            "structured_outputs needs llguidance, which is not installed: "
            "pip install 'quire[structured]'"
        ) from error
    if tokenizer is None:
        raise RequestError("this model has no tokenizer: structured_outputs cannot be followed")
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        raise RequestError(
            f"structured_outputs needs a fast tokenizer, and {type(tokenizer).__name__} is none"
        )
    plain = copy(fast)
    plain.no_padding()
    plain.no_truncation()
    try:
        return LLTokenizer(plain.to_str(), n_vocab=vocab_size, eos_token=eos_token_ids or None)
    except ValueError as error:
        raise RequestError(
            f"llguidance cannot use this model's tokenizer: {_first_line(str(error))}"
        ) from error


def _compiled(
    params: StructuredOutputsParams,
    tokenizer: "LLTokenizer",
    parts_of: Callable[[str], list[tuple[str, int | None]]],
) -> "LLMatcher":
    """A matcher at the beginning. Raises: RequestError."""
    from llguidance import LLMatcher, LLParserLimits, grammar_from

    kind, source = params.source
    most_bytes = _MOST_GRAMMAR_BYTES if kind == "grammar" else _MOST_SOURCE_BYTES
    if len(source.encode(errors="replace")) > most_bytes:
        raise RequestError(
            f"structured_outputs: the {kind} is longer than {format_bytes(most_bytes)}"
        )
    try:
        if kind == "json":
            grammar = LLMatcher.grammar_from_json_schema(
                source,
                overrides={"whitespace_flexible": False}
                if params.disable_any_whitespace
                else {"whitespace_pattern": _WHITESPACE},
            )
        else:
            grammar = grammar_from(kind, source)
        if params.reasoning is not None:
            grammar = _behind(params.reasoning, grammar, parts_of)
        matcher = LLMatcher(
            tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False)
        )
        problem = matcher.get_error()
    except ValueError as error:
        problem = str(error)
    if problem:
        raise RequestError(f"structured_outputs: the {kind} is wrong: {_first_line(problem)}")
    return matcher


def _behind(
    reasoning: Reasoning,
    grammar: str,
    parts_of: Callable[[str], list[tuple[str, int | None]]],
) -> str:
    """The grammar of reasoning, and of a text behind it.

    A mark may be a token of its own, or text, of which a token may hold the end and more.
    """
    opening, closing, lead = (
        " ".join(json.dumps(text) if token is None else f"<[{token}]>" for text, token in parts)
        for parts in map(parts_of, (reasoning.opens, reasoning.closes, reasoning.lead))
    )
    first, *others = parts_of(reasoning.closes)
    if first[1] is None and not others:
        thoughts = f"thoughts[suffix={closing}]: ANY"
    else:  # and not spelled otherwise, which a reader could not tell from it
        thoughts = (
            f"thoughts: UNMARKED? {closing}\n"
            f"UNMARKED: /(?s:.)+/ & ~(ANY {json.dumps(first[0])} ANY)"
        )
    blanks = "" if lead else "BLANKS?"
    start = (
        f"({opening})? thoughts {blanks} {lead} @answer"
        if reasoning.is_open
        else f"({blanks} {opening} thoughts {blanks})? {lead} @answer"
    )
    whole = f"start: {start}\n{thoughts}\nANY: /(?s:.)*/\nBLANKS: /[ \\t\\r\\n]{{1,8}}/\n"
    is_json = grammar.startswith('{"grammars"')  # llguidance's own form, of one grammar
    answer = json.loads(grammar)["grammars"][0] if is_json else {"lark_grammar": grammar}
    return json.dumps(
        {"grammars": [{"name": "whole", "lark_grammar": whole}, {**answer, "name": "answer"}]}
    )


def _refuse_without_texts(
    grammar: Grammar, params: StructuredOutputsParams, eos_token_ids: Sequence[int]
) -> None:
    """``{"$ref": "#"}`` is a schema, of no text at all. Raises: RequestError."""
    matcher = grammar.matcher()
    allowed = np.unpackbits(matcher.masks(())[0], bitorder="little")
    allowed[list(eos_token_ids)] = 0
    is_empty = any(matcher.taken([token_id])[0] for token_id in eos_token_ids)
    if not allowed.any() and not is_empty:
        why = f": {matcher.error}" if matcher.error else ""
        raise RequestError(f"structured_outputs: no text can follow the {params.source[0]}{why}")


def _on_a_large_stack(make: Callable[[], T]) -> T:
    """What it gives or raises, in a thread of its own."""
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    before = threading.stack_size(_STACK_BYTES)
    try:
        threading.Thread(target=run, name="quire-grammar", daemon=True).start()
    finally:
        threading.stack_size(before)
    return made.result()


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")
