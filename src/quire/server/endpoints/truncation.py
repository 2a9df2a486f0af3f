"""A conversation without its beginning, where all of it is more than the context takes."""

from bisect import bisect_left
from dataclasses import replace

from quire.errors import RequestTooLong
from quire.server.chat.chat import Chat, ChatRequest


def shortened(chat: Chat, asked: ChatRequest, most_tokens: int) -> ChatRequest:
    """As much of its end as fits, beginning with a user's message; instructions stay.

    Where not even the last turn fits, that one is all that is left: it is refused by its length.
    It renders as often as halving takes. Raises: RequestError.
    """
    messages = list(asked.messages)
    is_user = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not is_user:
        return asked
    head = messages[: is_user[0]]

    def of(start: int) -> ChatRequest:
        return replace(asked, messages=[*head, *messages[start:]])

    def fits(start: int) -> bool:
        try:
            return len(chat.prompt(of(start)).token_ids) <= most_tokens
        except RequestTooLong:
            return False

    place = bisect_left(is_user, True, key=fits)
    return of(is_user[min(place, len(is_user) - 1)])
