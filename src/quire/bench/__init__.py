"""Traffic, and what it finds: how fast an engine here or a server elsewhere answers it.

``workload`` and ``trace`` say what is asked and when, ``load`` sends it, ``metrics`` and ``report``
turn what came back into ``vllm bench serve``'s figures. Importing any of it imports no torch.
"""
