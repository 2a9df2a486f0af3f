"""``ModelRunner`` computes a plan's logits with a Hugging Face model, in a way that is tried."""

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionFailed,
    NoHostPart,
    make_batch,
    packed_tokens,
    tried,
)
from quire.devices import give_back_unused, on_device
from quire.engine.interfaces import ModelChanged
from quire.engine.kv_cache import KVCache
from quire.engine.parallel.leader import LeaderGroup
from quire.engine.step_plan import StepPlan
from quire.errors import RequestError, UnsupportedModel, one_line
from quire.kv import Fits
from quire.kv.layout import attention_groups, attention_spec
from quire.models.cuda_graphs import CapturedDecodes
from quire.models.executors.choice import WAYS, ImageTrial, Trial, Way, limit_for, make_way
from quire.models.executors.encoder_source import Source, kept_sources
from quire.models.executors.hooks import PackedStep, make_step
from quire.models.executors.image_features import ImageEncoder, PromptImages
from quire.models.fused_modules import FusedModules
from quire.models.loader import LoadedModel
from quire.models.model_watch import ModelWatch
from quire.models.states.recurrent_layers import RecurrentLayers
from quire.models.states.state_batch import make_state_batch, state_groups
from quire.models.step_inputs import HostInputs, Inputs
from quire.models.vision import Vision
from quire.models.weight_placement import is_offloaded

log = logging.getLogger(__name__)

_TRIAL_ID = -1  # requests count from 1
_TRIAL_PIXELS = 32  # of an image's side
_TRIAL_FRAMES = 4  # of a video
# Errors of a model that does not find what it expects in its cache or its arguments.
_MODEL_ERRORS = (KeyError, AttributeError, IndexError, RuntimeError, TypeError, ValueError)


class ModelRunner:
    """Runs a model over packed chunks, with keys and values in a cache of any strategy."""

    def __init__(
        self,
        loaded: LoadedModel,
        kv: KVCache,
        backend: AttentionBackend,
        stand_ins: FusedModules | None = None,  # of the model
        ranks: LeaderGroup | None = None,  # that have other parts of it
        watch: ModelWatch | None = None,  # the stand-ins' own, if there are any
        *,
        records: bool = True,  # passes over few tokens, where there are stand-ins
    ) -> None:
        layers = loaded.spec.recurrent_layers
        self._loaded, self._stand_ins, self._records = loaded, stand_ins, records
        self._watch = watch or (stand_ins.watch if stand_ins else ModelWatch(loaded.model))
        self._model: Way | None = None
        self.way = ""  # in which the model runs: one of ``WAYS``, once one is chosen
        # Makes pages for the next step ready while a device computes this one: a driver takes long
        # to create a page, which disturbs no kernel and changes no address.
        self.prepare_pages: Callable[[], None] | None = None
        self._lenders = {
            number: layer.shares_with
            for number, layer in enumerate(loaded.spec.layers)
            if layer.shares_with is not None
        }
        self._kv = kv
        self._backend = backend
        self._ranks = ranks
        self._recurrent = RecurrentLayers(loaded.model, layers) if layers else None
        if self._recurrent is not None:
            self._watch.lent = self._recurrent.lent
        self.device = loaded.device
        self._captured: CapturedDecodes | None = None
        self.encoder: ImageEncoder | None = None  # once images have been tried out
        self._with_images: Way | None = None  # runs steps that have some, if another one does
        self.needs_whole_images = False  # in one chunk each

    @property
    def overwrites_states(self) -> bool:
        return self._recurrent is not None

    def run(self, plan: StepPlan) -> Tensor:
        with self._watch.turn:
            return self._run_plan(plan)

    def _run_plan(self, plan: StepPlan) -> Tensor:
        if not self._watch.look():
            raise ModelChanged(f"{self._name} is not what it was in the last step")
        chunks: list[tuple[int, int, int]] = []
        sources = [
            chunk.sequence.request.source
            for chunk in plan.chunks
            if isinstance(chunk.sequence.request.source, Source)
        ]
        images = [
            given if isinstance(given := chunk.sequence.request.images, PromptImages) else None
            for chunk in plan.chunks
        ]
        token_ids: list[int] = []
        wanted: list[int] = []  # the packed tokens whose logits are wanted …
        pooled: list[int] = []  # … and those whose hidden states are
        for chunk in plan.chunks:
            chunks.append((chunk.sequence.seq_id, chunk.start, chunk.stop))
            token_ids += chunk.token_ids
            wanted += range(len(token_ids) - (chunk.stop - chunk.logits_from), len(token_ids))
            if chunk.pools:
                pooled.append(len(token_ids) - 1)
        hidden: list[Tensor] | None = [] if pooled else None
        logits, _ = self._forward(chunks, token_ids, wanted, sources, hidden, images)
        if hidden is not None:
            rows = torch.cat([each[0] for each in hidden])[pooled].float().cpu().numpy()
            for chunk, row in zip((c for c in plan.chunks if c.pools), rows, strict=True):
                assert chunk.sequence.request.pooling is not None
                chunk.sequence.embedding = chunk.sequence.request.pooling.pooled(row)
        if self.prepare_pages is not None:
            self.prepare_pages()
        return logits

    def close(self) -> None:
        """Drop the model, what was made from it, and what only steps need."""
        for part in (self._captured, self._model, self._with_images, self.encoder):
            if part is not None:
                part.close()
        self._captured = self._model = self._stand_ins = self._recurrent = self._ranks = None
        self._with_images = self.encoder = None
        self.prepare_pages = None
        # They hold weights, and what a backend keeps on a device from step to step.
        del self._loaded, self._watch, self._backend
        give_back_unused(self.device)

    def go(self, way: str) -> None:
        """Run the model in this way. Raises: UnsupportedModel where it cannot."""
        if self._model is not None:
            self._model.close()
        made = make_way(way, self._loaded, self._stand_ins, self._watch, records=self._records)
        self._model, self.way = made, way

    def try_out(self, *, max_tokens: int, small: "ModelRunner | None" = None) -> None:
        """Take the first of ``WAYS`` in which a trial, chunk by chunk, gives what the model gives.

        ``small`` runs a small copy of the model, which is tried too: rounding and long windows may
        hide an error in the model that the copy shows.

        Raises: UnsupportedModel if no way is right, with the reason of each; AttentionFailed where
        a GPU's kernels are wrong.
        """
        name, trial = self._name, self.make_trial(max_tokens)
        if self._recurrent is not None:
            self._settle_states(trial)
        wrong: dict[str, list[str]] = {}  # the ways that fail, by reason
        for way in WAYS:
            try:
                go = partial(self.go, way)
                go() if self._ranks is None else self._ranks.required("go", way, own=go)
                self._try(trial, max_tokens)
                if small is not None:
                    small.try_as_small_copy(way, max_tokens)
            except UnsupportedModel as error:
                wrong.setdefault(str(error), []).append(way)
                continue
            if wrong:
                log.warning("%s runs by way of %r: %s", name, way, _reasons(wrong))
            else:
                log.info("%s runs by way of %r", name, way)
            return
        raise UnsupportedModel(f"{name} runs in none of the ways: {_reasons(wrong)}")

    def try_images(self, vision: Vision, *, max_tokens: int, most_bytes: int) -> Vision:
        """Take a way in which an image amid text gives what the model gives by itself.

        It is the way of text, or that of one sequence at a time with images whole in a chunk, for
        models whose image tokens attend to each other. Videos must come out right in the same way.
        ``most_bytes``: of features that are kept.

        Returns: what can be shown, and why the rest cannot.
        """
        several = vision.of_kind("image").most > 1
        together = self._try_images(vision, 2, max_tokens, most_bytes) if several else ""
        alone = together or not several
        why_not = self._try_images(vision, 1, max_tokens, most_bytes) if alone else ""
        if why_not:
            log.warning("%s takes no images: %s", self._name, why_not)
            return vision.without("image", why_not)
        if together:
            log.warning("%s takes one image a prompt: with two, %s", self._name, together)
            vision = vision.with_one_image(f"with two, {together}")
        if vision.of_kind("video").why_not:
            return vision
        why_not = self._try_video(vision, max_tokens)
        if why_not:
            log.warning("%s takes no videos: %s", self._name, why_not)
            return vision.without("video", why_not)
        return vision

    def _try_images(self, vision: Vision, number: int, max_tokens: int, most_bytes: int) -> str:
        """Take a way for prompts with so many images. Return why there is none; empty if one is."""
        # The second one has another size.
        shown = [_noise(_TRIAL_PIXELS, _TRIAL_PIXELS * (1 + i), 3) for i in range(number)]
        try:
            images = vision.read(" and ".join([vision.placeholder] * number), shown, for_trial=True)
        except RequestError as error:
            return str(error)
        token_ids = {
            modality: kind.token_id for modality, kind in vision.kinds.items() if kind.has_encoder
        }
        wrong: dict[str, list[str]] = {}
        for way, whole in ((self.way, False), ("alone", True)):
            trial = ImageTrial(self._loaded, images, self._kept_as, whole=whole)
            if len(trial.token_ids) > max_tokens:
                return _too_long(trial, max_tokens)
            self.encoder = ImageEncoder(self._loaded.model, token_ids, most_bytes)
            try:
                if whole:
                    self._with_images = make_way(way, self._loaded, self._stand_ins, self._watch)
                self._try_in_chunks(trial)
            except UnsupportedModel as error:
                said = f"{way}, whole" if whole else way
                wrong.setdefault(str(error), []).append(said)
                continue
            self.needs_whole_images = whole
            log.info("%s takes images by way of %r%s", self._name, way, ", whole" if whole else "")
            return ""
        self.encoder = self._with_images = None
        return _reasons(wrong)

    def _try_video(self, vision: Vision, max_tokens: int) -> str:
        # Each frame twice: a processor may leave out what does not change.
        frames = _noise(_TRIAL_FRAMES // 2, _TRIAL_PIXELS, _TRIAL_PIXELS, 3).repeat(2, axis=0)
        try:
            placeholder = vision.of_kind("video").placeholder
            images = vision.read(placeholder, [], [frames], for_trial=True)
        except RequestError as error:
            return str(error)
        whole = self.needs_whole_images
        trial = ImageTrial(self._loaded, images, self._kept_as, whole=whole)
        if len(trial.token_ids) > max_tokens:
            return _too_long(trial, max_tokens)
        try:
            self._try_in_chunks(trial)
        except UnsupportedModel as error:
            return str(error)
        return ""

    def _try_in_chunks(self, trial: ImageTrial) -> None:
        """Try the way that was taken with an image. Raises: UnsupportedModel if it is wrong."""
        rows: list[Tensor] = []
        self._kv.accounting.add(_TRIAL_ID, max_tokens=len(trial.token_ids))
        try:
            for start, stop in pairwise([0, *trial.stops]):
                if not isinstance(self._kv.accounting.try_extend(_TRIAL_ID, stop), Fits):
                    raise UnsupportedModel(f"there is no room for {stop} tokens of a small one")
                self._kv.carry_out()
                self._kv.require()
                rows.append(self._trial_chunk(trial, start, stop).clone())
        finally:
            self._kv.accounting.free(_TRIAL_ID)
            self._kv.carry_out()
        try:
            trial.judge(torch.cat(rows), trial.stops[0])
        except UnsupportedModel:
            raise
        except _MODEL_ERRORS as error:
            raise UnsupportedModel(f"it does not run by itself: {one_line(error)}") from error

    def try_as_small_copy(self, way: str, max_tokens: int) -> None:
        """Try a way with a small copy of a model. Raises: UnsupportedModel if it is wrong."""
        trial = self.make_trial(max_tokens, exact=True)
        # With large random weights a scan may differ from its chunks: the model's is tried.
        if self._recurrent is not None and not self._settled(trial) <= limit_for(torch.float32):
            return
        try:
            self.go(way)
            self._try(trial, max_tokens)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"in a small copy {error}") from error

    def make_trial(self, max_tokens: int, *, exact: bool = False) -> Trial:
        """Make a trial for a model whose sequences can have ``max_tokens``."""
        groups = attention_groups(self._kv.accounting.groups)
        specs = [attention_spec(group) for group in groups]
        kernels = self._has_kernels and not exact
        return Trial(
            self._loaded, specs, self._kept_as, max_tokens, exact=exact, for_kernels=kernels
        )

    @property
    def _kept_as(self) -> torch.dtype:
        """Of keys and values."""
        groups = attention_groups(self._kv.accounting.groups)
        name = attention_spec(groups[0]).dtype if groups else self._loaded.dtype
        kept_as: torch.dtype = getattr(torch, name)
        return kept_as

    def compute(
        self,
        batches: list[AttentionBatch],
        given: HostInputs,
        complete: Callable[[PackedStep, Inputs], None] | None = None,  # adds what some models need
    ) -> tuple[Tensor, list[int]]:
        """Run one forward pass. Return logits [rows, vocabulary], and the silent layers."""
        with on_device(self.device):
            inputs = given.on(self.device, batches)
            step = self._step(self._backend, batches, inputs)
            if complete is not None:
                complete(step, inputs)
            return self._run(step, inputs), step.silent

    def capture(
        self, *, max_model_len: int, max_num_seqs: int, backend: AttentionBackend | None = None
    ) -> None:
        """Capture decode steps as graphs on a GPU, or log why they cannot be.

        ``backend`` attends in them, if it is not the one of other steps.
        """
        if self.device.type != "cuda":
            return
        backend = self._backend if backend is None else backend
        reason = self._why_not_captured(backend)
        if reason is None and backend is not self._backend:
            reason = self._why_not_right(backend, max_model_len)
        if reason is not None:
            log.info("%s runs without CUDA graphs: %s", self._name, reason)
            return
        accounting = self._kv.accounting
        groups = range(len(attention_groups(accounting.groups)))
        try:
            with on_device(self.device):
                self._captured = CapturedDecodes(
                    self._watch,
                    partial(self._run_decode, backend),
                    backend.replays or NoHostPart(),
                    self.device,
                    block_sizes=[accounting.block_size(group) for group in groups],
                    state_groups=len(state_groups(accounting)),
                    max_model_len=max_model_len,
                    max_num_seqs=max_num_seqs,
                )
                self._captured.capture(self._kv.storage)
        except RuntimeError as error:  # streams, memory that stays
            log.warning("%s runs without CUDA graphs: %s", self._name, one_line(error))
            self._captured = None
            return
        if self._captured.has_graphs and (reason := self._why_not_right(backend, max_model_len)):
            log.warning(
                "%s runs without CUDA graphs: where they are replayed, %s", self._name, reason
            )
            self._captured.close()
            self._captured = None
            give_back_unused(self.device)

    def _why_not_right(self, backend: AttentionBackend, max_tokens: int) -> str | None:
        """Run the trial with another backend. Return what is wrong, or None."""
        own, self._backend = self._backend, backend
        try:
            self._try(self.make_trial(max_tokens), max_tokens)
        except UnsupportedModel as error:
            return f"attention by {backend.name}: {error}"
        except AttentionFailed as error:
            return str(error)
        finally:
            self._backend = own
        return None

    def _why_not_captured(self, backend: AttentionBackend) -> str | None:
        if backend.replays is None and attention_groups(self._kv.accounting.groups):
            return f"attention by {backend.name} depends on numbers of the host"
        if self.way != "table":
            return f"by way of {self.way!r} the host decides what is computed"
        if self._recurrent is not None and (why := self._recurrent.why_not_padded) is not None:
            return f"states of padding cannot be left out: {why}"
        if self._ranks is not None:
            return "the other ranks would have to capture, and replay, at the same time"
        if is_offloaded(self._loaded.model):
            return "some weights are brought over for each step"
        return None

    def _try(self, trial: Trial, max_tokens: int) -> None:
        """Try the way that was taken. Raises: UnsupportedModel if it is wrong for the model."""
        rows: list[Tensor] = []
        stops = self._begin_trial(trial)
        own = self._backend
        if self._ranks is None:  # other ranks would wait for this one after an error
            self._backend = tried(own, self.device)
        try:
            for start, stop in pairwise([0, *stops]):
                if not isinstance(self._kv.accounting.try_extend(_TRIAL_ID, stop), Fits):
                    break
                self._kv.carry_out()
                self._kv.require()
                # The next step overwrites a graph's logits.
                rows.append(self._trial_chunk(trial, start, stop).clone())
        finally:
            self._backend = own
            self._kv.accounting.free(_TRIAL_ID)
            self._kv.carry_out()
        if self._ranks is not None and not trial.has_expectation:
            self._ranks.required("expect", max_tokens, own=trial.expect)
        trial.judge(torch.cat(rows), stops[0])

    def _begin_trial(self, trial: Trial) -> list[int]:
        """Return where the trial's chunks end. A small cache has room for a shorter trial."""
        num_tokens = len(trial.token_ids)
        while True:
            stops = self._trial_stops(trial, num_tokens)
            self._kv.accounting.add(_TRIAL_ID, max_tokens=num_tokens)
            if isinstance(self._kv.accounting.try_extend(_TRIAL_ID, stops[0]), Fits):
                return stops
            self._kv.accounting.free(_TRIAL_ID)
            num_tokens //= 2
            assert num_tokens, "refuse_too_little comes first"

    def _settle_states(self, trial: Trial) -> None:
        """Find how recurrent layers go on from chunk to chunk. Rounded logits would not show it.

        Raises: UnsupportedModel if they cannot.
        """
        assert self._recurrent is not None
        name, limit = self._name, limit_for(torch.float32)
        deviation = self._settled(trial)
        if slow := self._recurrent.slow_to_go_on:
            log.warning(
                "%s: %s cannot go on with several tokens at once, so that of a prompt longer than "
                "max_num_batched_tokens they get all later ones one by one, which is slow",
                name,
                ", ".join(slow),
            )
        if not deviation <= limit:
            raise UnsupportedModel(
                f"{name} computes other states chunk by chunk: {deviation:.1e} of the largest "
                f"output, {limit:.0e} allowed; its recurrent layers do not go on from one chunk to "
                f"the next as this engine needs: "
                f"model.generate(past_key_values=quire.cache(model)) runs it"
            )

    def _settled(self, trial: Trial) -> float:
        """Return how far the states of chunks are from those of the whole, at the closest."""
        assert self._recurrent is not None
        stops = self._trial_stops(trial, len(trial.token_ids))
        return self._recurrent.settle(trial.token_ids, stops, limit_for(torch.float32))

    @property
    def _has_kernels(self) -> bool:
        """Whether a GPU's kernels attend, which take another path for long sequences.

        Recurrent layers are excepted: their scans accumulate differences.
        """
        if self.device.type != "cuda" or self._recurrent is not None:
            return False
        return torch.cuda.get_device_capability(self.device) >= (8, 0)

    @property
    def _name(self) -> str:
        return f"{self._loaded.name} ({self._loaded.spec.model_type})"

    def _trial_stops(self, trial: Trial, num_tokens: int) -> list[int]:
        """Return the ends of two chunks; with states, graphs or kernels, of some single tokens."""
        middle = trial.first_stop(num_tokens)
        if self._recurrent is None and self._captured is None and not self._has_kernels:
            return [middle, num_tokens]
        return [middle, *range(max(middle + 1, num_tokens - 2), num_tokens + 1)]

    def _trial_chunk(self, trial: Trial, start: int, stop: int) -> Tensor:
        """Return logits [stop - start, vocabulary] of the trial's tokens [start, stop)."""
        chunks, ids = [(_TRIAL_ID, start, stop)], trial.token_ids[start:stop]
        sources = [] if trial.source is None else [trial.source]
        images = [trial.images] if isinstance(trial, ImageTrial) else []
        self._watch.look()
        try:
            logits, silent = self._forward(chunks, ids, [*range(len(ids))], sources, None, images)
        except UnsupportedModel:
            raise
        except _MODEL_ERRORS as error:
            raise UnsupportedModel(f"it does not run: {one_line(error)}") from error
        if silent:
            raise UnsupportedModel(
                f"layers {silent} never reached the cache, or attend by themselves"
            )
        return logits

    def _forward(
        self,
        chunks: list[tuple[int, int, int]],
        token_ids: list[int],
        logits_at: list[int],
        sources: Several[Source] = (),  # of the chunks, or none at all
        hidden: list[Tensor] | None = None,  # receives the last hidden states [1, T, hidden]
        images: Several[PromptImages | None] = (),  # of each chunk's prompt
    ) -> tuple[Tensor, list[int]]:
        """Return logits [rows, vocabulary] at some packed tokens, and the silent layers."""
        accounting, storage = self._kv.accounting, self._kv.storage
        shown, shifts = self._shown(chunks, images)
        groups = range(len(attention_groups(accounting.groups)))
        batches = [make_batch(accounting, group, chunks) for group in groups]
        given = HostInputs(
            token_ids=np.array(token_ids),
            positions=packed_tokens(chunks) + shifts,
            logits_at=np.array(logits_at, np.int64),
            states=None if self._recurrent is None else make_state_batch(accounting, chunks),
        )
        one_each = len(token_ids) == len(chunks) == len(logits_at)
        if self._captured is not None and one_each and not shown:
            with on_device(self.device):
                replayed = self._captured.replay(storage, batches, given)
            if replayed is not None:
                return replayed, []

        def complete(step: PackedStep, inputs: Inputs) -> None:
            step.hidden = hidden
            if shown:
                assert self.encoder is not None, "requests with images are refused without"
                spans = [(start, stop) for _, start, stop in chunks]
                with self._watch.passing():
                    step.images = self.encoder.of_step(
                        spans, images, inputs.token_ids, inputs.positions
                    )
            if sources:
                step.sources = kept_sources(accounting, storage, chunks, sources)

        own = partial(self.compute, batches, given, complete)
        return own() if self._ranks is None else self._ranks.compute(batches, given, own)

    def _shown(
        self, chunks: list[tuple[int, int, int]], images: Several[PromptImages | None]
    ) -> tuple[bool, npt.NDArray[np.int64] | int]:
        """Return whether a chunk is not behind its prompt's images, and what positions lack."""
        if self.encoder is None or not any(images):
            return False, 0
        pairs = [*zip(chunks, images, strict=True)]
        shown = any(own is not None and start < own.end for (_, start, _), own in pairs)
        shifts = [
            0 if own is None else self.encoder.shift(own, start) for (_, start, _), own in pairs
        ]
        return shown, np.repeat(shifts, [stop - start for _, start, stop in chunks])

    def _run(self, step: PackedStep, inputs: Inputs) -> Tensor:
        way = self._model if step.images is None or not self._with_images else self._with_images
        assert way is not None, "no way to run the model has been taken"
        return way.forward(step, inputs.token_ids, inputs.positions, inputs.logits_at)

    def _run_decode(
        self, backend: AttentionBackend, batches: Several[AttentionBatch], inputs: Inputs
    ) -> Tensor:
        """Run a decode step that is captured."""
        return self._run(self._step(backend, batches, inputs), inputs)

    def _step(
        self, backend: AttentionBackend, batches: Several[AttentionBatch], inputs: Inputs
    ) -> PackedStep:
        accounting, storage = self._kv.accounting, self._kv.storage
        step = make_step(accounting, storage, backend, [*batches], self._lenders)
        if self._recurrent is not None and inputs.states is not None:
            step.states = self._recurrent.of_step(accounting, storage, inputs.states)
        return step


def _noise(*shape: int) -> npt.NDArray[np.uint8]:
    """Return pixels of a trial."""
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


def _too_long(trial: Trial, max_tokens: int) -> str:
    return (
        f"the trial takes {len(trial.token_ids)} tokens with some text, and max_model_len is "
        f"{max_tokens}"
    )


def _reasons(wrong: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{', '.join(ways)}: {reason}" for reason, ways in wrong.items())
