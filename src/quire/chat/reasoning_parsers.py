"""Where a model's reasoning ends and its answer begins. The names are vLLM's.

A template may have opened the reasoning in the prompt, or closed it at once, so the prompt's end
counts too. Reasoning that does not end is reasoning to the end of the text.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from quire.chat.harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    HARMONY,
    MESSAGE,
    RETURN,
    START,
    read_thoughts,
)
from quire.chat.lexer import BLANKS, IncrementalLexer, Reading
from quire.chat.output_events import Events
from quire.errors import ConfigError
from quire.sampling_params import Reasoning

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The marks around a model's reasoning."""

    opens: str
    closes: str
    assumed: bool = False  # an answer begins with reasoning that no mark opens

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the tokens that a reader needs to see."""
        return (self.opens, self.closes)

    def begun(self, prompt: str, *, continues: bool = False) -> str:
        """Return the mark that the prompt has opened, as if the model had written it.

        ``continues``: the prompt ends in the middle of an answer, and maybe of reasoning.
        """
        opened, closed = prompt.rfind(self.opens), prompt.rfind(self.closes)
        # Earlier messages may have both marks; the end of the prompt counts.
        if opened > closed:
            is_open = continues or prompt[opened + len(self.opens) :].strip(BLANKS) == ""
        elif continues and closed >= 0:
            is_open = False
        else:
            is_open = self.assumed and not prompt.rstrip(BLANKS).endswith(self.closes)
        return self.opens if is_open else ""

    def before_a_form(
        self, prompt: str, *, continues: bool = False, function: str = ""
    ) -> Reasoning | None:
        """Return what may precede a text that must have a form; None where the prompt has ended it.

        ``function``: the form is that of the arguments of this function.
        """
        is_open = bool(self.begun(prompt, continues=continues))
        if not is_open and (continues or prompt.rstrip(BLANKS).endswith(self.closes)):
            return None
        return Reasoning(opens=self.opens, closes=self.closes, is_open=is_open)

    def read(self, lexer: IncrementalLexer, out: Events) -> Reading[None]:
        """Read the reasoning, if there is any; leave what follows it."""
        blanks = yield from lexer.blanks()
        if not (yield from lexer.skip(self.opens)):
            out.content(blanks)
            return
        # Some models repeat the mark that the prompt ends with.
        yield from lexer.blanks()
        yield from lexer.skip(self.opens)
        out.edge()
        if (yield from lexer.upto(self.closes, put=out.reasoning)) is None:
            out.end_of_reasoning()
            return
        yield from lexer.expect(self.closes)
        out.edge()


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels(ReasoningFormat):
    """Harmony's reasoning: a message of its own, before one that has a header too."""

    opens: str = f"{CHANNEL}analysis{MESSAGE}"
    closes: str = f"{END}{START}assistant"

    @property
    def marks(self) -> tuple[str, ...]:
        """Return all marks of the format."""
        return HARMONY.marks

    def begun(self, prompt: str, *, continues: bool = False) -> str:
        """Return the header that the prompt ends with; empty where it only says who speaks."""
        _, start, message = prompt.rpartition(START)
        header, mark, body = message.partition(MESSAGE)
        is_whole = any(end in body for end in (END, CALL, RETURN))
        is_said = is_whole or header.strip() == "assistant" or not start
        return "" if is_said else f"{start}{header}{mark}"

    def before_a_form(
        self, prompt: str, *, continues: bool = False, function: str = ""
    ) -> Reasoning | None:
        """Return the reasoning, with the header of the form or of a call's arguments behind it."""
        begun = self.begun(prompt)
        is_open = begun.endswith(self.opens)
        if begun and not is_open:
            return None
        lead = f"commentary to=functions.{function} {CONSTRAIN}json" if function else "final"
        return Reasoning(
            opens=self.opens,
            closes=self.closes,
            is_open=is_open,
            lead=f"{CHANNEL}{lead}{MESSAGE}",
        )

    def read(self, lexer: IncrementalLexer, out: Events) -> Reading[None]:
        """Read the reasoning, and the header of the form behind it."""
        yield from read_thoughts(lexer, out)


_THINK = ReasoningFormat(opens="<think>", closes="</think>")
_THINKS = ReasoningFormat(opens="<think>", closes="</think>", assumed=True)

REASONING: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "deepseek_r1": _THINKS,
        "qwen3": _THINK,
        "deepseek_v3": _THINK,
        "glm45": _THINK,
        "minimax_m2": _THINKS,
        "mistral": ReasoningFormat(opens="[THINK]", closes="[/THINK]"),
        "gemma4": ReasoningFormat(opens="<|channel>thought\n", closes="<channel|>"),
        "openai_gptoss": Channels(),
        "seed_oss": ReasoningFormat(opens="<seed:think>", closes="</seed:think>"),
        "granite": ReasoningFormat(
            opens="Here is my thought process:", closes="Here is my response:"
        ),
    }
)
# A mark in the template, and the format that it tells; the first one counts.
_FOUND_BY = (
    ("<|channel|>analysis", "openai_gptoss"),
    ("<|channel>", "gemma4"),
    ("<seed:think>", "seed_oss"),
    ("[THINK]", "mistral"),
    ("</think>", "qwen3"),
)


def reasoning_format(name: str | None, template: str) -> ReasoningFormat | None:
    """Return the format of a name; for "auto", the one that the template's text tells. Raises:
    ConfigError listing the known names.
    """
    if name is None:
        return None
    if name == "auto":
        found = next((name for mark, name in _FOUND_BY if mark in template), None)
        log.info("reasoning parser, by the chat template: %s", found or "none")
        return None if found is None else REASONING[found]
    if name not in REASONING:
        raise ConfigError(
            f"--reasoning-parser {name!r} is unknown; known: auto, {', '.join(REASONING)}"
        )
    return REASONING[name]
