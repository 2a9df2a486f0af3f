"""What came of one class: the facts that the page shows and the tests assert."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

ANOTHER_WAY = "it was not run, for its forward has no `mm_encoder_outputs`"
_SOURCE = (
    "an encoder-decoder, whose text attends to the image: it could be served as Whisper's "
    "recordings are, with its pixels as the source"
)
_STATES = (
    "a decoder with layers that attend to images: it could be served with the image's states as a "
    "source, if a source can come amid a text"
)
_OWN_CODE = (
    "its own code puts features among the embeddings: only by `inputs_embeds` could it be served"
)
_WAYS = {
    **dict.fromkeys(("florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop"), _SOURCE),
    "vision-encoder-decoder": _SOURCE,
    **dict.fromkeys(("mllama", "idefics"), _STATES),
    **dict.fromkeys(("blip", "git", "kosmos-2", "kosmos-2.5"), _OWN_CODE),
    "evolla": "it reads proteins, and no images",
    "mistral4": "it reads text: Transformers lists it here, and its class has no encoder",
    "pi0": "it makes a robot's movements of states and images, and no text",
}


def is_decoder(reason: str) -> bool:
    """Whether a class that is not run writes text after images, and no encoder reads the text."""
    return reason.startswith(ANOTHER_WAY) and reason.endswith((_STATES, _OWN_CODE))


_GLM = (
    "not judged: its code looks for a video's features under placeholders of images, and the "
    "engine refuses that, for it could not tell whose they are"
)
# Of a class's videos, where no small run could say more.
VIDEOS = dict.fromkeys(("glm4v", "glm4v_moe", "glm46v", "glmga", "glm_ocr"), _GLM)
_TIMM = "its encoder is of the package timm, which is not installed here"
# Why a class is not judged, where the error of Transformers does not say it.
NOT_JUDGED = {
    **dict.fromkeys(("fast_vlm", "gemma3n", "perception_lm"), _TIMM),
    "blip-2": "its own `generate` runs encoder and Q-Former itself, over tokens that its own "
    "processor writes",
    "diffusion_gemma": "it does not write token after token: it refines blocks by diffusion",
    "fuyu": "its processor makes `image_patches`, and its encoder takes `pixel_values`",
    "instructblip": "its features depend on the words of the prompt (`qformer_input_ids`)",
    "instructblipvideo": "it sees videos alone, and its features depend on the words of the prompt",
}


def another_way(model_type: str) -> str:
    """Why a class is not run that cannot be given what an encoder made, and what would serve it."""
    return f"{ANOTHER_WAY}: {_WAYS.get(model_type, 'its images go another way')}"


Verdict = Literal["exact", "differs", "fails", "refused", "not judged"]


@dataclass(slots=True, kw_only=True)
class Finding:
    """Filled in step by step; what has not come about stays empty."""

    model_type: str
    class_name: str
    verdict: Verdict = "not judged"
    reason: str = ""  # one line, where the verdict is not "exact"
    not_built: str = ""  # what its own code raised at this size
    not_generated: str = ""  # what Transformers' generate() raised
    own_cache_is_right: bool = False  # generate() says the same with its cache as without
    kinds: list[str] = field(default_factory=list)  # of memory, as the spec reads its config
    way: str = ""  # how the engine runs it
    deviation: float | None = None  # of logits, of the largest one
    num_rows: int = 0  # of logits that were compared
    num_cached_tokens: int = 0  # that were found in the prefix cache
    videos: str = ""  # "exact", or why not; nothing where the class has no encoder for them
    bytes_differ: str = ""  # from what Transformers' own cache holds, where it can be asked
    drop_in: str = ""  # what became of generate() with our cache, where it is not the same tokens

    @property
    def generates(self) -> bool:
        """Whether Transformers' own generate() runs it at this size."""
        return not self.not_built and not self.not_generated

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def one_line(error: BaseException) -> str:
    """What it says, its type before it where it is not ours."""
    text = " ".join(str(error).split())
    ours = type(error).__module__ == "quire.errors"
    return text if ours else f"{type(error).__name__}: {text}"[:200]
