"""Client requests as prefill and decode servers get them.

Only the top level of a body is decoded; values stay text (``msgspec.Raw``), so a large body costs one scan
and no objects. Servers get an encoding of the decoded fields, never the client's text: a removed field is
gone in every spelling, and a duplicate name is sent once.
"""

from __future__ import annotations

import codecs
import re
from enum import StrEnum
from http import HTTPStatus

import msgspec
from msgspec import Raw

Fields = dict[str, object]
"""A JSON object; values that others wrote are ``Raw``."""

TRANSFER = "kv_transfer_params"
"""The field in which tickets travel."""

TRANSFER_FIELDS = frozenset({TRANSFER, "ec_transfer_params"})
INTERNAL_FIELDS = TRANSFER_FIELDS | {"request_id"}
"""Fields between the proxy and servers. A client could use them to name another client's cache, to pin
blocks, or to take the name of another request."""
EXTRA_ARGUMENTS = "vllm_xargs"
"""vLLM accepts transfer fields here, too."""

ABOUT_THE_ANSWER = frozenset({"stream_options", "max_completion_tokens", "min_tokens", "n", "best_of"})
"""Not sent to prefill servers, which answer once, with one token."""
ASK_FOR_TICKET: Fields = {"do_remote_decode": True, "do_remote_prefill": False}
READ_WHILE_PREFILLED: Fields = {"do_remote_prefill": True, "do_remote_decode": False}
TRANSFER_ID, OVERLAP = "kvferry_transfer", "kvferry_overlap"
"""The name of a prefill that is read while it runs; a prefill server's statement that it supports this."""
ENGINE = "remote_engine_id"
MEETING = frozenset({"remote_host", "remote_port", ENGINE})

MAX_FIELDS = 1000
"""Limit of the fields of a decoded object."""
MAX_STRUCTURE = 3 * 2**20
"""Limit of commas, opening brackets and escapes of a body. Decoding takes about 12 ns for each, while all
other requests wait. A prompt of a million token ids has a million commas."""
STRUCTURE = b",[{\\"

NULL, FALSE, TRUE, ONE = (Raw(word) for word in (b"null", b"false", b"true", b"1"))
TOKEN_IDS = re.compile(rb"\[\s*-?\d")


class BodyRejected(Exception):
    """A body is too large, or not a JSON object."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class BodyBuffer:
    """An incoming body. Each part is checked when it arrives, so that no check takes long."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_structure = max_bytes, 0
        self._text, self._utf8 = bytearray(), codecs.getincrementaldecoder("utf-8")()

    def expect(self, num_bytes: int) -> None:
        """Reject a body that will be longer than allowed."""
        if len(self._text) + num_bytes > self._max_bytes:
            message = f"the body has more than {self._max_bytes} bytes (--max-body-mib)"
            raise BodyRejected(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)

    def add(self, part: bytes) -> None:
        self.expect(len(part))
        self._check_utf8(part)
        self._num_structure += len(part) - len(part.translate(None, STRUCTURE))
        if self._num_structure > MAX_STRUCTURE:
            message = f"the body has more than {MAX_STRUCTURE} commas, brackets and escapes"
            raise BodyRejected(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
        self._text += part

    def fields(self) -> Fields:
        self._check_utf8(b"", is_last=True)
        return fields_in(self._text)

    def _check_utf8(self, part: bytes, *, is_last: bool = False) -> None:
        try:
            self._utf8.decode(part, is_last)
        except UnicodeDecodeError as error:
            message = f"the body is not JSON: it is not UTF-8 ({error.reason})"
            raise BodyRejected(HTTPStatus.BAD_REQUEST, message) from None


class Decoding:
    """Of the current object; decoding is not interrupted."""

    num_names = 0


class FieldName(StrEnum):
    """The name of any field. It is an enumeration because msgspec calls ``_missing_`` for unknown values: an
    object with a million names is rejected at the first beyond the limit, before the others are decoded.
    """

    NEVER_SENT = "-" * 256
    """An enumeration needs a member. Its name is not counted, so it is too long to be repeated often."""

    @classmethod
    def _missing_(cls, value: object) -> FieldName | None:
        Decoding.num_names += 1
        if Decoding.num_names > MAX_FIELDS:
            return None
        name = str.__new__(cls, value)
        name._name_ = name._value_ = str(value)
        return name


FIELDS = msgspec.json.Decoder(dict[FieldName, Raw])
ONE_ITEM = msgspec.json.Decoder(tuple[Raw])


def fields_in(text: bytes | bytearray | Raw) -> Fields:
    """The fields of a JSON object; of a name that is given twice, the last.

    >>> {name: bytes(value) for name, value in fields_in(b'{"a": [1, 2], "b": 3, "b": null}').items()}
    {'a': b'[1, 2]', 'b': b'null'}
    """
    Decoding.num_names = 0
    try:
        return {str(name): value for name, value in FIELDS.decode(text).items()}
    except RecursionError:
        message = "the JSON of the body is nested too deeply"
    except msgspec.ValidationError:
        message = f"the body is not a JSON object with at most {MAX_FIELDS} fields"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"the body is not JSON: {error}"
    raise BodyRejected(HTTPStatus.BAD_REQUEST, message)


def without_internal_fields(body: Fields) -> Fields:
    """The request as a client may send it.

    >>> list(without_internal_fields({"prompt": Raw(b'"a"'), "kv_transfer_params": Raw(b"{}")}))
    ['prompt']
    """
    kept = {name: value for name, value in body.items() if name not in INTERNAL_FIELDS}
    extra = kept.get(EXTRA_ARGUMENTS)
    if isinstance(extra, Raw) and bytes(memoryview(extra)[:1]) == b"{":
        arguments = fields_in(extra)
        if not TRANSFER_FIELDS.isdisjoint(arguments):
            kept[EXTRA_ARGUMENTS] = {
                name: value for name, value in arguments.items() if name not in TRANSFER_FIELDS
            }
    return kept


def fits_a_ticket(body: Fields) -> bool:
    """Whether it is one request, whose prompt is needed for its cache only.

    Others go to a decode server only.

    >>> bodies = b'{"prompt": [1, 2]}', b'{"prompt": ["a", "b"]}', b'{"n": 2}'
    >>> [fits_a_ticket(fields_in(text)) for text in bodies]
    [True, False, False]
    """
    is_many = has_many_prompts(body.get("prompt", NULL)) or any(
        body.get(name, NULL) not in (NULL, ONE) for name in ("n", "best_of")
    )
    asks_of_prompt = body.get("echo", NULL) not in (NULL, FALSE) or body.get("prompt_logprobs", NULL) != NULL
    has_no_tokens = body.get("prompt_embeds", NULL) != NULL  # no ticket is given for vectors
    is_beam_search = body.get("use_beam_search", NULL) not in (NULL, FALSE)
    return not (is_many or asks_of_prompt or has_no_tokens or is_beam_search)


def has_many_prompts(prompt: object) -> bool:
    """Whether it is a list of prompts, not one text or one list of token ids."""
    text = memoryview(prompt)  # type: ignore[arg-type]
    if bytes(text[:1]) != b"[" or TOKEN_IDS.match(text):
        return False
    try:
        ONE_ITEM.decode(text)
    except msgspec.ValidationError:
        return True
    return False


def prefill_body(body: Fields, more: Fields) -> Fields:
    """The request for a prefill server; ``more``: transfer fields of other servers."""
    kept = {name: value for name, value in body.items() if name not in ABOUT_THE_ANSWER}
    return {**kept, "max_tokens": 1, "stream": False, TRANSFER: {**more, **ASK_FOR_TICKET}}


def decode_body(body: Fields, transfer: Fields) -> Fields:
    """The request for a decode server; ``transfer``: the fields that the prefill server returned."""
    return {**body, TRANSFER: transfer} if transfer else body


def meeting_in(transfer: Fields, known: Fields) -> Fields:
    """Where decode servers query the progress of a prefill; empty if the server does not support it.

    ``known``: its earlier statement. It remains valid if the same engine gives no ticket: its prompt cannot
    be offered, or the reader has it already.
    """
    if known and OVERLAP not in transfer and transfer.get(ENGINE) == known[ENGINE]:
        return known
    if transfer.get(OVERLAP) != TRUE or not transfer.keys() >= MEETING:
        return {}
    return {name: transfer[name] for name in sorted(MEETING)}


class PrefillAnswer(msgspec.Struct):
    kv_transfer_params: dict[str, Raw] | None = None


PREFILL_ANSWER = msgspec.json.Decoder(PrefillAnswer)


def transfer_in(payload: bytes) -> Fields:
    """The transfer fields of a prefill server's answer.

    >>> transfer_in(b'{"choices": []}')
    {}
    """
    return dict(PREFILL_ANSWER.decode(payload).kv_transfer_params or {})
