"""Guesses at the tokens to come, for sequences of which one token would be due.

A step computes the guesses along with the token that is due, and its logits tell which of them the
sampler would have chosen: those are kept, the rest is trimmed. So a text is the same as without,
and only the number of steps differs. ``Drafter`` (in ``engine.interfaces``) is the seam.
"""
