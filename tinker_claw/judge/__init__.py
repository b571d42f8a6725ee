"""The judge: reads what happened after a turn, gives a verdict and, where there is one, a hint."""
