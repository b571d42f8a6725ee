"""Serve a model to your agent, and let it learn: `python run.py --help`."""

from tinker_claw.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
