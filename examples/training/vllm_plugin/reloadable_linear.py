"""A vLLM plugin: linear layers on the CPU keep their weights, so that a reload has an effect.

As shipped, the CPU build packs every linear layer once and drops the original; a later reload answers 200 but changes
only embeddings and norms.
"""

from __future__ import annotations


def register() -> None:
    """Called by vLLM in each of its processes."""
    from torch import nn  # type: ignore[import-not-found]
    from vllm.model_executor.layers import utils  # type: ignore[import-not-found]

    def plain(layer: nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain
