"""Tinker's HTTP API over the local backend: any Tinker script runs on your own GPUs.

    python -m local_gpu.tinker --model demo --port 8000

Rule: what a client sends comes out as Tinker would answer it, or as an error that names what is
not served; nothing is approximated.
"""
