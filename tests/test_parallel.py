import ast
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

from fedhur_app.data.store import read_npz, write_npz
from fedhur_app.files import read_arrays, write_arrays
from fedhur_app.finite import all_finite
from fedhur_app.parallel import cores, in_order, threads
from fedhur_app.protocol import array_record, tensors_of
from fedhur_app.relations.filters import mean_gram_eigenpairs
from fedhur_app.relations.weights import shared_basis_filters


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_come_in_the_order_of_the_items(workers: int) -> None:
    def slow_first(number: int) -> int:
        time.sleep(0.01 if number == 0 else 0)
        return number * number

    assert list(in_order(slow_first, range(20), workers)) == [n * n for n in range(20)]


def test_calls_run_side_by_side_and_items_are_taken_only_a_few_ahead() -> None:
    meeting = threading.Barrier(2, timeout=20)  # broken, and so an error, if the calls came one after the other
    taken: list[int] = []

    def items():
        for number in range(12):
            taken.append(number)
            yield number

    results = in_order(lambda number: meeting.wait() >= 0 and number, items(), workers=2)
    assert next(results) == 0
    assert len(taken) <= 4
    assert list(results) == list(range(1, 12))


@pytest.mark.parametrize("workers", [1, 3])
def test_an_exception_comes_in_the_place_of_its_result(workers: int) -> None:
    results = in_order(lambda number: 10 // number, [5, 2, 0, 1], workers)
    assert [next(results), next(results)] == [2, 5]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_threads_limit_every_library_and_are_put_back() -> None:
    before = torch.get_num_threads(), [library["num_threads"] for library in threadpool_info()]
    with threads(3):
        assert torch.get_num_threads() == 1
        assert {library["num_threads"] for library in threadpool_info()} == {1}
        seen = list(in_order(lambda _: (torch.get_num_threads(), threading.current_thread().name), range(6)))
        assert {number for number, _ in seen} == {1}
        assert threading.current_thread().name not in {name for _, name in seen}
        # Nothing is spread twice: in the threads there is one worker.
        inner = in_order(lambda _: list(in_order(lambda _: threading.current_thread().name, range(2))), range(2))
        assert all(len(set(names)) == 1 for names in inner)
    assert (torch.get_num_threads(), [library["num_threads"] for library in threadpool_info()]) == before
    assert cores(4) == 4
    assert cores(0) >= 1


def test_the_number_of_threads_changes_no_bit() -> None:
    generator = torch.Generator().manual_seed(1)
    tables = list(torch.randn(7, 90, 6, generator=generator))
    alphas = list(torch.rand(3, 7, 7, generator=generator))
    labels = torch.arange(90) % 3
    results = []
    for number in (1, 2, 4):
        with threads(number):
            vectors, values = mean_gram_eigenpairs(tables, 8, method="iterative")
            exact = mean_gram_eigenpairs(tables, 8, method="exact")
            filters = shared_basis_filters(vectors, values, tables, alphas, 0.3, labels)
            results.append((vectors, values, *exact, filters))
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_entry_is_found(bad: float) -> None:
    table = torch.arange(12.0).reshape(3, 4)
    assert all_finite(table)
    assert all_finite(table[:0])
    assert all_finite(torch.tensor([3.4e38, -3.4e38]))
    table[1, 2] = bad
    assert not all_finite(table)


@pytest.mark.parametrize("reader", ["message", "checkpoint", "shard"])
def test_headers_of_arrays_are_read_one_at_a_time(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython's counter of depth in `ast.literal_eval`, which numpy calls for each, is one for all threads."""
    tables = {str(number): np.ones((2, 3)) for number in range(3)}
    record = array_record(tables)
    write_arrays(tmp_path / "checkpoint.npz", tables)
    write_npz(tmp_path / "shard.npz", "form 1", tables)
    read = {
        "message": lambda: tensors_of(record),
        "checkpoint": lambda: read_arrays(tmp_path / "checkpoint.npz"),
        "shard": lambda: read_npz(tmp_path / "shard.npz", "form 1"),
    }[reader]
    honest, inside, most = ast.literal_eval, [], []

    def slow(text):
        inside.append(text)
        most.append(len(inside))
        time.sleep(0.002)
        inside.pop()
        return honest(text)

    monkeypatch.setattr(ast, "literal_eval", slow)
    for arrays in in_order(lambda _: read(), range(8), workers=4):
        assert set(arrays) == set(tables)
    assert len(most) >= 8 * 3
    assert max(most) == 1
