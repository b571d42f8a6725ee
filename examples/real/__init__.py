"""A person's wishes on a real model of 1.5 billion parameters."""
