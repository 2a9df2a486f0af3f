"""The memory page: a live picture of the KV cache, its feed, and the page's files."""
