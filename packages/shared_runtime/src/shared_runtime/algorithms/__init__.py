"""Mathematics that language and diffusion training share: group-normalised rewards and KL estimators.

Everything here is a pure function. `groups` needs only numpy, so the driver can use it without torch.
"""
