"""Sampling, by an engine in this process or by vLLM or SGLang servers over HTTP."""
