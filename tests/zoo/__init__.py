"""Every decoder class of the installed Transformers, tiny, run through the engine and judged."""
