import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_plugin.core.chunk import fixed, step_token_budget
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.order import ORDER_POLICIES, QueuedPrompt, fcfs, left_of_current_round, ljf, next_round, sjf

QUEUE = [
    QueuedPrompt("c", 3.0, 50),
    QueuedPrompt("a", 1.0, 50),
    QueuedPrompt("b", 2.0, 10),
    QueuedPrompt("d", 4.0, 90),
]


def ids(prompts):
    return [prompt.id for prompt in prompts]


@pytest.mark.parametrize(("policy", "expected"), [(fcfs, "abcd"), (sjf, "bacd"), (ljf, "dacb")])
def test_order_inside_a_round(policy, expected):
    assert ids(policy(QUEUE)) == list(expected)


@pytest.mark.parametrize("policy", ORDER_POLICIES.values())
def test_prompts_equal_in_all_keep_their_place_in_the_queue(policy):
    queue = [QueuedPrompt(id, 1.0, 10) for id in ("10", "9", "11")]
    assert ids(policy(queue)) == ["10", "9", "11"]


def test_a_round_takes_the_oldest_and_only_then_orders_them():
    assert next_round(QUEUE, [], sjf, 3) == ["b", "a", "c"]
    assert next_round(QUEUE, [], ljf, 3) == ["a", "c", "b"]


def test_a_round_never_waits_to_fill():
    assert next_round(QUEUE[:1], [], sjf, 16) == ["c"]
    assert next_round([], ["gone"], sjf, 16) == []


def test_a_later_arrival_joins_the_next_round_however_short_it_is():
    late = QueuedPrompt("late", 9.0, 1)
    assert next_round([*QUEUE, late], ["b", "a", "c"], sjf, 3) == ["b", "a", "c"]
    assert next_round([QUEUE[0], QUEUE[3], late], ["b", "a", "c"], sjf, 3) == ["c"]
    assert next_round([QUEUE[3], late], ["b", "a", "c"], sjf, 3) == ["late", "d"]


@pytest.mark.parametrize("sched_batch", [0, -1])
def test_an_impossible_batch_is_refused(sched_batch):
    with pytest.raises(ConfigurationError, match=f"order.sched_batch={sched_batch}"):
        next_round(QUEUE, [], sjf, sched_batch)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(1, 1000)), max_size=30),
    st.sampled_from(sorted(ORDER_POLICIES)),
    st.integers(1, 8),
)
def test_rounds_serve_everybody_once_and_bound_overtaking(arrivals_and_tokens, name, sched_batch):
    queue = [QueuedPrompt(str(i), arrival, n) for i, (arrival, n) in enumerate(arrivals_and_tokens)]
    left, served, current = list(queue), [], []
    while left:
        current = next_round(left, current, ORDER_POLICIES[name], sched_batch)
        assert 1 <= len(current) <= sched_batch
        served.append(current[0])
        left = [prompt for prompt in left if prompt.id != current[0]]
    assert sorted(served) == sorted(prompt.id for prompt in queue)
    place = {id: i for i, id in enumerate(ids(fcfs(queue)))}
    for position, id in enumerate(served):
        assert sum(place[earlier] > place[id] for earlier in served[:position]) <= sched_batch - 1


@pytest.mark.parametrize(
    ("left", "chunk", "expected"),
    [
        ([], 512, []),
        ([18], 512, [18]),
        ([500, 500], 512, [500, 12]),
        ([488, 1000], 512, [488, 24]),
        ([1000], 512, [512]),
        ([100, 100, 312, 5], 512, [100, 100, 312, 0]),
        ([0, 5], 4, [0, 4]),
    ],
)
def test_a_chunk_fills_in_order_and_slices(left, chunk, expected):
    assert fixed(left, chunk) == expected


@given(st.lists(st.integers(0, 300), max_size=12), st.integers(1, 512))
def test_chunks_conserve_tokens(prompts, chunk):
    left, num_steps = list(prompts), 0
    while sum(left):
        scheduled = fixed(left, chunk)
        assert sum(scheduled) == min(chunk, sum(left))
        assert all(0 <= s <= n for s, n in zip(scheduled, left, strict=True))
        unfinished = [i for i, (s, n) in enumerate(zip(scheduled, left, strict=True)) if s < n]
        assert all(scheduled[i] == 0 for i in range(unfinished[0] + 1, len(left))) if unfinished else True
        left = [n - s for s, n in zip(scheduled, left, strict=True)]
        num_steps += 1
    assert num_steps == -(-sum(prompts) // chunk)


@pytest.mark.parametrize(
    ("decodes", "chunk", "limit", "expected"),
    [(0, 512, 2048, 512), (7, 512, 2048, 519), (7, 512, 515, 515), (600, 512, 512, 512)],
)
def test_step_token_budget(decodes, chunk, limit, expected):
    assert step_token_budget(decodes, chunk, limit) == expected


def test_an_impossible_chunk_is_refused():
    with pytest.raises(ConfigurationError, match=r"chunk\.chunk_tokens=0"):
        fixed([1], 0)
    with pytest.raises(ConfigurationError, match=r"chunk\.chunk_tokens=-1"):
        step_token_budget(0, -1, 100)
    with pytest.raises(ValueError, match="-3 tokens left"):
        fixed([-3], 10)


@pytest.mark.parametrize(
    ("rounds", "waiting", "left"),
    [
        ([], "ab", ""),
        ([["a", "b"]], "ab", "ab"),  # offered and not begun: it stays the current one
        ([["a", "b"], ["c", "d"]], "abcde", "ab"),
        ([["a", "b"], ["c", "d"]], "bcde", "b"),
        ([["a", "b"], ["c", "d"]], "de", "d"),  # the second has begun: e joins the next
        ([["a", "b"], ["c", "d"]], "bde", "bd"),  # b was skipped and keeps its place
        ([["a", "b"], ["c", "d"]], "e", ""),
    ],
)
def test_the_current_round_is_the_last_that_has_begun(rounds, waiting, left):
    assert left_of_current_round(rounds, set(waiting)) == list(left)
