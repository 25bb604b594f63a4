"""The devices that a config asks for."""

import pytest

from zinf.core.machine.devices import on_devices, say_unused


def test_cpu_devices_that_are_not_used_are_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    say_unused.cache_clear()
    assert on_devices({"mesh": {"fsdp": 2}})[1].size == 2
    assert not caplog.messages
    for _ in range(2):
        assert on_devices({})[1].size == 1
    (message,) = caplog.messages
    assert message.startswith("1 of 8 CPU devices is used")
    assert "set mesh: {fsdp: 8}" in message
