"""sdcpd: distributed speculative decoding by the Speculative Decoding Coordination Protocol (SDCP)."""

__version__ = "0.1.0"
