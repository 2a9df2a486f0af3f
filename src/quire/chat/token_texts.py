"""Texts as tokens, and tokens as text and bytes."""

from functools import lru_cache
from typing import Any, final

from quire.errors import RequestError, RequestTooLong
from quire.units import format_count

_REPLACEMENT = "\ufffd"


@final
class TokenTexts:
    """One tokenizer's texts; without a tokenizer, ids stand for themselves.

    ``max_model_len`` bounds the texts that are tokenized.
    """

    def __init__(self, tokenizer: Any, max_model_len: int | None = None) -> None:
        self._tokenizer, self._max_model_len = tokenizer, max_model_len
        self._byte_of = _bytes_of_characters()
        self._longest = _longest(tokenizer)  # the most characters of a token, with a margin
        self.of = lru_cache(maxsize=65_536)(self._of)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text. It may take a second for each million characters. Raises:
        RequestError; RequestTooLong for a text that cannot fit, before it is tokenized.
        """
        if self._tokenizer is None:
            raise RequestError(
                "this model has no tokenizer: it takes token ids, neither texts nor messages"
            )
        most = None if self._max_model_len is None else self._max_model_len * self._longest
        if most is not None and len(text) > most:
            raise RequestTooLong(
                f"the prompt has {format_count(len(text))} characters, and the context of "
                f"{format_count(self._max_model_len or 0)} tokens (max_model_len) cannot hold more "
                f"than {format_count(most)}: shorten the prompt"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is not valid Unicode: {error.reason}") from None
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens)[
            "input_ids"
        ]
        return token_ids

    def text_of(self, token_ids: list[int] | tuple[int, ...]) -> str:
        """Return the text of several tokens together."""
        if self._tokenizer is None:
            return " ".join(map(str, token_ids))
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def _of(self, token_id: int) -> tuple[str, bytes]:
        """Return a token's text and its bytes: part of a character has no text of its own."""
        if self._tokenizer is None:
            return f"token_id:{token_id}", b""
        text = self.text_of([token_id])
        if _REPLACEMENT in text:
            piece = self._tokenizer.convert_ids_to_tokens(token_id)
            data = self._bytes_of(piece) if isinstance(piece, str) else None
            if data is not None:
                return text, data
        return text, text.encode(errors="replace")

    def _bytes_of(self, piece: str) -> bytes | None:
        """Return a token's bytes; None for a vocabulary that is written otherwise."""
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):  # byte fallback
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                return None
        if all(character in self._byte_of for character in piece):
            return bytes(self._byte_of[character] for character in piece)
        return None


def _longest(tokenizer: Any) -> int:
    """Return four times the longest token's characters: some vocabularies leave characters out."""
    return 4 * max(map(len, tokenizer.get_vocab()), default=1) if tokenizer is not None else 1


def _bytes_of_characters() -> dict[str, int]:
    """Return the byte for each character of byte-level vocabularies.

    Source: GPT-2's ``bytes_to_unicode``.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    written = {chr(byte): byte for byte in printable}
    written.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return written
