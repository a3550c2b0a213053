"""``kvferry proxy``: one address in front of vLLM servers that prefill and vLLM servers that decode."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry.cli.options import examples

HELP = "\n\n".join(
    (
        "Serve one OpenAI-compatible address in front of vLLM prefill and decode servers.",
        "Each request goes to a prefill server, for one token and a ticket, then with the ticket to a decode"
        " server, which fetches the prompt's cache and streams the answer. The proxy chooses the ready"
        " server with the fewest running requests.",
        "kv_transfer_params sent by clients are removed. A failed prefill is retried on another server, a"
        " failed decode only if its server could not be reached. If no prefill server can be reached, the"
        " decode server computes the prompt (--fallback). Requests that one ticket cannot serve (n > 1,"
        " several prompts, echo, prompt_logprobs) go to a decode server only.",
        "\n".join(
            (
                "\b",
                "Paths:",
                "  /v1/completions, /v1/chat/completions, /v1/models",
                "  /health    number of ready servers; 503 if requests cannot be served",
                "  /live      200 while the proxy itself runs",
                "  /metrics   for Prometheus: kvferry_proxy_…",
            )
        ),
        "The log has a line per request: outcome, servers, times; no prompt, no ticket. After"
        " SIGTERM or Ctrl-C, new requests are rejected and running ones have 30 s to finish; a second"
        " signal aborts them."
        " The proxy has no authentication and no TLS: put a gateway in front of it. It passes the"
        " client's `Authorization` header on.",
        examples(
            "kvferry proxy --prefill http://10.0.0.7:8100 --decode http://10.0.0.8:8200",
            "kvferry proxy --prefill http://p0:8100 --prefill http://p1:8100 \\",
            "              --decode http://d0:8200 --listen 0.0.0.0:8000",
        ),
        'It needs aiohttp: pip install ".[proxy]" in a clone of kvferry; ".[vllm]" includes it.',
        "Exit codes: 0 stopped by a signal; 2 bad usage, or the address is in use.",
    )
)


def proxy(
    prefill: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="A prefill server (repeatable).")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="A decode server (repeatable).")
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address for clients; port 0: any free port.")
    ] = "127.0.0.1:8000",
    fallback: Annotated[
        bool,
        typer.Option(
            "--fallback/--no-fallback",
            help="Use decode servers alone if no prefill server is reachable.",
        ),
    ] = True,
    conversations: Annotated[
        bool,
        typer.Option(
            "--conversations/--no-conversations",
            help="Pass offers of decode servers to the prefill of the next turn.",
        ),
    ] = True,
    overlap: Annotated[
        bool,
        typer.Option("--overlap/--no-overlap", help="Let decode servers read prefills while they run."),
    ] = True,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.001, metavar="S", help="Timeout for a prefill, and between two parts of an answer."
        ),
    ] = 600.0,
    max_body_mib: Annotated[
        float, typer.Option(min=0.001, metavar="N", help="Largest request, in MiB.")
    ] = 16.0,
) -> None:
    """Serve one address in front of prefill and decode servers."""
    from kvferry.proxy.settings import ProxyLimits, ProxySettings, Role, listen_address, server_urls

    host, port = listen_address(listen)
    settings = ProxySettings(
        host,
        port,
        server_urls(Role.PREFILL, prefill or ()),
        server_urls(Role.DECODE, decode or ()),
        ProxyLimits(
            prefill_seconds=timeout,
            decode_seconds=timeout,
            max_body_bytes=int(max_body_mib * 2**20),
        ),
        is_falling_back=fallback,
        has_conversations=conversations,
        is_overlapping=overlap,
    )
    from kvferry.proxy.serve import run_proxy

    run_proxy(settings)
