# SPDX-License-Identifier: Apache-2.0
"""An OpenAI endpoint over HTTP that answers from a function of the request, with the router's traces."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from deltaserve.verify.compare import Answer

Reply = tuple[Answer, dict[str, Any]]


def true_answer(body: dict[str, Any]) -> Answer:
    """What the model would say: depends on the prompt, the seed and the number of tokens."""
    start = sum(body["prompt"]) + int(body.get("seed", 0))
    tokens = tuple((start + step) % 997 for step in range(body["max_tokens"]))
    return Answer(tokens, tuple(-0.01 * (token % 50) for token in tokens))


def true_trace(body: dict[str, Any]) -> dict[str, Any]:
    """What the router would say of it when all goes well."""
    length = len(body["prompt"])
    handed_over = length > 1 and (body.get("kv_transfer_params") or {}).get("placement") == "handover"
    restored = length - 1 if handed_over else 0
    return {
        "prompt_tokens": length,
        "route": "handover prefill-a decode-a" if handed_over else "local short_prompt decode-a",
        "failure": "",
        "from_store": restored,
        "local": 0,
        "recomputed": length - restored,
        "boundary_length": restored,
    }


class FakeEndpoint:
    """Serves `reply(body)` until closed; remembers what it was asked. A reply may also be an HTTP status."""

    def __init__(self, reply: Callable[[dict[str, Any]], Reply | int]) -> None:
        self.bodies: list[dict[str, Any]] = []
        traces: dict[str, dict[str, Any]] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                """Tests print nothing."""

            def answer(self, status: int, document: Any) -> None:
                data = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                if self.path == "/v1/models":
                    self.answer(200, {"data": [{"id": "fake"}]})
                elif self.path.startswith("/deltaserve/requests/") and self.path[21:] in traces:
                    self.answer(200, traces[self.path[21:]])
                else:
                    self.answer(404, {"error": {"message": "no such path"}})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                made = reply(body)
                if isinstance(made, int):
                    self.answer(made, {"error": {"message": "not today"}})
                    return
                answer, trace = made
                name = f"cmpl-{len(outer.bodies)}"
                if trace:
                    traces[name] = trace
                choice = {
                    "token_ids": list(answer.tokens),
                    "logprobs": {"token_logprobs": list(answer.logprobs)},
                    "finish_reason": "length",
                }
                self.answer(200, {"id": name, "choices": [choice]})

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
