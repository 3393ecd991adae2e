"""Waiting for what background threads do, with a deadline."""

import threading
import time

DEADLINE_S = 10.0


def wait_until(condition, deadline_s=DEADLINE_S):
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "still not so after the deadline"
        time.sleep(0.002)


def running():
    return [thread for thread in threading.enumerate() if thread.name == "jdp-prefetch"]


def wait_until_none_runs():
    wait_until(lambda: not running())
