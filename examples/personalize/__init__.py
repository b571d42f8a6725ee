"""The experiment: users who want something talk to the running system, and what it learns is
scored."""
