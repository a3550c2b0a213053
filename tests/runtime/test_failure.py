"""The codes of failures are one closed list."""

import pytest

from kvferry.endpoint.meeting import failure_of
from kvferry.errors import RequestError
from kvferry.runtime import FailureCode


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("src-hole", FailureCode.SRC_TABLES),
        ("dst-table-short", FailureCode.REQUEST),
        ("need-kept", FailureCode.REQUEST),
        ("never-heard-of", FailureCode.REQUEST),
        ("too-many-runs", FailureCode.TOO_MANY_RUNS),
        ("not-proved", FailureCode.NOT_PROVED),
    ],
)
def test_a_request_that_does_not_fit_has_one_of_four_codes_and_its_own_code_is_said_once(code, failure):
    found = failure_of(RequestError(code, "full", "so it is"), FailureCode.BAD_TABLES)
    assert found.code is failure
    assert str(found).count(code) == 1
