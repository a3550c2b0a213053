"""What ``kvferry diff`` says, on paper and on a page."""

from __future__ import annotations

from kvferry.cli.manifest_diff import Direction, Effect, ManifestDiff
from kvferry.cli.output import milliseconds

SENTENCES = {
    None: "nothing differs",
    "harmless": "nothing that matters differs",
    "not tried": "what differs may cost time; ranks are missing, so nothing was planned",
    "slower": "they can talk, slowly; see `kvferry plan`",
    "refused": "they cannot talk",
}
WORDS = {
    None: "SAME",
    "harmless": "SAME",
    "not tried": "NOTE",
    "slower": "SLOW",
    "refused": "REFUSED",
}


OTHER_MODEL = "not the same model: running engines would refuse each other, although the bytes would fit"


def sentence(found: ManifestDiff) -> str:
    """What came out, in a few words."""
    return OTHER_MODEL if found.effect is Effect.REFUSED and found.bytes_fit else SENTENCES[found.effect]


def direction_time(direction: Direction) -> str:
    """What a request takes in one direction; empty if it moves nothing."""
    if direction.is_refused:
        return "refused"
    if direction.lacks_ranks:
        return "not tried: the manifest does not list all ranks"
    bill = direction.over_network
    if bill is None:
        return ""
    time, long = (milliseconds(1e3 * each) for each in (bill.seconds, bill.long_run_seconds))
    return f"{time} over {bill.profile.name}; {long} in long runs"
