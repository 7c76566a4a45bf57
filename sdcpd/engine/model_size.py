"""What a model takes in memory, by precision, counted from its shape (no torch here).

Weights of linear layers may be int8 with one scale an output; embedding, norms and biases are kept in the dtype. What
else counts is known only where the model is loaded, so that there is a least and a most:

- Where embedding and head are tied, the head is a matrix of its own if it is kept in another form: as int8, always; in
  the layout that products on a CPU want, if torch has them there.
- In fp32 a CPU keeps the weights of linear layers in fp16, if that holds all of them exactly (linear.py).
"""

from typing import Final

from msgspec import Struct

from sdcpd.engine.model_config import ModelConfig

DTYPE_BYTES: Final = {"bf16": 2, "fp32": 4}
HALF_BYTES: Final = 2
PRECISIONS: Final = (("bf16", "int8"), ("bf16", "none"), ("fp32", "none"))
"""(dtype, quantization) worth telling, the smallest first."""


class ModelSize(Struct, frozen=True):
    """Numbers of elements: weights of linear layers, their outputs, and all else that is kept in the dtype.

    `head` counts the weights of the output layer, which are among `linear_weights`. `repeated` are copies that the
    checkpoint does not have: norms of queries and keys, one a head.
    """

    linear_weights: int
    linear_outputs: int
    others: int
    repeated: int
    head: int
    tied: bool
    kv_elements_a_token: int

    @property
    def parameters(self) -> int:
        """Of the checkpoint: a tied head is the embedding."""
        return self.linear_weights + self.others - (self.head if self.tied else 0)

    def weights_bytes(self, dtype: str, quantization: str = "none") -> int:
        """Memory of the weights, at most."""
        size = DTYPE_BYTES[dtype]
        kept = size * (self.others + self.repeated)
        if quantization == "int8":
            return self.linear_weights + size * self.linear_outputs + kept
        return size * self.linear_weights + kept

    def least_weights_bytes(self, dtype: str, quantization: str = "none") -> int:
        """At least: the head not a second time, or halves where fp32 is asked for."""
        most = self.weights_bytes(dtype, quantization)
        if quantization == "int8":
            return most
        once = most - (DTYPE_BYTES[dtype] * self.head if self.tied else 0)
        return once if dtype != "fp32" else min(once, most - (DTYPE_BYTES[dtype] - HALF_BYTES) * self.linear_weights)

    def kv_bytes_a_token(self, dtype: str) -> int:
        """Keys and values of one token in all layers."""
        return DTYPE_BYTES[dtype] * self.kv_elements_a_token


def measure(config: ModelConfig) -> ModelSize:
    """The sizes that follow from a model's shape."""
    query, key_value = config.heads * config.head_dim, config.kv_heads * config.head_dim
    projected = query + 2 * key_value
    weights = outputs = others = repeated = 0

    def linear(out: int, width: int, biased: bool = False, times: int = 1) -> None:
        nonlocal weights, outputs, others
        weights += times * out * width
        outputs += times * out
        others += times * out if biased else 0

    for number in range(config.layers):
        linear(projected, config.hidden, config.qkv_bias)
        linear(config.hidden, query, config.o_bias)
        experts = config.experts
        if experts is not None and number in experts.layers:
            linear(experts.count, config.hidden)
            linear(2 * experts.intermediate, config.hidden, times=experts.count)
            linear(config.hidden, experts.intermediate, times=experts.count)
        else:
            linear(2 * config.intermediate, config.hidden, config.mlp_bias)
            linear(config.hidden, config.intermediate, config.mlp_bias)
        others += 2 * config.hidden + (2 * config.head_dim if config.qk_norm else 0)
        repeated += (config.heads + config.kv_heads - 2) * config.head_dim if config.qk_norm else 0
    head = config.vocabulary * config.hidden
    linear(config.vocabulary, config.hidden)
    return ModelSize(
        linear_weights=weights,
        linear_outputs=outputs,
        others=others + head + config.hidden,
        repeated=repeated,
        head=head,
        tied=config.tied,
        kv_elements_a_token=2 * config.layers * key_value,
    )
