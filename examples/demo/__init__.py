"""The demo: a simulated user talks to the real product, which learns the replies that they want.

    recipe/    how the tiny model was made: its texts, its tokenizer, its training
    model/     what came of it, with a list of hashes
    judge.py   the rules that judge its replies

Rule: the product is a child process that is reached over HTTP only. Its user speaks, and scores, by
the grammar and the skills of the recipe, which are the tiny model's world.
"""


class DemoError(Exception):
    """An error that stops the demo; its message is a sentence for the person who started it."""
