"""Structured outputs: a compiled grammar tells at each place of a text which tokens may come.

llguidance compiles and follows grammars. It is an extra, imported at the first such request. The
sampler applies the masks.
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

# llguidance recurses from rule to rule: some thousand rules overflowed a stack of 8 MiB.
_STACK_BYTES = 256 * 1024 * 1024
# The time to translate GBNF to Lark's notation grows with the square of its rules.
_MOST_GRAMMAR_BYTES = 16 * 1024
_MOST_SOURCE_BYTES = 64 * 1024  # of the other kinds
_MOST_GRAMMARS = 64  # kept for requests to come
# One blank at each place: small models tend to write blanks without end.
_WHITESPACE = r"[\x20\x0A\x0D\x09]"


class Matcher:
    """One sequence's place in its grammar. Looking ahead does not move it.

    ``error`` says why the grammar cannot be followed any further; empty while it can.
    """

    def __init__(self, matcher: "LLMatcher", num_mask_bytes: int) -> None:
        self._matcher = matcher
        self._num_mask_bytes = num_mask_bytes

    @property
    def error(self) -> str:
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else ""

    def consume(self, token_ids: list[int]) -> None:
        """Move on by generated tokens."""
        if token_ids:  # to take nothing would end a grammar of the empty text
            self._matcher.consume_tokens(token_ids)

    def masks(self, drafts: tuple[int, ...]) -> list[NDArray[np.uint8]]:
        """Return masks u8[mask bytes]: of the next token, and of those behind each valid draft.

        A token has one bit, the lowest of a byte first.
        """
        found = [self._mask()]
        for draft in drafts:
            if not self._matcher.try_consume_tokens([draft]):
                break
            found.append(self._mask())
        self._matcher.rollback(len(found) - 1)
        return found

    def taken(self, token_ids: Sequence[int]) -> tuple[int, bool]:
        """Return how many of these tokens are valid, and whether the grammar ends with the last."""
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
    """A compiled grammar. Each sequence that follows it has a matcher of its own."""

    def __init__(self, matcher: "LLMatcher", num_mask_bytes: int) -> None:
        self._matcher = matcher
        self._num_mask_bytes = num_mask_bytes

    def matcher(self) -> Matcher:
        """Make a matcher at the beginning of a text."""
        return Matcher(self._matcher.deep_copy(), self._num_mask_bytes)


class Grammars:
    """The grammars of one tokenizer. Those that were used last are kept.

    Any thread may compile one. A limit on the source, and llguidance's own limits on a grammar's
    size and work, bound the time to about a second.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._prepared: LLTokenizer | None = None
        self._kept: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Compile a grammar. Raises: RequestError for a wrong grammar, or a missing package."""
        with self._lock:
            if params in self._kept:
                self._kept.move_to_end(params)
                return self._kept[params]
            if self._prepared is None:
                self._prepared = _prepare(self._tokenizer, self._vocab_size, self._eos_token_ids)
        if params.reasoning is not None:
            self.compile(replace(params, reasoning=None))  # whose errors are the clearer ones
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
        """Split a mark into special tokens and the texts between them, whose token is None."""
        assert self._prepared is not None, "``compile`` prepares the tokenizer"
        found = self._tokenizer.backend_tokenizer.encode(mark, add_special_tokens=False)
        parts: list[tuple[str, int | None]] = []
        at = 0
        for token_id, (start, end) in zip(found.ids, found.offsets, strict=True):
            if self._prepared.is_special_token(token_id):
                parts += [(mark[at:start], None), (mark[start:end], token_id)]
                at = end
        return [(text, token_id) for text, token_id in [*parts, (mark[at:], None)] if text]


def _prepare(tokenizer: Any, vocab_size: int, eos_token_ids: list[int]) -> "LLTokenizer":
    """Convert the tokenizer for llguidance. Raises: RequestError."""
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise RequestError(
            "structured_outputs needs llguidance, which is not installed: "
            "pip install 'quire-kv[structured]'"
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
    """Compile a grammar to a matcher at its beginning. Raises: RequestError."""
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
    """Return the grammar of reasoning that ends with its mark, and of the answer behind it.

    A mark may be a token of its own, or text, whose last token may hold more than its end.
    """
    opening, closing, lead = (
        " ".join(json.dumps(text) if token is None else f"<[{token}]>" for text, token in parts)
        for parts in map(parts_of, (reasoning.opens, reasoning.closes, reasoning.lead))
    )
    first, *others = parts_of(reasoning.closes)
    if first[1] is None and not others:
        thoughts = f"thoughts[suffix={closing}]: ANY"
    else:  # thoughts may not spell the mark in other tokens, which would read the same
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
    """Refuse a grammar without any text, as ``{"$ref": "#"}`` is. Raises: RequestError."""
    matcher = grammar.matcher()
    allowed = np.unpackbits(matcher.masks(())[0], bitorder="little")
    allowed[list(eos_token_ids)] = 0
    is_empty = any(matcher.taken([token_id])[0] for token_id in eos_token_ids)
    if not allowed.any() and not is_empty:
        why = f": {matcher.error}" if matcher.error else ""
        raise RequestError(f"structured_outputs: no text can follow the {params.source[0]}{why}")


def _on_a_large_stack(make: Callable[[], T]) -> T:
    """Call a function in a thread with a large stack."""
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
