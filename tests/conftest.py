"""How Hypothesis runs here.

``default``  fresh examples each run, kept in ``.hypothesis`` when they fail
``ci``       the same examples each run, so that a red run is a red commit
``law``      as many examples as ``KVFERRY_LAW_EXAMPLES`` says (``make law``)

``HYPOTHESIS_PROFILE`` names one. Without it ``KVFERRY_LAW_EXAMPLES`` picks ``law``, and ``CI``
picks ``ci``.
No profile has a deadline: a slow machine is not a broken law.
"""

import os

from hypothesis import HealthCheck, settings

law_examples = os.environ.get("KVFERRY_LAW_EXAMPLES")

settings.register_profile("default", deadline=None, print_blob=True)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.register_profile(
    "law",
    settings.get_profile("default"),
    max_examples=int(law_examples or 20_000),
    suppress_health_check=[HealthCheck.too_slow],
)

profile = "law" if law_examples else "ci" if os.environ.get("CI") else "default"
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or profile)
