"""The attention backend that replaces one whose kernels fail at the start, and the log line for it.

Kernels are compiled where they run, so they are tried before a request is served. The other
fallbacks are elsewhere: ``models.cuda_graphs`` runs a step without a graph, and
``memory.by_device`` refuses a device whose memory cannot be mapped.
"""

import logging

import torch

from quire.attention import AUTO, BY_TORCH, AttentionFailed, fallback_backends
from quire.config import EngineConfig
from quire.devices import wait_for
from quire.engine.kv_sizing import stored_spec
from quire.errors import ConfigError, QuireError, UnsupportedModel, one_line
from quire.kv.layout import attention_groups, attention_spec
from quire.models.loader import LoadedModel

log = logging.getLogger(__name__)


class OtherAttention:
    """The attention backends that are left for one engine."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel) -> None:
        self._config, self._loaded = config, loaded
        self._left: list[str] | None = None

    def instead(self, error: Exception) -> str:
        """Return the next backend after the engine could not be built, and log it.

        Raises: the error, where attention cannot be its cause or no backend is left; ConfigError
        with the option to change, where an option names the backend.
        """
        device, asked = self._loaded.device, self._config.attention_backend
        if device.type != "cuda" or not _may_be_of_attention(error):
            raise error
        reason = one_line(error)
        try:
            wait_for(device)
        except RuntimeError:
            raise ConfigError(
                f"the GPU gives nothing but errors to this process any more, since {reason}: start "
                f"another process, with attention_backend=sdpa if it was a kernel of attention's"
            ) from error
        if asked not in (AUTO, *BY_TORCH):
            kind = UnsupportedModel if isinstance(error, UnsupportedModel) else ConfigError
            raise kind(
                f"attention_backend={asked}: {reason}. With attention_backend=sdpa torch "
                f"attends, with auto what works"
            ) from error
        if self._left is None:
            spec = stored_spec(self._config, self._loaded.spec)
            specs = [attention_spec(group) for group in attention_groups(spec.groups)]
            self._left = fallback_backends(asked, specs, device)
        if not self._left:
            raise error
        found = self._left.pop(0)
        log.warning("attention backend: %s instead, since %s", found, reason)
        return found


def _may_be_of_attention(error: Exception) -> bool:
    """Return whether another backend may help: not if memory is short or an option is wrong."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return False
    return isinstance(error, AttentionFailed | UnsupportedModel) or not isinstance(
        error, QuireError
    )
