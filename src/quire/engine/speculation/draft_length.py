"""How many tokens to draft for one sequence: as many as were accepted before, or more.

An accepted token saves a step, and a rejected one costs a row of a step. So a text whose drafts
fail gets none for longer and longer.
"""

from quire.engine.sequence import Sequence

_FIRST_TOKENS = 2
_MOST_REST_STEPS = 32


class DraftLength:
    """Doubles after a draft that was right to its end; else one token more than was right.

    After a draft whose first token was wrong: none for 1, 2, 4, … 32 steps, and then one token.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._num_tokens = min(_FIRST_TOKENS, most_tokens)
        self._rest_steps = 0
        self._next_rest_steps = 1
        self._guess: tuple[int, ...] = ()
        self._made_at = 0  # tokens that the sequence had then

    def num_tokens_due(self, sequence: Sequence) -> int:
        """Return how many tokens to draft in this step, by what has come since the last one."""
        self._judge(sequence)
        if self._rest_steps:
            self._rest_steps -= 1
            return 0
        return self._num_tokens

    def note(self, sequence: Sequence, guess: tuple[int, ...]) -> None:
        """Note a draft, to compare it with the tokens that come."""
        self._guess, self._made_at = guess, sequence.num_tokens

    def _judge(self, sequence: Sequence) -> None:
        came = sequence.token_ids[self._made_at : self._made_at + len(self._guess)]
        if not came:
            return
        num_right = num_alike(self._guess, came)
        self._guess = ()
        if num_right == 0:
            self._num_tokens = 1
            self._rest_steps = self._next_rest_steps
            self._next_rest_steps = min(2 * self._rest_steps, _MOST_REST_STEPS)
            return
        self._next_rest_steps = 1
        further = 2 * self._num_tokens if num_right == len(came) else num_right + 1
        self._num_tokens = min(further, self._most_tokens)


def num_alike(guess: tuple[int, ...], came: list[int]) -> int:
    """Return how many of their first tokens are the same."""
    for count, (guessed, real) in enumerate(zip(guess, came, strict=False)):
        if guessed != real:
            return count
    return min(len(guess), len(came))
