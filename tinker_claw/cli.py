"""The command line: settings in, exit status out."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from tinker_claw import config
from tinker_claw.errors import ClawError

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gateway until it is told to stop. An error is one sentence on standard error."""
    try:
        settings = config.load(sys.argv[1:] if arguments is None else arguments)
        from tinker_claw.serve import serve  # takes seconds: --help and wrong flags need none of it

        asyncio.run(serve(settings))
    except ClawError as error:
        sys.stderr.write(f"tinker-claw: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:  # before serving; from then on Ctrl-C is a signal that serve handles
        return EXIT_INTERRUPTED
    return 0
