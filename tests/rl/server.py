"""A completions server on the loopback: the scripted policy behind HTTP, with prefix caching that can be counted."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

from tests.rl.worlds import script


class Server:
    """What the handler answers from, and what it was asked."""

    def __init__(self, answer: Callable[[dict[str, Any]], Any]) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.held: set[tuple[int, ...]] = set()
        self.computed = 0
        self.failures: list[tuple[int, str]] = []
        self.url = ""
        self.lock = Lock()

    def read(self, prompt: list[int]) -> None:
        """Prefix caching: only missing tokens are computed."""
        beginnings = {tuple(prompt[:i]) for i in range(1, len(prompt) + 1)}
        self.computed += len(beginnings - self.held)
        self.held |= beginnings


def complete(fields: dict[str, Any]) -> dict[str, Any]:
    """An answer as vLLM writes it with `return_token_ids`."""
    (completion,) = script([fields["prompt"]], [fields["seed"]])
    names = [f"token_id:{token}" for token in completion.tokens]
    logprobs = {"tokens": names, "token_logprobs": list(completion.logprobs)}
    return {"choices": [{"index": 0, "text": "", "token_ids": list(completion.tokens), "logprobs": logprobs}]}


@contextmanager
def serve(answer: Callable[[dict[str, Any]], Any] = complete) -> Iterator[Server]:
    """Run a server on a free port of the loopback."""
    state = Server(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                state.requests.append(fields)
                state.headers.append(dict(self.headers))
                status, text = state.failures.pop() if state.failures else (200, "")
                if status == 200 and not text:
                    state.read(fields["prompt"])
                    text = json.dumps(state.answer(fields))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        state.url = f"http://127.0.0.1:{server.server_port}/v1/completions"
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
