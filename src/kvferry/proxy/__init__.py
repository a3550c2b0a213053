"""One OpenAI-compatible address in front of vLLM servers that prefill and vLLM servers that decode.

A request goes to a prefill server first, for one token and a ticket, then with the ticket to a decode server,
whose answer is passed on as it comes. What clients say about transfers is removed: tickets come from prefill
servers alone. Only this room imports aiohttp, which is client and server in one, and which vLLM itself needs.
"""
