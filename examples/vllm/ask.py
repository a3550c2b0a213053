"""Two questions, one answered at once and one as a stream; and how the decode server came by the prompts.

python ask.py PROXY_URL DECODE_URL
"""

import json
import re
import sys
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any
from urllib.request import Request, urlopen

NUM_TOKENS = 16


def post(url: str, body: dict[str, Any]) -> HTTPResponse:
    data = json.dumps({"max_tokens": NUM_TOKENS, "temperature": 0, **body}).encode()
    answer: HTTPResponse = urlopen(Request(url, data, {"Content-Type": "application/json"}))
    return answer


def events(answer: HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in answer:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line.removeprefix(b"data: "))


def show(text: str) -> str:
    """A random model says anything, also what moves the cursor."""
    return "".join(letter if letter.isprintable() else "\N{MIDDLE DOT}" for letter in text)


def main() -> None:
    proxy, decode = sys.argv[1:]
    with urlopen(f"{proxy}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]

    question = {
        "role": "user",
        "content": "Across which river did Charon ferry the dead, and for what fee?",
    }
    with post(f"{proxy}/v1/chat/completions", {"model": model, "messages": [question]}) as answer:
        message = json.load(answer)["choices"][0]["message"]
    print(f"{question['content']}\n    {show(message['content'])}")

    beginning = "A ferry crosses a river more cheaply than a bridge does, if"
    print(f"{beginning} …\n    ", end="")
    with post(f"{proxy}/v1/completions", {"model": model, "prompt": beginning, "stream": True}) as answer:
        for event in events(answer):
            print(show(event["choices"][0]["text"]), end="", flush=True)
    print()

    with urlopen(f"{decode}/metrics") as answer:
        metrics = answer.read().decode()
    sources = r'^vllm:prompt_tokens_by_source_total\{.*source="(\w+)".*\} (\S+)$'
    for source, num_tokens in re.findall(sources, metrics, re.MULTILINE):
        print(f"prompt tokens of the decode server by {source}: {float(num_tokens):.0f}")


if __name__ == "__main__":
    main()
