"""What ranks say of a hang, from the words of all of them."""

from __future__ import annotations

import threading
import time

import torch.distributed as dist

from smp.training.faults.hang import Hang, Word, describe, word_of_thread

WAITS = Word("a", "all_reduce of Trainer._counts", "all_reduce (distributed_c10d.py:1)", "  stack of a waiting rank\n")
SLEEPS = Word("b", "", "hang (x.py:3)", '  File "x.py", line 3, in hang\n')


def test_who_has_not_come_is_named_with_its_stack() -> None:
    text = describe({0: WAITS, 1: WAITS, 2: SLEEPS, 3: WAITS}, 4)
    assert text.splitlines() == [
        "hang: ranks 0-1, 3 are in all_reduce of Trainer._counts",
        "hang: rank 2 on b has not arrived: it is in hang (x.py:3); its stack:",
        '  File "x.py", line 3, in hang',
    ]


def test_ranks_without_a_word_and_ranks_in_another_collective() -> None:
    other = Word("c", "barrier of save", "barrier (distributed_c10d.py:9)", "  stack\n")
    text = describe({0: WAITS, 1: WAITS, 2: other}, 4)
    assert "rank 2 on c has not arrived: it is in barrier of save, another one" in text
    assert text.endswith("hang: rank 3 is silent: stopped, gone, or in code that holds the interpreter")
    assert describe({0: WAITS, 1: WAITS}, 2).endswith("a link between them is cut, or a device has not finished")
    assert describe({0: SLEEPS}, 1).startswith("hang: no rank is in a collective\nhang: rank 0 on b has not arrived")


def test_the_lowest_rank_that_is_there_speaks() -> None:
    """Rank 0 of 3 has stopped."""
    store, said, since = dist.HashStore(), dict[int, str](), time.time()

    def ask(rank: int) -> None:
        said[rank] = Hang(store, rank, 3, since).report(SLEEPS if rank == 2 else WAITS, 0.5)

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said[2] == "" and "rank 2 on b has not arrived" in said[1] and "hang: rank 0 is silent" in said[1]


def test_words_of_an_earlier_standstill_are_not_read_and_ranks_need_not_have_had_equally_many() -> None:
    """Ranks 0 and 2 of 3 stood still before, rank 1 went on just before it would have left word. Now rank 2 is gone."""
    store, said = dist.HashStore(), dict[int, str]()
    for rank in (2, 0):
        Hang(store, rank, 3, time.time()).report(WAITS, 0.1)
    since = time.time()

    def ask(rank: int) -> None:
        said[rank] = Hang(store, rank, 3, since).report(SLEEPS if rank == 1 else WAITS, 0.5)

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said[1] == "" and "rank 1 on b has not arrived" in said[0]
    assert "\nhang: rank 2 is silent" in said[0]


def test_a_thread_is_in_a_collective_or_elsewhere() -> None:
    def sleeps() -> None:
        time.sleep(5)

    thread = threading.Thread(target=sleeps, daemon=True)
    thread.start()
    time.sleep(0.2)
    assert thread.ident is not None
    word = word_of_thread(thread.ident)
    assert word.collective == "" and ".sleeps (test_hang.py:" in word.function and "time.sleep(5)" in word.stack
