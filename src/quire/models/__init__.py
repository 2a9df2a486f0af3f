"""Hugging Face models through their own seams, no model code of ours: the room of Transformers."""
