"""Memory of a GPU, by the virtual-memory calls of CUDA's driver."""

from quire.memory.cuda.memory import CudaMemory, CudaRegion, CudaWindow

__all__ = ["CudaMemory", "CudaRegion", "CudaWindow"]
