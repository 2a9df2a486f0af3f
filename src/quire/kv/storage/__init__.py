"""Where bytes lie: the storages of all strategies, and what they are made of."""
