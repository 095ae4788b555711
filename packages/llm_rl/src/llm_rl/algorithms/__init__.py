"""Estimators, losses and corrections of language-model training, one subject a file.

Everything is a pure function of tensors: no config, no process group, no logging. Where a number spans all ranks, the
caller passes a reduction `all_reduce_sum: Callable[[Tensor], Tensor] | None`.

Layout. A micro-batch of B samples is ragged: the values of all *response* tokens, sample behind sample, in one tensor
of shape (T,), and a :class:`~llm_rl.algorithms.segments.Segments` that says which token belongs to which sample.
Nothing is padded, and nothing loops over samples. Shapes in docstrings: B samples, T response tokens, V vocabulary,
H hidden size, K candidates a position.

Masks. `mask` has shape (T,); non-zero marks a trainable token. A function that takes a mask ignores everything that
stands at the other tokens, NaN and infinity included: value 0, gradient 0.

From log-probabilities to one number: a loss function returns the loss of each token (T,), `reduction.token_weights`
gives each token a weight that already holds the global denominator, and `reduction.masked_sum` adds up. The result is
summed (not averaged) over micro-batches and ranks, so neither can change it.
"""
