"""``kvferry proxy``: one address in front of vLLM servers that prefill and vLLM servers that decode."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry.cli.options import examples

HELP = "\n\n".join(
    (
        "Serve one OpenAI-compatible address in front of vLLM servers that prefill and others that decode.",
        "Each request goes to a prefill server first, for one token and a ticket, then with the ticket to a"
        " decode server, which fetches the prompt's cache and answers; its answer is passed on as it comes."
        " Of several servers the ready one with the fewest requests is next.",
        "Clients' kv_transfer_params are removed: tickets come from prefill servers alone. A prefill that"
        " fails is tried on another server; a decode only if its server could not be reached: what a client"
        " may have seen is never repeated. What does not fit one ticket (n > 1, several prompts, echo,"
        " prompt_logprobs) goes to a decode server alone.",
        "\n".join(
            (
                "\b",
                "Paths:",
                "  /v1/completions, /v1/chat/completions, /v1/models",
                "  /health    how many servers are ready; 503 unless one of each kind is",
                "  /live      200 while the proxy itself runs",
                "  /metrics   for Prometheus: kvferry_proxy_…",
            )
        ),
        "The log has a line per request: outcome, servers, times; no prompt, no ticket. SIGTERM or Ctrl-C:"
        " no new requests, those under way may end; again: at once. The proxy asks nobody for a password and"
        " speaks plain HTTP: put your own gateway in front of it. Servers get the client's `Authorization`.",
        examples(
            "kvferry proxy --prefill http://10.0.0.7:8100 --decode http://10.0.0.8:8200",
            "kvferry proxy --prefill http://p0:8100 --prefill http://p1:8100 \\",
            "              --decode http://d0:8200 --listen 0.0.0.0:8000",
        ),
        'It needs aiohttp: pip install "kvferry[vllm]", or, on a machine of its own, "kvferry[proxy]".',
        "Exit codes: 0 stopped as told; 2 bad usage, or the address to listen on is taken.",
    )
)


def proxy(
    prefill: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="A server that prefills; may be given again.")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="A server that decodes; may be given again.")
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where clients come; port 0: any free one.")
    ] = "127.0.0.1:8000",
    retries: Annotated[
        int, typer.Option(min=0, metavar="N", help="How many more servers are tried after a failure.")
    ] = 1,
    connect_seconds: Annotated[
        float, typer.Option(min=0.001, metavar="S", help="How long a server may take to be connected to.")
    ] = 5.0,
    prefill_seconds: Annotated[
        float, typer.Option(min=0.001, metavar="S", help="How long a prefill may take.")
    ] = 600.0,
    decode_seconds: Annotated[
        float, typer.Option(min=0.001, metavar="S", help="How long a decode server may send nothing.")
    ] = 600.0,
    client_seconds: Annotated[
        float,
        typer.Option(
            min=0.001,
            metavar="S",
            help="How long a client may take to send its headers or body, or to take a part.",
        ),
    ] = 60.0,
    drain_seconds: Annotated[
        float, typer.Option(min=0.0, metavar="S", help="How long to wait for requests when stopped.")
    ] = 30.0,
    max_body_mib: Annotated[
        float, typer.Option(min=0.001, metavar="N", help="The longest request, in MiB.")
    ] = 16.0,
    max_requests: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many requests may be under way.")
    ] = 4096,
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
            num_retries=retries,
            connect_seconds=connect_seconds,
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            client_seconds=client_seconds,
            drain_seconds=drain_seconds,
            max_body_bytes=int(max_body_mib * 2**20),
            max_requests=max_requests,
        ),
    )
    from kvferry.proxy.serve import run_proxy

    run_proxy(settings)
