"""One OpenAI-compatible address in front of vLLM prefill and decode servers.

A request goes to a prefill server first, for one token and a ticket, then with the ticket to a decode server,
which streams the answer. Transfer fields of clients are removed: only prefill servers issue tickets. Only
this room imports aiohttp.
"""
