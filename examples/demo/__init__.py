"""The demo: a simulated user talks to the real product, and the replies become what he wants.

Rule: the product is a child process that is reached over HTTP only. From the product's packages
come the grammar and the skills of the tiny model's world (`local_gpu.demo`), and nothing else.
"""


class DemoError(Exception):
    """What stops the demo, as a sentence for the person who started it."""
