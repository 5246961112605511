"""The pool itself: every rank runs, failures come back with their text, and a hung rank does not hang the tests."""

import os
import time

import pytest
import torch
import torch.distributed as dist


def sum_of_ranks(scale):
    value = torch.tensor([float(dist.get_rank() * scale)])
    dist.all_reduce(value)
    return dist.get_rank(), value


def process_id():
    return os.getpid()


def fail_on(ranks):
    if dist.get_rank() in ranks:
        raise ValueError(f"no luck on rank {dist.get_rank()}")
    dist.barrier()


class Odd(Exception):
    def __init__(self, left, right):
        super().__init__(f"{left} against {right}")


def raise_odd():
    raise Odd(1, 2)


def sleep_on_rank_1():
    time.sleep(60 if dist.get_rank() == 1 else 0)


def die_on_rank_1():
    if dist.get_rank() == 1:
        os._exit(3)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_rank_runs_and_answers_in_order(pool, size):
    results = pool(size).run(sum_of_ranks, 3)
    assert [rank for rank, _ in results] == list(range(size))
    assert all(value.item() == 3 * sum(range(size)) for _, value in results)


def test_processes_stay_alive_between_runs(pool):
    assert pool(2).run(process_id) == pool(2).run(process_id)


def test_an_error_on_every_rank_is_raised_here_and_the_pool_goes_on(pool):
    before = pool(2).run(process_id)
    with pytest.raises(ValueError, match="no luck on rank") as caught:
        pool(2).run(fail_on, [0, 1])
    assert "in fail_on" in caught.value.__notes__[0]
    assert pool(2).run(process_id) == before


def test_an_error_on_one_rank_is_raised_while_the_others_wait(pool):
    with pytest.raises(ValueError, match="no luck on rank 1"):
        pool(2).run(fail_on, [1])
    assert len(pool(2).run(sum_of_ranks, 1)) == 2


def test_an_exception_that_does_not_unpickle_keeps_its_text(pool):
    with pytest.raises(RuntimeError, match="Odd: 1 against 2"):
        pool(2).run(raise_odd)


def test_a_hung_rank_times_out_and_the_pool_is_rebuilt(pool):
    with pytest.raises(TimeoutError, match=r"sleep_on_rank_1 on 2 ranks: no answer from ranks \[1\] within 2 s"):
        pool(2).run(sleep_on_rank_1, timeout=2)
    assert len(pool(2).run(sum_of_ranks, 1)) == 2


def test_a_dead_rank_is_named(pool):
    with pytest.raises(RuntimeError, match="the process of rank 1 ended"):
        pool(2).run(die_on_rank_1)
