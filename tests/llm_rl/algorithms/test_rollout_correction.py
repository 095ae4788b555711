"""TIS, IcePop, MIS and the mismatch metrics against loops over tokens and samples."""

from __future__ import annotations

import math

import pytest
import torch

from llm_rl.algorithms.metrics import merge_metrics
from llm_rl.algorithms.mis import level_log_ratio, mis_correction
from llm_rl.algorithms.mismatch import mismatch_metrics
from llm_rl.algorithms.reduction import masked_sum, token_weights
from llm_rl.algorithms.rollout_correction import icepop, truncated_importance_sampling
from llm_rl.algorithms.segments import Segments

SPOILS = [float("nan"), float("inf"), -float("inf"), 1e30]
BOUNDS = {"tis_lower_bound": 0.5, "tis_upper_bound": 1.5}


def draw(ragged, scale=0.7):
    rollout = ragged.log_probs(2.0)
    return rollout + ragged.randn(scale), rollout


def trainable(ragged, train, rollout):
    """(sample, log-ratio) of each trainable token, as Python numbers."""
    ids, log_ratio = ragged.segments.ids.tolist(), (train - rollout).tolist()
    return [(i, x) for i, x, m in zip(ids, log_ratio, ragged.mask.tolist(), strict=True) if m]


def level_by_hand(tokens, level):
    out = []
    for i, x in tokens:
        same = [y for j, y in tokens if j == i]
        out.append({"token": x, "sequence": sum(same), "geometric": sum(same) / len(same)}[level])
    return out


def chosen(ragged, x):
    return x[ragged.mask == 1].tolist()


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else 0.0


@pytest.mark.parametrize(("clip_low", "clip"), [(0.0, 2.0), (0.5, 1.2)])
def test_tis_and_icepop(ragged, clip_low, clip):
    train, rollout = draw(ragged)
    ratios = [math.exp(x) for _, x in trainable(ragged, train, rollout)]
    tis = truncated_importance_sampling(
        train, rollout, ragged.mask, ragged.segments, tis_clip=clip, tis_clip_low=clip_low
    )
    assert chosen(ragged, tis.weights) == pytest.approx([min(max(r, clip_low), clip) for r in ratios])
    pop = icepop(train, rollout, ragged.mask, ragged.segments, tis_clip=clip, tis_clip_low=clip_low)
    assert chosen(ragged, pop.weights) == pytest.approx([r if clip_low <= r <= clip else 0.0 for r in ratios])
    for correction in (tis, pop):
        assert torch.equal(correction.mask, ragged.mask)
        got = correction.metrics.finish()
        assert got["tis"] == pytest.approx(mean(ratios))
        assert got["tis_abs"] == pytest.approx(mean(abs(r - 1) for r in ratios))
        assert got["tis_clipfrac"] == pytest.approx(mean(not clip_low <= r <= clip for r in ratios))


def test_on_policy_weights_are_exactly_one(ragged):
    train, _ = draw(ragged)
    for level in ("token", "sequence", "geometric"):
        got = mis_correction(train, train, ragged.mask, ragged.segments, tis_level=level, use_rs=True, **BOUNDS)
        assert chosen(ragged, got.weights) == [1.0] * 11
        assert torch.equal(got.mask, ragged.mask)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_mis_weights(ragged, level, mode):
    train, rollout = draw(ragged)
    raw = [math.exp(x) for x in level_by_hand(trainable(ragged, train, rollout), level)]
    low, high = 0.5, 1.5
    expected = {
        "truncate": [min(r, high) for r in raw],
        "clip": [min(max(r, low), high) for r in raw],
        "mask": [r if low <= r <= high else 0.0 for r in raw],
    }[mode]
    got = mis_correction(train, rollout, ragged.mask, ragged.segments, tis_level=level, tis_mode=mode, **BOUNDS)
    assert chosen(ragged, got.weights) == pytest.approx(expected)
    assert (got.weights[ragged.mask == 0] == 0).all()
    assert torch.equal(got.mask, ragged.mask)  # weight 0 is not rejection
    metrics = got.metrics.finish()
    assert metrics["mis_tis_weight_before_bound"] == pytest.approx(mean(raw))
    assert metrics["mis_tis_weight_after_bound"] == pytest.approx(mean(expected))
    assert metrics["mis_is_ratio_mean_final"] == pytest.approx(mean(expected))
    assert metrics["mis_is_ratio_min_final"] == pytest.approx(min(expected))
    assert metrics["mis_is_ratio_max_final"] == pytest.approx(max(expected))
    assert metrics["mis_batch_norm_factor"] == 1.0
    if mode == "truncate":
        assert metrics["mis_tis_truncate_fraction"] == pytest.approx(mean(r > high for r in raw))
    else:
        assert metrics[f"mis_tis_{mode}_fraction_low"] == pytest.approx(mean(r < low for r in raw))
        assert metrics[f"mis_tis_{mode}_fraction_high"] == pytest.approx(mean(r > high for r in raw))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("use_tis", [False, True])
def test_rejection(ragged, level, use_tis):
    train, rollout = draw(ragged, scale=0.4)
    raw = [math.exp(x) for x in level_by_hand(trainable(ragged, train, rollout), level)]
    got = mis_correction(
        train,
        rollout,
        ragged.mask,
        ragged.segments,
        use_tis=use_tis,
        use_rs=True,
        rs_level=level,
        rs_lower_bound=0.8,
        rs_upper_bound=1.25,
    )
    assert chosen(ragged, got.mask) == [int(0.8 <= r <= 1.25) for r in raw]
    assert 0 < got.mask.sum() < ragged.mask.sum()
    metrics = got.metrics.finish()
    assert metrics["mis_rs_mask_fraction_low"] == pytest.approx(mean(r < 0.8 for r in raw))
    assert metrics["mis_rs_mask_fraction_high"] == pytest.approx(mean(r > 1.25 for r in raw))
    if use_tis:
        kept = [w for w, m in zip(got.weights.tolist(), got.mask.tolist(), strict=True) if m]
        assert metrics["mis_is_ratio_mean_after_tis_rs"] == pytest.approx(mean(kept))
    else:
        assert chosen(ragged, got.weights) == [1.0] * 11


def test_rejection_falls_back_to_the_tis_bounds(ragged):
    train, rollout = draw(ragged)
    explicit = {"rs_lower_bound": 0.5, "rs_upper_bound": 1.5}
    a = mis_correction(train, rollout, ragged.mask, ragged.segments, use_rs=True, **BOUNDS)
    b = mis_correction(train, rollout, ragged.mask, ragged.segments, use_rs=True, **explicit)
    assert torch.equal(a.mask, b.mask)
    assert a.mask.sum() < ragged.mask.sum()


@pytest.mark.parametrize("use_tis", [False, True])
def test_veto_drops_the_whole_sample(ragged, use_tis):
    rollout = ragged.log_probs()
    train = rollout.clone()
    train[12] -= 10.0  # trainable, in sample 4
    train[9] -= 50.0  # masked, in sample 4
    train[4] -= 50.0  # in the fully masked sample
    got = mis_correction(train, rollout, ragged.mask, ragged.segments, use_tis=use_tis, rs_veto_threshold=1e-4)
    expected = ragged.mask.clone()
    expected[8:14] = 0
    assert torch.equal(got.mask, expected)
    metrics = got.metrics.finish()
    assert metrics["mis_rs_catastrophic_token_fraction"] == pytest.approx(1 / 11)
    assert metrics["mis_rs_catastrophic_seq_fraction"] == pytest.approx(1 / 4)
    kept = mis_correction(train, rollout, ragged.mask, ragged.segments, rs_veto_threshold=1e-5)
    assert torch.equal(kept.mask, ragged.mask)  # exp(-10) = 4.5e-5


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_batch_normalisation(ragged, level):
    train, rollout = draw(ragged)
    options = {"tis_level": level, **BOUNDS}
    plain = mis_correction(train, rollout, ragged.mask, ragged.segments, **options)
    got = mis_correction(train, rollout, ragged.mask, ragged.segments, tis_batch_normalize=True, **options)
    if level == "token":
        factor = mean(chosen(ragged, plain.weights))
        assert mean(chosen(ragged, got.weights)) == pytest.approx(1.0)
    else:
        firsts = {i: w for i, w in zip(ragged.segments.ids.tolist(), plain.weights.tolist(), strict=True) if w}
        factor = mean(firsts.values())
    torch.testing.assert_close(got.weights, plain.weights / factor)
    assert got.metrics.finish()["mis_batch_norm_factor"] == pytest.approx(factor)


def test_batch_normalisation_spans_ranks(ragged):
    train, rollout = draw(ragged)
    whole = mis_correction(train, rollout, ragged.mask, ragged.segments, tis_batch_normalize=True)
    parts, sums = [(slice(0, 7), [4, 0, 3]), (slice(7, 19), [1, 6, 5])], []
    for reduce in (lambda t: sums.append(t) or t, lambda t: sums[0] + sums[1]):
        got = [
            mis_correction(
                train[s], rollout[s], ragged.mask[s], Segments.of(n), tis_batch_normalize=True, all_reduce_sum=reduce
            )
            for s, n in parts
        ]
    torch.testing.assert_close(torch.cat([x.weights for x in got]), whole.weights)


def test_rejected_tokens_leave_the_average(ragged):
    """The loss after rejection equals the loss of a batch whose mask never had those tokens."""
    train, rollout = draw(ragged)
    loss = ragged.randn()
    got = mis_correction(train, rollout, ragged.mask, ragged.segments, use_tis=False, use_rs=True, **BOUNDS)
    for per_token in (False, True):
        counts = {"global_num_samples": 6, "global_num_tokens": int(got.mask.sum())}
        weights = token_weights(got.mask, ragged.segments, per_token=per_token, dtype=torch.float64, **counts)
        kept = [x[m == 1] for x, m in zip(ragged.samples(loss), ragged.samples(got.mask), strict=True)]
        if per_token:
            expected = torch.cat(kept).mean()
        else:
            expected = sum(x.sum() / max(len(x), 1) for x in kept) / 6
        torch.testing.assert_close(masked_sum(loss * got.weights, weights), expected)


@pytest.mark.parametrize("gap", [1e4, -1e4, float("inf"), -float("inf")])
def test_extreme_ratios_stay_finite(ragged, gap):
    rollout = ragged.log_probs()
    train = rollout.clone()
    train[0] += gap
    for level in ("token", "sequence", "geometric"):
        got = mis_correction(train, rollout, ragged.mask, ragged.segments, tis_level=level, **BOUNDS)
        assert got.weights.isfinite().all()
        assert all(math.isfinite(x) for x in got.metrics.finish().values())
    assert truncated_importance_sampling(train, rollout, ragged.mask, ragged.segments).weights.isfinite().all()


@pytest.mark.parametrize("spoil", SPOILS)
def test_masked_tokens_change_nothing(ragged, spoil):
    clean = draw(ragged)
    dirty = tuple(ragged.spoiled(x, spoil) for x in clean)
    everything = {"use_rs": True, "rs_level": "geometric", "rs_veto_threshold": 1e-3, "tis_batch_normalize": True}
    results = []
    for train, rollout in (clean, dirty):
        args = (train, rollout, ragged.mask, ragged.segments)
        corrections = [
            mis_correction(*args, tis_level="sequence", **BOUNDS, **everything),
            icepop(*args),
            truncated_importance_sampling(*args),
        ]
        results.append((corrections, mismatch_metrics(*args).finish()))
    for a, b in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(a.weights, b.weights)
        assert torch.equal(a.mask, b.mask)
        assert a.metrics.finish() == b.metrics.finish()
    assert results[0][1] == results[1][1]


def test_no_gradient_flows(ragged):
    train, rollout = draw(ragged)
    got = mis_correction(train.requires_grad_(), rollout, ragged.mask, ragged.segments)
    assert not got.weights.requires_grad


def test_refusals(ragged):
    args = (*draw(ragged), ragged.mask, ragged.segments)
    with pytest.raises(ValueError, match=r"rejection sampling .* needs a lower and an upper bound"):
        mis_correction(*args, use_tis=False, use_rs=True, rs_lower_bound=0.5, tis_upper_bound=None)
    with pytest.raises(ValueError, match="tis_mode mask needs"):
        mis_correction(*args, tis_mode="mask")
    with pytest.raises(ValueError, match="lower bound <= upper bound"):
        mis_correction(*args, tis_mode="clip", tis_lower_bound=3.0)
    with pytest.raises(ValueError, match="geometric"):
        mis_correction(*args, tis_level="geometric", tis_batch_normalize=True)
    with pytest.raises(ValueError, match="must be positive"):
        mis_correction(*args, rs_veto_threshold=0.0)
    with pytest.raises(ValueError, match="one of token, sequence, geometric"):
        mis_correction(*args, rs_level="seq")
    with pytest.raises(ValueError, match="lower bound <= upper bound"):
        icepop(*args, tis_clip=0.1)


def test_levels_of_an_empty_batch():
    s, x = Segments.of([]), torch.zeros(0)
    for level in ("token", "sequence", "geometric"):
        assert level_log_ratio(x, x, s, level).shape == (0,)
    got = mis_correction(x, x, x, s, use_rs=True, rs_veto_threshold=1e-4, tis_batch_normalize=True, **BOUNDS)
    assert all(math.isfinite(v) for v in got.metrics.finish().values())
    assert all(math.isfinite(v) for v in mismatch_metrics(x, x, x, s).finish().values())


def mismatch_by_hand(ragged, train, rollout):
    tokens = trainable(ragged, train, rollout)
    r = [x for _, x in tokens]
    per_sample = []
    for t, q, m in zip(*(ragged.samples(x) for x in (train, rollout, ragged.mask)), strict=True):
        if m.sum():
            per_sample.append((t[m == 1].tolist(), q[m == 1].tolist()))
    ppl = [(-mean(t), -mean(q)) for t, q in per_sample]
    return {
        "mis_kl": mean(-x for x in r),
        "mis_k3_kl": mean(math.exp(x) - x - 1 for x in r),
        "mis_chi2_token": mean(math.exp(x) ** 2 for x in r) - 1,
        "train_rollout_logprob_abs_diff": mean(abs(x) for x in r),
        "mis_training_log_ppl": mean(a for a, _ in ppl),
        "mis_training_ppl": mean(math.exp(a) for a, _ in ppl),
        "mis_rollout_log_ppl": mean(b for _, b in ppl),
        "mis_rollout_ppl": mean(math.exp(b) for _, b in ppl),
        "mis_log_ppl_diff": mean(a - b for a, b in ppl),
        "mis_log_ppl_abs_diff": mean(abs(a - b) for a, b in ppl),
        "mis_ppl_ratio": mean(math.exp(a) / math.exp(b) for a, b in ppl),
        "mis_chi2_seq": mean(math.exp(sum(t) - sum(q)) ** 2 for t, q in per_sample) - 1,
    }


def test_mismatch_metrics(ragged):
    train, rollout = draw(ragged, scale=0.3)
    got = mismatch_metrics(train, rollout, ragged.mask, ragged.segments).finish()
    assert got == pytest.approx(mismatch_by_hand(ragged, train, rollout), rel=1e-9)


def test_metrics_merge_over_micro_batches_and_ranks(ragged):
    train, rollout = draw(ragged)

    def run(s, lengths):
        args = (train[s], rollout[s], ragged.mask[s], Segments.of(lengths))
        both = (mis_correction(*args, use_rs=True, **BOUNDS).metrics, mismatch_metrics(*args))
        return merge_metrics(both)

    whole = run(slice(None), ragged.lengths).finish()
    parts = [run(slice(0, 4), [4]), run(slice(4, 7), [0, 3]), run(slice(7, 19), [1, 6, 5])]
    expected = whole | {"mis_batch_norm_factor": 1.0}
    assert merge_metrics(parts).finish() == pytest.approx(expected)
    # Two ranks: each reduction sees this rank's tensor and the other's.
    a, b = parts[2], merge_metrics(parts[:2])
    sums = lambda t: t + torch.stack(list(b.means.values()))  # noqa: E731
    theirs = torch.stack([*b.maxima.values(), *(-x for x in b.minima.values())])
    assert a.finish(sums, lambda t: torch.maximum(t, theirs)) == pytest.approx(expected)
