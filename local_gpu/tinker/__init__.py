"""Tinker's HTTP API over the local backend: any Tinker script runs on your own GPUs.

    python -m local_gpu.tinker --model demo --port 8000

Rule: a request gets the answer that Tinker would give, or an error that names what is not served;
nothing is approximated.
"""
