"""Speculative decoding: drafts of the next tokens, for sequences that decode.

A step computes the drafts with the last token, and its logits tell which of them the sampler would
have chosen: those are kept, the others are trimmed. So the text is the same as without drafts, in
fewer steps. ``Drafter`` in ``engine.interfaces`` is the protocol.
"""
