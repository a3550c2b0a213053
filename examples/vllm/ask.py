"""Ask two questions through the proxy, one of them streamed, and compare the answers with a single server's.

    python ask.py PROXY_URL PREFILL_URL DECODE_URL

The last line is the verdict. The exit status is 0 only if every token equals the prefill server's own answer,
and the decode server loaded the prompts instead of computing them.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

NUM_TOKENS = 16
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """A request: path and body, and its text for people."""

    path: str
    text: str
    body: Body


CHARON = "Across which river did Charon ferry the dead, and for what fee?"
BRIDGE = "A ferry crosses a river more cheaply than a bridge does, if"
QUESTIONS = (
    Question("/v1/chat/completions", CHARON, {"messages": [{"role": "user", "content": CHARON}]}),
    Question("/v1/completions", f"{BRIDGE} …", {"prompt": BRIDGE, "stream": True}),
)


def ask(url: str, question: Question, model: str) -> Iterator[tuple[str, list[int]]]:
    """The answer's text and tokens, at once or part by part."""
    greedy = {"model": model, "max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True}
    data = json.dumps({**greedy, **question.body}).encode()
    with urlopen(Request(url + question.path, data, {"Content-Type": "application/json"})) as answer:
        for event in events(answer) if question.body.get("stream") else [json.load(answer)]:
            if "error" in event:
                raise OSError(f"{url} broke off: {event['error']['message']}")
            for choice in event["choices"]:
                text = choice["message"]["content"] if "message" in choice else choice["text"]
                yield text, choice.get("token_ids") or []


def events(answer: HTTPResponse) -> Iterator[Body]:
    for line in answer:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line.removeprefix(b"data: "))


def show(text: str) -> str:
    """Printable text: a random model also produces control characters."""
    return "".join(letter if letter.isprintable() else "\N{MIDDLE DOT}" for letter in text)


def ask_and_show(url: str, question: Question, model: str) -> list[int]:
    """The answer's tokens; prints the text as it arrives."""
    print(f"{question.text}\n    ", end="")
    tokens = []
    try:
        for text, more in ask(url, question, model):
            print(show(text), end="", flush=True)
            tokens += more
    finally:
        print()
    return tokens


def prompt_tokens(decode: str) -> dict[str, int]:
    """Prompt tokens of the decode server, by source."""
    with urlopen(f"{decode}/metrics") as answer:
        metrics = answer.read().decode()
    sources = r'^vllm:prompt_tokens_by_source_total\{.*source="(\w+)".*\} (\S+)$'
    return {source: int(float(count)) for source, count in re.findall(sources, metrics, re.MULTILINE)}


def main() -> bool:
    """Ask, compare, and print the verdict as the last line."""
    try:
        is_good, sentence = compare(*sys.argv[1:])
    except HTTPError as problem:
        with problem:
            is_good, sentence = False, f"NO ANSWER: {problem}: {problem.read().decode(errors='replace')}"
    except OSError as problem:
        is_good, sentence = False, f"NO ANSWER: {problem}"
    print(sentence)
    return is_good


def compare(proxy: str, prefill: str, decode: str) -> tuple[bool, str]:
    """Compare the answers through the proxy with those of the prefill server alone."""
    with urlopen(f"{proxy}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]

    before = prompt_tokens(decode)
    moved = [ask_and_show(proxy, question, model) for question in QUESTIONS]
    after = prompt_tokens(decode)
    alone = [[token for _, more in ask(prefill, question, model) for token in more] for question in QUESTIONS]

    counts = {source: count - before.get(source, 0) for source, count in after.items()}
    for source, count in counts.items():
        print(f"prompt tokens of the decode server by {source}: {count}")
    return verdict(moved, alone, counts.get("external_kv_transfer", 0), counts.get("local_compute", 0))


def verdict(
    moved: list[list[int]], alone: list[list[int]], num_moved: int, num_computed: int
) -> tuple[bool, str]:
    """Whether the answers are right, and the verdict as a sentence."""
    for question, ours, theirs in zip(QUESTIONS, moved, alone, strict=True):
        if not ours or ours != theirs:
            said = f"{question.text!r} was answered with tokens {ours}, by one server alone with {theirs}"
            return False, f"DIFFERENT: {said}"
    # A model with states or windows computes the last token of each prompt itself.
    if num_moved == 0 or num_computed > len(QUESTIONS):
        counted = f"received {num_moved} prompt tokens and computed {num_computed}"
        return False, f"NOT MOVED: the tokens are equal, but the decode server {counted}; its log says why"
    equal = f"all {sum(map(len, moved))} tokens equal those of one server alone"
    return (
        True,
        f"EQUAL: {equal}; kvferry moved {num_moved} prompt tokens, {num_computed} were computed again",
    )


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
