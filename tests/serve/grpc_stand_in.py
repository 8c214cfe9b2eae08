"""A gRPC server without generated code: messages are bytes. `Say` echoes; `Count` streams as many messages as asked.

python -m tests.serve.grpc_stand_in --port 8000 [--name one]     # prints a line once it listens
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

SERVICE = "bed.Echo"
SAY, COUNT = f"/{SERVICE}/Say", f"/{SERVICE}/Count"


def serve(port: int, text: str) -> grpc.Server:
    """Start a server whose answers begin with its name."""
    name = text.encode()

    def say(request: bytes, context: Any) -> bytes:
        return name + b" " + request

    def count(request: bytes, context: Any) -> Iterator[bytes]:
        for number in range(int(request)):
            yield b"%s %d" % (name, number)

    methods = {
        "Say": grpc.unary_unary_rpc_method_handler(say),
        "Count": grpc.unary_stream_rpc_method_handler(count),
    }
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", help="default: its port")
    given = parser.parse_args()
    server = serve(given.port, given.name or str(given.port))
    print("listening", flush=True)
    server.wait_for_termination()
