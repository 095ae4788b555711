"""Distillation penalties against sets and dicts of tokens, one position at a time."""

from __future__ import annotations

import math

import pytest
import torch

from llm_rl.algorithms.opd import TopK, distill_advantages, sampled_reverse_kl, top_k_reverse_kl

STRATEGIES = ["only-student", "only-teacher", "intersection", "union", "xor"]
WEIGHTS = ["student_p", "teacher_p", "none"]
T, V, K = 5, 8, 3


def draw(k_teacher=K):
    g = torch.Generator().manual_seed(2)
    student, teacher = (torch.randn(T, V, dtype=torch.float64, generator=g).log_softmax(1) for _ in range(2))
    tops = []
    for model, k in ((student, K), (teacher, k_teacher)):
        ids = model.topk(k, dim=1).indices
        tops.append(TopK(ids, student.gather(1, ids), teacher.gather(1, ids)))
    return student, teacher, *tops


def by_hand(student, teacher, s_ids, t_ids, strategy, mode):
    s_set, t_set = set(s_ids), set(t_ids)
    tokens = {
        "only-student": s_set,
        "only-teacher": t_set,
        "intersection": s_set & t_set,
        "union": s_set | t_set,
        "xor": s_set ^ t_set,
    }[strategy]
    weights = {
        v: {"student_p": math.exp(student[v]), "teacher_p": math.exp(teacher[v]), "none": 1.0}[mode] for v in tokens
    }
    total = sum(weights.values()) if strategy != "xor" else 1.0
    return sum(w / total * (student[v] - teacher[v]) for v, w in weights.items())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mode", WEIGHTS)
@pytest.mark.parametrize("k_teacher", [K, 5])
def test_top_k(strategy, mode, k_teacher):
    student, teacher, s_top, t_top = draw(k_teacher)
    got = top_k_reverse_kl(s_top, t_top, torch.ones(T), strategy=strategy, weight_mode=mode)
    for t in range(T):
        ids = s_top.ids[t].tolist(), t_top.ids[t].tolist()
        expected = by_hand(student[t].tolist(), teacher[t].tolist(), *ids, strategy, mode)
        assert got[t].item() == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_strategies_and_modes_all_differ():
    _, _, s_top, t_top = draw()
    seen = {
        round(top_k_reverse_kl(s_top, t_top, torch.ones(T), strategy=s, weight_mode=m).sum().item(), 9)
        for s in STRATEGIES
        for m in WEIGHTS
    }
    assert len(seen) == 15


@pytest.mark.parametrize("mode", ["student_p", "teacher_p"])
def test_the_whole_vocabulary_gives_the_exact_kl(mode):
    student, teacher, *_ = draw()
    ids = torch.arange(V).expand(T, V)
    got = top_k_reverse_kl(TopK(ids, student, teacher), None, torch.ones(T), weight_mode=mode)
    weights = (student if mode == "student_p" else teacher).exp()
    torch.testing.assert_close(got, (weights * (student - teacher)).sum(1))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mode", WEIGHTS)
def test_same_model_has_no_penalty_and_unused_slots_do_not_count(strategy, mode):
    _, _, s_top, t_top = draw()
    same = TopK(s_top.ids, s_top.student_log_probs, s_top.student_log_probs)
    assert (top_k_reverse_kl(same, same, torch.ones(T), strategy=strategy, weight_mode=mode) == 0).all()

    def padded(top):
        pad = torch.full((T, 2), float("nan"), dtype=torch.float64)
        return TopK(*(torch.cat([x, p], 1) for x, p in zip(top, (torch.full((T, 2), -1), pad, pad), strict=True)))

    args = {"strategy": strategy, "weight_mode": mode}
    plain = top_k_reverse_kl(s_top, t_top, torch.ones(T), **args)
    torch.testing.assert_close(top_k_reverse_kl(padded(s_top), padded(t_top), torch.ones(T), **args), plain)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_order_of_candidates_does_not_matter(strategy):
    _, _, s_top, t_top = draw()
    flipped = [TopK(*(x.flip(1) for x in top)) for top in (s_top, t_top)]
    a, b = (top_k_reverse_kl(*tops, torch.ones(T), strategy=strategy) for tops in ((s_top, t_top), flipped))
    torch.testing.assert_close(a, b)


def test_disjoint_sets():
    lp = torch.full((1, 1), -1.0)
    a, b = TopK(torch.tensor([[0]]), lp, lp - 1), TopK(torch.tensor([[1]]), lp - 2, lp)
    assert top_k_reverse_kl(a, b, torch.ones(1), strategy="intersection").item() == 0.0
    xor = top_k_reverse_kl(a, b, torch.ones(1), strategy="xor", weight_mode="none")
    assert xor.item() == pytest.approx(1.0 - 2.0)
    everything = top_k_reverse_kl(a, a, torch.ones(1), strategy="xor")
    assert everything.item() == 0.0


def test_a_token_the_teacher_rules_out():
    """Log-prob -inf under the teacher: infinite penalty where it has weight, none where the teacher weighs."""
    ids = torch.tensor([[0, 1]])
    top = TopK(ids, torch.log(torch.tensor([[0.5, 0.5]])), torch.tensor([[0.0, -torch.inf]]))
    assert top_k_reverse_kl(top, None, torch.ones(1)).item() == torch.inf
    assert top_k_reverse_kl(top, None, torch.ones(1), weight_mode="teacher_p").item() == pytest.approx(math.log(0.5))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("spoil", [float("nan"), float("inf"), -float("inf")])
def test_masked_positions_are_zero(strategy, spoil):
    _, _, s_top, t_top = draw()
    mask = torch.tensor([1, 0, 1, 0, 1])

    def spoiled(top):
        broken = [x.clone() for x in top[1:]]
        for x in broken:
            x[mask == 0] = spoil
        return TopK(top.ids, *broken)

    a = top_k_reverse_kl(s_top, t_top, mask, strategy=strategy)
    b = top_k_reverse_kl(spoiled(s_top), spoiled(t_top), mask, strategy=strategy)
    assert torch.equal(a, b)
    assert (a[mask == 0] == 0).all()


def test_what_a_strategy_needs():
    _, _, s_top, t_top = draw()
    bare = lambda top, **kw: top._replace(**kw)  # noqa: E731
    ok = top_k_reverse_kl(
        bare(s_top, teacher_log_probs=None), bare(t_top, student_log_probs=None), torch.ones(T), strategy="intersection"
    )
    assert ok.isfinite().all()
    for strategy in ("union", "xor"):
        with pytest.raises(ValueError, match="teacher_top with the log-probs"):
            top_k_reverse_kl(s_top, bare(t_top, student_log_probs=None), torch.ones(T), strategy=strategy)
        with pytest.raises(ValueError, match="both student and teacher"):
            top_k_reverse_kl(s_top, None, torch.ones(T), strategy=strategy)
    with pytest.raises(ValueError, match="student_top"):
        top_k_reverse_kl(None, t_top, torch.ones(T))
    with pytest.raises(ValueError, match="strategy must be one of"):
        top_k_reverse_kl(s_top, t_top, torch.ones(T), strategy="both")
    with pytest.raises(ValueError, match="weight_mode must be one of"):
        top_k_reverse_kl(s_top, t_top, torch.ones(T), weight_mode="p")


def test_sampled_token_penalty(ragged):
    student, teacher, advantages = ragged.log_probs(grad=True), ragged.log_probs(), ragged.randn()
    kl = sampled_reverse_kl(student, teacher, ragged.mask)
    got = distill_advantages(advantages, kl, ragged.mask, kl_coef=0.5)
    expected = (advantages - 0.5 * (student - teacher)).detach() * ragged.mask
    torch.testing.assert_close(got, expected)
    assert not got.requires_grad
    spoiled = sampled_reverse_kl(*(ragged.spoiled(x, float("nan")) for x in (student, teacher)), ragged.mask)
    assert torch.equal(spoiled, kl)


def test_sampled_penalty_is_unbiased():
    student, teacher, *_ = draw()
    exact = (student.exp() * (student - teacher)).sum(1)
    estimate = sum(
        student[:, v].exp() * sampled_reverse_kl(student[:, v], teacher[:, v], torch.ones(T)) for v in range(V)
    )
    torch.testing.assert_close(estimate, exact)
