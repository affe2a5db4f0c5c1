"""Asks the server that `make serve` started for the value of one key in a long document.

    .venv/bin/python examples/ask_demo.py                  # key-value retrieval, 10,000 tokens
    .venv/bin/python examples/ask_demo.py --code           # continue a Python function

The document is made here, from a seed; the device pool of the demo server is far smaller than it.
"""

import argparse
import json
import urllib.request
from typing import Any

from echokv.bench.tasks import make_task

CODE = '''\
import os

def read_lines(path):
    """Return the lines of a file, without line ends."""
    with open(path) as'''


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """One JSON request."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        parsed: dict[str, Any] = json.load(answer)
        return parsed


def main() -> None:
    """Ask, and print what came back."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server")
    parser.add_argument("--tokens", type=int, default=10_000, help="length of the document")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another document")
    parser.add_argument("--code", action="store_true", help="continue Python code instead")
    args = parser.parse_args()
    if args.code:
        body = {"prompt": CODE, "max_tokens": 48, "temperature": 0}
        print(CODE + post(f"{args.url}/v1/completions", body)["choices"][0]["text"])
        return

    def count(text: str) -> int:
        return int(post(f"{args.url}/tokenize", {"prompt": text})["count"])

    prompt, expected = make_task("kv_uuid", args.tokens, count, args.seed)
    print(f"a document of {count(prompt):,} tokens, ending in: {prompt.splitlines()[-1]}")
    answer = post(
        f"{args.url}/v1/chat/completions",
        {"messages": [{"role": "user", "content": prompt}], "max_tokens": 48, "temperature": 0},
    )
    print(f"answer:   {answer['choices'][0]['message']['content'].strip()}")
    print(f"expected: {expected}")


if __name__ == "__main__":
    main()
