"""A GPU that is not there: tensors that say they are on CUDA, and lie in the memory of the CPU.

``with pretend.cuda() as gpu:`` makes ``device="cuda"`` work. Operations compute on the CPU, so what
they give is true; what a GPU would refuse is refused (tensors of two devices in one operation); and
``gpu`` counts what makes a step slow there: kernels launched, and each time that the host waits.

* ``tensor``: the tensors, and what each operation does to them.
* ``runtime`` and ``streams``: what ``torch.cuda`` offers: copies, graphs; streams and events.
* ``late``: several streams, of which all but the first do what they have to as late as can be.
* ``attention``: a backend of kernels that read nothing but what lies there.
* ``memory``: a ``MemoryProvider`` whose regions lie there.
* ``ranks``: several processes with a device each, and what they tell each other.

What it cannot tell: how long anything takes, and what a kernel does that is not torch's. That a
program runs here says that its tensors are in the right places; it is no proof that it runs on a
GPU.
"""

from pretend.attention import PretendAttention
from pretend.memory import PretendMemory
from pretend.runtime import Gpu, cuda
from pretend.tensor import PretendTensor

__all__ = ["Gpu", "PretendAttention", "PretendMemory", "PretendTensor", "cuda"]
