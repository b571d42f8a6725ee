"""A stand-in for Tinker's service, for one user on this machine: scripts run without a key.

    python -m local_gpu.tinker --model demo --port 8000

    app            the HTTP routes.
    service        sessions, the model in training, samplers.
    futures        answers that are retrieved later, and the order of a model's requests.
    messages       JSON and protobuf bodies, to and from records.
    checkpoints    saved weights on disk.

It runs on the CPU, trains one model at a time and listens on loopback only.

Rule: a request gets the answer that Tinker would give, or an error that names what is not served;
nothing is approximated.
"""
