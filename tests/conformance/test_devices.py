"""Eight devices: the same quantile to the bit for every split, the same loss, and no token leaves its device."""

from __future__ import annotations

import pytest

from tests.helpers.devices import report_of


@pytest.mark.slow
def test_eight_devices() -> None:
    found = report_of("tests.conformance.devices_main")
    assert found["devices"] == 8
    assert len(set(found["q"]["sat-grpo"])) == 1  # to the bit, for every split
    reference = found["q"]["sat-gspo"][0]  # here d itself is a mean, whose rounding depends on how T is split
    assert max(abs(q - reference) for q in found["q"]["sat-gspo"]) <= 1e-6 * reference
    for values in found["loss"].values():
        assert max(abs(v - values[0]) for v in values) < 1e-6
    assert all(size <= 64 for size in found["collectives"])
    assert found["tokens"][0] == found["tokens"][1]
    assert round(found["device_scope"][0]) == found["device_scope"][1]
