"""The store of a process group without torch."""

import threading
from datetime import timedelta


class Store:
    """The store of a process group, for ranks that are threads. `questions`: how often it was asked anything."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.questions = 0
        self.timeouts = 0
        self.waking: set[str] = set()
        """Keys for which those who wait were woken up."""

    def add(self, key: str, amount: int) -> int:
        with self.changed:
            self.values[key] = str(int(self.values.get(key, 0)) + amount).encode()
            self.waking.add(key)
            self.changed.notify_all()
            return int(self.values[key])

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value.encode()
            self.waking.add(key)
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        """torch's store would wait for what is not there."""
        assert key in self.values, f"this rank would wait for {key}"
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        with self.changed:
            self.questions += 1
            return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """As torch's store without libuv, it wakes up nobody."""
        with self.changed:
            if self.values.get(key, b"").decode() == expected_value:
                self.values[key] = desired_value.encode()
            return self.values[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self.changed:
            if all(key in self.values for key in keys):
                return
            if not self.changed.wait_for(lambda: self.waking.issuperset(keys), min(60.0, timeout.total_seconds())):
                self.timeouts += 1
                raise RuntimeError("wait timeout")
