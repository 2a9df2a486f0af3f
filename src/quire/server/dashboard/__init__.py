"""The memory page: a live picture of the pool, its feed, and the files that show it."""
