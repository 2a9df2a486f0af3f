"""Machine code for this processor, written in a small vector language and compiled on the spot.

``language`` is what kernels are written in, ``machine`` makes addresses of them and keeps them for
the next process, ``threads`` runs them on torch's own threads.
"""
