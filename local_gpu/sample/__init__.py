"""Sampling, by an engine in this process or by vLLM servers over HTTP."""
