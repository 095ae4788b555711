from __future__ import annotations

import torch

from llm_rl.algorithms.segments import Segments


def test_sums_means_counts_and_last(ragged):
    x = ragged.randn()
    xs, ms = ragged.samples(x), ragged.samples(ragged.mask)
    got = ragged.segments
    torch.testing.assert_close(got.sum(x), torch.stack([v.sum() for v in xs]))
    pairs = list(zip(xs, ms, strict=True))
    torch.testing.assert_close(got.sum(x, ragged.mask), torch.stack([(v * m).sum() for v, m in pairs]))
    expected = torch.stack([(v * m).sum() / max(int(m.sum()), 1) for v, m in pairs])
    torch.testing.assert_close(got.mean(x, ragged.mask), expected)
    assert got.count(ragged.mask).tolist() == [4, 0, 0, 1, 3, 3]
    assert got.last(ragged.mask).nonzero().flatten().tolist() == [3, 7, 12, 18]
    assert got.expand(torch.arange(6)).tolist() == [0] * 4 + [2] * 3 + [3] + [4] * 6 + [5] * 5


def test_nothing_at_all():
    for lengths in ([], [0], [0, 0, 0]):
        s = Segments.of(lengths)
        empty = torch.zeros(0)
        assert (s.num_samples, s.num_tokens) == (len(lengths), 0)
        assert s.sum(empty).tolist() == [0.0] * len(lengths)
        assert s.mean(empty, empty).tolist() == [0.0] * len(lengths)
        assert s.last(empty).shape == s.expand(torch.zeros(len(lengths))).shape == (0,)
