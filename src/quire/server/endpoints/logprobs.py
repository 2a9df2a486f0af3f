"""Log-probabilities in the three forms that clients know."""

from collections.abc import Iterable, Sequence

from quire.chat.token_texts import TokenTexts
from quire.engine.sequence import TokenLogprobs
from quire.server.schemas.chat_request import ChatLogprob, ChatLogprobs, LikelyToken
from quire.server.schemas.completion_request import CompletionLogprobs
from quire.server.schemas.request_fields import PromptLogprob, PromptLogprobs

_LEAST = -9999.0  # stands for minus infinity, which JSON lacks, as at OpenAI


def of_completion(
    texts: TokenTexts,
    tokens: Iterable[TokenLogprobs | int],
    num_top: int,
    offset: int,
    *,
    as_ids: bool = False,
) -> tuple[CompletionLogprobs, int]:
    """Return an entry for each token, from a text's ``offset`` on, and the offset behind them.

    A bare id is a token without a probability: the first of a prompt. ``as_ids``: a token is named
    by its id, as in vLLM; offsets are in the text all the same.
    """
    said = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token in tokens:
        token_id = token if isinstance(token, int) else token.token_id
        text, _ = texts.of(token_id)
        said.text_offset.append(offset)
        said.tokens.append(_label(texts, token_id, as_ids=as_ids))
        offset += len(text)
        if isinstance(token, int):
            said.token_logprobs.append(None)
            said.top_logprobs.append(None)
        else:
            said.token_logprobs.append(_finite(token.logprob))
            said.top_logprobs.append(_top(texts, token, num_top, as_ids=as_ids))
    return said, offset


def of_chat(
    texts: TokenTexts, tokens: Iterable[TokenLogprobs], num_top: int, *, as_ids: bool = False
) -> ChatLogprobs:
    """Return an entry for each token, with the ``num_top`` likeliest ones."""
    content = []
    for token in tokens:
        _, data = texts.of(token.token_id)
        content.append(
            ChatLogprob(
                token=_label(texts, token.token_id, as_ids=as_ids),
                logprob=_finite(token.logprob),
                bytes=list(data),
                top_logprobs=[
                    LikelyToken(
                        token=_label(texts, token_id, as_ids=as_ids),
                        logprob=_finite(logprob),
                        bytes=list(texts.of(token_id)[1]),
                    )
                    for token_id, logprob in token.top[:num_top]
                ],
            )
        )
    return ChatLogprobs(content=content)


def of_prompt(texts: TokenTexts, tokens: Sequence[TokenLogprobs]) -> PromptLogprobs:
    """Return vLLM's form: nothing for the first token, and for each other one the
    likeliest, by id.
    """
    said: PromptLogprobs = [None]
    for token in tokens:
        entry: dict[str, PromptLogprob] = {}
        for rank, (token_id, logprob) in enumerate(token.top, 1):
            entry[str(token_id)] = _entry(texts, token_id, logprob, rank)
        entry[str(token.token_id)] = _entry(texts, token.token_id, token.logprob, token.rank)
        said.append(entry)
    return said


def _entry(texts: TokenTexts, token_id: int, logprob: float, rank: int) -> PromptLogprob:
    text, _ = texts.of(token_id)
    return PromptLogprob(logprob=_finite(logprob), rank=rank, decoded_token=text)


def _label(texts: TokenTexts, token_id: int, *, as_ids: bool) -> str:
    """Return a token's text; ``as_ids``: vLLM's name for it, which no two tokens share."""
    return f"token_id:{token_id}" if as_ids else texts.of(token_id)[0]


def _top(
    texts: TokenTexts, token: TokenLogprobs, num_top: int, *, as_ids: bool
) -> dict[str, float]:
    """Return the likeliest tokens first, and the token itself if it is none of them, as OpenAI
    does.
    """
    top: dict[str, float] = {}
    for token_id, logprob in (*token.top[:num_top], (token.token_id, token.logprob)):
        top.setdefault(_label(texts, token_id, as_ids=as_ids), _finite(logprob))
    return top


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
