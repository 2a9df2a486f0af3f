"""One model's conversations: requests become prompts, and generated text becomes an answer.

All three interfaces (chat completions, responses, messages) use this module.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from quire.chat.lexer import IncrementalLexer, Reading
from quire.chat.output_events import CallEnded, Event, Events, Reply, call_id, reply
from quire.chat.reasoning_parsers import REASONING, ReasoningFormat, reasoning_format
from quire.chat.template_sandbox import TemplateLimits
from quire.chat.templates import NO_PLACEHOLDERS, ChatTemplate, stop_strings
from quire.chat.token_texts import TokenTexts
from quire.chat.tools.declared import Tool, checked_tools
from quire.chat.tools.json_objects import arguments_of, required
from quire.chat.tools.registry import TOOL_FORMATS, tool_format
from quire.chat.tools.tool_choice import ToolChoice, allowed, checked_choice, forced_form
from quire.chat.tools.tool_format import ToolFormat
from quire.errors import ConfigError, RequestError
from quire.sampling_params import Reasoning, StructuredOutputsParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """A client's request in OpenAI's words. Nothing of it has been checked yet."""

    messages: Iterable[Any]
    tools: Iterable[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = (
        None  # None: one call where a call is required, else any number
    )
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    add_special_tokens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A prompt for the engine, and what is needed to read the answer.

    ``structured_outputs`` is the form that ``tool_choice`` prescribes, or None. ``reasoning`` may
    come before a text of any form; None where none may. ``skip_special_tokens`` is for the sampling
    parameters: False where marks of tool calls or reasoning are special tokens, which the text
    would otherwise lack. ``stop`` ends an answer besides the client's own stop strings: models
    without an end token name some, as ``chat_stop_strings`` in tokenizer_config.json.
    """

    text: str
    token_ids: tuple[int, ...]
    structured_outputs: StructuredOutputsParams | None
    reasoning: Reasoning | None
    skip_special_tokens: bool
    tools: Mapping[str, Tool]
    choice: ToolChoice
    parallel: bool
    begun: str = ""
    images: tuple[Any, ...] = ()  # addresses as given; the text has a placeholder for each
    stop: tuple[str, ...] = ()


def _num_alike(one: Any, other: Any) -> int:
    """Count the items with which two texts, or two tuples, both begin."""
    longest = min(len(one), len(other))
    return bisect_left(range(1, longest + 1), True, key=lambda n: one[:n] != other[:n])


@final
class Chat:
    """The conversations of one model. Any thread may use it.

    ``tool_call_parser`` and ``reasoning_parser`` are names of formats, or "auto": the template's
    text decides. Without a name calls are read all the same, by the template or the model's type.
    ``placeholders`` are what a prompt says where an image goes, and where a video goes; a model
    that sees none has none.

    Raises: ConfigError for a template that cannot be compiled, or a name that no parser has.
    """

    def __init__(
        self,
        tokenizer: Any,
        texts: TokenTexts | None = None,
        *,
        chat_template: str | Path | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        model_type: str = "",
        limits: TemplateLimits | None = None,
        placeholders: Mapping[str, str] = NO_PLACEHOLDERS,
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = texts or TokenTexts(tokenizer)
        self.template = ChatTemplate(
            tokenizer,
            chat_template,
            limits=limits,
            placeholders=placeholders,
        )
        self._tools, self._reasoning = _formats(
            tool_call_parser, reasoning_parser, self.template.source, model_type
        )
        self._has_special_marks = self._marks_are_special()
        self._stop = stop_strings(tokenizer)
        if self._tools is not None:
            self._stop += self._tools.stop

    def prompt(self, request: ChatInput) -> ChatPrompt:
        """Check a request and write its prompt. It may take as long as a template may. Raises:
        RequestError naming what is wrong.
        """
        given, tools = allowed(request.tool_choice, checked_tools(request.tools))
        choice = checked_choice(given, tools)
        if choice.kind == "auto" and self._tools is None:
            raise RequestError(
                "tool_choice=auto: neither the chat template nor the model's type tells how this "
                "model writes tool calls: start the server with --tool-call-parser, one of "
                f"{', '.join(TOOL_FORMATS)}; or ask with tool_choice required, or none"
            )
        parallel = request.parallel_tool_calls
        if parallel is None:
            # A grammar for any number of calls lets a small model call until its tokens end.
            parallel = choice.kind != "required"
        form = forced_form(choice, tools, parallel=parallel)
        shown = () if choice.kind == "none" else tools
        images: list[Any] = []
        text = self.template.render(
            request.messages,
            [dict(tool.declaration) for tool in shown] or None,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            kwargs=request.chat_template_kwargs,
            images=images,
        )
        reads_marks = choice.kind == "auto" or self._reasoning is not None
        marks, continues = self._reasoning, request.continue_final_message
        return ChatPrompt(
            text=text,
            # Where the model wants a beginning of sequence, the template wrote it.
            token_ids=tuple(
                self._texts.encode(text, add_special_tokens=request.add_special_tokens)
            ),
            structured_outputs=form,
            reasoning=None
            if marks is None
            else marks.before_a_form(text, continues=continues, function=choice.name),
            skip_special_tokens=not (self._has_special_marks and reads_marks),
            tools=MappingProxyType({tool.name: tool for tool in shown}),
            choice=choice,
            parallel=parallel,
            images=tuple(images),
            begun="" if marks is None else marks.begun(text, continues=continues),
            stop=() if form is not None else self._stop,
        )

    def num_shared_tokens(self, prompt: ChatPrompt, beginning: ChatInput) -> int:
        """Count a prompt's first tokens that it shares with the beginning of its conversation.

        0 where the template cannot write that beginning. It may take as long as a template may.
        """
        tools = [dict(tool.declaration) for tool in prompt.tools.values()]
        tools = tools[: len(list(beginning.tools or ()))]
        try:
            text = self.template.render(
                beginning.messages,
                tools or None,
                add_generation_prompt=False,
                kwargs=beginning.chat_template_kwargs,
            )
        except RequestError:
            return 0
        shared = text[: _num_alike(text, prompt.text)]
        # The last token of a text that is cut may be another one: what is alike counts.
        token_ids = self._texts.encode(shared, add_special_tokens=False) if shared else []
        return _num_alike(tuple(token_ids), prompt.token_ids)

    def reader(self, prompt: ChatPrompt) -> "Reader":
        """Return a reader for one continuation of a prompt."""
        tools = self._tools
        reads_all = tools is not None and tools.is_all and not prompt.choice.is_forced
        return Reader(
            prompt,
            tools=tools if reads_all or prompt.choice.kind == "auto" else None,
            reasoning=None if reads_all else self._reasoning,
            make_id=call_id if tools is None else tools.make_id,
        )

    def _marks_are_special(self) -> bool:
        marks = (*self._tools.opens, *self._tools.marks) if self._tools else ()
        marks += self._reasoning.marks if self._reasoning else ()
        special = set(getattr(self._tokenizer, "all_special_tokens", None) or ())
        # Most tokenizers have special tokens without a role, and skip all of them.
        added = getattr(self._tokenizer, "added_tokens_decoder", None) or {}
        special |= {str(token) for token in added.values() if token.special}
        return any(mark in special for mark in marks)


def _formats(
    tool_call_parser: str | None, reasoning_parser: str | None, template: str, model_type: str
) -> tuple[ToolFormat | None, ReasoningFormat | None]:
    """Return the formats of the names, or those found. One of Harmony's two names is enough.
    Raises: ConfigError.
    """
    tools = tool_format(tool_call_parser, template, model_type)
    reasoning = reasoning_format(reasoning_parser, template)
    harmony = TOOL_FORMATS["openai"], REASONING["openai_gptoss"]
    if (tools is harmony[0]) == (reasoning is harmony[1]):
        return tools, reasoning
    names = tool_call_parser, reasoning_parser
    if any(name not in (None, "auto", "openai", "openai_gptoss") for name in names):
        raise ConfigError(
            f"--tool-call-parser {tool_call_parser or 'auto'} and --reasoning-parser "
            f"{reasoning_parser or 'auto'} are for different models: the calls and the reasoning "
            "of Harmony are read together, by openai and openai_gptoss"
        )
    return harmony


@final
class Reader:
    """Reads one answer while it is generated.

    The result does not depend on how the text was cut into pieces, except where a piece of
    reasoning, content or arguments ends.
    """

    def __init__(
        self,
        prompt: ChatPrompt,
        *,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        make_id: Callable[[], str],
    ) -> None:
        self._prompt, self._tools, self._reasoning = prompt, tools, reasoning
        self._lexer, self._out = IncrementalLexer(), Events(make_id)
        self._lexer.add(prompt.begun)
        self._num_calls, self._is_full = 0, False
        self._reading: Reading[None] | None = self._read()
        self._go_on()

    @property
    def reads_reasoning(self) -> bool:
        """Return whether it tells reasoning from the rest."""
        return self._reasoning is not None or (self._tools is not None and self._tools.is_all)

    @property
    def is_full(self) -> bool:
        """Return whether the one call that ``parallel_tool_calls=False`` allows has come."""
        return self._is_full

    @property
    def num_calls(self) -> int:
        """Return the number of complete calls. With one, the finish reason is "tool_calls"."""
        return self._num_calls

    def feed(self, text: str) -> list[Event]:
        """Return the events of more text. Text whose meaning is not clear yet is held back."""
        self._lexer.add(text)
        self._go_on()
        return self._taken()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """Return the last events. ``cut``: the model had not come to an end.

        Of a call that is cut its beginning stays; of a call that the model left unfinished, the
        text.
        """
        self._lexer.end(cut=cut)
        self._go_on()
        return self._taken()

    def read(self, text: str, *, cut: bool = False) -> Reply:
        """Read a whole answer at once."""
        return reply([*self.feed(text), *self.finish(cut=cut)])

    def _taken(self) -> list[Event]:
        """Return what has been found; after the only call that is allowed, nothing more."""
        taken: list[Event] = []
        for event in self._out.take():
            if self._is_full:
                break
            taken.append(event)
            if isinstance(event, CallEnded):
                self._num_calls += 1
                self._is_full = not self._prompt.parallel
        return taken

    def _go_on(self) -> None:
        if self._reading is not None:
            try:
                next(self._reading)
            except StopIteration:
                self._reading = None

    def _read(self) -> Reading[None]:
        prompt, lexer, out = self._prompt, self._lexer, self._out
        if self._reasoning is not None:
            yield from self._reasoning.read(lexer, out)
        if prompt.choice.kind == "named":
            yield from arguments_of(prompt.choice.name, lexer, out)
        elif prompt.choice.kind == "required":
            yield from required(lexer, out)
        elif self._tools is not None:
            yield from self._tools.read(lexer, out, prompt.tools)
        else:
            yield from lexer.upto(put=out.content)
        out.end_of_content()
