"""Backward recurrences along samples, all samples at once, without a loop over time."""

from __future__ import annotations

from torch import Tensor

from llm_rl.algorithms.segments import Segments


def discounted_suffix_sum(values: Tensor, mask: Tensor, segments: Segments, discount: float) -> Tensor:
    """y_t = x_t + discount · y_t', where t' is the next *trainable* token of the same sample (0 beyond the last).

    Masked tokens neither receive nor decay: they are taken out before and put back as 0 after. The recurrence doubles
    its reach at each pass, so it takes log2(longest sample) passes over the tokens instead of one step a token.

    Args:
        values: (T,).
        mask: (T,), non-zero means trainable.
        segments: Borders of the samples.
        discount: In [0, 1].

    Returns:
        (T,), 0 at masked tokens.

    Raises:
        ValueError: If the discount is outside [0, 1].
    """
    if not 0 <= discount <= 1:
        raise ValueError(f"a discount must be between 0 and 1, not {discount}")
    chosen = mask != 0
    ids, y = segments.ids[chosen], values[chosen]
    longest = int(segments.lengths.max()) if segments.num_samples else 0
    step = 1
    while step < min(longest, y.numel()) and discount > 0:
        # Tokens `step` apart of one sample are that many trainable tokens apart, since only those are left.
        ahead = (y[step:] * discount**step).masked_fill(ids[step:] != ids[:-step], 0.0)
        y[:-step] += ahead
        step *= 2
    out = values.new_zeros(values.shape)
    out[chosen] = y
    return out
