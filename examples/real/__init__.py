"""Say it once, on a real model: `make real`.

    wishes.py      wishes of a person's, questions, and rules that tell whether a reply does it
    person.py      a person at the gateway, over the openai SDK; a judge by rule
    cell.py        one cell: an arm, a wish and a seed, through the whole product
    cost.py        what a cell would cost at a service's prices
    report.py      tables and a picture

Rule: what was measured is written down reply by reply, so a run that was killed goes on.
"""
