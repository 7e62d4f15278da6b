"""Tensors of a client's state in files between the messages of a simulation under Flower."""

from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from client_app.state import ClientState, set_place
from fedhur_app import runtime
from tests.running import history, result, resume, run


@pytest.fixture
def context(tmp_path):
    context = Context(1, 7, {}, RecordDict(), {})
    set_place(context, {"states": str(tmp_path)})
    return context


def files(tmp_path: Path) -> dict[str, int]:
    """Files of the only node and when they were written."""
    return {path.name: path.stat().st_mtime_ns for path in (tmp_path / "node-7").iterdir()}


def state() -> ClientState:
    model = {"users": torch.randn(3, 5), "items": torch.randn(7, 5)}
    optimizer = {"adam/items/step": torch.tensor(4.0), "adam/items/exp_avg": torch.randn(7, 5, dtype=torch.float64)}
    labels = {"items": torch.arange(7), "seen": torch.tensor([True, False, True]), "none": torch.zeros(0, 5)}
    return ClientState({"model": model, "optimizer": optimizer, "labels": labels, "empty": {}}, {"client": 3})


def same(first: ClientState, second: ClientState) -> bool:
    assert first.numbers == second.numbers
    assert {name: set(tensors) for name, tensors in first.arrays.items()} == {
        name: set(tensors) for name, tensors in second.arrays.items()
    }
    for name, tensors in first.arrays.items():
        for key, tensor in tensors.items():
            other = second.arrays[name][key]
            assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
            assert torch.equal(tensor, other)
    return True


def test_a_state_comes_back_bit_by_bit_and_the_context_holds_no_tensor(context):
    stored = state()
    stored.to_context(context)
    assert not context.state.array_records
    found = ClientState.from_context(context)
    assert same(stored, found)
    for tensors in found.arrays.values():
        assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors.values() if tensor.numel())


def test_a_node_without_a_state_has_an_empty_one(context):
    assert ClientState.from_context(context) == ClientState()


def test_only_what_was_replaced_is_written(context, tmp_path):
    state().to_context(context)
    before = files(tmp_path)
    second = ClientState.from_context(context)
    second.arrays["best"] = dict(second.arrays["model"])  # the same tensors under another name
    second.numbers["best_round"] = 1
    second.to_context(context)
    assert files(tmp_path) == before
    third = ClientState.from_context(context)
    assert same(second, third)
    third.arrays["model"] = third.arrays["model"] | {"items": torch.ones(2, 2)}
    third.to_context(context)
    written = set(files(tmp_path)) - set(before)
    assert sum((tmp_path / "node-7" / name).stat().st_size for name in written) == 4 * 4
    assert same(third, ClientState.from_context(context))


def test_a_tensor_that_two_records_share_is_written_once(context, tmp_path):
    items = torch.randn(100, 10)
    ClientState({"model": {"items": items}, "best": {"items": items}}).to_context(context)
    assert [path.stat().st_size for path in (tmp_path / "node-7").iterdir()] == [4000]


def test_the_state_before_stays_readable_for_one_message(context, tmp_path):
    """A worker may die before its answer arrives: the server's process then still holds the context from before."""
    state().to_context(context)
    first = RecordDict(dict(context.state))
    kept = ClientState.from_context(context)
    for number in range(3):
        changed = ClientState.from_context(context)
        changed.arrays = {"model": {"items": torch.full((2,), float(number))}}
        changed.to_context(context)
        if number == 0:
            before = Context(1, 7, {}, first, {})
            assert same(kept, ClientState.from_context(before))
    assert len(files(tmp_path)) == 2
    assert ClientState.from_context(context).arrays["model"]["items"].tolist() == [2.0, 2.0]


def test_writing_to_a_mapped_tensor_changes_no_file(context):
    state().to_context(context)
    found = ClientState.from_context(context)
    expected = found.arrays["model"]["items"].clone()
    found.arrays["model"]["items"].zero_()
    assert torch.equal(ClientState.from_context(context).arrays["model"]["items"], expected)


def test_a_stage_that_fails_while_writing_leaves_the_state(context, monkeypatch):
    state().to_context(context)
    expected = ClientState.from_context(context)
    changed = expected.copy()
    changed.arrays["model"] = {"items": torch.ones(4)}
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        changed.to_context(context)
    monkeypatch.undo()
    assert same(expected, ClientState.from_context(context))


def test_non_contiguous_tensors_are_written_as_they_look(context):
    table = torch.from_numpy(np.arange(12.0).reshape(3, 4)).T
    ClientState({"model": {"items": table}}).to_context(context)
    assert torch.equal(ClientState.from_context(context).arrays["model"]["items"], table)


@pytest.mark.parametrize("strategy", ["fedhur", "fedca", "gpfedrec"])
def test_a_run_with_states_in_files_has_the_same_numbers_and_leaves_none_behind(strategy, tmp_path, monkeypatch):
    options = "rounds=3 min_rounds=3"
    run(tmp_path / "live", strategy, options)
    monkeypatch.setattr(runtime, "InProcessContext", Context)  # as Flower's simulation has them
    seen = []

    def kill(message, client):
        seen.append((tmp_path / "files" / "states").is_dir())
        if message.metadata.group_id == "round-3":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "files", strategy, options, kill)
    assert seen[-1]
    assert not (tmp_path / "files" / "states").exists()
    resume(tmp_path / "files")
    assert not (tmp_path / "files" / "states").exists()
    assert history(tmp_path / "files") == history(tmp_path / "live")
    assert result(tmp_path / "files")["test"] == result(tmp_path / "live")["test"]
