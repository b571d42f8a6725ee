"""Check of a judge: labelled cases, injections, real follow-ups, and a command that measures them.

- cases.jsonl: request, reply, what came next, and what that is
- injections.jsonl: texts that try to move a verdict, and where each stands
- real.jsonl: labels of messages in a public set of conversations
- lessons.jsonl: what a user says after a reply, and what it is of their earlier wishes
"""
