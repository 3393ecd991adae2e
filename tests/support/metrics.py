"""What `jdp.log` has written."""

import json

from jdp.distributed import metrics_log


def lines(path):
    metrics_log.flush()
    return [json.loads(line) for line in path.read_text().splitlines()]
