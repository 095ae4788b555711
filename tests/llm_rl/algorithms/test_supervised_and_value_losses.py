"""Value, SFT and DPO losses against plain formulas."""

from __future__ import annotations

import math

import pytest
import torch

from llm_rl.algorithms.dpo_loss import dpo_loss
from llm_rl.algorithms.reduction import masked_sum, token_weights
from llm_rl.algorithms.segments import Segments
from llm_rl.algorithms.sft_loss import mask_through_eos, sft_loss
from llm_rl.algorithms.value_loss import value_loss

SPOILS = [float("nan"), float("inf"), -float("inf"), 1e30]


@pytest.mark.parametrize("clip", [0.2, 1.0, 0.0, None])
def test_value_loss(ragged, clip):
    values, old, returns = ragged.randn(grad=True), ragged.randn(), ragged.randn()
    got = value_loss(values, old, returns, ragged.mask, value_clip=clip)
    for t in range(len(values)):
        v, o, r, m = (x[t].item() for x in (values, old, returns, ragged.mask))
        plain, bounded = (v - r) ** 2, -1.0
        if clip is not None:
            bounded = (o + max(-clip, min(clip, v - o)) - r) ** 2
        assert got.loss[t].item() == pytest.approx(m * max(plain, bounded))
        assert got.clipped[t].item() == m * (bounded > plain)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, ragged.mask, value_clip=clip).loss, (values,))


def test_value_loss_gradient_stops_where_clipped():
    values = torch.tensor([2.0, 0.1], requires_grad=True)
    value_loss(values, torch.zeros(2), torch.tensor([-1.0, 1.0]), torch.ones(2), value_clip=0.2).loss.sum().backward()
    # 2.0 is far from old and on the wrong side: (2+1)² > (0.2+1)², the plain branch pulls it back.
    assert values.grad.tolist() == pytest.approx([6.0, -1.8])
    values = torch.tensor([0.9], requires_grad=True)
    value_loss(values, torch.zeros(1), torch.ones(1), torch.ones(1), value_clip=0.2).loss.sum().backward()
    assert values.grad.item() == 0.0  # moved far enough already


@pytest.mark.parametrize("micro_batch", [1, 2, 8])
@pytest.mark.parametrize("kind", ["critic", "distillation"])
def test_micro_batch_size_does_not_change_the_gradient(micro_batch, kind):
    torch.manual_seed(0)
    lengths = [5, 1, 9, 3, 7, 2, 4, 6]
    n = sum(lengths)
    model = torch.nn.Linear(4, 1).double()
    x, target, old, mask = torch.randn(n, 4).double(), torch.randn(n).double(), torch.randn(n).double(), torch.ones(n)
    mask[::3] = 0

    def gradient(size):
        model.zero_grad()
        for row in range(0, len(lengths), size):
            here = slice(sum(lengths[:row]), sum(lengths[: row + size]))
            out = model(x[here]).squeeze(1)
            if kind == "critic":
                loss = value_loss(out, old[here], target[here], mask[here]).loss
            else:
                loss = sft_loss(torch.nn.functional.logsigmoid(out), mask[here])
            weights = token_weights(
                mask[here],
                Segments.of(lengths[row : row + size]),
                per_token=False,
                global_num_samples=8,
                global_num_tokens=int(mask.sum()),
                dtype=torch.float64,
            )
            masked_sum(loss, weights).backward()
        return model.weight.grad.clone()

    torch.testing.assert_close(gradient(micro_batch), gradient(len(lengths)), rtol=1e-12, atol=1e-15)


def test_sft_is_the_negative_mean_log_prob_over_the_mask(ragged):
    log_probs = ragged.log_probs(grad=True)
    n = int(ragged.mask.sum())
    weights = token_weights(
        ragged.mask,
        ragged.segments,
        per_token=True,
        global_num_samples=6,
        global_num_tokens=n,
        dtype=torch.float64,
    )
    loss = masked_sum(sft_loss(log_probs, ragged.mask), weights)
    torch.testing.assert_close(loss, -log_probs[ragged.mask == 1].mean())
    (grad,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(grad, -ragged.mask / n, check_dtype=False)


def test_mask_through_eos():
    eos, other, pad = 2, 7, 0
    rows = [
        ([5, 6, 2, 0, 0], [1, 1, 1, 0, 0]),  # through EOS, padding masked
        ([5, 6, 4, 0, 0], [1, 1, 1, 0, 0]),  # no EOS: padding masked
        ([], []),
        ([2], [1]),
        ([5, 7, 5, 2], [1, 1, 0, 0]),  # another end id
        ([5, 0, 5, 2, 2], [1, 1, 1, 1, 0]),  # a pad id inside the response is a token
        ([0, 0], [0, 0]),
    ]
    tokens = torch.tensor([t for row, _ in rows for t in row])
    segments = Segments.of([len(row) for row, _ in rows])
    got = mask_through_eos(tokens, segments, [eos, other], pad)
    assert got.tolist() == [m for _, mask in rows for m in mask]


def test_mask_when_pad_and_eos_share_an_id():
    got = mask_through_eos(torch.tensor([5, 6, 2, 2, 2, 5, 2]), Segments.of([5, 2]), [2], 2)
    assert got.tolist() == [1, 1, 1, 0, 0, 1, 1]


def test_mask_of_nothing():
    for lengths in ([], [0, 0]):
        assert mask_through_eos(torch.zeros(0, dtype=torch.int64), Segments.of(lengths), [2], 0).shape == (0,)


@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo(ragged, beta, smoothing):
    log_probs, ref = ragged.log_probs(grad=True), ragged.log_probs()
    got = dpo_loss(log_probs, ref, ragged.mask, ragged.segments, beta=beta, label_smoothing=smoothing)
    rows = zip(*(ragged.samples(x) for x in (log_probs, ref, ragged.mask)), strict=True)
    h = [beta * ((p - r) * m).sum() for p, r, m in rows]
    for i in range(3):
        margin = (h[2 * i] - h[2 * i + 1]).item()
        sigmoid = 1 / (1 + math.exp(-margin))
        expected = -(1 - smoothing) * math.log(sigmoid) - smoothing * math.log(1 - sigmoid)
        assert got.loss[i].item() == pytest.approx(expected)
        assert got.chosen_rewards[i].item() == pytest.approx(h[2 * i].item())
        assert got.rejected_rewards[i].item() == pytest.approx(h[2 * i + 1].item())
    f = lambda p: dpo_loss(p, ref, ragged.mask, ragged.segments, beta=beta, label_smoothing=smoothing).loss  # noqa: E731
    assert torch.autograd.gradcheck(f, (log_probs,))


def test_dpo_at_the_reference_is_log_2_and_prefers_the_chosen(ragged):
    ref = ragged.log_probs()
    log_probs = ref.clone().requires_grad_()
    got = dpo_loss(log_probs, ref, ragged.mask, ragged.segments)
    torch.testing.assert_close(got.loss, torch.full((3,), math.log(2), dtype=torch.float64))
    (grad,) = torch.autograd.grad(got.loss.sum(), log_probs)
    sign = ragged.segments.expand(torch.tensor([-1.0, 1.0] * 3)) * ragged.mask
    torch.testing.assert_close(grad, sign.double() * 0.05)


@pytest.mark.parametrize("spoil", SPOILS)
def test_masked_tokens_change_nothing(ragged, spoil):
    clean = (ragged.log_probs(grad=True), ragged.log_probs(), ragged.randn())
    dirty = tuple(ragged.spoiled(x, spoil) for x in clean)
    results = []
    for p, ref, returns in (clean, dirty):
        losses = [
            value_loss(p, ref, returns, ragged.mask).loss,
            sft_loss(p, ragged.mask),
            dpo_loss(p, ref, ragged.mask, ragged.segments).loss,
        ]
        results.append([*losses, torch.autograd.grad(sum(x.sum() for x in losses), p)[0]])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()


def test_refusals(ragged):
    x = ragged.randn()
    with pytest.raises(ValueError, match="not be negative"):
        value_loss(x, x, x, ragged.mask, value_clip=-1)
    with pytest.raises(ValueError, match="in pairs"):
        dpo_loss(torch.zeros(3), torch.zeros(3), torch.ones(3), Segments.of([3]))
    with pytest.raises(ValueError, match="beta"):
        dpo_loss(x, x, ragged.mask, ragged.segments, beta=0)
    with pytest.raises(ValueError, match="label_smoothing"):
        dpo_loss(x, x, ragged.mask, ragged.segments, label_smoothing=0.5)
