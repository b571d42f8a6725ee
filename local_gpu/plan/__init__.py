"""Which GPU learns, samples or judges; whether that fits; and how the servers are started."""
