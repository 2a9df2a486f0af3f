"""What a request's parameters name, in tokens: words that it bars, ids that it favours."""

from collections.abc import Iterable
from typing import Any

from quire.errors import RequestError
from quire.units import format_count


def bad_word_ids(
    words: tuple[str, ...], tokenizer: Any, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Each word as the tokenizer writes it at the beginning of a text and, as vLLM does, after a
    space, where that makes another first token and no more of them.

    Raises: RequestError for a word without tokens.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        bare = _encoded(word.lstrip(), tokenizer)
        spaced = _encoded(" " + word.lstrip(), tokenizer)
        if not bare:
            raise RequestError(f"bad_words: {word!r} has no tokens of its own")
        found.append(bare)
        if spaced[0] != bare[0] and len(spaced) == len(bare):
            found.append(spaced)
    for own in found:
        refuse_unknown_ids(own, vocab_size, "bad_words")
    return tuple(found)


def refuse_unknown_ids(token_ids: Iterable[int], vocab_size: int, name: str) -> None:
    """Raises: RequestError for a token id that the model does not have."""
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise RequestError(
                f"{name}: token id {token_id} is not in the vocabulary: it ends at "
                f"{format_count(vocab_size - 1)}"
            )


def _encoded(text: str, tokenizer: Any) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))
