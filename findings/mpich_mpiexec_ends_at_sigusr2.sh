#!/usr/bin/env bash
# MPICH's mpiexec passes SIGUSR1 on to the ranks; SIGUSR2 ends mpiexec itself, and no rank hears of it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq mpich==5.0.2
cd "$folder"
cat > rank.py <<'END'
import os
import signal
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
heard = []
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: heard.append(signal.Signals(number).name))
(folder / f"ready-{os.getpid()}").touch()
deadline = time.monotonic() + 4
while time.monotonic() < deadline and not heard:
    time.sleep(0.05)
(folder / f"heard-{os.getpid()}").write_text(" ".join(heard))
END
"$folder/venv/bin/python" - <<'END'
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

print("mpich", version("mpich"))
mpiexec = Path(sys.executable).parent / "mpiexec"
found = {}
for number in (signal.SIGUSR1, signal.SIGUSR2):
    folder = Path(number.name)
    folder.mkdir()
    command = [mpiexec, "-n", "2", sys.executable, "rank.py", folder]
    launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while len([*folder.glob("ready-*")]) < 2:
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.send_signal(number)
    code = launcher.wait()
    heard = sorted(path.read_text() for path in folder.glob("heard-*"))
    found[number.name] = heard, code
    print(f"{number.name} to mpiexec: the ranks heard {heard}, mpiexec returned {code}")
assert found["SIGUSR1"] == (["SIGUSR1", "SIGUSR1"], 0), "changed"
assert "SIGUSR2" not in found["SIGUSR2"][0] and found["SIGUSR2"][1] == -12, "changed"
END
