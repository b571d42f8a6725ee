"""The ledger: every turn, verdict, sample, step and version as rows of one SQLite file."""
