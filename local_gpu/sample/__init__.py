"""Sampling by vLLM or SGLang servers over HTTP: in processes, and environments, of their own."""
