"""Prompts of a conversation that a caller in this process has: messages, with pictures in them."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, final

from quire.chat.picture_bounds import count_shown, open_shown
from quire.chat.templates import ChatTemplate, stop_strings
from quire.chat.token_texts import TokenTexts
from quire.engine.prompts import Prompt, ShownPrompt
from quire.engine.request_maker import ModelFacts
from quire.errors import RequestError

Messages: TypeAlias = Sequence[Mapping[str, Any]]
NO_KWARGS: Mapping[str, Any] = MappingProxyType({})


@final
class ChatPrompts:
    """Writes the prompts of one model's conversations."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts
        self._texts = TokenTexts(facts.tokenizer, facts.max_model_len)
        self._template = lru_cache(maxsize=4)(self._compiled)
        self.stop = stop_strings(facts.tokenizer)

    def of(
        self,
        messages: Messages | Iterable[Messages],
        *,
        chat_template: str | Path | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: list[dict[str, Any]] | None,
        chat_template_kwargs: Mapping[str, Any],
    ) -> list[Prompt]:
        """Return a prompt for one conversation, or one for each of several. Raises: RequestError;
        ConfigError for a template that is none.
        """
        template = self._template(chat_template)
        prompts: list[Prompt] = []
        for conversation in _several(messages):
            given: list[Any] = []
            text = template.render(
                conversation,
                tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                kwargs=chat_template_kwargs,
                images=given,
            )
            prompts.append(self._shown(text, given) if given else self._encoded(text))
        return prompts

    def _compiled(self, template: str | Path | None) -> ChatTemplate:
        vision = self._facts.vision
        return ChatTemplate(
            self._facts.tokenizer,
            template or vision.chat_template,
            placeholders=vision.placeholders,
        )

    def _encoded(self, text: str) -> list[int]:
        # Where the model wants a beginning of sequence, the template wrote it.
        token_ids = self._texts.encode(text, add_special_tokens=False)
        if not token_ids:
            raise RequestError("the chat template writes nothing for these messages")
        return token_ids

    def _shown(self, text: str, given: Sequence[Any]) -> ShownPrompt:
        """Read a text with its pictures: in memory, or ``data:`` URLs. Raises: RequestError."""
        vision = self._facts.vision
        vision.check_numbers(*count_shown(given))
        pictures, videos, _ = open_shown(given)
        read = vision.read(text, pictures, videos, add_special_tokens=False)
        return ShownPrompt(token_ids=read.token_ids, images=read)


def _several(messages: Any) -> list[Any]:
    """Return one conversation or several as a list. Raises: RequestError for anything else."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise RequestError("messages are a list of objects with a role, or several such lists")
    several = list(messages)
    return several if several and not isinstance(several[0], Mapping) else [several]
