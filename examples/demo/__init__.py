"""The demo: a simulated user talks to the real product, which learns the replies that they want.

    recipe/    how the tiny model was made: its texts, its tokenizer, its training
    model/     the model that it made, with a list of hashes
    judge.py   the rules that judge its replies

Rule: the product is a child process that is reached over HTTP only. Its user's messages and scores
follow `homework` and `skills`, which are all that the tiny model knows.
"""

from examples import StoppedError


class DemoError(StoppedError):
    """An error of the demo, or of what the product says."""
