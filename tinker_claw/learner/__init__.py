"""Learning: judge next states, queue samples, take steps, publish versions."""
