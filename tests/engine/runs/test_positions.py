"""Positions in the data that another number of processes takes, or refuses with the rows that are at stake."""

import grain
import pytest
from grain.experimental import ElasticIterator

from eformer._engine.runs.positions import position_of, set_position

AHEAD = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
ROWS = grain.MapDataset.range(64).seed(7).shuffle()


def shard(number, count, **more):
    return grain.sharding.ShardOptions(shard_index=number, shard_count=count, **more)


def elastic(number, count):
    return iter(ElasticIterator(ROWS, 8, shard(number, count), read_options=AHEAD))


def sliced(number, count):
    return iter(ROWS[number::count].to_iter_dataset(AHEAD))


def loader(number, count, **more):
    sampler = grain.samplers.IndexSampler(50, shard(number, count), shuffle=True, seed=7)
    source = grain.sources.RangeDataSource(0, 50, 1)
    return iter(grain.DataLoader(data_source=source, sampler=sampler, read_options=AHEAD, **more))


class Sharded:
    """Divides shards of examples by itself: its position has the place in each of its shards."""

    def __init__(self, number, count, shards=6):
        self.places = dict.fromkeys(range(number, shards, count), 0)

    def __next__(self):
        shard = min(self.places, key=lambda shard: (self.places[shard], shard))
        self.places[shard] += 1
        return shard, self.places[shard]

    def get_state(self):
        return {str(shard): place for shard, place in self.places.items()}

    def set_state(self, state):
        self.places = {shard: state[str(shard)] for shard in self.places}

    def set_states(self, states):
        self.set_state({shard: place for state in states for shard, place in state.items()})


class Torch:
    """The same, by the names of PyTorch."""

    def __init__(self, number, count):
        self.inner = Sharded(number, count)
        self.state_dict, self.load_state_dict = self.inner.get_state, self.inner.set_state
        self.load_state_dicts = self.inner.set_states

    def __next__(self):
        return next(self.inner)


def job(kind, count):
    return [kind(number, count) for number in range(count)]


def take(iterators, times=1):
    """Return the rows that the processes of a job take next, in no order."""
    batches = [next(data) for data in iterators for _ in range(times)]
    return sorted(row for batch in batches for row in (batch if getattr(batch, "shape", ()) else [batch]))


def recorded(iterators):
    return {"data": [position_of(data).decode() for data in iterators]}


def put(iterators, facts):
    for number, data in enumerate(iterators):
        set_position(data, facts, "step 5 of run", number=number, count=len(iterators))


def moved(kind, before, after, times=3):
    """Take rows in one job; return the next job at its position."""
    first = job(kind, before)
    take(first, times)
    then = job(kind, after)
    put(then, recorded(first))
    return then


def refusal(kind, before, after, times=3):
    with pytest.raises(ValueError, match=f"{before} processes in the data, this job has {after}") as raised:
        moved(kind, before, after, times)
    return str(raised.value)


@pytest.mark.parametrize("after", [1, 2, 8])
def test_an_elastic_iterator_goes_on_in_any_number_of_processes(after):
    whole = job(elastic, 1)
    take(whole, 3)
    then = moved(elastic, 4, after)
    for _ in range(5):
        assert take(then) == take(whole)  # the rows of each batch of the whole job, to the last
    with pytest.raises(StopIteration):
        take(then)


@pytest.mark.parametrize("kind", [Sharded, Torch])
@pytest.mark.parametrize("after", [1, 2, 6])
def test_a_loader_may_divide_the_positions_itself(kind, after):
    then = moved(kind, 3, after, times=4)
    assert take(then, 6 // after) == [(shard, 3) for shard in range(6)]


def test_elastic_iterators_at_different_examples_are_refused():
    first = job(elastic, 2)
    take(first)
    next(first[1])
    with pytest.raises(
        ValueError, match=r"from example 8 would repeat examples up to 15 .* from 16 would lose"
    ):
        put(job(elastic, 4), recorded(first))


def test_an_error_says_which_elements_fewer_processes_would_repeat():
    assert "have had 3 each of the elements of their parts, 12 in all" in refusal(sliced, 4, 2)
    assert "2 processes at the same positions would repeat the elements 6 to 11." in refusal(sliced, 4, 2)


def test_an_error_says_which_elements_more_processes_would_lose():
    assert "4 processes at the same positions would lose the elements 6 to 11." in refusal(sliced, 2, 4)


def test_the_rows_of_an_error_are_the_rows_of_the_iterator():
    had = take(job(sliced, 4), 3)
    assert sorted(ROWS[index] for index in range(12)) == had
    again = take([data for data in job(sliced, 2) if [next(data) for _ in range(3)]], 3)
    assert sorted(set(again) & set(had)) == sorted(ROWS[index] for index in range(6, 12))


def test_an_error_counts_the_examples_of_a_loader():
    message = "have had 3 each of the elements of their parts, 6 in all; the parts of 3 processes are others"
    assert message in refusal(loader, 2, 3)


def test_an_error_says_what_can_be_done():
    message = refusal(sliced, 4, 2)
    assert "Read the data by grain.experimental.ElasticIterator" in message
    assert "give the PrefetchDatasetIterator a method set_states(positions)" in message
    assert message.endswith("or resume without data= and place the iterators yourself")


def test_an_error_shows_a_position_that_says_nothing_of_rows():
    class Opaque(Sharded):
        set_states = None

    assert "They do not say which rows the processes have had" in refusal(Opaque, 2, 1)
    assert "the first position is {'0': 1, '2': 1, '4': 1}" in refusal(Opaque, 2, 1)


def test_equal_positions_alone_are_no_reason_to_take_them():
    first = job(sliced, 2)
    assert len({*recorded(first)["data"]}) == 1
    with pytest.raises(ValueError, match="positions of 2 processes"):
        put(job(sliced, 1), recorded(first))


@pytest.mark.parametrize("count", [1, 2])
def test_a_process_without_a_position_is_named(count):
    facts = recorded(job(elastic, 2))
    facts["data"][1] = ""
    with pytest.raises(ValueError, match=r"step 5 of run was saved without data= in process 1"):
        put(job(elastic, count), facts)
