"""The sampler inside this process: transformers' continuous batching behind guards."""
