"""Shapes, sizes, equations (S4–S9)."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from presage.config import ModelConfig, preset
from presage.model import LSTM, MOTION, RRNN, Model, Perception, layer_norm, loss

KINDS = ("rrnn", "lstm", "plain")


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    torch.manual_seed(0)
    return Model(ModelConfig(prediction=request.param)).eval()


def inputs(batch=2, k=3, horizon=25):
    torch.manual_seed(1)
    return torch.randint(0, 256, (batch, 4, 84, 84), dtype=torch.uint8), torch.randint(
        -1, 2, (batch, k, horizon, 3)
    ).float()


def test_shapes(model):
    frames, controls = inputs()
    h = model.perceive(frames)
    assert h.shape == (2, 100)
    assert model(frames, controls[:, 0]).shape == (2, 25, 2)
    assert model.imagine(h, controls).died.shape == (2, 3)
    assert model.imagine_steps(h, controls).scored.shape == (2, 3, 25)


def test_imagining_agrees_with_the_forward_pass(model):
    """Final step only, every step, and the pass that is trained: the same probabilities (float32 sums, 1e-5)."""
    frames, controls = inputs()
    h = model.perceive(frames)
    last, steps = model.imagine(h, controls), model.imagine_steps(h, controls)
    for k in range(3):
        p = model(frames, controls[:, k]).sigmoid()
        torch.testing.assert_close(steps.died[:, k], p[..., 0], rtol=0, atol=1e-5)
        torch.testing.assert_close(steps.scored[:, k], p[..., 1], rtol=0, atol=1e-5)
        torch.testing.assert_close(last.died[:, k], p[:, -1, 0], rtol=0, atol=1e-5)
        torch.testing.assert_close(last.scored[:, k], p[:, -1, 1], rtol=0, atol=1e-5)


def test_monotone_probabilities_of_death_never_fall(model):
    frames, controls = inputs(k=20)
    h = model.perceive(frames)
    plain, steps, last = (
        model.imagine_steps(h, controls),
        model.imagine_steps(h, controls, monotone=True),
        model.imagine(h, controls, monotone=True),
    )
    assert (plain.died.diff(dim=-1) < 0).any()  # else this shows nothing
    assert (steps.died.diff(dim=-1) >= 0).all()
    assert torch.equal(steps.died[..., -1], plain.died.amax(-1))
    # Planning walks step by step: float32 sums in another order.
    torch.testing.assert_close(last.died, steps.died[..., -1], rtol=0, atol=1e-6)
    torch.testing.assert_close(last.scored, plain.scored[..., -1], rtol=0, atol=1e-6)


def test_a_prediction_depends_on_the_past_controls_only(model):
    frames, controls = inputs(k=1)
    before = model(frames, controls[:, 0])
    controls[:, 0, 10:] *= -1
    after = model(frames, controls[:, 0])
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=0, atol=1e-6)
    assert (before[:, 10:] != after[:, 10:]).any()


def test_parameter_counts():
    counts = Model(preset("paper").model).parameters_by_part()
    assert counts == {"perception": 347_172, "prediction": 102_100, "valuation": 10_302}


def test_units_without_weights_are_counted_in_each_part():
    model = Model(preset("paper").model)
    assert model.asleep() == {"perception": (0, 580), "prediction": (0, 600), "valuation": (0, 102)}
    with torch.no_grad():
        model.prediction.f1.weight[:300] *= 1e-5
        model.perception.stages[0].weight[7] = 0
    assert model.asleep() == {"perception": (1, 580), "prediction": (300, 600), "valuation": (0, 102)}


@pytest.mark.parametrize("sizes", [(100, 500), (100, 250), (64, 300)])
def test_the_three_predictions_have_equal_sizes_within_3_percent(sizes):
    state, hidden = sizes
    counts = {
        kind: Model(ModelConfig(prediction=kind, state_size=state, hidden_size=hidden)).parameters_by_part()[
            "prediction"
        ]
        for kind in KINDS
    }
    assert counts["plain"] == counts["rrnn"]
    assert abs(counts["lstm"] / counts["rrnn"] - 1) < 0.03


def test_the_rrnn_is_the_papers_equations():
    """r = f(LN(h)·x), h' = h + r; f: ReLU, linear, ReLU, linear; no ReLU on the control. Written out, in float64."""
    torch.manual_seed(0)
    for residual, normal in ((True, True), (False, True), (True, False)):  # the last two are ablations
        net = RRNN(6, 9, residual, normal).double()
        h, x = torch.randn(4, 6).double(), torch.randn(4, 3).double()
        norm = (h - h.mean(1, keepdim=True)) / (h.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        inner = torch.cat([(norm if normal else h).clamp(min=0), x], 1) @ net.f1.weight.T + net.f1.bias
        r = inner.clamp(min=0) @ net.f2.weight.T + net.f2.bias
        expected = h + r if residual else r
        torch.testing.assert_close(net(h, x[:, None])[:, 0], expected)
        torch.testing.assert_close(next(net.walk(h, x[:, None])), expected)


def test_an_lstm_step_uses_its_whole_history():
    net = LSTM(8, 32)
    h, controls = torch.randn(2, 8), torch.randn(2, 5, 3)
    torch.testing.assert_close(net(h, controls), torch.stack(list(net.walk(h, controls)), 1))
    late = net(h, controls * torch.tensor([0.0, 1, 1, 1, 1])[:, None])  # another first control
    assert (late[:, -1] != net(h, controls)[:, -1]).any()


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=200))
def test_no_component_of_a_normalised_vector_exceeds_the_root_of_its_length(values):
    """Observation 1 of the paper (S6); LN has no affine part here, so the bound is the plain one."""
    n = len(values)
    assert layer_norm(torch.tensor(values, dtype=torch.float64)).abs().max() <= n**0.5 + 1e-9


def test_the_bound_is_nearly_reached_by_a_single_spike():
    spike = torch.zeros(100, dtype=torch.float64)
    spike[0] = 1e6
    assert layer_norm(spike).max() == pytest.approx(99**0.5, rel=1e-6)


def test_the_loss_is_the_mean_over_unmasked_steps_and_both_outcomes():
    logits = torch.tensor([[[0.0, 2.0], [5.0, -5.0]]])
    died, scored, mask = torch.tensor([[True, False]]), torch.tensor([[False, True]]), torch.tensor([[True, False]])
    expected = (F.softplus(torch.tensor(-0.0)) + F.softplus(torch.tensor(2.0))) / 2
    assert float(loss(logits, died, scored, mask)) == pytest.approx(float(expected))
    logits.requires_grad_()
    loss(logits, died, scored, mask).backward()
    assert logits.grad[0, 1].abs().sum() == 0  # what is masked teaches nothing


def test_motion_is_the_newest_frame_and_the_changes_before_it():
    """A network that is shown changes, and one that is shown frames and takes their differences itself: the same."""
    torch.manual_seed(0)
    shown = Perception((4, 4, 4), 8, motion=True).eval()
    plain = Perception((4, 4, 4), 8).eval()
    plain.load_state_dict(shown.state_dict())
    change = shown.stages[0].weight.detach()  # [C, 4, 8, 8], the last for the newest frame
    weight = torch.cat([torch.zeros_like(change[:, :1]), MOTION * change[:, :3]], 1)  # to the later frame of each pair
    weight[:, :3] -= MOTION * change[:, :3]  # from the earlier
    weight[:, 3] += change[:, 3]
    plain.stages[0].weight.data.copy_(weight)
    frames, _ = inputs()
    torch.testing.assert_close(shown(frames), plain(frames), rtol=1e-4, atol=1e-4)
