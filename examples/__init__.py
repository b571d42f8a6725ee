"""Example programs that use the product as its users do: from outside, over HTTP."""
