"""Arrays of parts come back from the disk with their bits."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdp.checkpoint import orbax_files

ARRAYS = {
    "0['w']@0,12": np.arange(60, dtype=np.float32).reshape(5, 12),
    "1['a/b']@0": np.full(7, -0.0, np.float32),
    "2['zeros']@3": np.zeros((2, 3)),
    "3.n": np.array(5, np.int64),
    "4['h']": np.asarray(jnp.arange(6, dtype=jnp.bfloat16)),
    "5['nibbles']": np.asarray(jnp.arange(3, dtype=jnp.int4)),
    "6['c']": np.array([1j, np.nan], np.complex64),
}


def bits(arrays):
    return {name: (x.dtype, x.shape, x.tobytes()) for name, x in arrays.items()}


@pytest.mark.parametrize("batch_bytes", [1, 64 << 20])
def test_arrays_come_back_with_their_bits(tmp_path, monkeypatch, batch_bytes):
    monkeypatch.setattr(orbax_files, "_BATCH_BYTES", batch_bytes)
    orbax_files.write_parts(tmp_path / "state-1", iter(ARRAYS.items()))
    assert bits(orbax_files.read_parts(tmp_path / "state-1", [*ARRAYS])) == bits(ARRAYS)
    some = [*ARRAYS][1:3]
    assert [*orbax_files.read_parts(tmp_path / "state-1", some)] == some


def test_an_array_whose_files_are_gone_is_an_error(tmp_path):
    orbax_files.write_parts(tmp_path / "state-1", ARRAYS.items())
    for path in (tmp_path / "state-1").rglob("*"):
        if path.parent.name == "d":
            path.unlink()
    with pytest.raises(ValueError, match="NOT_FOUND|DATA_LOSS"):
        orbax_files.read_parts(tmp_path / "state-1", [*ARRAYS])
