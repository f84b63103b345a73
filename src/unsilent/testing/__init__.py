"""Contract tests for rules, detectors, judges, checkpoint formats and kinds of campaign, also of other packages.

Each is a class for pytest. Derive a class from one in a test file, give it the method that makes the part, and pytest runs the
tests on it:

    class TestDoubled(RuleContract):
        def make_rule(self):
            return Doubled()

The tests of a contract need pytest, and are the only part of this package that imports it.
"""

import pytest

for _module in ("rules", "detectors", "judges", "formats", "kinds"):
    pytest.register_assert_rewrite(f"{__name__}.{_module}")

from unsilent.testing.detectors import DetectorContract as DetectorContract  # noqa: E402
from unsilent.testing.formats import FormatContract as FormatContract  # noqa: E402
from unsilent.testing.judges import JudgeContract as JudgeContract  # noqa: E402
from unsilent.testing.kinds import KindContract as KindContract  # noqa: E402
from unsilent.testing.rules import RuleContract as RuleContract  # noqa: E402
