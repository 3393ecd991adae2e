#!/usr/bin/env bash
# import orbax.checkpoint adds a handler to the root logger, so logging.basicConfig() behind it does nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq orbax-checkpoint==0.12.8 absl-py==2.5.1 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
for first in "import orbax.checkpoint" "import jax, optax" ; do
    if [ "$first" = "import jax, optax" ]; then
        "$folder/venv/bin/python" -m pip install -qq optax==0.2.8
    fi
    "$folder/venv/bin/python" -c "
import logging
$first
print('behind', '$first', 'the root logger has', len(logging.root.handlers), 'handler(s)')
logging.basicConfig(level=logging.INFO, format='of the application: %(message)s')
logging.getLogger('application').info('a line')
" 2>&1 | tee -a "$folder/out"
done
"$folder/venv/bin/python" -m pip list 2>/dev/null | grep -E "^(orbax-checkpoint|absl-py) "
diff "$folder/out" - <<'END'
behind import orbax.checkpoint the root logger has 1 handler(s)
behind import jax, optax the root logger has 0 handler(s)
of the application: a line
END
