"""How well a judge is read, and what injections do to it: cases with their labels, and a command.

cases.jsonl        request, reply, what came next, and the verdict that a person gives
injections.jsonl   texts that try to move a verdict, and where each stands
scripted.py        an endpoint by rules, which stands in where no model judges
"""
