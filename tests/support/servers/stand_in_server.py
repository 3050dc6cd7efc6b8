"""A server with OpenAI's interface whose tokens are words, for comparisons."""

import sys

from metal_prefill.bench._peers.servers import Command

# It answers each prompt with its last word, three times. It keeps the last prompt of conversations, as
# llama-server does in its slot, and reports the number of computed tokens.
PROGRAM = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
last = []
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def do_GET(self):
        self.answer("application/json", json.dumps({"data": [{"id": "stand-in"}]}).encode())
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["model"] == "stand-in"
        (self.chat if self.path == "/v1/chat/completions" else self.complete)(body)
    def chat(self, body):
        global last
        words = " ".join(m["role"] + " " + m["content"] for m in body["messages"]).split()
        computed = max(len(words) - len(os.path.commonprefix([words, last])), 1)
        last = words
        answer = {"usage": {"prompt_tokens": len(words), "completion_tokens": 2}}
        if "silent" not in sys.argv: answer["timings"] = {"prompt_n": computed, "prompt_ms": 1.5}
        self.answer("application/json", json.dumps(answer).encode())
    def complete(self, body):
        assert (body["max_tokens"], body["stream"]) == (64, True)
        word = body["prompt"].split()[-1]
        chunks = [{"choices": [{"text": t}]} for t in ("", word, word, word)] + [{"choices": []}]
        if "fails" in sys.argv: chunks = [{"error": {"message": "no"}}]
        lines = b"".join(b"data: " + json.dumps(c).encode() + b"\\n\\n" for c in chunks)
        self.answer("text/event-stream", lines + b"data: [DONE]\\n\\n")
    def answer(self, kind, content):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def stand_in(*flags: str) -> Command:
    """Return the command of the server. It may not report computed tokens (`silent`), or fail (`fails`)."""
    return lambda options, port: [sys.executable, "-c", PROGRAM, "--port", str(port), *flags]
