"""Which layers of a language model are adapted: groups by the names that Hugging Face models give them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shared_runtime.training.lora import LoraError, matched_layers

GROUPS = {
    "attn": ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
    "unembed": ("lm_head",),
}
"""Group to the last parts of its layers' names, in any model."""


def lora_targets(
    model: nn.Module, target_modules: Sequence[str] = (), exclude_modules: Sequence[str] = ()
) -> list[str]:
    """Full names of the linear layers to adapt.

    Args:
        model: The plain model; may be on the meta device.
        target_modules: Groups and ends of names, also several in a word with commas. Empty or `all-linear`: attention
            and MLP.
        exclude_modules: Ends of names, taken out afterwards.

    Raises:
        LoraError: If a group or a name matches no linear layer, nothing is left, or an output layer that shares its
            weight with the embedding is asked for.
    """
    words = _words(target_modules)
    names = matched_layers(model, _expand(model, words or ["all-linear"]), flag="--target-modules")
    if excluded := _words(exclude_modules):
        left_out = set(matched_layers(model, excluded, flag="--exclude-modules"))
        names = [name for name in names if name not in left_out]
    if not names:
        raise LoraError("--exclude-modules leaves none of the layers of --target-modules")
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if tied and any(name.rpartition(".")[2] == "lm_head" for name in names):
        raise LoraError("--target-modules unembed: this model's output layer is its embedding, which has no adapter")
    return names


def _expand(model: nn.Module, words: Sequence[str]) -> list[str]:
    """Groups replaced by those of their names that the model has."""
    if list(words) == ["all-linear"]:
        words = ["attn", "mlp"]
    present = {name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    expanded = []
    for word in words:
        found = [name for name in GROUPS.get(word, (word,)) if word not in GROUPS or name in present]
        if not found:
            raise LoraError(
                f"--target-modules {word}: {type(model).__name__} has none of the linear layers "
                f"{', '.join(GROUPS[word])} (routed experts have no adapters); its layers end in "
                f"{', '.join(sorted(present))}"
            )
        expanded += found
    return expanded


def _words(modules: Sequence[str]) -> list[str]:
    return [word for entry in modules for word in entry.split(",") if word]
