"""Send a load to an engine or a server, and measure its throughput and latency.

``workload`` and ``traffic`` make the requests, ``load`` sends them, and ``metrics`` computes the
figures of ``vllm bench serve``. None of these imports torch. ``calibrate`` times single steps.
"""
