"""`python -m tinker_claw` is `tinker-claw`."""

import sys

from tinker_claw.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
