"""``RequestMaker``: a request of a prompt and its parameters, or the reason why it cannot run.

It knows a model by its facts alone and holds neither weights nor KV memory, so that a process
without an engine makes and refuses requests as an engine does. Whether there is memory for a
request is the engine's to say.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, final

from quire.engine.detokenizer import Detokenizer
from quire.engine.pooling import Poolable
from quire.engine.prompts import (
    Prompt,
    ShownPrompt,
    bad_word_ids,
    encode,
    refuse_unknown_ids,
    with_images,
)
from quire.engine.scheduling.policy import SchedulerLimits, refuse_too_long
from quire.engine.sequence import FinishReason, Request, Resumption, Sequence
from quire.engine.source_prompts import SourcePrompts
from quire.engine.structured import Grammars
from quire.engine.transfer import read_params
from quire.errors import RequestError
from quire.kv import NO_KEYS, PrefixKeys
from quire.models.executors.image_features import PromptImages
from quire.models.speech import Hearing
from quire.models.vision import Vision, named
from quire.sampling_params import BeamSearchParams, Params, PoolingParams, SamplingParams
from quire.units import format_count


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What can be known of a served model without its weights. It can be pickled."""

    name: str
    model_type: str  # of its config
    tokenizer: Any  # None where it came without one
    vocab_size: int
    max_model_len: int  # tokens
    eos_token_ids: frozenset[int]
    sampling_defaults: Mapping[str, Any]  # of its generation config
    embeddings: Poolable
    hearing: Hearing
    vision: Vision
    source_prompts: SourcePrompts | None  # reads the prompts of an encoder-decoder
    takes_blocks: bool  # from other servers, by ``kv_transfer_params``


@final
class RequestMaker:
    """Makes the requests of one model. Any thread may ask."""

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts
        self._grammars = Grammars(facts.tokenizer, facts.vocab_size, facts.eos_token_ids)
        self._limits = SchedulerLimits(
            max_model_len=facts.max_model_len,
            max_num_seqs=1,
            max_num_batched_tokens=1,
            eos_token_ids=facts.eos_token_ids,
        )
        self._ids = count(1)

    def make(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        priority: int = 0,
        keys: PrefixKeys = NO_KEYS,
        kv_transfer_params: Mapping[str, Any] | None = None,
        output_token_ids: tuple[int, ...] = (),
    ) -> Request:
        """Make a request of a prompt, as ``LLM.request`` says.

        Raises: RequestError; RequestTooLong for a prompt that leaves no room in the context.
        """
        facts = self.facts
        leaves_blocks, remote = read_params(kv_transfer_params)
        pooling = params if isinstance(params, PoolingParams) else None
        if pooling is not None:
            facts.embeddings.check(pooling)
        beam = params if isinstance(params, BeamSearchParams) else None
        if beam is not None:
            params = beam.sampling(facts.eos_token_ids, facts.vocab_size)
        params = params if isinstance(params, SamplingParams) else SamplingParams()
        if facts.tokenizer is None and (params.stop or params.bad_words):
            raise RequestError("this model has no tokenizer: stop and bad_words cannot be found")
        for name in ("logit_bias", "allowed_token_ids"):
            refuse_unknown_ids(getattr(params, name) or (), facts.vocab_size, name)
        sources, images = facts.source_prompts, None
        if sources is None:
            source = None
            token_ids, images = self._read(prompt)
        else:
            source, token_ids = sources.read(prompt)
        if images is not None:
            images = replace(images, owner=keys.of_root())
            keys = replace(keys, images=named(images))
        request = Request(
            request_id=next(self._ids),
            prompt_token_ids=token_ids,
            params=params,
            source=source,
            images=images,
            keys=keys,
            priority=priority,
            pooling=pooling,
            beam=beam,
            bad_words=bad_word_ids(params.bad_words, facts.tokenizer, facts.vocab_size),
            suppressed=() if sources is None else sources.suppressed,
            suppressed_first=() if sources is None else sources.suppressed_first,
            leaves_blocks=leaves_blocks,
            remote=remote,
            output_token_ids=tuple(output_token_ids),
        )
        return self.complete(request)

    def adopt(self, request: Request) -> Request:
        """Return a request that another process has made, with an id and a grammar of this one's.

        Raises: as ``make``.
        """
        return self.complete(replace(request, request_id=next(self._ids)))

    def complete(self, request: Request) -> Request:
        """Return a request with what cannot be sent to another process: grammar and resumption.

        Raises: RequestError; RequestTooLong.
        """
        structured = request.params.structured_outputs
        if structured is not None and request.grammar is None:
            request = replace(request, grammar=self._grammars.compile(structured))
        if request.output_token_ids:
            request = replace(request, resumption=self._resumption(request))
        refuse_too_long(request, self.facts.max_model_len)
        return request

    def _read(self, prompt: Prompt) -> tuple[tuple[int, ...], PromptImages | None]:
        """Return a decoder's prompt as token ids, and its images. Raises: RequestError."""
        facts = self.facts
        if isinstance(prompt, ShownPrompt):
            assert isinstance(prompt.images, PromptImages), "what Vision.read has returned"
            return encode(prompt.token_ids, None, facts.vocab_size), prompt.images
        text, pictures, videos = with_images(prompt)
        if not pictures and not videos:
            return encode(text, facts.tokenizer, facts.vocab_size), None
        facts.vision.check("video" if videos else "image")
        if not isinstance(text, str):
            raise RequestError(
                "a prompt with images is text, in which a placeholder stands for each: "
                "it is not token ids"
            )
        images = facts.vision.read(text, pictures, videos)
        return encode(images.token_ids, None, facts.vocab_size), images

    def _resumption(self, request: Request) -> Resumption:
        """Read the tokens that were generated before, as the engine did that generated them.

        Raises: RequestError where nothing can go on after them.
        """
        tokens, params = request.output_token_ids, request.params
        if params.n != 1 or request.beam is not None or request.pooling is not None:
            raise RequestError(
                "output_token_ids: only a request for one continuation (n=1, no beam search, no "
                "embedding) goes on after them"
            )
        for token_id in tokens:
            if not 0 <= token_id < self.facts.vocab_size:
                raise RequestError(
                    f"output_token_ids: token id {token_id} is not in the vocabulary: it ends at "
                    f"{format_count(self.facts.vocab_size - 1)}"
                )
        if len(tokens) > params.max_tokens:
            raise RequestError(
                f"output_token_ids are {format_count(len(tokens))}, more than "
                f"max_tokens={format_count(params.max_tokens)}"
            )
        reason = self._limits.finish_reason(Sequence(request, seq_id=0), tokens[-1])
        is_text, stopped_by = reason != "stop", None
        if not is_text and tokens[-1] in params.stop_token_ids:
            stopped_by = tokens[-1]
        if request.grammar is not None:
            num_valid, ends = request.grammar.matcher().taken(tokens)
            if num_valid < len(tokens):
                raise RequestError(
                    f"output_token_ids: number {num_valid} does not follow structured_outputs"
                )
            reason = reason or ("stop" if ends else None)
        return self._told(request, reason, stopped_by, is_text=is_text)

    def _told(
        self,
        request: Request,
        reason: FinishReason | None,
        stopped_by: str | int | None,
        *,
        is_text: bool,
    ) -> Resumption:
        """Return a resumption with the text of the tokens, which may hold a stop string."""
        tokens, params = request.output_token_ids, request.params
        if self.facts.tokenizer is None:
            return Resumption(detokenizer=None, finish_reason=reason, stopped_by=stopped_by)
        detokenizer = Detokenizer(self.facts.tokenizer, params)
        try:
            for token_id in tokens[:-1]:
                detokenizer.add(token_id)
            if is_text or params.include_stop_str_in_output:
                detokenizer.add(tokens[-1], last=reason is not None)
            else:
                detokenizer.flush()
        except Exception as error:
            raise RequestError(f"output_token_ids cannot be decoded: {error!r}") from error
        if detokenizer.stopped_by is not None:
            reason, stopped_by = "stop", detokenizer.stopped_by
        return Resumption(detokenizer=detokenizer, finish_reason=reason, stopped_by=stopped_by)
