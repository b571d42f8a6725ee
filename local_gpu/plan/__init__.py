"""Plan which GPU learns, samples or judges, whether that fits, and how servers are started."""
