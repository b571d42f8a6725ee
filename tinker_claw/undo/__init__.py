"""Commands that undo what was learned or kept, and that take it along."""
