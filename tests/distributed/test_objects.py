"""Objects between processes."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import jdp


def exchanged(sizes):
    me = jax.process_index()
    mine = {"from": me, "bits": np.arange(sizes[me], dtype=np.int32) * (me + 1), "key": (me, None)}
    everyone = jdp.all_gather_object(mine)
    sent = [jdp.broadcast_object(mine if me == source else object, source) for source in range(2)]
    return everyone, sent


@pytest.mark.parametrize("sizes", [(0, 3), (5, 100_000), (2**23 + 1, 2)])
def test_every_process_gets_all_objects_in_order(processes, sizes):
    for everyone, sent in processes(2).run(exchanged, sizes):
        for found in (everyone, sent):
            assert [each["from"] for each in found] == [0, 1]
            assert [each["key"] for each in found] == [(0, None), (1, None)]
            for i, each in enumerate(found):
                np.testing.assert_array_equal(each["bits"], np.arange(sizes[i]) * (i + 1))


def fails_on_one():
    value = (lambda: None) if jax.process_index() else 1
    first = ""
    try:
        jdp.all_gather_object(value)
    except Exception as error:
        first = f"{type(error).__name__}: {error}"
    return first, jdp.all_gather_object(jax.process_index())


def test_an_object_that_one_process_cannot_pickle_is_an_error_on_all(processes):
    (other, after), (own, _) = processes(2).run(fails_on_one)
    assert "process 1 failed in jdp.all_gather_object" in other and "JDP208" in other
    assert "lambda" in own and after == [0, 1]


def has_a_failed_step_on_one():
    where = jax.sharding.Mesh(np.array(jax.local_devices()), ("data",))

    @jdp.eval_step(weight=lambda batch: batch.sum())
    def step(state, batch):
        return {"mean": batch.mean() * state}

    texts = []
    if jax.process_index():
        copies = jax.sharding.NamedSharding(where, jax.sharding.PartitionSpec())
        step(jax.device_put(np.float32(1), copies), -np.ones(where.size, np.float32))
    for _ in range(2):
        try:
            texts.append([len(each) for each in jdp.all_gather_object(bytes(100_000))])
        except RuntimeError as error:
            texts.append(str(error))
    return texts


def test_an_error_of_an_earlier_step_of_one_process_is_one_on_all(processes):
    (other, after), (own, _) = processes(2).run(has_a_failed_step_on_one)
    assert "JDP208" in other and "process 1 failed in jdp.all_gather_object" in other
    assert "weight" in own and after == [100_000] * 2


def test_a_call_in_a_thread_is_refused():
    with ThreadPoolExecutor(1) as pool:
        for call in (jdp.all_gather_object, jdp.broadcast_object):
            with pytest.raises(RuntimeError, match="main thread"):
                pool.submit(call, 1).result()


def calls_another():
    try:
        if jax.process_index():
            jdp.broadcast_object(1)
        else:
            jdp.all_gather_object(1)
    except RuntimeError as error:
        return str(error)


def test_another_call_on_one_process_is_named(processes):
    for text in processes(2).run(calls_another):
        assert "jdp.all_gather_object" in text and "jdp.broadcast_object from process 0" in text


def test_one_process_gets_a_copy():
    value = {"rows": [1]}
    [found] = jdp.all_gather_object(value)
    assert found == value and found["rows"] is not value["rows"]
    assert jdp.broadcast_object(value) == value


@pytest.mark.parametrize("source", [-1, 1])
def test_a_source_that_is_no_process_is_refused(source):
    with pytest.raises(ValueError, match=f"source={source} is not a process"):
        jdp.broadcast_object(1, source)


def test_a_call_in_a_step_is_refused():
    with pytest.raises(ValueError, match="between steps"):
        jax.jit(lambda x: jdp.all_gather_object(1) and x)(1.0)
