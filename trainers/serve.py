"""Serve a trained language model with OpenAI's API: `python -m trainers.serve --checkpoint FOLDER --port 8000`.

Under `broker serve` it listens on `BROKER_REPLICA_HOST` and `BROKER_REPLICA_PORT`. Streams contain token ids on
request, so that another replica can continue them.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from trainers.environment import read_environment
from trainers.errors import TrainerError


def main(arguments: Sequence[str]) -> int:
    """Parse the flags, load the model and serve until SIGTERM or a failure; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainers.serve", description="Serve a trained language model.")
    parser.add_argument(
        "--checkpoint",
        metavar="FOLDER",
        help="checkpoints of trainers.lm, or a folder in Hugging Face's format (default: $BROKER_CHECKPOINT_DIR)",
    )
    parser.add_argument("--tokenizer", metavar="NAME", help="`bytes`, a folder or a name (default: the checkpoint's)")
    parser.add_argument("--name", default="model", help="model name in responses")
    parser.add_argument(
        "--host",
        help="address to listen on (default: $BROKER_REPLICA_HOST, or all interfaces on a cloud node, or the loopback)",
    )
    parser.add_argument("--port", type=int, help="port to listen on (default: $BROKER_REPLICA_PORT, or 8000)")
    parser.add_argument("--slots", type=int, default=16, help="sequences in a batch")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="data type of the weights")
    options = parser.parse_args(arguments)
    try:
        asyncio.run(serve(options))
    except (TrainerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


async def serve(options: argparse.Namespace) -> None:
    """Load the model and answer requests.

    Raises TrainerError, also if the engine fails, and OSError if the port is in use.
    """
    import torch

    from trainers.serve_api import Api
    from trainers.serve_engine import Engine
    from trainers.serve_http import start_server
    from trainers.serve_model import CachedModel, load_model
    from trainers.tokenizers import create_tokenizer

    environment = read_environment()
    source = options.checkpoint or environment.checkpoint_url
    model, config, tokenizer_name = load_model(source, dtype=getattr(torch, options.dtype))
    tokenizer = create_tokenizer(options.tokenizer or tokenizer_name)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cached = CachedModel(model, config, slots=options.slots, device=device)
    engine = Engine(cached, slots=options.slots, vocabulary=tokenizer.vocabulary)
    engine.start()
    api = Api(
        engine,
        tokenizer,
        name=options.name,
        context=config.context,
        preemption_file=environment.preemption_file,
    )
    port = options.port if options.port is not None else int(os.environ.get("BROKER_REPLICA_PORT") or 8000)
    server = await start_server(api.handle, options.host or find_host(os.environ), port)
    print(f"serving `{source}` on port {server.sockets[0].getsockname()[1]}", flush=True)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    engine.on_failure = lambda: loop.call_soon_threadsafe(stopped.set)
    if engine.has_failed:  # by a request before
        stopped.set()
    await stopped.wait()
    server.close()
    await asyncio.to_thread(engine.close)
    if engine.has_failed:
        raise TrainerError("the engine has failed")


def find_host(variables: Mapping[str, str]) -> str:
    """Return the address from `broker serve`; without it all interfaces on a cloud's node, else the loopback."""
    if host := variables.get("BROKER_REPLICA_HOST"):
        return host
    addresses = variables.get("SKYPILOT_NODE_IPS", "")
    return "0.0.0.0" if addresses and not addresses.startswith("127.") else "127.0.0.1"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
