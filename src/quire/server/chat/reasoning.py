"""Where a model's reasoning ends and its answer begins. The names are vLLM's.

A template may have opened the reasoning in the prompt, or closed it at once; so the prompt's end is
looked at too. Reasoning that the text ends in is reasoning to the end.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from quire.engine.params import Reasoning
from quire.errors import ConfigError
from quire.server.chat.events import Events
from quire.server.chat.tape import BLANKS, Reading, Tape

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The marks around a model's reasoning."""

    opens: str
    closes: str
    assumed: bool = False  # the model reasons though neither it nor the template opens anything

    def is_open(self, prompt: str, *, continues: bool = False) -> bool:
        """Whether the text that follows this prompt begins within reasoning.

        ``continues``: the prompt ends in the middle of an answer, and maybe of reasoning.
        """
        opened, closed = prompt.rfind(self.opens), prompt.rfind(self.closes)
        # Of an earlier message both may be there; what counts is what the prompt ends with.
        if opened > closed:
            return continues or prompt[opened + len(self.opens) :].strip(BLANKS) == ""
        if continues and closed >= 0:
            return False
        return self.assumed and not prompt.rstrip(BLANKS).endswith(self.closes)

    def before_a_form(self, prompt: str, *, continues: bool = False) -> Reasoning | None:
        """What may come before a text that must have a form; None where the prompt has ended it."""
        is_open = self.is_open(prompt, continues=continues)
        if not is_open and (continues or prompt.rstrip(BLANKS).endswith(self.closes)):
            return None
        return Reasoning(opens=self.opens, closes=self.closes, is_open=is_open)

    def read(self, tape: Tape, out: Events, *, is_open: bool) -> Reading[None]:
        """The reasoning, if there is any; what comes after it is left."""
        blanks = yield from tape.blanks()
        # Some models open it once more where the prompt has done so.
        opened = yield from tape.skip(self.opens)
        if not opened and not is_open:
            out.content(blanks)
            return
        out.edge()
        if (yield from tape.upto(self.closes, put=out.reasoning)) is None:
            out.end_of_reasoning()
            return
        yield from tape.expect(self.closes)
        out.edge()


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
        "seed_oss": ReasoningFormat(opens="<seed:think>", closes="</seed:think>"),
        "granite": ReasoningFormat(
            opens="Here is my thought process:", closes="Here is my response:"
        ),
    }
)
# Of what a template must have in it, for its format to be found there.
_FOUND_BY = (
    ("<seed:think>", "seed_oss"),
    ("[THINK]", "mistral"),
    ("</think>", "qwen3"),
)


def reasoning_format(name: str | None, template: str) -> ReasoningFormat | None:
    """That of a name, or "auto": as the template's text tells. Without a name there is none.

    Raises: ConfigError naming those there are.
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
