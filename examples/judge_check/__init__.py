"""Check of a judge: labelled cases, injections, and a command that measures verdicts on both.

cases.jsonl        request, reply, what came next, and the verdict that a person gives
injections.jsonl   texts that try to move a verdict, and where each stands
scripted.py        an endpoint by rules, which stands in where no model judges
"""
