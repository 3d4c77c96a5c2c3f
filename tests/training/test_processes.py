"""Who is who among the ranks, and who does what (`PartialState`; `Accelerator` is one)."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from nblaunch.errors import CollectiveError
from nblaunch.training.accelerator import Accelerator
from nblaunch.training.kinds import DistributedType
from nblaunch.training.processes import PartialState


def test_alone_there_is_one_process():
    state = PartialState(cpu=True)
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert state.device == torch.device("cpu")
    assert state.distributed_type == "NO"
    assert not state.use_distributed
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.is_last_process
    assert not dist.is_initialized()
    state.wait_for_everyone()


def test_every_rank_knows_its_place(launch):
    def place():
        state = Accelerator()
        again = PartialState()
        assert again.process_index == state.process_index
        return (
            state.num_processes,
            state.process_index,
            state.local_process_index,
            state.distributed_type,
            state.use_distributed,
            (state.is_main_process, state.is_local_main_process, state.is_last_process),
            str(state.device),
            dist.get_backend(),
        )

    multi = DistributedType.MULTI_CPU
    assert launch(place, num_processes=3) == [
        (3, 0, 0, multi, True, (True, True, False), "cpu", "gloo"),
        (3, 1, 1, multi, True, (False, False, False), "cpu", "gloo"),
        (3, 2, 2, multi, True, (False, False, True), "cpu", "gloo"),
    ]


def test_a_group_that_the_user_made_is_used(launch):
    def use():
        dist.init_process_group("gloo")
        mine = dist.group.WORLD
        state = PartialState()
        state.wait_for_everyone()
        return dist.group.WORLD is mine, state.num_processes

    assert launch(use) == [(True, 2)] * 2


def test_decorators_choose_who_runs(launch):
    def choose():
        state = Accelerator()

        @state.on_main_process
        def main():
            return "main"

        @state.on_local_main_process()
        def local_main():
            return "local main"

        @state.on_last_process
        def last():
            return "last"

        @state.on_process(process_index=1)
        def second(word):
            return word

        @state.on_local_process(local_process_index=0)
        def first():
            return "first"

        return main(), local_main(), last(), second("second"), first()

    assert launch(choose) == [("main", "local main", None, None, "first"), (None, None, "last", "second", None)]


def test_on_process_needs_a_number():
    with pytest.raises(ValueError, match="process_index="):
        PartialState().on_process(lambda: None)


def test_main_process_first_and_its_failure(launch, tmp_path):
    marker = tmp_path / "cache"

    def first():
        state = Accelerator()
        with state.main_process_first():
            if state.is_main_process:
                time.sleep(0.2)
                marker.write_text("filled")
            seen = marker.exists()
        with state.local_main_process_first():
            pass
        try:
            with state.main_process_first():
                if state.is_main_process:
                    raise KeyError("no such cache")
        except (KeyError, CollectiveError) as error:
            return seen, type(error).__name__, str(error)

    main, other = launch(first)
    assert main[:2] == (True, "KeyError")
    assert other[:2] == (True, "CollectiveError")
    assert "rank 0: KeyError: 'no such cache'" in other[2]


def test_print_is_once_per_machine(launch, capfd):
    launch(lambda: Accelerator().print("hello", flush=True))
    assert capfd.readouterr().out.count("hello") == 1


def test_the_trigger_reaches_all_once(launch):
    def trigger():
        state = Accelerator()
        before = state.check_trigger()
        if state.process_index == 1:
            state.set_trigger()
        return before, state.check_trigger(), state.check_trigger()

    assert launch(trigger) == [(False, True, False)] * 2


def _split(inputs, padding=False):
    with PartialState().split_between_processes(inputs, apply_padding=padding) as part:
        return part


def test_split_between_processes(launch):
    given = {"a": [1, 2, 3], "b": (4, 5, 6)}

    def split():
        parts = (
            _split([1, 2, 3, 4, 5]),
            _split((1, 2, 3, 4)),
            _split(torch.arange(5)).tolist(),
            _split(given),
            _split([1]),
            _split([]),
        )
        assert given == {"a": [1, 2, 3], "b": (4, 5, 6)}
        return parts

    assert launch(split, num_processes=3) == [
        ([1, 2], (1, 2), [0, 1], {"a": [1], "b": (4,)}, [1], []),
        ([3, 4], (3,), [2, 3], {"a": [2], "b": (5,)}, [], []),
        ([5], (4,), [4], {"a": [3], "b": (6,)}, [], []),
    ]


def test_split_padding_repeats_the_last_element(launch):
    def split():
        return (
            _split([1, 2, 3, 4], padding=True),
            _split((1, 2, 3, 4), padding=True),
            _split(torch.arange(1, 5), padding=True).tolist(),
            _split({"a": [1, 2, 3, 4]}, padding=True),
        )

    assert launch(split, num_processes=3) == [
        ([1, 2], (1, 2), [1, 2], {"a": [1, 2]}),
        ([3, 4], (3, 4), [3, 4], {"a": [3, 4]}),
        ([4, 4], (4, 4), [4, 4], {"a": [4, 4]}),
    ]


def test_split_refuses_what_it_cannot_split(launch):
    def refuse():
        for wrong in ({"a": [1], "b": [1, 2]}, {1, 2}):
            with pytest.raises((ValueError, TypeError)) as caught:
                _split(wrong)
            yield type(caught.value).__name__

    assert launch(lambda: list(refuse())) == [["ValueError", "TypeError"]] * 2


def test_split_of_a_datasets_dataset(launch):
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"x": [1, 2, 3]})
    assert launch(lambda: _split(whole)["x"][:]) == [[1, 2], [3]]


def test_a_second_accelerator_shares_the_group_and_may_not_contradict(launch):
    def twice():
        first = Accelerator(mixed_precision="bf16")
        second = Accelerator()
        assert second.mixed_precision == first.mixed_precision
        with pytest.raises(ValueError, match="mixed_precision='no' contradicts"):
            Accelerator(mixed_precision="no")
        return True

    assert launch(twice) == [True, True]


def test_a_second_accelerator_knows_the_loaders_of_the_first(launch):
    """As in a function for evaluation that makes an Accelerator of its own."""

    def evaluate():
        loader = Accelerator().prepare(DataLoader(torch.arange(5), batch_size=2))
        second = Accelerator()
        return [x for batch in loader for x in second.gather_for_metrics(batch).tolist()]

    assert launch(evaluate) == [[0, 1, 2, 3, 4]] * 2
