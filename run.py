"""Serve a model to your agent, and let it learn: `python run.py --help`."""

import signal
import sys

if sys.version_info < (3, 11):  # noqa: UP036 - whoever has an older one shall read why
    sys.exit(
        f"tinker-claw: this is Python {sys.version_info[0]}.{sys.version_info[1]}, and 3.11 is the "
        "oldest that will do: make PYTHON=/path/to/python3.11"
    )

at_ctrl_c = signal.getsignal(signal.SIGINT)
if at_ctrl_c is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while modules are loaded
try:
    from tinker_claw.cli.main import main

    signal.signal(signal.SIGINT, at_ctrl_c)
    if __name__ == "__main__":
        raise SystemExit(main())
except ModuleNotFoundError as error:
    if str(error.name).startswith(("tinker_claw", "local_gpu")):
        raise
    sys.exit(
        f"tinker-claw: {error.name} is not installed for {sys.executable}: `make` makes an "
        "environment, and `source .venv/bin/activate` enters it"
    )
