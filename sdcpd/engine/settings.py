"""What an operator may set about a model pass (no torch here, so that configuration is read without it)."""

from typing import Annotated, Literal

from msgspec import Meta, Struct


class EngineSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model on one device.

    `model` is a Hugging Face folder. "auto" takes a CUDA device when there is one, and bf16 where that is fast (CUDA,
    CPUs with AVX-512), else fp32: `device.py` decides, and the outcome is part of the target digest.

    `quantization` "int8" keeps the weights of linear layers as int8, one scale an output (`linear.py`); embeddings and
    norms stay as they are. It makes another target with a digest of its own. A drafter's model has its own key.

    `numerics` "batch_invariant": the bits of a row of logits depend on the tokens before it alone, not on what shares
    its pass nor on how the text was cut into passes, so that a greedy text is the same with and without speculation and
    at any load. Tried at load; where it does not hold the engine does not start. "fast" promises nothing and saves the
    padding of keys (CPU, short contexts: up to 10 % of a pass of eight sessions). "auto" is batch_invariant on a CPU
    where it holds, else fast.

    `kv_cache_bytes` is the size of the page pool; without it the pool takes `kv_cache_share` of the memory that is
    free once the weights are loaded. `page_tokens` is the size of a page and of a cache block (a multiple of 16
    keeps pages aligned for the kernels). `context_tokens` lowers the model's own limit. `threads` 0 leaves torch's
    own choice, one a core.
    """

    model: Annotated[str, Meta(min_length=1)]
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    quantization: Literal["none", "int8"] = "none"
    numerics: Literal["auto", "fast", "batch_invariant"] = "auto"
    kv_cache_bytes: Annotated[int, Meta(ge=1)] | None = None
    kv_cache_share: Annotated[float, Meta(gt=0, le=0.95)] = 0.5
    page_tokens: Annotated[int, Meta(ge=16, le=1024, multiple_of=16)] = 64
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    context_tokens: Annotated[int, Meta(ge=1)] | None = None
