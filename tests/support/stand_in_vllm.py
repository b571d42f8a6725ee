#!/usr/bin/env python3
"""Stands in for the `vllm` executable: its command line, its readiness, its processes; no model.

    serve MODEL ... --port P ...

It starts a helper of its own session, as engines do, and writes command line, environment and
process ids to `started.jsonl` in the folder MODEL. A file `behave` in that folder says how it goes
wrong: `dies` before it is ready, `stubborn` against SIGTERM, `refuses` its first request,
`falls` over it.
"""

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

model = Path(sys.argv[2])
behave = (model / "behave").read_text().split() if (model / "behave").exists() else []
helper = subprocess.Popen(["sleep", "300"], start_new_session=True)
started = {"command": sys.argv[1:], "pids": [os.getpid(), helper.pid], "env": dict(os.environ)}
with (model / "started.jsonl").open("a") as file:
    file.write(json.dumps(started) + "\n")
print("loading the weights", flush=True)
if "dies" in behave:
    helper.kill()
    sys.exit("ValueError: No available memory for the cache blocks.")
if "stubborn" in behave:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {os.environ['VLLM_API_KEY']}":
            return self.answer(401)
        (model / "asked.json").write_text(json.dumps(asked))
        if "falls" in behave:
            print("RuntimeError: CUDA error: an illegal memory access", flush=True)
            os._exit(3)
        self.answer(500 if "refuses" in behave else 200)

    def answer(self, status):
        body = json.dumps({"data": [{"id": str(model), "owned_by": "vllm"}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Answer).serve_forever()
