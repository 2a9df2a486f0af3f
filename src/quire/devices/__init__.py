"""Which device a model runs on, and how a step's numbers get there."""

from quire.devices.choice import choose_device, on_device, refuse_other_device, why_no_cuda

__all__ = ["choose_device", "on_device", "refuse_other_device", "why_no_cuda"]
