"""Step dynamics, step strategies and losses of diffusion training, one subject a file.

Everything is a pure function of tensors: no config, no process group, no logging. Engine and trainer use the same
functions, so a transition scores the same on both sides.

Convention. σ runs from 1 (noise) to 0 (image): x_σ = (1-σ)·x₀ + σ·ε, the model predicts the velocity v = ε - x₀, and a
step goes from σ to the smaller σ', dt = σ' - σ < 0. Shapes in docstrings: B pairs or samples, `...` the latent
dimensions (C, h, w for most families), T denoising steps. Every loss comes per pair, (B,): the caller weighs it with
the global denominator and sums over micro-batches and ranks, so neither can change the result.
"""
