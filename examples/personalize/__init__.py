"""The experiment: users talk to the running system until its first replies are what they want.

- experiment.py: what is run, by a file in configs/personalize/ and flags
- scenario.py: who talks, and what they want, as a file says it
- users.py: honest users and liars, by rules
- smollm2.py: a real small model from a package, for `make real ARGS=--smollm2`
- played.py: users whom a language model plays, and a scorer that is one
- judges.py: judges by rules, and those of the controls
- run.py: one run of a gateway, users and exams, with its results
- report.py: the results as CSV, Markdown and one plot

Rule: a user reaches the product over HTTP only, and what a control needs is done to the judge that
the product asks, outside of it. The loop is the demo's.
"""
