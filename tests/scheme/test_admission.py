"""First come, first served, within a budget."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvfun.errors import AdmissionError, BudgetError, GeometryError
from kvfun.scheme import Model, admission
from kvfun.scheme.admission import Pool, cancel, close, release, request
from kvfun.service import AdmissionPool

from .models import SMOLLM2

BUDGET, QUEUE = 20, 4


class PoolMachine(RuleBasedStateMachine):
    """Against two lists, and every earlier pool stays what it was."""

    def __init__(self):
        super().__init__()
        self.pool = Pool(BUDGET, QUEUE)
        self.running: dict[int, int] = {}
        self.waiting: list[tuple[int, int]] = []
        self.closed = False
        self.count = 0
        self.before: list[tuple[Pool, tuple, tuple]] = []

    def stepped(self, step):
        self.before.append((self.pool, self.pool.running, self.pool.waiting))
        self.pool, admitted = step
        expected = []
        while self.waiting and sum(self.running.values()) + self.waiting[0][1] <= BUDGET:
            name, nbytes = self.waiting.pop(0)
            self.running[name] = nbytes
            expected.append(name)
        assert list(admitted) == expected

    @rule(nbytes=st.integers(0, 25))
    def ask(self, nbytes):
        name, self.count = self.count, self.count + 1
        fits = not self.waiting and sum(self.running.values()) + nbytes <= BUDGET
        full = len(self.waiting) >= QUEUE and not fits
        if self.closed or nbytes > BUDGET or full:
            kind = BudgetError if nbytes > BUDGET and not self.closed else AdmissionError
            with pytest.raises(kind):
                request(self.pool, name, nbytes)
            return
        self.waiting.append((name, nbytes))
        self.stepped(request(self.pool, name, nbytes))

    @rule(name=st.integers(0, 40))
    def give_back(self, name):
        self.running.pop(name, None)
        self.stepped(release(self.pool, name))

    @rule(name=st.integers(0, 40))
    def leave(self, name):
        self.running.pop(name, None)
        self.waiting = [each for each in self.waiting if each[0] != name]
        self.stepped(cancel(self.pool, name))

    @rule()
    def shut(self):
        if self.count % 7:
            return
        self.before.append((self.pool, self.pool.running, self.pool.waiting))
        self.pool, away = close(self.pool)
        assert list(away) == [name for name, _ in self.waiting]
        self.waiting, self.closed = [], True

    @invariant()
    def it_is_what_the_lists_say(self):
        assert dict(self.pool.running) == self.running
        assert list(self.pool.waiting) == self.waiting
        assert self.pool.used <= BUDGET
        for pool, running, waiting in self.before:
            assert (pool.running, pool.waiting) == (running, waiting)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=max(30, settings().max_examples // 2))


def test_a_large_request_is_not_overtaken():
    pool, _ = request(Pool(10), "a", 6)
    pool, _ = request(pool, "large", 9)
    pool, now = request(pool, "small", 1)
    assert now == ()
    assert release(pool, "a")[1] == ("large", "small")


def test_a_full_queue_takes_nobody_however_small():
    pool = Pool(10, 1, running=(admission.Request("a", 6),))
    pool, _ = request(pool, "large", 9)
    with pytest.raises(AdmissionError, match="1 requests wait already"):
        request(pool, "small", 1)


def test_giving_back_twice_is_giving_back_once():
    pool, _ = request(Pool(10), "a", 6)
    once = release(pool, "a")[0]
    assert release(once, "a") == (once, ())
    assert once.used == 0


def test_without_a_budget_everybody_runs():
    pool = Pool(None)
    for name in range(100):
        pool, admitted = request(pool, name, 10**12)
        assert admitted == (name,)


def test_refusals_say_what_to_do():
    with pytest.raises(BudgetError, match="never fit a budget of 10: ask for fewer tokens"):
        request(Pool(10), "a", 11)
    full = Pool(10, 0, running=(admission.Request("a", 10),))
    with pytest.raises(AdmissionError, match="0 requests wait already"):
        request(full, "b", 1)
    with pytest.raises(AdmissionError, match="asked already"):
        request(full, "a", 1)
    with pytest.raises(AdmissionError, match="closed"):
        request(close(Pool(10))[0], "a", 1)
    for budget in (0, -1, 1.5, True):
        with pytest.raises(BudgetError, match="budget"):
            Pool(budget)
    with pytest.raises(BudgetError, match="nbytes"):
        request(Pool(10), "a", -1)


# -- the box --------------------------------------------------------------------------------------


def test_threads_never_use_more_than_the_budget_and_all_have_their_turn():
    pool, lock = AdmissionPool(10, queue=100), threading.Lock()
    used, most, done = 0, 0, []

    def work(index):
        nonlocal used, most
        nbytes = 1 + index % 7
        with pool.submit(nbytes).result(timeout=30):
            with lock:
                used += nbytes
                most = max(most, used)
            with lock:
                used -= nbytes
        done.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(done) == list(range(60))
    assert most <= 10
    assert pool.state.used == 0
    assert pool.state.waiting == ()


def test_cancelling_leaves_the_queue_and_lets_the_next_one_in():
    pool = AdmissionPool(10)
    lease = pool.submit(8).result()
    large, small = pool.submit(9), pool.submit(2)
    assert not small.done()
    assert large.cancel()
    assert small.result(timeout=5).nbytes == 2
    lease.release()
    lease.release()
    assert pool.state.used == 2


def test_a_lease_that_comes_too_late_is_given_back(monkeypatch):
    """A future that was cancelled while its request was admitted."""
    pool = AdmissionPool(10)
    lease, waits = pool.submit(10).result(), pool.submit(5)
    monkeypatch.setattr(AdmissionPool, "_cancelled", lambda *_: None)  # as if it came later
    assert waits.cancel()
    lease.release()
    assert pool.state.used == 0


def test_coroutines_wait_their_turn():
    pool = AdmissionPool(10)

    async def one(nbytes, order):
        with await asyncio.wrap_future(pool.submit(nbytes)):
            order.append(nbytes)
            await asyncio.sleep(0)

    async def all_of_them():
        order: list[int] = []
        await asyncio.gather(*[one(n, order) for n in (9, 8, 7)])
        return order

    assert asyncio.run(all_of_them()) == [9, 8, 7]
    assert pool.state.used == 0


def test_a_coroutine_that_is_cancelled_does_not_hold_the_queue():
    pool = AdmissionPool(10)
    lease = pool.submit(10).result()

    async def waits():
        waiting = asyncio.wrap_future(pool.submit(5))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(waiting, 0.01)

    asyncio.run(waits())
    assert pool.state.waiting == ()
    lease.release()


def test_closing_turns_away_those_that_wait_and_leaves_the_others():
    pool = AdmissionPool(10)
    lease, waits = pool.submit(10).result(), pool.submit(1)
    pool.close()
    pool.close()
    with pytest.raises(AdmissionError, match="closed"):
        waits.result(timeout=5)
    with pytest.raises(AdmissionError, match="closed"):
        pool.submit(1)
    assert pool.state.used == 10
    lease.release()
    assert pool.state.used == 0


def test_rows_are_admitted_by_what_they_will_take():
    smol = Model.from_config(SMOLLM2)
    pool = AdmissionPool(23_040 * 1024)
    assert pool.submit_row(smol, 100, 400).result().nbytes == 23_040 * 512
    assert pool.submit_row(smol, 100, 400).done()
    assert not pool.submit_row(smol, 1, 1).done()
    assert pool.submit_row(smol, 1, 1, "kv4").cancel()
    with pytest.raises(BudgetError, match="never fit"):
        pool.submit_row(smol, 2000, 1)
    with pytest.raises(GeometryError, match="positions"):
        pool.submit_row(smol, 8000, 1000)
