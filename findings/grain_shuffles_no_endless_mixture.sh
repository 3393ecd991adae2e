#!/usr/bin/env bash
# shuffle() behind a mix of repeated sources of Grain leaves the periodic order of the sources.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq grain==0.2.18 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'END'
from importlib.metadata import version

import grain

print("grain", version("grain"))


def sources(endless):
    one, other = (grain.MapDataset.source([name] * 400) for name in "ab")
    if endless:
        one, other = one.repeat(), other.repeat()
    mixture = grain.MapDataset.mix([one, other], weights=[0.75, 0.25]).seed(0).shuffle()
    return "".join(mixture[i] for i in range(400))


for endless in (False, True):
    order = sources(endless)
    periodic = all(order[i] == order[i % 4] for i in range(400))
    print("endless sources:" if endless else "finite sources: ", order[:32], "periodic:", periodic)
    assert periodic is endless, "changed"
END
