# syntax=docker/dockerfile:1
# For --backend tinker, without torch:    docker build -t tinker-claw .
# For --backend local, with torch:        docker build --target gpu -t tinker-claw:gpu .
# docs/operating.md says how to run them; compose.yaml puts vLLM beside the second.
FROM python:3.11-slim-trixie AS source
WORKDIR /src
COPY . .

FROM source AS packages
RUN python -m venv /venv && /venv/bin/pip install --no-cache-dir -c constraints.txt .

FROM source AS gpu-packages
RUN python -m venv /venv && /venv/bin/pip install --no-cache-dir -c constraints.txt '.[local]'

# What both have. Nothing is written but to /data, so that the root may be mounted read-only.
FROM python:3.11-slim-trixie AS base
RUN useradd --uid 10001 --home-dir /data --create-home claw
ENV PATH=/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/data \
    HF_HOME=/data/huggingface \
    TINKER_CLAW_GATEWAY__HOST=0.0.0.0
# Records are in /data/runs/<model>-<method>, models from the hub in /data/huggingface.
WORKDIR /data
VOLUME /data
EXPOSE 30000
# Healthy is what answers: a gateway that cannot learn for a while goes on serving. No proxy is asked.
HEALTHCHECK --interval=15s --timeout=10s --start-period=10m \
    CMD ["python", "-c", "import urllib.request as it; it.build_opener(it.ProxyHandler({})).open('http://127.0.0.1:30000/healthz', timeout=8)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tinker-claw"]

# torch's wheels bring CUDA's libraries; Triton asks for a C compiler when it compiles a kernel.
FROM base AS gpu
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=gpu-packages /venv /venv
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TRITON_CACHE_DIR=/data/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/data/cache/inductor \
    TINKER_CLAW_RUN__BACKEND=local
USER 10001:10001

FROM base AS gateway
COPY --from=packages /venv /venv
# Said, so that `docker run --tty` asks nothing.
ENV TINKER_CLAW_RUN__BACKEND=tinker
USER 10001:10001
