#!/usr/bin/env bash
# After SIGTERM to mpiexec of MPICH 4.0, as in Debian 12, both ranks save and exit with 75, and mpiexec returns 0 in a quarter of all runs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat > rank.sh <<'END'
trap 'sleep 0.2; touch "$0/saved-$PMI_RANK"; exit 75' TERM
touch "$0/ready-$PMI_RANK"
while :; do sleep 0.02; done
END
cat > count.py <<'END'
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

mpiexec = Path(sys.executable).parent / "mpiexec"
script = Path("rank.sh").read_text()
found = Counter()
for _ in range(40):
    folder = Path(tempfile.mkdtemp(dir="."))
    command = [mpiexec, "-n", "2", "sh", "-c", script, folder]
    launcher = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while len([*folder.glob("ready-*")]) < 2:
        time.sleep(0.01)
    launcher.send_signal(signal.SIGTERM)
    found[launcher.wait()] += 1
    assert len([*folder.glob("saved-*")]) == 2
print(f"mpich {version('mpich')}: both ranks exit with 75, codes of mpiexec: {dict(found)}")
assert {str(code) for code in found} == set(sys.argv[1:]), "changed"
END
for expected in "4.0.3 0 75" "4.1.3 75"; do
    set -- $expected
    python3 -m venv --clear "$folder/venv"
    "$folder/venv/bin/python" -m pip install -qq "mpich==$1"
    shift
    "$folder/venv/bin/python" count.py "$@"
done
