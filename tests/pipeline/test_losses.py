"""The loss, term by term on tensors small enough to compute by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.losses import LengthLoss

EDGES = (0, 100, 200, 300)
MIDDLES = (49.5, 149.5, 249.5)


def loss_of(logits: Any, labels: list[tuple[int, int]], **settings: float) -> torch.Tensor:
    """Granularity 100, everything off that is not given; labels are (tokens, 1 if censored)."""
    plain = {"smoothing_tokens": 0.0, "expected_value_weight": 0.0}
    loss = LengthLoss(EDGES, 100, **{**plain, **settings})
    return loss({"logits": torch.as_tensor(logits, dtype=torch.float32)}, torch.tensor(labels))


def term(logits: Any, labels: list[tuple[int, int]], **settings: float) -> float:
    """What a term adds to plain cross-entropy."""
    return (loss_of(logits, labels, **settings) - loss_of(logits, labels)).item()


def log_of(*shares: float) -> list[float]:
    """Logits whose softmax is `shares`; 1e-9 stands for none."""
    return [math.log(max(share, 1e-9)) for share in shares]


def test_plain_loss_is_cross_entropy_of_the_bucket() -> None:
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    lengths = [(0, 0), (99, 0), (100, 0), (299, 0), (5000, 0)]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 0, 1, 2, 2]))
    assert loss_of(logits, lengths).item() == pytest.approx(expected.item())


@pytest.mark.parametrize(("cut", "share"), [(0, 1.0), (99, 1.0), (100, 0.5), (199, 0.5), (200, 0.1), (9999, 0.1)])
def test_a_censored_reply_costs_the_mass_from_its_bucket_on(cut: int, share: float) -> None:
    assert loss_of([log_of(0.5, 0.4, 0.1)], [(cut, 1)]).item() == pytest.approx(-math.log(share), abs=1e-6)


def test_a_batch_is_the_mean_of_both_kinds() -> None:
    logits = [log_of(0.5, 0.4, 0.1), log_of(0.2, 0.2, 0.6)]
    mixed = loss_of(logits, [(150, 0), (150, 1)]).item()
    assert mixed == pytest.approx((-math.log(0.4) - math.log(0.8)) / 2, abs=1e-6)


def test_smoothing_is_cross_entropy_with_a_normal_around_the_length() -> None:
    weights = [math.exp(-0.5 * ((middle - 40) / 80) ** 2) for middle in MIDDLES]
    shares = (0.5, 0.3, 0.2)
    expected = -sum(w / sum(weights) * math.log(share) for w, share in zip(weights, shares, strict=True))
    assert loss_of([log_of(*shares)], [(40, 0)], smoothing_tokens=80).item() == pytest.approx(expected, rel=1e-5)


def test_smoothing_prefers_a_near_bucket_to_a_far_one() -> None:
    near, far = (loss_of([logits], [(40, 0)], smoothing_tokens=100) for logits in ([0.0, 5.0, 0.0], [0.0, 0.0, 5.0]))
    assert near < far
    plain = [loss_of([logits], [(40, 0)]) for logits in ([0.0, 5.0, 0.0], [0.0, 0.0, 5.0])]
    assert plain[0] == plain[1]


def test_smoothing_leaves_censored_rows_alone() -> None:
    assert term([log_of(0.5, 0.4, 0.1)], [(150, 1)], smoothing_tokens=80) == 0.0


def test_expected_length_joins_in_units_of_the_granularity() -> None:
    uniform = [[0.0, 0.0, 0.0]]  # mean 149.5
    assert term(uniform, [(49, 0)], expected_value_weight=2.0) == pytest.approx(2.0 * 100.5 / 100)
    assert term(uniform, [(190, 0)], expected_value_weight=2.0) == pytest.approx(2.0 * 40.5 / 100)
    # lengths beyond the last edge count as the longest that there is
    assert term(uniform, [(9000, 0)], expected_value_weight=1.0) == pytest.approx(149.5 / 100)


def test_a_longer_forecast_than_the_cut_is_no_error() -> None:
    uniform = [[0.0, 0.0, 0.0]]
    assert term(uniform, [(49, 1)], expected_value_weight=2.0) == pytest.approx(0.0, abs=1e-7)
    assert term(uniform, [(190, 1)], expected_value_weight=2.0) == pytest.approx(2.0 * 40.5 / 100)


def test_weights_scale_their_terms_and_all_add_up() -> None:
    logits, labels = [log_of(0.5, 0.4, 0.1), log_of(0.2, 0.2, 0.6)], [(250, 0), (50, 0)]
    together = loss_of(logits, labels, smoothing_tokens=60, expected_value_weight=0.5).item()
    smooth = loss_of(logits, labels, smoothing_tokens=60).item()
    value = term(logits, labels, expected_value_weight=1.0)
    assert together == pytest.approx(smooth + 0.5 * value, rel=1e-5)
    assert value > 0.1


ALL_ON = {"smoothing_tokens": 50.0, "expected_value_weight": 0.5}


@given(
    rows=st.lists(
        st.tuples(
            st.tuples(*[st.floats(-200, 200, width=32)] * 3), st.tuples(st.integers(0, 5000), st.integers(0, 1))
        ),
        min_size=1, max_size=5,
    ),
    settings=st.sampled_from([{}, ALL_ON]),
)  # fmt: skip
def test_loss_and_gradients_are_finite(rows: list[Any], settings: dict[str, float]) -> None:
    logits = torch.tensor([row[0] for row in rows], requires_grad=True)
    loss = loss_of(logits, [row[1] for row in rows], **settings)
    loss.backward()
    assert torch.isfinite(loss) and loss >= -1e-6
    assert logits.grad is not None and torch.isfinite(logits.grad).all()


def test_gradients_point_the_right_way() -> None:
    """A censored row pulls mass past its cut and is content with any place there."""
    logits = torch.zeros((1, 3), requires_grad=True)
    loss_of(logits, [(150, 1)]).backward()
    assert logits.grad is not None
    below, there, beyond = (-logits.grad[0]).tolist()
    assert below < 0 < there
    assert there == pytest.approx(beyond)


def test_half_precision_logits_are_summed_in_single() -> None:
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).bfloat16()
    labels = [(50, 0), (150, 0), (250, 1), (20, 0)]
    loss = LengthLoss(EDGES, 100, **ALL_ON)({"logits": logits}, torch.tensor(labels))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(loss_of(logits.float(), labels, **ALL_ON).item())
